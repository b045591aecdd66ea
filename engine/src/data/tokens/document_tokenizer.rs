//! Texts to tokens of documents, with the tokenizer of a model.

use crate::error::{EngineError, Result};
use crate::models::causal_lm::{FimTokens, TextTokenizer, eos_token_name, open_tokenizer};
use crate::models::config;
use aitk_common::gguf::model_file;
use std::path::Path;
use tokenizers::{Encoding, Tokenizer};

/// Bytes of a text that are converted at a time: the tokenizer takes a hundred times as much memory.
const MAX_PART_BYTES: usize = 1 << 20;

/// The parts of a long text, with their beginnings: each ends with a line, where tokenizers of code begin a new token, or else with a character.
fn parts(text: &str, max: usize) -> Vec<(usize, &str)> {
    let mut parts = Vec::new();
    let mut start = 0;
    while text.len() - start > max {
        let limit = (start + 1..=start + max).rev().find(|at| text.is_char_boundary(*at));
        let limit = limit.unwrap_or(text.len());
        let line = text[start..limit].rfind('\n').map(|at| start + at + 1);
        let end = line.unwrap_or(limit);
        parts.push((start, &text[start..end]));
        start = end;
    }
    parts.push((start, &text[start..]));
    parts
}

/// The tokenizer of a language model, with the token that ends a document.
#[derive(Clone, Debug)]
pub struct DocumentTokenizer {
    base: TextTokenizer,
    end: Option<u32>,
}

impl DocumentTokenizer {
    /// Opens the tokenizer of a model with `vocabulary` tokens. `model`: its folder, or its GGUF file. `None`: the folder has none.
    ///
    /// # Errors
    /// When it is damaged, has tokens that the model does not have, or is of a kind in a GGUF file that is not supported.
    pub fn open(model: &Path, vocabulary: usize) -> Result<Option<Self>> {
        if model_file(model).is_some() {
            let (config, base) = open_tokenizer(model)?;
            let end = config.eos_token_ids.first().copied();
            let end = end.filter(|id| base.inner().0.id_to_token(*id).is_some());
            return Ok(Some(Self { base, end }));
        }
        if !TextTokenizer::is_in(model) {
            return Ok(None);
        }
        let base = TextTokenizer::open(model, vocabulary)?;
        let end = end_token(model, base.inner().0)?;
        Ok(Some(Self { base, end }))
    }

    /// The token that ends a document. `None`: the model has none.
    #[must_use]
    pub fn end(&self) -> Option<u32> {
        self.end
    }

    /// The tokens for fill-in-the-middle.
    ///
    /// # Errors
    /// When the tokenizer has none.
    pub fn fim_tokens(&self) -> Result<FimTokens> {
        self.base.fim_tokens().ok_or_else(|| {
            EngineError::bad_input(format!(
                "{}: fill-in-the-middle needs tokens that mark prefix, middle and suffix (`<fim_prefix>`, `<|fim_prefix|>`, …), and this \
                 tokenizer has none: set `fim_rate: 0`",
                self.base.inner().1.display()
            ))
        })
    }

    /// The tokens of a text. `special`: with the tokens that the model has at the beginning of a text. Those that the tokenizer adds at its end
    /// are left out, because the text may go on.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        for (start, part) in parts(text, MAX_PART_BYTES) {
            if start > 0 {
                ids.extend(self.base.encode_continuation(part)?);
                continue;
            }
            let encoding = self.encoding(part, special)?;
            let added = if special { self.base.added_at_end() } else { 0 };
            ids.extend_from_slice(&encoding.get_ids()[..encoding.len().saturating_sub(added)]);
        }
        Ok(ids)
    }

    /// The tokens of a text that continues another one, such as the completion of a prompt: without special tokens, and without the space that some
    /// tokenizers put before each text.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn encode_continuation(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        for (_, part) in parts(text, MAX_PART_BYTES) {
            ids.extend(self.base.encode_continuation(part)?);
        }
        Ok(ids)
    }

    /// The tokens of prefix, middle and suffix of a text with a gap, without the marks.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub(super) fn encode_fim_parts(
        &self,
        fim: FimTokens,
        [prefix, middle, suffix]: [&str; 3],
    ) -> Result<[Vec<u32>; 3]> {
        let prefix = match fim.has_separate_parts && prefix.len() <= MAX_PART_BYTES {
            true => self.base.encode_fim_prefix(fim, prefix)?,
            false => self.encode(prefix, false)?,
        };
        Ok([
            prefix,
            self.encode_continuation(middle)?,
            self.encode_continuation(suffix)?,
        ])
    }

    /// The tokens of a text without special ones, and where each begins in the text, in bytes.
    pub(super) fn encode_with_starts(&self, text: &str) -> Result<(Vec<u32>, Vec<usize>)> {
        let (mut ids, mut starts) = (Vec::new(), Vec::new());
        for (first, part) in parts(text, MAX_PART_BYTES) {
            let encoding = self.encoding(part, false)?;
            ids.extend_from_slice(encoding.get_ids());
            starts.extend(encoding.get_offsets().iter().map(|(start, _)| first + start));
        }
        Ok((ids, starts))
    }

    fn encoding(&self, text: &str, special: bool) -> Result<Encoding> {
        let (tokenizer, path) = self.base.inner();
        tokenizer.encode(text, special).map_err(|error| {
            EngineError::model_config(path, format!("a text could not be converted to tokens: {error}"))
        })
    }

    /// The text of tokens, without special ones.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.base.decode(ids)
    }

    /// The text of tokens that continue a prompt, without special ones. Decoded alone, some tokenizers leave out the space that it begins with.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn decode_continuation(&self, prompt: &[u32], ids: &[u32]) -> Result<String> {
        let before = self.decode(prompt)?;
        let whole = self.decode(&[prompt, ids].concat())?;
        match whole.strip_prefix(before.as_str()) {
            Some(text) => Ok(text.to_owned()),
            // The prompt ends within a character.
            None => self.decode(ids),
        }
    }
}

/// The token that ends a document: `eos_token` of `tokenizer_config.json` or of `special_tokens_map.json`, else the (first)
/// `eos_token_id` of `config.json`.
fn end_token(folder: &Path, tokenizer: &Tokenizer) -> Result<Option<u32>> {
    if let Some((path, name)) = eos_token_name(folder)? {
        let id = tokenizer.token_to_id(&name).ok_or_else(|| {
            EngineError::model_config(
                path,
                format!("`eos_token` is `{name}`, which the tokenizer does not have"),
            )
        })?;
        return Ok(Some(id));
    }
    let path = folder.join("config.json");
    if !path.is_file() {
        return Ok(None);
    }
    let config = config::read_json(&path)?;
    let id = config.get("eos_token_id");
    let id = id.and_then(|id| id.as_u64().or_else(|| id.as_array()?.first()?.as_u64()));
    Ok(id
        .and_then(|id| u32::try_from(id).ok())
        .filter(|id| tokenizer.id_to_token(*id).is_some()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{DocumentTokenizer, FimTokens, parts};
    use crate::testing::byte_tokenizer::write_tokenizer;
    use crate::testing::fixtures;

    /// Like Llama 2's tokenizer, this one puts a space before a text.
    #[test]
    fn the_completion_of_a_prompt_gets_no_space_of_the_tokenizer() {
        let folder = tempfile::tempdir().unwrap();
        let model = fixtures().join("sentencepiece/bpe/tokenizer.model");
        std::fs::copy(model, folder.path().join("tokenizer.model")).unwrap();
        let tokenizer = DocumentTokenizer::open(folder.path(), 520).unwrap().unwrap();
        assert!(tokenizer.base.has_prefix());
        for (prompt, completion) in [
            ("x = ", "12\n"),
            ("def f", "(a):\n"),
            ("a", "\n\nb"),
            ("a", " b"),
            ("a", ""),
            ("a", "0."),
        ] {
            let mut ids = tokenizer.encode(prompt, false).unwrap();
            ids.extend(tokenizer.encode_continuation(completion).unwrap());
            assert_eq!(tokenizer.decode(&ids).unwrap(), format!("{prompt}{completion}"));
            let (prompt, new) = ids.split_at(tokenizer.encode(prompt, false).unwrap().len());
            assert_eq!(tokenizer.decode_continuation(prompt, new).unwrap(), completion);
        }
        // So do the parts of a text that is converted in parts.
        let long = "ab\n".repeat(400_000);
        let ids = tokenizer.encode(&long, true).unwrap();
        assert_eq!(tokenizer.decode(&ids).unwrap(), long);

        let folder = tempfile::tempdir().unwrap();
        write_tokenizer(folder.path(), 264);
        let bytes = DocumentTokenizer::open(folder.path(), 264).unwrap().unwrap();
        assert!(!bytes.base.has_prefix());
        let text = "\n a";
        assert_eq!(
            bytes.encode_continuation(text).unwrap(),
            bytes.encode(text, false).unwrap()
        );
    }

    /// As for a prompt with a gap: mistral-common's tokenizer has no token for an empty prefix, that of Code Llama has the space.
    #[test]
    fn an_empty_prefix_has_tokens_only_where_the_middle_has_a_mark() {
        let folder = tempfile::tempdir().unwrap();
        let model = fixtures().join("sentencepiece/bpe/tokenizer.model");
        std::fs::copy(model, folder.path().join("tokenizer.model")).unwrap();
        let tokenizer = DocumentTokenizer::open(folder.path(), 520).unwrap().unwrap();
        let prefix = |middle: Option<u32>, prefix: &str| {
            let marks = FimTokens {
                prefix: 1,
                suffix: 2,
                middle,
                end: None,
                has_separate_parts: true,
            };
            let [prefix, ..] = tokenizer.encode_fim_parts(marks, [prefix, "a", "b"]).unwrap();
            prefix
        };
        assert_eq!(prefix(None, ""), Vec::<u32>::new());
        assert!(!prefix(Some(3), "").is_empty());
        assert_eq!(prefix(None, "a"), prefix(Some(3), "a"));
    }

    #[test]
    fn long_texts_are_converted_in_parts_of_whole_lines_or_characters() {
        assert_eq!(parts("", 4), [(0, "")]);
        assert_eq!(parts("abcd", 4), [(0, "abcd")]);
        assert_eq!(parts("a\nb\ncd", 5), [(0, "a\nb\n"), (4, "cd")]);
        assert_eq!(parts("abcdefgh", 3), [(0, "abc"), (3, "def"), (6, "gh")]);
        assert_eq!(parts("ääää", 3), [(0, "ä"), (2, "ä"), (4, "ä"), (6, "ä")]);
    }
}
