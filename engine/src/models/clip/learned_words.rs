//! Words of textual inversion in prompts.
//!
//! A word stands for several ids, which follow those of the vocabulary. `word` in a prompt is all of them, as diffusers'
//! `maybe_convert_prompt` makes it; `word_2` is the third one alone. A `word` that `word_1` follows is the first one alone: the
//! prompt has been converted already. Capitals do not matter, and a part of a longer word is not the word. Both are compared as
//! CLIP's tokenizer compares words: composed (NFC), in lower case.

use std::ops::Range;
use tokenizers::NormalizedString;
use tokenizers::normalizer::Range as Place;

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
struct Occurrence {
    at: Range<usize>,
    ids: Range<u32>,
}

impl Word {
    pub(super) fn new(trigger: &str, ids: Range<u32>) -> Self {
        Self {
            trigger: normalized(trigger).get().to_owned(),
            ids,
        }
    }

    /// Why prompts cannot use both words, if they cannot.
    pub(super) fn conflict(&self, known: &Self) -> Option<String> {
        if self.trigger == known.trigger {
            return Some(format!(
                "another word is called `{}` too: keep one of them, or rename one",
                self.trigger
            ));
        }
        let (word, part) = match (known.has_part(self), self.has_part(known)) {
            (true, _) => (known, self),
            (_, true) => (self, known),
            _ => return None,
        };
        Some(format!(
            "prompts could not use both words: `{}` is also how they write one of the {} vectors of `{}`; rename one of them",
            part.trigger,
            word.ids.end - word.ids.start,
            word.trigger
        ))
    }

    /// Whether the other word is how prompts write a single vector of this one: `word_2`.
    fn has_part(&self, other: &Self) -> bool {
        let rest = other.trigger.strip_prefix(self.trigger.as_str());
        rest.is_some_and(|rest| {
            number_after(rest)
                .is_some_and(|(number, length)| length == rest.len() && number < self.ids.end - self.ids.start)
        })
    }

    /// The first place at or after `from` of a normalised text.
    fn find(&self, lower: &str, from: usize) -> Option<Occurrence> {
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
    fn at(&self, lower: &str, start: usize) -> Option<Occurrence> {
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
            return Some(Occurrence {
                at: start..end + length,
                ids: first + number..first + number + 1,
            });
        }
        if self.trigger.ends_with(is_word_char) && rest.starts_with(is_word_char) {
            return None;
        }
        let next = rest.trim_start().strip_prefix(self.trigger.as_str());
        let is_converted = last - first > 1 && next.and_then(number_after).is_some_and(|(number, _)| number == 1);
        Some(Occurrence {
            at: start..end,
            ids: if is_converted {
                first..first + 1
            } else {
                self.ids.clone()
            },
        })
    }
}

/// A text as words are compared, which knows the places of its letters in the original.
fn normalized(text: &str) -> NormalizedString {
    let mut text = NormalizedString::from(text);
    text.nfc().lowercase();
    text
}

/// The place in the original where the letter at a place of the normalised text begins.
fn original_place(text: &NormalizedString, place: usize) -> usize {
    // A letter has several places in the original if it was composed: the end of one is where the next one begins.
    let next = text.get().get(place..).and_then(|rest| rest.chars().next());
    let letter = next.map(|next| Place::Normalized(place..place + next.len_utf8()));
    let original = letter.and_then(|letter| text.convert_offsets(letter));
    original.map_or(text.len_original(), |original| original.start)
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
    let lower = normalized(text);
    // `from` is a place in the normalised text, `done` the same place in the original.
    let (mut pieces, mut from, mut done) = (Vec::new(), 0, 0);
    loop {
        let found = words.iter().filter_map(|word| word.find(lower.get(), from));
        let Some(Occurrence { at, ids }) = found.min_by_key(|found| (found.at.start, std::cmp::Reverse(found.at.end)))
        else {
            break;
        };
        let start = original_place(&lower, at.start);
        if let Some(before) = text.get(done..start).filter(|before| !before.is_empty()) {
            pieces.push(Piece::Text(before));
        }
        (from, done) = (at.end, original_place(&lower, at.end));
        pieces.push(Piece::Ids(ids));
    }
    if let Some(rest) = text.get(done..).filter(|rest| !rest.is_empty()) {
        pieces.push(Piece::Text(rest));
    }
    pieces
}

/// Why prompts cannot use both words, each with its number of vectors, if they cannot.
#[must_use]
pub fn word_conflict(new: (&str, u32), known: (&str, u32)) -> Option<String> {
    Word::new(new.0, 0..new.1).conflict(&Word::new(known.0, 0..known.1))
}

/// Whether a prompt has the word of this many vectors.
#[must_use]
pub fn has_word(text: &str, trigger: &str, vectors: u32) -> bool {
    let word = Word::new(trigger, 0..vectors);
    word.find(normalized(text).get(), 0).is_some()
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

    #[test]
    fn letters_are_compared_as_clip_compares_them() {
        let words = [Word::new("Äöü", 100..103), Word::new("STRAẞE", 103..104)];
        // The second is decomposed: letters and diaereses.
        for text in ["äöü", "A\u{308}o\u{308}U\u{308}", "ÄÖÜ"] {
            assert_eq!(split(&words, text), [Ids(100..103)], "{text}");
            let long = format!("İ É {text} İ");
            assert_eq!(
                split(&words, &long),
                [Text("İ É "), Ids(100..103), Text(" İ")],
                "{text}"
            );
        }
        assert_eq!(split(&words, "äöü_1 straße"), [Ids(101..102), Text(" "), Ids(103..104)]);
        assert_eq!(split(&words, "äöüé aou"), [Text("äöüé aou")]);
        assert!(has_word("ÉIN ÄÖÜ", "äöü", 3));
        assert_eq!(replace_word("É Äöü, É", "äöü", 3, "cat"), "É cat, É");
    }

    #[test]
    fn a_word_that_names_a_vector_of_another_one_is_its_part() {
        let word = Word::new("Vorx", 0..4);
        for part in ["vorx_1", "VORX_3"] {
            assert!(word.has_part(&Word::new(part, 0..1)), "{part}");
        }
        for other in ["vorx", "vorx_0", "vorx_4", "vorx_1x", "vorx_01", "vorx1", "a_vorx_1"] {
            assert!(!word.has_part(&Word::new(other, 0..1)), "{other}");
        }
        let conflict = |new: &str, known: &str| word_conflict((new, 4), (known, 4));
        assert!(
            conflict("vorx_1", "Vorx")
                .unwrap()
                .contains("`vorx_1` is also how they write one of the 4 vectors of `vorx`")
        );
        assert!(conflict("vorx", "vorx_1").unwrap().contains("`vorx_1` is also how"));
        assert!(conflict("vorx", "VORX").unwrap().contains("called `vorx` too"));
        assert_eq!(conflict("vorx", "vorxes"), None);
    }

    proptest::proptest! {
        #[test]
        fn no_text_is_lost(text in "[zZorb_ 12éİ\u{308}<cat>]{0,40}") {
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
