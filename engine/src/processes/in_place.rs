//! An attempt that runs in place: it reads the user's own files, and nothing was staged for it.

use crate::error::{EngineError, Result};
use aitk_common::attempt::AttemptSpec;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The spec of an attempt that runs in place, to check what it reads. `inputs`: the local path of each path in the config. It is parsed from JSON, so that fields with defaults are not listed here.
pub(super) fn in_place_attempt(inputs: &BTreeMap<String, PathBuf>) -> Result<AttemptSpec> {
    let spec = json!({
        "job_id": "validate", "attempt_id": "validate", "epoch": 1, "job": {}, "config_text": "", "config_format": "yaml",
        "inputs": inputs, "output_root": null, "resume_from": null, "device": {"kind": "cpu", "index": 0},
        "profile": "cpu_only", "seed": 0,
    });
    serde_json::from_value(spec)
        .map_err(|error| EngineError::Internal(format!("cannot make the spec of a preview: {error}")))
}
