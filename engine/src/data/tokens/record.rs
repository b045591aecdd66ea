//! Records of JSON and JSONL data sets: `[1, 2, 3]`, `{"tokens": […]}`, `{"text": "…"}`, `{"prompt": "…", "completion": "…"}`.

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;

/// The names of fields with a token sequence.
pub(super) const TOKEN_FIELDS: [&str; 2] = ["tokens", "input_ids"];

/// The names of the columns of a data set.
#[derive(Clone, Debug)]
pub(super) struct Columns {
    /// A text to train on.
    pub(super) text: String,
    /// A text that is not trained on.
    pub(super) prompt: String,
    /// The text that follows the prompt.
    pub(super) completion: String,
}

/// A value of a data set, without what is not needed of it. Its token ids may be any whole numbers.
#[derive(Debug)]
pub(super) enum RawRecord {
    Tokens(Vec<i64>),
    Fields(BTreeMap<String, Field>),
    /// A number of a file that is one sequence.
    Number(i64),
    Other,
}

/// The value of a field.
#[derive(Debug)]
pub(super) enum Field {
    Text(String),
    Tokens(Vec<i64>),
    Other,
}

/// What is trained on.
#[derive(Debug, PartialEq)]
pub(super) enum Record {
    Tokens(Vec<u32>),
    Text(String),
    Pair { prompt: String, completion: String },
}

impl RawRecord {
    /// The record of a value. `vocabulary`: the number of tokens of the model.
    ///
    /// # Errors
    /// What is wrong, without the place.
    pub(super) fn read(self, columns: &Columns, vocabulary: usize) -> Result<Record, String> {
        let mut fields = match self {
            Self::Tokens(tokens) => return checked_ids(tokens, vocabulary).map(Record::Tokens),
            Self::Fields(fields) => fields,
            Self::Number(_) | Self::Other => {
                return Err("expected a list of token ids or an object with fields".to_owned());
            }
        };
        let names = [TOKEN_FIELDS[0], TOKEN_FIELDS[1], &columns.text, &columns.prompt];
        let present: Vec<&str> = names.into_iter().filter(|name| fields.contains_key(*name)).collect();
        if let [one, other, ..] = present.as_slice() {
            return Err(format!(
                "it has `{one}` and `{other}`, and only one of them can be trained on: remove the other field, or name another column \
                 (`text_column`, `prompt_column`)"
            ));
        }
        for name in TOKEN_FIELDS {
            match fields.remove(name) {
                Some(Field::Tokens(tokens)) => return checked_ids(tokens, vocabulary).map(Record::Tokens),
                Some(_) => {
                    return Err(format!(
                        "`{name}`: expected a list of token ids, which are whole numbers"
                    ));
                }
                None => {}
            }
        }
        let names: Vec<String> = fields.keys().map(|name| format!("`{name}`")).collect();
        let mut text = |name: &str| match fields.remove(name) {
            Some(Field::Text(text)) => Ok(Some(text)),
            Some(_) => Err(format!("`{name}`: expected text")),
            None => Ok(None),
        };
        match (text(&columns.prompt)?, text(&columns.completion)?) {
            (Some(prompt), Some(completion)) => return Ok(Record::Pair { prompt, completion }),
            (Some(_), None) => {
                return Err(format!("it has `{}` and no `{}`", columns.prompt, columns.completion));
            }
            (None, Some(_)) => {
                return Err(format!("it has `{}` and no `{}`", columns.completion, columns.prompt));
            }
            (None, None) => {}
        }
        match text(&columns.text)? {
            Some(text) => Ok(Record::Text(text)),
            None => Err(format!(
                "it has none of the fields `{}`, `{}`, `{}`, and `{}` with `{}`; its fields are: {}. `text_column`, `prompt_column` and \
                 `completion_column` name others",
                TOKEN_FIELDS[0],
                TOKEN_FIELDS[1],
                columns.text,
                columns.prompt,
                columns.completion,
                if names.is_empty() {
                    "none".to_owned()
                } else {
                    names.join(", ")
                }
            )),
        }
    }
}

/// Checks token ids.
fn checked_ids(tokens: Vec<i64>, vocabulary: usize) -> Result<Vec<u32>, String> {
    let check = |(position, id): (usize, i64)| {
        u32::try_from(id).ok().filter(|id| (*id as usize) < vocabulary).ok_or_else(|| {
            format!(
                "the token id {id} at position {position} is not in the model's vocabulary of {vocabulary} tokens: the tokens are those of another \
                 model"
            )
        })
    };
    tokens.into_iter().enumerate().map(check).collect()
}

/// Reads a list of whole numbers. A list of anything else is not one.
fn read_numbers<'de, A: SeqAccess<'de>>(mut items: A) -> Result<Option<Vec<i64>>, A::Error> {
    let mut numbers = Vec::new();
    let mut are_whole = true;
    while let Some(item) = items.next_element::<Number>()? {
        match item.0 {
            Some(number) if are_whole => numbers.push(number),
            _ => {
                are_whole = false;
                numbers = Vec::new();
            }
        }
    }
    Ok(are_whole.then_some(numbers))
}

/// A whole number, or `None` for any other value.
struct Number(Option<i64>);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(ValueVisitor).map(|value| match value {
            Shape::Number(number) => Self(number),
            _ => Self(None),
        })
    }
}

impl<'de> Deserialize<'de> for Field {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(ValueVisitor).map(|value| match value {
            Shape::Text(text) => Self::Text(text),
            Shape::Numbers(numbers) => Self::Tokens(numbers),
            _ => Self::Other,
        })
    }
}

impl<'de> Deserialize<'de> for RawRecord {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(RecordVisitor)
    }
}

/// A value without the content of maps and mixed lists.
enum Shape {
    Number(Option<i64>),
    Text(String),
    Numbers(Vec<i64>),
    Other,
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Shape;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Shape, E> {
        Ok(Shape::Other)
    }

    fn visit_i64<E>(self, number: i64) -> Result<Shape, E> {
        Ok(Shape::Number(Some(number)))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Shape, E> {
        // Too large for any vocabulary.
        Ok(Shape::Number(Some(i64::try_from(number).unwrap_or(i64::MAX))))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Shape, E> {
        Ok(Shape::Number(None))
    }

    fn visit_str<E>(self, text: &str) -> Result<Shape, E> {
        Ok(Shape::Text(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> Result<Shape, E> {
        Ok(Shape::Text(text))
    }

    fn visit_unit<E>(self) -> Result<Shape, E> {
        Ok(Shape::Other)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Shape, A::Error> {
        Ok(read_numbers(items)?.map_or(Shape::Other, Shape::Numbers))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Shape, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Shape::Other)
    }
}

struct RecordVisitor;

impl<'de> Visitor<'de> for RecordVisitor {
    type Value = RawRecord;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of token ids or an object")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<RawRecord, A::Error> {
        match read_numbers(items)? {
            Some(numbers) => Ok(RawRecord::Tokens(numbers)),
            None => Err(A::Error::custom(
                "expected a list of token ids, which are whole numbers",
            )),
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawRecord, A::Error> {
        /// More fields than a record has.
        const MAX_FIELDS: usize = 10_000;
        let mut fields = BTreeMap::new();
        while let Some((name, field)) = map.next_entry::<String, Field>()? {
            if fields.len() == MAX_FIELDS {
                return Err(A::Error::custom(format!("an object of more than {MAX_FIELDS} fields")));
            }
            fields.insert(name, field);
        }
        Ok(RawRecord::Fields(fields))
    }

    fn visit_bool<E>(self, _: bool) -> Result<RawRecord, E> {
        Ok(RawRecord::Other)
    }

    fn visit_i64<E>(self, number: i64) -> Result<RawRecord, E> {
        Ok(RawRecord::Number(number))
    }

    fn visit_u64<E>(self, number: u64) -> Result<RawRecord, E> {
        // Too large for any vocabulary.
        Ok(RawRecord::Number(i64::try_from(number).unwrap_or(i64::MAX)))
    }

    fn visit_f64<E>(self, _: f64) -> Result<RawRecord, E> {
        Ok(RawRecord::Other)
    }

    fn visit_str<E>(self, _: &str) -> Result<RawRecord, E> {
        Ok(RawRecord::Other)
    }

    fn visit_unit<E>(self) -> Result<RawRecord, E> {
        Ok(RawRecord::Other)
    }
}
