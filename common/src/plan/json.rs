//! Reads keys of a job's JSON one by one, so that jobs of a newer version with unknown keys get a prediction, too.

use super::memory_options::MemoryOptions;
use serde_json::Value;

pub(super) fn number(value: &Value, pointer: &str) -> Option<f64> {
    value.pointer(pointer)?.as_f64().filter(|n| n.is_finite() && *n >= 0.0)
}

pub(super) fn text<'a>(value: &'a Value, pointer: &str) -> Option<&'a str> {
    value.pointer(pointer)?.as_str()
}

pub(super) fn flag(value: &Value, pointer: &str) -> bool {
    value.pointer(pointer).and_then(Value::as_bool).unwrap_or(false)
}

/// The texts of a list, or the single text.
pub(super) fn strings(value: Option<&Value>) -> Vec<String> {
    match value {
        Some(Value::String(one)) => vec![one.clone()],
        Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        _ => Vec::new(),
    }
}

/// The largest number of a list, or the single number.
pub(super) fn largest(value: Option<&Value>) -> Option<f64> {
    let value = value?;
    match value.as_array() {
        Some(list) => list
            .iter()
            .filter_map(Value::as_f64)
            .fold(None, |max: Option<f64>, n| Some(max.map_or(n, |max| max.max(n)))),
        None => value.as_f64(),
    }
}

/// Bytes per number of a dtype, by its name in configs.
pub(super) fn dtype_bytes(dtype: Option<&str>) -> f64 {
    match dtype {
        Some("fp16" | "float16" | "f16" | "bf16" | "bfloat16") => 2.0,
        _ => 4.0,
    }
}

/// The memory options in the `model` section.
pub(super) fn config_options(body: &Value) -> MemoryOptions {
    let offloads = body
        .pointer("/model/layer_offloading")
        .and_then(Value::as_bool)
        .unwrap_or_else(|| flag(body, "/model/auto_memory"));
    let share = |key: &str| number(body, key).unwrap_or(1.0);
    MemoryOptions::from_config(
        flag(body, "/model/low_vram"),
        offloads.then(|| {
            let shares = ["transformer", "text_encoder"];
            shares.map(|part| share(&format!("/model/layer_offloading_{part}_percent")))
        }),
    )
}
