//! Serialises maps of floats to JSON. JSON has no NaN or infinity, so these values are written as text (`"NaN"`, `"inf"`): a diverged
//! loss must be visible.

use serde::{Deserialize, Deserializer, Serializer, de::Error};
use std::collections::BTreeMap;

#[derive(Deserialize)]
#[serde(untagged)]
enum Number {
    Plain(f64),
    Text(String),
}

pub(crate) fn serialize<S: Serializer>(values: &BTreeMap<String, f64>, to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(values.iter().map(|(name, value)| {
        let json = match value {
            v if v.is_finite() => serde_json::Value::from(*v),
            v => serde_json::Value::from(v.to_string()),
        };
        (name, json)
    }))
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, f64>, D::Error> {
    BTreeMap::<String, Number>::deserialize(from)?
        .into_iter()
        .map(|(name, number)| match number {
            Number::Plain(value) => Ok((name, value)),
            Number::Text(text) => match text.parse() {
                Ok(value) => Ok((name, value)),
                Err(_) => Err(D::Error::custom(format!("{name}: not a number: {text:?}"))),
            },
        })
        .collect()
}
