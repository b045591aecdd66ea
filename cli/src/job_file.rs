//! What a config file says of its job before anything is sent: its models, its images, its parsed form.

use crate::context::env;
use crate::failure::Failure;
use crate::paths::expand;
use aitk_common::control::MAX_CONFIG_BYTES;
use aitk_common::fsutil::regular;
use aitk_common::job::generate::prompt_lines;
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use aitk_common::job::{InputKind, JobSpec, LoadedJob};
use aitk_common::plan::anatomy::Anatomy;
use std::path::Path;

/// What the job's first model consists of, when it lies here.
pub(crate) fn anatomy(loaded: &LoadedJob, directory: &Path) -> Option<Anatomy> {
    let inputs = loaded.spec.inputs();
    let model = inputs.iter().find(|input| input.kind == InputKind::Model)?;
    Anatomy::read(&expand(&model.config_path, directory, &env))
}

/// How many images the job draws, where its prompts lie here.
pub(crate) fn images(spec: &JobSpec, directory: &Path) -> Option<u64> {
    spec.image_count(|file| prompts_in(file, directory))
}

/// How many prompts a file holds.
pub(crate) fn prompts_in(file: &str, directory: &Path) -> Option<usize> {
    let text = regular::read_text(&expand(file, directory, &env), MAX_TEXT_FILE_BYTES).ok()?;
    Some(prompt_lines(&text).len())
}

/// The parsed form of a config, which with its text is what a coordinator takes.
pub(crate) fn job_json(loaded: &LoadedJob, config: &Path) -> Result<String, Failure> {
    let text = serde_json::to_string(&loaded.spec)
        .map_err(|error| Failure::failed(format!("{}: cannot be sent: {error}", config.display())))?;
    // As the coordinator and the worker will: nobody learns of a mistake of ours after an upload.
    JobSpec::from_json(&text)
        .map_err(|error| Failure::failed(format!("{}: cannot be sent: {error}", config.display())))?;
    for (what, bytes) in [("the file", loaded.text.len()), ("its content", text.len())] {
        if bytes > MAX_CONFIG_BYTES {
            return Err(Failure::failed(format!(
                "{}: {what} has {bytes} bytes; a coordinator takes {MAX_CONFIG_BYTES} at most",
                config.display()
            ))
            .hint("long lists of prompts can go into several jobs"));
        }
    }
    Ok(text)
}
