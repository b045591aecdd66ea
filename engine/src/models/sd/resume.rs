//! Resumes training from a saved model.

use super::save::META_FILE;
use super::sd_config::SdConfig;
use super::source::prefixed_name;
use super::{SdModel, ldm};
use crate::error::{EngineError, Result};
use crate::weights::Index;
use candle_core::DType;
use serde_json::Value;
use std::path::Path;

/// The training step at which a model was saved, from the metadata of its file or in its folder. `None` if it has none.
///
/// # Errors
/// When it cannot be read.
pub fn saved_step(path: &Path) -> Result<Option<u64>> {
    if path.is_dir() {
        let metadata = path.join(META_FILE);
        // `model_index.json` is written last: without it the folder is incomplete.
        let model_index = path.join("model_index.json");
        std::fs::metadata(&model_index).map_err(|e| EngineError::io(&model_index, e))?;
        return match std::fs::read_to_string(&metadata) {
            Ok(text) => Ok(parse_step(&text)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(EngineError::io(&metadata, error)),
        };
    }
    let index = Index::open(path)?;
    let info = index.metadata().into_iter().find(|(key, _)| key == "training_info");
    let info = info.and_then(|(_, text)| serde_json::from_str::<Value>(&text).ok());
    Ok(info.and_then(|info| info.get("step")?.as_u64()))
}

/// The step in `training_info`, a mapping of numbers, on one line or several.
fn parse_step(yaml: &str) -> Option<u64> {
    let (_, info) = yaml.split_once("training_info:")?;
    let (_, step) = info.split_once("step")?;
    let step = step.trim_start_matches(['"', '\'', ':', ' ']);
    let digits = step.find(|c: char| !c.is_ascii_digit()).unwrap_or(step.len());
    step.get(..digits)?.parse().ok()
}

impl SdModel {
    /// Loads the trained tensors from a saved model: a diffusers folder, or a file in the LDM layout.
    ///
    /// # Errors
    /// When it cannot be read, or a tensor is missing or has another shape. Then no tensor is changed.
    pub fn load_trained(&self, path: &Path) -> Result<()> {
        let [text_encoder, unet] = if path.is_dir() {
            [Index::open(path.join("text_encoder"))?, Index::open(path.join("unet"))?]
        } else {
            super::check_family(path)?;
            let [text_encoder, unet, _] = ldm::split(&Index::open(path)?, &SdConfig::default())?;
            [text_encoder, unet]
        };
        let text_encoder = text_encoder.renamed(|name, shape| Some((prefixed_name(name), shape.to_vec())));
        let mut sources = Vec::with_capacity(self.trained.len());
        for (name, var) in &self.trained {
            let source = match name.split_once('.') {
                Some(("unet", inner)) => (&unet, inner.to_owned()),
                Some((_, inner)) => (&text_encoder, prefixed_name(inner)),
                None => {
                    return Err(EngineError::Internal(format!(
                        "the trained tensor `{name}` belongs to no component"
                    )));
                }
            };
            source.0.check_shape(&source.1, var.shape())?;
            sources.push((source, var));
        }
        for ((index, name), var) in sources {
            var.set(&index.read(&name, DType::F32, var.device())?.contiguous()?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::parse_step;

    #[test]
    fn the_step_is_found_in_all_yaml_styles() {
        for (text, step) in [
            ("format: pt\ntraining_info:\n  step: 250\n  epoch: 3\n", Some(250)),
            ("training_info:\n  epoch: 3\n  step: 250\nversion: '1'\n", Some(250)),
            ("training_info: {\"step\": 7, \"epoch\": 0}\n", Some(7)),
            ("training_info: {}\n", None),
            ("step: 5\n", None),
        ] {
            assert_eq!(parse_step(text), step, "{text}");
        }
    }
}
