//! A JSON value as a deserialiser for configs. Unlike serde_json's own it does not read a list into a struct, field by field, and its errors
//! are in plain words.

use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{DeserializeOwned, Deserializer, Error as _, IntoDeserializer, Unexpected, Visitor};
use serde::forward_to_deserialize_any;
use serde_json::{Error, Value};

/// A value of a config.
struct ConfigValue(Value);

/// Converts a value to a config type.
///
/// # Errors
/// A sentence with the key that has another type.
pub(super) fn read<T: DeserializeOwned>(value: Value) -> Result<T, String> {
    serde_path_to_error::deserialize(ConfigValue(value)).map_err(|error| {
        let (key, problem) = (error.path().to_string(), in_plain_words(&error.inner().to_string()));
        match key.as_str() {
            // The whole config.
            "." => problem,
            key => format!("`{key}`: {problem}"),
        }
    })
}

/// An error of serde without the names of Rust's types.
fn in_plain_words(problem: &str) -> String {
    if problem.starts_with("data did not match any variant") {
        return "expected one value, or a list of such values".into();
    }
    if let Some(key) = problem.strip_prefix("missing field ") {
        return format!("the key {key} is missing");
    }
    if let Some((length, expected)) = problem
        .strip_prefix("invalid length ")
        .and_then(|rest| rest.split_once(", expected "))
    {
        let size = expected
            .split(|c: char| !c.is_ascii_digit())
            .find(|digits| !digits.is_empty());
        let expected = size.map_or_else(|| expected.to_owned(), |size| format!("a list of {size} values"));
        return format!("expected {expected}, found a list of {length}");
    }
    let mismatch = ["invalid type: ", "invalid value: ", "unknown variant "];
    let mismatch = mismatch.iter().find_map(|start| problem.strip_prefix(start));
    let Some((found, expected)) = mismatch.and_then(|rest| rest.rsplit_once(", expected ")) else {
        return problem.to_owned();
    };
    let expected = match expected {
        "f32" | "f64" => "a number",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number from 0",
        "a boolean" => "true or false",
        "a string" => "text",
        "a sequence" => "a list",
        "a map" => "an object",
        name if name.starts_with("struct ") => "an object",
        other => other,
    };
    let found = match found {
        "sequence" => "a list",
        "map" => "an object",
        other => ["string ", "integer ", "floating point ", "boolean "]
            .iter()
            .find_map(|kind| other.strip_prefix(kind))
            .unwrap_or(other),
    };
    format!("expected {expected}, found {found}")
}

impl<'de> IntoDeserializer<'de, Error> for ConfigValue {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for ConfigValue {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Array(items) => {
                let mut items = SeqDeserializer::new(items.into_iter().map(Self));
                let value = visitor.visit_seq(&mut items)?;
                items.end()?;
                Ok(value)
            }
            Value::Object(keys) => {
                let mut keys = MapDeserializer::new(keys.into_iter().map(|(key, value)| (key, Self(value))));
                let value = visitor.visit_map(&mut keys)?;
                keys.end()?;
                Ok(value)
            }
            other => other.deserialize_any(visitor),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self.0 {
            Value::Array(_) => Err(Error::invalid_type(Unexpected::Seq, &"an object")),
            other => Self(other).deserialize_any(visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.0.deserialize_enum(name, variants, visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple tuple_struct map
        identifier ignored_any
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::read;
    use serde::Deserialize;
    use serde_json::{Value, json};

    #[derive(Debug, Default, Deserialize, PartialEq)]
    #[serde(default)]
    struct Inner {
        factor: Option<f64>,
        name: String,
    }

    #[derive(Debug, Default, Deserialize, PartialEq)]
    #[serde(default)]
    struct Outer {
        size: usize,
        offset: i64,
        on: bool,
        sizes: Vec<usize>,
        inner: Option<Inner>,
        pair: (u32, f64),
        any: Value,
        kind: Kind,
        named: Option<Named>,
    }

    #[derive(Debug, Default, Deserialize, PartialEq)]
    #[serde(rename_all = "lowercase")]
    enum Kind {
        #[default]
        First,
        Second,
    }

    #[derive(Debug, Deserialize, PartialEq)]
    struct Named {
        name: String,
    }

    #[test]
    fn objects_are_read_as_by_serde_json() {
        let json = json!({
            "size": 4, "offset": -1, "on": true, "sizes": [1, 2], "inner": {"factor": 2, "name": "x"}, "pair": [1, 2.5],
            "any": {"b": [1, null], "a": "text"}, "unknown": [{"x": 1}], "kind": "second", "named": {"name": "y"},
        });
        let expected: Outer = serde_json::from_value(json.clone()).unwrap();
        assert_eq!(read::<Outer>(json).unwrap(), expected);
        assert_eq!(expected.inner.unwrap().factor, Some(2.0));
    }

    #[test]
    fn errors_name_the_key_and_no_type_of_rust() {
        for (json, expected) in [
            (json!([1, 2]), "expected an object, found a list"),
            (
                json!({"inner": [2.0, "x"]}),
                "`inner`: expected an object, found a list",
            ),
            (json!({"inner": 3}), "`inner`: expected an object, found `3`"),
            (
                json!({"inner": {"factor": "2"}}),
                "`inner.factor`: expected a number, found \"2\"",
            ),
            (
                json!({"size": "big"}),
                "`size`: expected a whole number from 0, found \"big\"",
            ),
            (
                json!({"size": -1}),
                "`size`: expected a whole number from 0, found `-1`",
            ),
            (
                json!({"size": 1.5}),
                "`size`: expected a whole number from 0, found `1.5`",
            ),
            (
                json!({"offset": {}}),
                "`offset`: expected a whole number, found an object",
            ),
            (json!({"on": 1}), "`on`: expected true or false, found `1`"),
            (
                json!({"sizes": [1, "two"]}),
                "`sizes[1]`: expected a whole number from 0, found \"two\"",
            ),
            (json!({"sizes": 7}), "`sizes`: expected a list, found `7`"),
            (json!({"inner": {"name": 5}}), "`inner.name`: expected text, found `5`"),
            (
                json!({"pair": [1]}),
                "`pair`: expected a list of 2 values, found a list of 1",
            ),
            (
                json!({"pair": [1, 2, 3]}),
                "`pair`: expected a list of 2 values, found a list of 3",
            ),
            (
                json!({"kind": "third"}),
                "`kind`: expected `first` or `second`, found `third`",
            ),
            (json!({"named": {}}), "`named`: the key `name` is missing"),
        ] {
            assert_eq!(read::<Outer>(json.clone()).unwrap_err(), expected, "{json}");
        }
    }
}
