//! Reads and checks `scheduler/scheduler_config.json` of a diffusers folder.

use crate::error::{EngineError, Result};
use crate::models::config;
use crate::samplers::SamplerParams;
use serde_json::Value;
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
