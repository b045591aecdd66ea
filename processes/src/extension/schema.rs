//! Checks the `config` of an extension by the schema that its program sends: a part of JSON Schema.
//!
//! Known keywords: `type`, `enum`, `minimum`, `maximum`, `properties`, `required`, `additionalProperties` (true or
//! false), `items` (one schema). Keywords that only describe are ignored. Any other keyword is an error, because a
//! rule that is not checked would look as if it were.

use super::message::shorten;
use serde_json::{Map, Value};

/// Keywords without effect on what is valid.
const DESCRIPTIONS: &[&str] = &["$schema", "$id", "title", "description", "default", "examples"];

/// Checks a value by a schema. `path` is the key of the value.
///
/// # Errors
/// The first key that is not valid, with what was expected; or what is wrong with the schema.
pub(super) fn check(schema: &Value, value: &Value, path: &str) -> Result<(), SchemaError> {
    let schema = as_schema(schema, path)?;
    for key in schema.keys() {
        let is_known = matches!(
            key.as_str(),
            "type" | "enum" | "minimum" | "maximum" | "properties" | "required" | "additionalProperties" | "items"
        );
        if !is_known && !DESCRIPTIONS.contains(&key.as_str()) {
            return Err(wrong_schema(
                path,
                &format!("the keyword `{}` is not known", shorten(key, 40)),
            ));
        }
    }
    if let Some(kinds) = schema.get("type") {
        check_type(kinds, value, path)?;
    }
    if let Some(choices) = schema.get("enum") {
        let choices = choices
            .as_array()
            .ok_or_else(|| wrong_schema(path, "`enum` must be a list"))?;
        if !choices.contains(value) {
            let known: Vec<String> = choices.iter().map(Value::to_string).collect();
            return Err(invalid(
                path,
                value,
                &format!("one of {}", shorten(&known.join(", "), 200)),
            ));
        }
    }
    check_range(schema, value, path)?;
    if let Value::Object(map) = value {
        check_map(schema, map, path)?;
    }
    if let (Value::Array(items), Some(of_items)) = (value, schema.get("items")) {
        for (index, item) in items.iter().enumerate() {
            check(of_items, item, &format!("{path}[{index}]"))?;
        }
    }
    Ok(())
}

/// Why a value was refused.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SchemaError {
    /// The value is not what the schema asks for.
    Value(String),
    /// The program's schema is wrong.
    Schema(String),
}

fn as_schema<'a>(schema: &'a Value, path: &str) -> Result<&'a Map<String, Value>, SchemaError> {
    schema
        .as_object()
        .ok_or_else(|| wrong_schema(path, "a schema must be an object"))
}

fn wrong_schema(path: &str, what: &str) -> SchemaError {
    SchemaError::Schema(format!("its schema of `{path}`: {what}"))
}

fn invalid(path: &str, value: &Value, expected: &str) -> SchemaError {
    let found = shorten(&value.to_string(), 60);
    SchemaError::Value(format!("`{path}` is {found}; expected {expected}"))
}

fn check_type(kinds: &Value, value: &Value, path: &str) -> Result<(), SchemaError> {
    let kinds: Vec<&str> = match kinds {
        Value::String(kind) => vec![kind],
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    if kinds.is_empty() {
        return Err(wrong_schema(path, "`type` must be a name or a list of names"));
    }
    let mut fits = false;
    for kind in &kinds {
        fits |= match *kind {
            "object" => value.is_object(),
            "array" => value.is_array(),
            "string" => value.is_string(),
            "boolean" => value.is_boolean(),
            "null" => value.is_null(),
            "number" => value.is_number(),
            "integer" => value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|number| number.fract() == 0.0),
            other => {
                let what = format!("the type `{}` is not known", shorten(other, 40));
                return Err(wrong_schema(path, &what));
            }
        };
    }
    match fits {
        true => Ok(()),
        false => Err(invalid(path, value, &format!("a value of type {}", kinds.join(" or ")))),
    }
}

fn check_range(schema: &Map<String, Value>, value: &Value, path: &str) -> Result<(), SchemaError> {
    for (keyword, words) in [("minimum", "at least"), ("maximum", "at most")] {
        let Some(limit) = schema.get(keyword) else { continue };
        let limit = limit
            .as_f64()
            .ok_or_else(|| wrong_schema(path, &format!("`{keyword}` must be a number")))?;
        let Some(number) = value.as_f64() else { continue };
        let fits = if keyword == "minimum" {
            number >= limit
        } else {
            number <= limit
        };
        if !fits {
            return Err(invalid(path, value, &format!("{words} {limit}")));
        }
    }
    Ok(())
}

fn check_map(schema: &Map<String, Value>, map: &Map<String, Value>, path: &str) -> Result<(), SchemaError> {
    let empty = Map::new();
    let properties = match schema.get("properties") {
        Some(properties) => properties
            .as_object()
            .ok_or_else(|| wrong_schema(path, "`properties` must be an object"))?,
        None => &empty,
    };
    if let Some(required) = schema.get("required") {
        let names = required
            .as_array()
            .ok_or_else(|| wrong_schema(path, "`required` must be a list"))?;
        for name in names.iter().filter_map(Value::as_str) {
            if !map.contains_key(name) {
                return Err(SchemaError::Value(format!("`{path}.{name}` is missing")));
            }
        }
    }
    let others_are_allowed = match schema.get("additionalProperties") {
        None => true,
        Some(Value::Bool(allowed)) => *allowed,
        Some(_) => return Err(wrong_schema(path, "`additionalProperties` must be true or false")),
    };
    for (key, value) in map {
        match properties.get(key) {
            Some(of_key) => check(of_key, value, &format!("{path}.{key}"))?,
            None if others_are_allowed => {}
            None => {
                let known: Vec<&str> = properties.keys().map(String::as_str).collect();
                return Err(SchemaError::Value(format!(
                    "`{path}.{}` is not a setting of this extension. Known: {}",
                    shorten(key, 60),
                    shorten(&known.join(", "), 200)
                )));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn schema() -> Value {
        json!({"type": "object", "additionalProperties": false, "required": ["steps"], "properties": {
            "steps": {"type": "integer", "minimum": 1, "maximum": 10, "description": "how many"},
            "mode": {"enum": ["a", "b"]},
            "sizes": {"type": "array", "items": {"type": ["number", "null"]}},
        }})
    }

    #[test]
    fn a_config_is_checked_and_the_error_names_the_key() {
        assert_eq!(
            check(
                &schema(),
                &json!({"steps": 3, "mode": "b", "sizes": [1.5, null]}),
                "config"
            ),
            Ok(())
        );
        for (config, expected) in [
            (json!({}), "`config.steps` is missing"),
            (json!({"steps": 0}), "`config.steps` is 0; expected at least 1"),
            (json!({"steps": 11}), "`config.steps` is 11; expected at most 10"),
            (
                json!({"steps": "x"}),
                "`config.steps` is \"x\"; expected a value of type integer",
            ),
            (json!({"steps": 1, "mode": "c"}), "expected one of \"a\", \"b\""),
            (json!({"steps": 1, "sizes": ["x"]}), "`config.sizes[0]`"),
            (json!({"steps": 1, "other": 1}), "`config.other` is not a setting"),
        ] {
            let Err(SchemaError::Value(message)) = check(&schema(), &config, "config") else {
                panic!("{config}");
            };
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn a_schema_with_rules_that_are_not_checked_is_refused() {
        for wrong in [
            json!({"pattern": "x"}),
            json!(3),
            json!({"type": "tensor"}),
            json!({"type": []}),
            json!({"minimum": "x"}),
            json!({"properties": []}),
            json!({"required": 1}),
            json!({"enum": 1}),
            json!({"additionalProperties": {}}),
        ] {
            assert!(
                matches!(check(&wrong, &json!({"a": 1}), "config"), Err(SchemaError::Schema(_))),
                "{wrong}"
            );
        }
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let words = [
            "type",
            "object",
            "properties",
            "required",
            "enum",
            "minimum",
            "items",
            "a",
            "integer",
        ];
        let word = move || proptest::sample::select(words.to_vec()).prop_map(str::to_owned);
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            word().prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 4, move |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                proptest::collection::hash_map(word(), inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn any_schema_and_any_value_give_an_answer(schema in any_json(), value in any_json()) {
            let _ = check(&schema, &value, "config");
        }
    }
}
