//! The text of tokens that come one after another.

use crate::error::Result;
use crate::models::decoder::TextTokenizer;

/// How many tokens of the prompt are decoded together with the first new one: whether a token begins with a space may depend on them.
const CONTEXT: usize = 8;

/// A character has at most four bytes, and so many tokens. More that are no text do not become one.
const MAX_TOKENS_OF_CHARACTER: usize = 4;

/// A text that grows by tokens. A character of several tokens appears when it is complete.
#[derive(Debug)]
pub(super) struct TextStream {
    ids: Vec<u32>,
    /// Where the tokens begin that are decoded together.
    start: usize,
    /// Where the tokens begin whose text has not appeared yet.
    unread: usize,
    text: String,
}

impl TextStream {
    /// A text that continues these tokens, which are not part of it.
    pub(super) fn new(prompt: &[u32]) -> Self {
        let ids = prompt[prompt.len().saturating_sub(CONTEXT)..].to_vec();
        Self {
            start: 0,
            unread: ids.len(),
            ids,
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
        self.read(tokenizer, false)
    }

    /// Adds what is left of an incomplete character.
    pub(super) fn finish(&mut self, tokenizer: &TextTokenizer) -> Result<()> {
        self.read(tokenizer, true)
    }

    fn read(&mut self, tokenizer: &TextTokenizer, is_last: bool) -> Result<()> {
        if self.unread == self.ids.len() {
            return Ok(());
        }
        let before = tokenizer.decode(&self.ids[self.start..self.unread])?;
        let whole = tokenizer.decode(&self.ids[self.start..])?;
        let is_short = self.ids.len() - self.unread < MAX_TOKENS_OF_CHARACTER;
        if whole.ends_with('\u{fffd}') && is_short && !is_last {
            return Ok(());
        }
        match whole.strip_prefix(before.as_str()) {
            Some(new) => self.text.push_str(new),
            // The prompt ends within a character.
            None => self.text.push_str(&tokenizer.decode(&self.ids[self.unread..])?),
        }
        self.start = self.unread;
        self.unread = self.ids.len();
        Ok(())
    }
}
