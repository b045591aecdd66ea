//! Metadata that every safetensors file of a job gets.

use crate::adapters::python_json;
use aitk_common::job::JobSpec;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The `meta` section of a job, as ai-toolkit writes it: nested values as JSON, and `[name]` replaced by the job's name.
pub(super) fn job_metadata(job: &JobSpec) -> BTreeMap<String, String> {
    let text = |value: &Value| match value {
        Value::String(text) => text.replace("[name]", &job.name),
        other => python_json(other, false).replace("[name]", &job.name),
    };
    let pairs = job.meta.iter();
    pairs.map(|(key, value)| (key.clone(), text(value))).collect()
}

/// The program that wrote a file, as a value of `software`.
pub(super) fn software() -> String {
    python_json(&json!({"name": "aitk", "version": env!("CARGO_PKG_VERSION")}), false)
}
