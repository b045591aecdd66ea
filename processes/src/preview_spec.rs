//! The attempt of a preview, which reads the user's own files: nothing was staged for it.

use crate::error::{EngineError, Result};
use aitk_common::attempt::AttemptSpec;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The spec of a preview: an attempt that only checks what it would read. `inputs`: the local path of each path in the config.
pub(super) fn preview_spec(inputs: &BTreeMap<String, PathBuf>) -> Result<AttemptSpec> {
    // Parsed from JSON, so that fields with defaults are not listed here.
    let spec = json!({
        "job_id": "preview", "attempt_id": "preview", "epoch": 1, "job": {}, "config_text": "", "config_format": "yaml",
        "inputs": inputs, "output_root": null, "resume_from": null, "device": {"kind": "cpu", "index": 0},
        "profile": "cpu_only", "seed": 0,
    });
    serde_json::from_value(spec)
        .map_err(|error| EngineError::Internal(format!("cannot make the spec of a preview: {error}")))
}
