//! The text of tokens that come one after another.

use crate::error::Result;
use crate::models::causal_lm::TextTokenizer;

/// How many tokens of the prompt are decoded together with the first new one: whether a token begins with a space may depend on them.
const CONTEXT: usize = 8;

/// What a decoder writes for bytes that are not UTF-8 text.
const REPLACEMENT: char = '\u{fffd}';

/// So many tokens that are not decided are decoded again with each further one. Bytes of one character lie in fewer.
const MAX_UNDECIDED: usize = 32;

/// A text that grows by tokens. A character of several tokens appears when it is complete.
#[derive(Debug)]
pub(super) struct TextStream {
    /// The end of the prompt, and all tokens after it.
    ids: Vec<u32>,
    /// How many of them are of the prompt.
    prompt: usize,
    /// Where the tokens begin that are decoded together.
    start: usize,
    /// Where the tokens begin that were not decided at the last one.
    undecided: usize,
    /// The bytes of the text of the tokens from `start` on that have appeared, or are of the prompt. `None`: before the first token.
    emitted: Option<usize>,
    text: String,
}

impl TextStream {
    /// A text that continues these tokens, which are not part of it.
    pub(super) fn new(prompt: &[u32]) -> Self {
        let ids = prompt[prompt.len().saturating_sub(CONTEXT)..].to_vec();
        Self {
            prompt: ids.len(),
            start: 0,
            undecided: ids.len(),
            ids,
            emitted: None,
            text: String::new(),
        }
    }

    /// The text so far.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Adds a token.
    pub(super) fn push(&mut self, tokenizer: &TextTokenizer, id: u32) -> Result<()> {
        self.ids.push(id);
        if self.emitted.is_none() {
            self.begin(tokenizer)?;
        }
        let whole = tokenizer.decode(&self.ids[self.start..])?;
        let decided = tokenizer.decided(&whole);
        let emitted = self.emitted.unwrap_or(0);
        if let Some(new) = decided.get(emitted..) {
            self.text.push_str(new);
            self.emitted = Some(decided.len().max(emitted));
        }
        if decided.len() == whole.len() {
            let start = self.undecided;
            self.undecided = self.ids.len();
            self.move_to(tokenizer, start)?;
        } else if self.ids.len() - self.start > MAX_UNDECIDED {
            self.leave_behind(tokenizer, &whole)?;
        }
        Ok(())
    }

    /// Makes the text that of all tokens, also of what is left of an incomplete character.
    pub(super) fn finish(&mut self, tokenizer: &TextTokenizer) -> Result<()> {
        let before = tokenizer.decode(&self.ids[..self.prompt])?;
        let whole = tokenizer.decode(&self.ids)?;
        self.text = match continuation(&before, &whole) {
            Some(text) => text.to_owned(),
            None => tokenizer.decode(&self.ids[self.prompt..])?,
        };
        Ok(())
    }

    /// Chooses where decoding begins: with the prompt, unless it ends within a character.
    fn begin(&mut self, tokenizer: &TextTokenizer) -> Result<()> {
        let before = tokenizer.decode(&self.ids[..self.prompt])?;
        let whole = tokenizer.decode(&self.ids)?;
        self.emitted = Some(before.len());
        if continuation(&before, &whole).is_none() {
            (self.start, self.emitted) = (self.prompt, Some(0));
        }
        Ok(())
    }

    /// Decodes from token `start` on from now on: all of its text has appeared.
    fn move_to(&mut self, tokenizer: &TextTokenizer, start: usize) -> Result<()> {
        self.start = start;
        let whole = tokenizer.decode(&self.ids[start..])?;
        self.emitted = Some(tokenizer.decided(&whole).len());
        Ok(())
    }

    /// Leaves tokens behind that no further one can change, so that long runs of bytes that are not text cost no more than others. `whole`:
    /// the text from `start` on.
    fn leave_behind(&mut self, tokenizer: &TextTokenizer, whole: &str) -> Result<()> {
        // A cut within a character would show: both halves become a replacement of their own.
        let latest = self.ids.len() - 1;
        for cut in (latest.saturating_sub(MAX_UNDECIDED / 4)..=latest).rev() {
            let halves = [
                tokenizer.decode(&self.ids[self.start..cut])?,
                tokenizer.decode(&self.ids[cut..])?,
            ];
            if halves.concat() == whole {
                self.undecided = cut;
                return self.move_to(tokenizer, cut);
            }
        }
        Ok(())
    }
}

/// What a text has after that of the prompt. `None`: the prompt ends within a character, or its end is written in another way with what
/// follows, so that the tokens after it are decoded alone.
fn continuation<'a>(before: &str, whole: &'a str) -> Option<&'a str> {
    whole.strip_prefix(before).filter(|_| !before.ends_with(REPLACEMENT))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{TextStream, continuation};
    use crate::models::causal_lm::TextTokenizer;
    use crate::rng::TorchGenerator;
    use crate::testing::byte_tokenizer::write_tokenizer;
    use crate::testing::fixtures;

    /// Random bytes, of which many are not text, and characters that are cut anywhere.
    #[test]
    fn the_text_of_tokens_one_by_one_is_that_of_all_tokens() {
        let folder = tempfile::tempdir().unwrap();
        write_tokenizer(folder.path(), 260);
        let tokenizer = TextTokenizer::open(folder.path(), 260).unwrap();
        let mut generator = TorchGenerator::manual_seed(1);
        let mut draw = |below: usize| (generator.rand_f64(1)[0] * below as f64) as usize;
        for case in 0..200 {
            let mut ids = Vec::new();
            for _ in 0..draw(40) {
                match draw(3) {
                    0 => ids.extend((0..draw(60)).map(|_| draw(256) as u32)),
                    1 => ids.extend(tokenizer.encode("aé刄🦀 x\n").unwrap()),
                    _ => ids.push(tokenizer.encode("ӣ").unwrap()[draw(2)]),
                }
            }
            let prompt = draw(ids.len() + 1);
            let mut stream = TextStream::new(&ids[..prompt]);
            let mut texts = Vec::new();
            for id in &ids[prompt..] {
                stream.push(&tokenizer, *id).unwrap();
                texts.push(stream.text().to_owned());
            }
            stream.finish(&tokenizer).unwrap();
            let from = prompt.saturating_sub(super::CONTEXT);
            let (before, whole) = (tokenizer.decode(&ids[from..prompt]), tokenizer.decode(&ids[from..]));
            let expected = match continuation(&before.unwrap(), &whole.unwrap()) {
                Some(text) => text.to_owned(),
                None => tokenizer.decode(&ids[prompt..]).unwrap(),
            };
            assert_eq!(stream.text(), expected, "case {case}");
            for text in &texts {
                assert!(
                    expected.starts_with(text.as_str()),
                    "case {case}: {text:?} of {expected:?}"
                );
            }
            // At most one incomplete character is held back.
            let last = texts.last().map_or("", String::as_str);
            assert!(
                expected.len() - last.len() <= 3,
                "case {case}: {last:?} of {expected:?}"
            );
        }
    }

    /// Characters that the vocabulary lacks are bytes, as in Llama 2, and several follow one another.
    #[test]
    fn characters_of_bytes_appear_when_they_are_complete() {
        let folder = tempfile::tempdir().unwrap();
        let model = fixtures().join("sentencepiece/bpe/tokenizer.model");
        std::fs::copy(model, folder.path().join("tokenizer.model")).unwrap();
        let tokenizer = TextTokenizer::open(folder.path(), 520).unwrap();
        let mut generator = TorchGenerator::manual_seed(1);
        let mut draw = |below: usize| (generator.rand_f64(1)[0] * below as f64) as usize;
        let pieces = ["a", "def ", "🦀", "刄", "ӣ", "  ", "\n", "x = 1", "🦀刄", "é"];
        let mut compared = 0;
        for case in 0..200 {
            let text: String = (0..1 + draw(24)).map(|_| pieces[draw(pieces.len())]).collect();
            let ids = tokenizer.encode(&text).unwrap();
            let prompt = 1 + draw(ids.len() - 1);
            let from = prompt.saturating_sub(super::CONTEXT);
            if tokenizer
                .decode(&ids[from..prompt])
                .unwrap()
                .ends_with(super::REPLACEMENT)
            {
                continue;
            }
            compared += 1;
            let mut stream = TextStream::new(&ids[..prompt]);
            let mut texts = Vec::new();
            for id in &ids[prompt..] {
                stream.push(&tokenizer, *id).unwrap();
                texts.push(stream.text().to_owned());
            }
            let last = stream.text().to_owned();
            stream.finish(&tokenizer).unwrap();
            assert_eq!(last, stream.text(), "case {case}: {text:?}");
            for part in &texts {
                assert!(
                    stream.text().starts_with(part.as_str()),
                    "case {case}: {part:?} of {text:?}"
                );
            }
        }
        assert!(compared > 50, "{compared}");
    }
}
