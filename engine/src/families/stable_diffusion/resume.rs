//! Resumes training from a saved model.

use super::save::META_FILE;
use super::sd_config::SdConfig;
use super::source::prefixed_name;
use super::{SdModel, ldm};
use crate::error::{EngineError, Result};
use crate::families::check::check_family;
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
    /// Loads the trained tensors from a saved model: a diffusers folder, or a single file.
    ///
    /// # Errors
    /// When it cannot be read, or a tensor is missing or has another shape. Then no tensor is changed.
    pub(super) fn load_trained_tensors(&self, path: &Path) -> Result<()> {
        let folders: Vec<&str> = self.variant.components().iter().map(|spec| spec.folder).collect();
        let indexes = if path.is_dir() {
            let trained = folders.iter().filter(|folder| **folder != "vae");
            trained
                .map(|folder| Index::open(path.join(folder)))
                .collect::<Result<Vec<_>>>()?
        } else {
            check_family(path, self.variant.family.arch())?;
            ldm::split(&Index::open(path)?, &SdConfig::defaults(self.variant)?, self.variant)?
        };
        let indexes: Vec<Index> = indexes
            .into_iter()
            .zip(&folders)
            .map(|(index, folder)| match self.variant.is_text_encoder(folder) {
                true => index.renamed(|name, shape| Some((prefixed_name(name), shape.to_vec()))),
                false => index,
            })
            .collect();
        let mut sources = Vec::with_capacity(self.trained.len());
        for (name, var) in &self.trained {
            let unknown = || EngineError::Internal(format!("the trained tensor `{name}` belongs to no component"));
            let (folder, inner) = name.split_once('.').ok_or_else(unknown)?;
            let position = folders.iter().position(|known| *known == folder);
            let index = position
                .and_then(|position| indexes.get(position))
                .ok_or_else(unknown)?;
            let inner = match self.variant.is_text_encoder(folder) {
                true => prefixed_name(inner),
                false => inner.to_owned(),
            };
            index.check_shape(&inner, var.shape())?;
            sources.push((index, inner, var));
        }
        for (index, name, var) in sources {
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
