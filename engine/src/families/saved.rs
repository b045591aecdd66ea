//! What saved models of all families have in common: the metadata of a folder, the configs, the step.

use super::metadata_yaml;
use crate::error::{EngineError, Result};
use crate::models::config;
use crate::weights::Index;
use aitk_common::fsutil;
use candle_core::DType;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;

/// The file with the metadata of a folder, named as in ai-toolkit.
pub const META_FILE: &str = "aitk_meta.yaml";

/// The files of which a complete folder has one: a whole model, a transformer alone, and an adapter of images.
const MARKS: [&str; 3] = ["model_index.json", "transformer/config.json", "config.json"];

/// The training step at which a model was saved, from the metadata of its file or in its folder. `None` if it has none.
///
/// # Errors
/// When it cannot be read.
pub fn saved_step(path: &Path) -> Result<Option<u64>> {
    if path.is_dir() {
        let metadata = path.join(META_FILE);
        // `model_index.json` is written last: without it the folder is incomplete. A folder with a transformer has none.
        let mark = MARKS.iter().map(|mark| path.join(mark)).find(|mark| mark.exists());
        let mark = mark.unwrap_or_else(|| path.join(MARKS[0]));
        std::fs::metadata(&mark).map_err(|e| EngineError::io(&mark, e))?;
        return match config::read_text(&metadata) {
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

/// Writes the metadata of a folder.
pub(super) fn write_metadata(folder: &Path, metadata: &BTreeMap<String, String>) -> Result<()> {
    write_text_file(&folder.join(META_FILE), &metadata_yaml::to_yaml(metadata))
}

/// Checks that a model can be saved in `dtype`.
pub(super) fn check_save_dtype(dtype: DType) -> Result<()> {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        _ => Err(EngineError::Unsupported(format!(
            "a model is saved as float32, float16 or bfloat16, not as {dtype:?}"
        ))),
    }
}

/// A component's `config.json` for weights in `dtype` that are not quantised. Unchanged if the source's is already right.
/// `source`: where it is from, for the error.
pub(super) fn config_in_dtype(text: &str, dtype: DType, source: &Path) -> Result<String> {
    let mut value = parse_config(text, source)?;
    let mut changed = false;
    if let Some(keys) = value.as_object_mut() {
        changed |= keys.shift_remove("quantization_config").is_some();
        let dtype = match dtype {
            DType::F16 => "float16",
            DType::BF16 => "bfloat16",
            _ => "float32",
        };
        for key in ["dtype", "torch_dtype"] {
            if let Some(value) = keys.get_mut(key).filter(|value| *value != dtype) {
                *value = dtype.into();
                changed = true;
            }
        }
    }
    Ok(if changed { pretty_json(&value) } else { text.to_owned() })
}

/// Parses a config of the model that was loaded from `source`.
pub(super) fn parse_config(text: &str, source: &Path) -> Result<Value> {
    config::parse_json(text)
        .map_err(|e| EngineError::model_config(source, format!("a config of this model is not valid JSON: {e}")))
}

/// JSON with indentation and a newline at the end.
pub(super) fn pretty_json(value: &Value) -> String {
    format!("{value:#}\n")
}

/// Writes a small file.
pub(super) fn write_text_file(path: &Path, text: &str) -> Result<()> {
    Ok(fsutil::write_atomic(path, |out| out.write_all(text.as_bytes()))?)
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
