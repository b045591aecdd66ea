//! The tokenizer of a language model: `tokenizer.json` of its folder, or else `tokenizer.model`.

use super::fim::FimTokens;
use super::scored_vocabulary::{FILE_NAME, SentencePieceModel};
use super::sentencepiece_tokenizer::tokenizer_json;
use crate::error::{EngineError, Result};
use crate::models::{config, tokenizer_file};
use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

/// Texts before a text that continues another one. The first that stays a token of its own is used.
const BEFORE_CONTINUATION: [&str; 4] = ["\n", "0", ".", "a"];

/// Converts between texts and token ids.
#[derive(Clone, Debug)]
pub struct TextTokenizer {
    tokenizer: Tokenizer,
    path: PathBuf,
    /// Special tokens that it adds at the end of a text.
    added_at_end: usize,
    /// The token that ends a text.
    end: Option<u32>,
    /// See [`has_byte_fallback`].
    has_byte_fallback: bool,
    /// See [`has_prefix`].
    has_prefix: bool,
    /// The tokens that mark a gap, with their names.
    fim: Option<(FimTokens, [&'static str; 3])>,
}

/// Whether the tokenizer puts a space before each text, as that of Llama 2 does.
fn has_prefix(tokenizer: &Tokenizer) -> bool {
    let ids = |text: &str| Some(tokenizer.encode(text, false).ok()?.get_ids().to_vec());
    let (Some(line), Some(word), Some(both)) = (ids("\n"), ids("a"), ids("\na")) else {
        return false;
    };
    both.strip_prefix(line.as_slice()).is_some_and(|rest| rest != word)
}

/// Whether bytes of characters that are not in the vocabulary are tokens of their own, each of which is decoded to a replacement until the
/// character is complete, as in tokenizers of SentencePiece.
fn has_byte_fallback(tokenizer: &Tokenizer) -> bool {
    let bytes = ["<0xE5>", "<0x88>"].iter().map(|name| tokenizer.token_to_id(name));
    let Some(bytes) = bytes.collect::<Option<Vec<u32>>>() else {
        return false;
    };
    let is_replacement = |character: &char| *character == char::REPLACEMENT_CHARACTER;
    tokenizer
        .decode(&bytes, true)
        .is_ok_and(|text| text.chars().filter(is_replacement).count() == bytes.len())
}

/// The name of the token that ends a text, `eos_token` of `tokenizer_config.json` or of `special_tokens_map.json`, with that file.
/// `None`: the folder names none.
///
/// # Errors
/// When one of the files is not JSON.
pub fn eos_token_name(folder: &Path) -> Result<Option<(PathBuf, String)>> {
    for file in ["tokenizer_config.json", "special_tokens_map.json"] {
        let path = folder.join(file);
        if !path.is_file() {
            continue;
        }
        let json = config::read_json(&path)?;
        let token = json.get("eos_token");
        let name = token.and_then(|token| token.as_str().or_else(|| token.get("content")?.as_str()));
        if let Some(name) = name {
            return Ok(Some((path, name.to_owned())));
        }
    }
    Ok(None)
}

/// The number of special tokens that a tokenizer adds at the end of a text: in the first text with tokens of its own, those that were
/// added have a mark. A tokenizer that fails says so when texts are read.
fn count_added_at_end(tokenizer: &Tokenizer) -> usize {
    let of_text = |text: &&str| {
        let encoding = tokenizer.encode(*text, true).ok()?;
        let mask = encoding.get_special_tokens_mask();
        let last = mask.iter().rposition(|mark| *mark == 0)?;
        Some(mask.len() - 1 - last)
    };
    ["a", "0", " "].iter().find_map(of_text).unwrap_or(0)
}

impl TextTokenizer {
    /// Whether a model folder has a tokenizer.
    #[must_use]
    pub fn is_in(folder: &Path) -> bool {
        ["tokenizer.json", FILE_NAME]
            .iter()
            .any(|name| folder.join(name).is_file())
    }

    /// Opens `tokenizer.json` of a model folder, or else its `tokenizer.model`, for a model with this many token ids.
    ///
    /// # Errors
    /// When it or a file beside it cannot be read, or it has ids that the model does not have.
    pub fn open(folder: &Path, vocab_size: usize) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        let sentencepiece = folder.join(FILE_NAME);
        if !path.is_file() && sentencepiece.is_file() {
            return Self::open_sentencepiece(folder, sentencepiece, vocab_size);
        }
        let text = config::read_text(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => EngineError::model_config(&path, config::INCOMPLETE),
            _ => EngineError::io(&path, error),
        })?;
        let tokenizer: Tokenizer = text
            .parse()
            .map_err(|error| EngineError::model_config(&path, format!("this is not a tokenizer: {error}")))?;
        let tokenizer = Self::new(tokenizer, path, vocab_size)?;
        let end = eos_token_name(folder)?.and_then(|(_, name)| tokenizer.token_id(&name));
        Ok(Self { end, ..tokenizer })
    }

    fn open_sentencepiece(folder: &Path, path: PathBuf, vocab_size: usize) -> Result<Self> {
        let model = SentencePieceModel::open(folder)?;
        let json = tokenizer_json(&model).map_err(|message| EngineError::model_config(&path, message))?;
        Self::from_json(&json.to_string(), path, vocab_size)
    }

    /// A tokenizer from the text of a `tokenizer.json`; `path` is for messages.
    pub(super) fn from_json(json: &str, path: PathBuf, vocab_size: usize) -> Result<Self> {
        let tokenizer = json
            .parse()
            .map_err(|error| EngineError::model_config(&path, format!("its tokenizer cannot be used: {error}")))?;
        Self::new(tokenizer, path, vocab_size)
    }

    /// A tokenizer from its parts; `path` is for messages.
    fn new(mut tokenizer: Tokenizer, path: PathBuf, vocab_size: usize) -> Result<Self> {
        tokenizer_file::forget_last_call(&mut tokenizer);
        let largest = tokenizer.get_vocab(true).into_values().max().unwrap_or(0);
        if largest as usize >= vocab_size {
            return Err(EngineError::model_config(
                path,
                format!(
                    "the tokenizer has the id {largest}, and the model has {vocab_size} tokens (`vocab_size` of config.json): it is the \
                     tokenizer of another model, or tokens were added without resizing the model's embeddings"
                ),
            ));
        }
        Ok(Self {
            added_at_end: count_added_at_end(&tokenizer),
            has_byte_fallback: has_byte_fallback(&tokenizer),
            has_prefix: has_prefix(&tokenizer),
            fim: FimTokens::find(&tokenizer),
            tokenizer,
            path,
            end: None,
        })
    }

    /// The ids of a text that goes on: with the special tokens that the tokenizer adds at its beginning, without those that it adds at its
    /// end.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.tokenizer.encode(text, true);
        let encoding = encoding.map_err(|error| self.error(&error))?;
        let count = encoding.len().saturating_sub(self.added_at_end);
        Ok(encoding.get_ids()[..count].to_vec())
    }

    /// The number of special tokens that the tokenizer adds at the end of a text.
    #[must_use]
    pub fn added_at_end(&self) -> usize {
        self.added_at_end
    }

    /// The token that ends a text according to the folder's files of the tokenizer. `None`: they name none that it has.
    #[must_use]
    pub fn end(&self) -> Option<u32> {
        self.end
    }

    /// Whether it puts a space before each text.
    #[must_use]
    pub fn has_prefix(&self) -> bool {
        self.has_prefix
    }

    /// The ids of a text that continues another one: without special tokens, and without the space that some tokenizers put before each text.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn encode_continuation(&self, text: &str) -> Result<Vec<u32>> {
        if text.is_empty() {
            return Ok(Vec::new());
        }
        let ids = |text: &str| -> Result<Vec<u32>> {
            let encoding = self.tokenizer.encode(text, false).map_err(|error| self.error(&error))?;
            Ok(encoding.get_ids().to_vec())
        };
        if self.has_prefix {
            for before in BEFORE_CONTINUATION {
                let alone = ids(before)?;
                let both = ids(&format!("{before}{text}"))?;
                if let Some(ids) = both.strip_prefix(alone.as_slice()) {
                    return Ok(ids.to_vec());
                }
            }
        }
        ids(text)
    }

    /// The ids of the text before a gap, without the mark, in models whose parts are converted each alone
    /// ([`FimTokens::has_separate_parts`]). An empty text has none in models without a mark of the middle, as in mistral-common.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn encode_fim_prefix(&self, tokens: FimTokens, prefix: &str) -> Result<Vec<u32>> {
        let has_none = prefix.is_empty() && tokens.middle.is_none();
        match self.has_prefix && !has_none {
            true => self.encode_continuation(&format!(" {prefix}")),
            false => self.encode_continuation(prefix),
        }
    }

    /// The ids of a text with a gap, in the order prefix, suffix, middle (PSM); of models that have no mark of the middle suffix, prefix.
    ///
    /// # Errors
    /// When the tokenizer has no tokens for gaps, or fails.
    pub fn encode_fim(&self, prefix: &str, suffix: &str) -> Result<Vec<u32>> {
        let Some((tokens, [of_prefix, of_suffix, of_middle])) = &self.fim else {
            return Err(EngineError::bad_input(format!(
                "{}: this tokenizer has no tokens for gaps (such as {}), so the model cannot fill them: use `prompts`, or a model that was \
                 trained to fill gaps, such as StarCoder2 or Qwen2.5-Coder",
                self.path.display(),
                FimTokens::known_names()
            )));
        };
        if !tokens.has_separate_parts {
            return self.encode(&format!("{of_prefix}{prefix}{of_suffix}{suffix}{of_middle}"));
        }
        let prefix = self.encode_fim_prefix(*tokens, prefix)?;
        // What the tokenizer puts at the beginning of a text.
        let mut ids = self.encode("")?;
        ids.extend(tokens.before_middle(&prefix, &self.encode_continuation(suffix)?, false));
        Ok(ids)
    }

    /// The tokens for fill-in-the-middle, if the tokenizer has them.
    #[must_use]
    pub fn fim_tokens(&self) -> Option<FimTokens> {
        self.fim.map(|(tokens, _)| tokens)
    }

    /// The tokenizer itself, and its file.
    #[must_use]
    pub fn inner(&self) -> (&Tokenizer, &Path) {
        (&self.tokenizer, &self.path)
    }

    /// The text of ids, without special tokens.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.tokenizer.decode(ids, true).map_err(|error| self.error(&error))
    }

    /// The part of a decoded text that no further token changes: without what stands for a character at its end that is not complete.
    #[must_use]
    pub fn decided<'a>(&self, text: &'a str) -> &'a str {
        match self.has_byte_fallback {
            // One for each byte; and of complete characters before it without a token between them, too.
            true => text.trim_end_matches(char::REPLACEMENT_CHARACTER),
            false => text.strip_suffix(char::REPLACEMENT_CHARACTER).unwrap_or(text),
        }
    }

    /// The id of a token by its name.
    #[must_use]
    pub fn token_id(&self, name: &str) -> Option<u32> {
        self.tokenizer.token_to_id(name)
    }

    fn error(&self, error: &dyn std::fmt::Display) -> EngineError {
        EngineError::bad_input(format!("{}: the tokenizer fails: {error}", self.path.display()))
    }
}
