//! Data derived from a config before it is sent: its model's structure, its number of images, its parsed form as JSON.

use crate::context::env;
use crate::failure::Failure;
use crate::paths::expand;
use aitk_common::control_plane::MAX_CONFIG_BYTES;
use aitk_common::fsutil::regular;
use aitk_common::job::generate::prompt_lines;
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use aitk_common::job::{InputKind, JobSpec, LoadedJob, ProcessKind};
use aitk_common::plan::image_batches::ImageBatch;
use aitk_common::plan::parameter_counts::ParameterCounts;
use aitk_common::plan::prompt_files::{largest_images_in_files, longest_line};
use aitk_common::plan::training_memory::new_model_counts;
use std::path::Path;

/// Reads the structure of the job's first model, if the model is on this machine.
pub(crate) fn parameter_counts(loaded: &LoadedJob, directory: &Path) -> Option<ParameterCounts> {
    let inputs = loaded.spec.inputs();
    let model = inputs
        .iter()
        .find(|input| matches!(input.kind, InputKind::Model | InputKind::LanguageModel))?;
    let path = expand(&model.config_path, directory, &env);
    if loaded.spec.is_new_language_model(model) {
        return new_model_counts(&path);
    }
    ParameterCounts::read(&path)
}

/// Counts the images that the job generates, if its prompts are on this machine.
pub(crate) fn images(spec: &JobSpec, directory: &Path) -> Option<u64> {
    spec.image_count(|file| prompts_in(file, directory))
}

/// Bytes of the longest prompt in the job's files of texts to continue, if they are on this machine.
pub(crate) fn longest_prompt(spec: &JobSpec, directory: &Path) -> Option<u64> {
    let files = spec.process.iter().filter_map(|process| match &process.kind {
        ProcessKind::LmGenerate(process) => process.generate.prompt_file(),
        _ => None,
    });
    files
        .filter_map(|file| longest_line(&expand(file, directory, &env)))
        .max()
}

/// The largest image of each process whose prompts are in a file on this machine.
pub(crate) fn largest_images(spec: &JobSpec, directory: &Path) -> Vec<ImageBatch> {
    largest_images_in_files(spec, |file| Some(expand(file, directory, &env)))
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
