//! Reads and checks `scheduler/scheduler_config.json` of a diffusers folder, or gives the published one.

use crate::error::{EngineError, Result};
use crate::models::config;
use crate::samplers::SamplerParams;
use aitk_common::model_files::ModelParts;
use serde_json::{Value, json};
use std::path::Path;

/// The parsed `scheduler/scheduler_config.json` of a model's folder.
///
/// # Errors
/// When the file is missing or a value has a wrong type. The error names the file.
pub(super) fn read(folder: &Path) -> Result<Value> {
    let path = folder.join("scheduler/scheduler_config.json");
    let parsed = config::read_json(&path)?;
    SamplerParams::from_json(&parsed).map_err(|e| EngineError::model_config(&path, e.to_string()))?;
    let class = parsed["_class_name"].as_str().unwrap_or_default();
    if class.starts_with("EDM") {
        return Err(EngineError::model_config(
            &path,
            format!("`_class_name: {class}`: models of EDM's noise levels (Playground v2.5, CosXL) are not supported"),
        ));
    }
    Ok(parsed)
}

/// The scheduler's config, which belongs to the transformer: that of a folder whose own transformer is of another kind is not used, but
/// `published`. `is_other` says it of the transformer's `config.json`.
///
/// # Errors
/// When a file cannot be read.
pub(super) fn of_transformer(
    parts: &ModelParts,
    is_other: impl FnOnce(&Path) -> Result<bool>,
    published: Value,
) -> Result<Value> {
    let is_other = match &parts.scheduler_transformer {
        Some(file) => is_other(file)?,
        None => false,
    };
    match &parts.scheduler {
        Some(folder) if !is_other => read(folder),
        _ => Ok(published),
    }
}

/// `scheduler/scheduler_config.json` of FLUX.1-dev, or without dynamic shifting that of FLUX.1-schnell.
pub(super) fn flux(use_dynamic_shifting: bool) -> Value {
    json!({
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "base_image_seq_len": 256,
        "base_shift": 0.5,
        "max_image_seq_len": 4096,
        "max_shift": 1.15,
        "num_train_timesteps": 1000,
        "shift": if use_dynamic_shifting { 3.0 } else { 1.0 },
        "use_dynamic_shifting": use_dynamic_shifting,
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_wrong_value_is_reported_with_its_file_and_key() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("scheduler")).unwrap();
        let file = folder.path().join("scheduler/scheduler_config.json");
        std::fs::write(&file, r#"{"beta_start": 0.1, "beta_end": null}"#).unwrap();
        assert_eq!(super::read(folder.path()).unwrap()["beta_start"], 0.1);
        std::fs::write(&file, r#"{"_class_name": "EDMEulerScheduler", "sigma_data": 0.5}"#).unwrap();
        let error = super::read(folder.path()).unwrap_err().to_string();
        assert!(error.contains("`_class_name: EDMEulerScheduler`"), "{error}");
        std::fs::write(&file, r#"{"beta_start": "small"}"#).unwrap();
        let error = super::read(folder.path()).unwrap_err().to_string();
        assert!(
            error.contains(&*file.to_string_lossy()) && error.contains("`beta_start`"),
            "{error}"
        );
    }
}
