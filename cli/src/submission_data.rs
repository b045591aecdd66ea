//! Data derived from a config before it is sent: its model's structure, its number of images, its parsed form as JSON.

use crate::context::env;
use crate::failure::Failure;
use crate::paths::expand;
use aitk_common::control_plane::MAX_CONFIG_BYTES;
use aitk_common::fsutil::regular;
use aitk_common::job::generate::prompt_lines;
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use aitk_common::job::{InputKind, JobSpec, LoadedJob};
use aitk_common::plan::parameter_counts::ParameterCounts;
use std::path::Path;

/// Reads the structure of the job's first model, if the model is on this machine.
pub(crate) fn parameter_counts(loaded: &LoadedJob, directory: &Path) -> Option<ParameterCounts> {
    let inputs = loaded.spec.inputs();
    let model = inputs
        .iter()
        .find(|input| matches!(input.kind, InputKind::Model | InputKind::LanguageModel))?;
    let path = expand(&model.config_path, directory, &env);
    if loaded.spec.is_new_language_model(model) {
        return counts_of_new_model(&path);
    }
    ParameterCounts::read(&path)
}

/// The parameters of a code model that is made from the config in a folder.
#[cfg(feature = "embedded")]
fn counts_of_new_model(folder: &Path) -> Option<ParameterCounts> {
    let config = aitk_engine::models::causal_lm::CausalLmConfig::read_new(folder).ok()?;
    let count = u64::try_from(config.parameter_count()).ok()?;
    Some(ParameterCounts {
        denoiser: count,
        ..ParameterCounts::default()
    })
}

/// Nothing: this build cannot read configs of models.
#[cfg(not(feature = "embedded"))]
fn counts_of_new_model(_: &Path) -> Option<ParameterCounts> {
    None
}

/// Counts the images that the job generates, if its prompts are on this machine.
pub(crate) fn images(spec: &JobSpec, directory: &Path) -> Option<u64> {
    spec.image_count(|file| prompts_in(file, directory))
}

/// Counts the prompts in a file.
pub(crate) fn prompts_in(file: &str, directory: &Path) -> Option<usize> {
    let text = regular::read_text(&expand(file, directory, &env), MAX_TEXT_FILE_BYTES).ok()?;
    Some(prompt_lines(&text).len())
}

/// Serialises the parsed config. The coordinator gets it together with the config's text.
pub(crate) fn job_json(loaded: &LoadedJob, config: &Path) -> Result<String, Failure> {
    let text = serde_json::to_string(&loaded.spec)
        .map_err(|error| Failure::failed(format!("{}: cannot be sent: {error}", config.display())))?;
    // Coordinator and worker will parse it the same way; an error of ours should show before the upload.
    JobSpec::from_json(&text)
        .map_err(|error| Failure::failed(format!("{}: cannot be sent: {error}", config.display())))?;
    for (what, bytes) in [("the file", loaded.text.len()), ("its content", text.len())] {
        if bytes > MAX_CONFIG_BYTES {
            return Err(Failure::failed(format!(
                "{}: {what} has {bytes} bytes; a coordinator accepts at most {MAX_CONFIG_BYTES}",
                config.display()
            ))
            .hint("split long lists of prompts into several jobs"));
        }
    }
    Ok(text)
}
