//! Words of textual inversion in prompts.
//!
//! A word stands for several ids, which follow those of the vocabulary. `word` in a prompt is all of them, as diffusers'
//! `maybe_convert_prompt` makes it; `word_2` is the third one alone. A `word` that `word_1` follows is the first one alone: the
//! prompt has been converted already. Capitals do not matter, and a part of a longer word is not the word.

use std::ops::Range;

/// A word and its ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Word {
    trigger: String,
    pub(super) ids: Range<u32>,
}

/// A part of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Piece<'a> {
    /// Text without learned words.
    Text(&'a str),
    /// The ids of a word.
    Ids(Range<u32>),
}

/// A word in a text.
struct Found {
    at: Range<usize>,
    ids: Range<u32>,
}

impl Word {
    pub(super) fn new(trigger: &str, ids: Range<u32>) -> Self {
        Self {
            trigger: trigger.to_ascii_lowercase(),
            ids,
        }
    }

    pub(super) fn is(&self, trigger: &str) -> bool {
        self.trigger == trigger.to_ascii_lowercase()
    }

    /// The first place at or after `from` of a text in small letters.
    fn find(&self, lower: &str, from: usize) -> Option<Found> {
        let mut from = from;
        loop {
            let start = from + lower.get(from..)?.find(&self.trigger)?;
            if let Some(found) = self.at(lower, start) {
                return Some(found);
            }
            from = start + lower[start..].chars().next().map_or(1, char::len_utf8);
        }
    }

    /// The word at `start`, where its letters are.
    fn at(&self, lower: &str, start: usize) -> Option<Found> {
        let end = start + self.trigger.len();
        let (before, rest) = (lower.get(..start)?, lower.get(end..)?);
        if self.trigger.starts_with(is_word_char) && before.ends_with(is_word_char) {
            return None;
        }
        let Range {
            start: first,
            end: last,
        } = self.ids;
        if let Some((number, length)) = number_after(rest)
            && number < last - first
        {
            return Some(Found {
                at: start..end + length,
                ids: first + number..first + number + 1,
            });
        }
        if self.trigger.ends_with(is_word_char) && rest.starts_with(is_word_char) {
            return None;
        }
        let next = rest.trim_start().strip_prefix(self.trigger.as_str());
        let is_converted = last - first > 1 && next.and_then(number_after).is_some_and(|(number, _)| number == 1);
        Some(Found {
            at: start..end,
            ids: if is_converted {
                first..first + 1
            } else {
                self.ids.clone()
            },
        })
    }
}

fn is_word_char(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// `_2` at the beginning of a text, not followed by a letter: the number and the length.
fn number_after(rest: &str) -> Option<(u32, usize)> {
    let digits = rest.strip_prefix('_')?;
    let length = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    if digits.starts_with('0') || digits[length..].starts_with(is_word_char) {
        return None;
    }
    Some((digits[..length].parse().ok()?, 1 + length))
}

/// Splits a prompt at learned words. Where several begin, the longest counts.
pub(super) fn split<'a>(words: &[Word], text: &'a str) -> Vec<Piece<'a>> {
    // As long as the text: only letters of ASCII change.
    let lower = text.to_ascii_lowercase();
    let (mut pieces, mut from) = (Vec::new(), 0);
    loop {
        let found = words.iter().filter_map(|word| word.find(&lower, from));
        let Some(Found { at, ids }) = found.min_by_key(|found| (found.at.start, std::cmp::Reverse(found.at.end)))
        else {
            break;
        };
        if at.start > from {
            pieces.push(Piece::Text(&text[from..at.start]));
        }
        from = at.end;
        pieces.push(Piece::Ids(ids));
    }
    if from < text.len() {
        pieces.push(Piece::Text(&text[from..]));
    }
    pieces
}

/// Whether a prompt has the word of so many vectors.
#[must_use]
pub fn has_word(text: &str, trigger: &str, vectors: u32) -> bool {
    let word = Word::new(trigger, 0..vectors);
    word.find(&text.to_ascii_lowercase(), 0).is_some()
}

/// A text in which the word is replaced by another text; `word_1`, `word_2`, … are removed.
#[must_use]
pub fn replace_word(text: &str, trigger: &str, vectors: u32, by: &str) -> String {
    let word = Word::new(trigger, 0..vectors);
    let pieces = split(std::slice::from_ref(&word), text);
    let texts = pieces.into_iter().map(|piece| match piece {
        Piece::Text(text) => text,
        Piece::Ids(ids) if ids.start == 0 => by,
        Piece::Ids(_) => "",
    });
    texts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use Piece::{Ids, Text};

    fn words() -> [Word; 2] {
        [Word::new("Zorb", 100..103), Word::new("<cat>", 103..104)]
    }

    #[test]
    fn a_word_is_all_its_vectors() {
        let pieces = split(&words(), "a ZORB, and <cat>toy");
        assert_eq!(
            pieces,
            [Text("a "), Ids(100..103), Text(", and "), Ids(103..104), Text("toy")]
        );
        assert_eq!(split(&words(), "zorb"), [Ids(100..103)]);
        assert_eq!(split(&words(), ""), []);
        assert_eq!(split(&[], "zorb"), [Text("zorb")]);
    }

    #[test]
    fn parts_of_other_words_are_no_words() {
        for text in [
            "zorbs", "ezorb", "_zorb", "zorb_x", "zorb_3", "zorb_01", "zorb_1x", "äzorb", "zorbé", "zorb2",
        ] {
            assert_eq!(split(&words(), text), [Text(text)], "{text}");
        }
        assert_eq!(split(&words(), "zorbs zorb"), [Text("zorbs "), Ids(100..103)]);
    }

    #[test]
    fn numbered_words_are_single_vectors() {
        assert_eq!(split(&words(), "zorb_2"), [Ids(102..103)]);
        assert_eq!(
            split(&words(), "zorb zorb_1 zorb_2."),
            [
                Ids(100..101),
                Text(" "),
                Ids(101..102),
                Text(" "),
                Ids(102..103),
                Text(".")
            ]
        );
    }

    #[test]
    fn words_are_found_and_replaced() {
        assert!(has_word("a zorb", "zorb", 2) && has_word("a zorb_1", "zorb", 2));
        assert!(!has_word("a zorb_2", "zorb", 2) && !has_word("", "zorb", 2));
        assert_eq!(replace_word("a zorb zorb_1, zorb", "zorb", 2, "cat"), "a cat , cat");
    }

    #[test]
    fn the_longest_word_counts() {
        let words = [Word::new("a-b", 0..1), Word::new("a", 1..2)];
        assert_eq!(split(&words, "a-b a"), [Ids(0..1), Text(" "), Ids(1..2)]);
    }

    proptest::proptest! {
        #[test]
        fn no_text_is_lost(text in "[zZorb_ 12é<cat>]{0,40}") {
            let kept: String = split(&words(), &text)
                .into_iter()
                .map(|piece| match piece {
                    Text(text) => text.to_owned(),
                    Ids(_) => String::new(),
                })
                .collect();
            proptest::prop_assert!(kept.len() <= text.len());
            let has_none = !has_word(&text, "zorb", 3) && !has_word(&text, "<cat>", 1);
            proptest::prop_assert_eq!(has_none, kept == text);
        }
    }
}
