//! Checks the files that a config names, beside models and data sets: do they exist, and can they be read as what they are used for?

use crate::context::env;
use crate::paths::expand;
use aitk_common::fsutil::regular;
use aitk_common::job::generate::prompt_lines;
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use aitk_common::job::prompt::PromptFileReport;
use aitk_common::job::{Input, InputKind, JobSpec, ProcessKind};
use std::path::Path;

/// The most messages of one kind about the flags in a file.
const MAX_FLAG_MESSAGES: usize = 20;

/// Returns an error for each file of prompts, textual inversion, control image, image of a validation, folder of control images, code
/// model, data set of a code model and input of an extension that does not exist or cannot be read. Models and data sets are checked elsewhere.
pub(super) fn input_problems(spec: &JobSpec, directory: &Path) -> Vec<String> {
    let is_checked_here = |input: &Input| {
        matches!(
            input.kind,
            InputKind::PromptFile | InputKind::ControlImages | InputKind::Embedding | InputKind::LanguageModel
        ) || spec.extension().is_some()
            || is_lm_dataset(spec, input)
    };
    let inputs = spec.inputs().into_iter().filter(is_checked_here);
    inputs
        .filter(|input| !input.config_path.is_empty())
        .flat_map(|input| {
            let local = expand(&input.config_path, directory, &env);
            let problem = match local.exists() {
                // The hub is asked for it where other models are.
                false if input.may_be_repository() => None,
                false => Some(missing_message(&input, &local)),
                true if spec.is_new_language_model(&input) => new_model_problem(&local),
                true => content_problem(&input, &local),
            };
            let flags = flag_report(spec, &input, &local).errors;
            let problems = problem.into_iter().chain(flags);
            let at_key = |problem| spec.finding(input.key.clone(), problem).to_string();
            problems.map(at_key).collect::<Vec<_>>()
        })
        .collect()
}

/// Returns a warning for each flag without effect in the job's files of prompts.
pub(super) fn input_warnings(spec: &JobSpec, directory: &Path) -> Vec<String> {
    let of_input = |input: Input| {
        let local = expand(&input.config_path, directory, &env);
        let warnings = flag_report(spec, &input, &local).warnings.into_iter();
        warnings
            .map(|warning| spec.finding(input.key.clone(), warning).to_string())
            .collect::<Vec<_>>()
    };
    spec.inputs().into_iter().flat_map(of_input).collect()
}

/// What is wrong with the flags in a file of prompts for images; at most [`MAX_FLAG_MESSAGES`] of each kind. Other files have none.
fn flag_report(spec: &JobSpec, input: &Input, local: &Path) -> PromptFileReport {
    let of_images = spec.process.iter().enumerate().any(|(index, process)| {
        matches!(process.kind, ProcessKind::Generate(_))
            && input.key == format!("config.process[{index}].generate.prompts")
    });
    if input.kind != InputKind::PromptFile || !of_images {
        return PromptFileReport::default();
    }
    let text = regular::read_text(local, MAX_TEXT_FILE_BYTES).unwrap_or_default();
    let report = PromptFileReport::of(&text);
    let first = |messages: Vec<String>| {
        let named = |message| format!("{}:{message}", input.config_path);
        messages.into_iter().take(MAX_FLAG_MESSAGES).map(named).collect()
    };
    PromptFileReport {
        errors: first(report.errors),
        warnings: first(report.warnings),
    }
}

/// Whether an input is a data set of a training of a code model.
fn is_lm_dataset(spec: &JobSpec, input: &Input) -> bool {
    let mut keys = spec
        .process
        .iter()
        .enumerate()
        .filter(|(_, process)| process.lm_trainer().is_some());
    input.kind == InputKind::Dataset
        && keys.any(|(index, _)| input.key.starts_with(&format!("config.process[{index}].")))
}

/// Returns why an existing file cannot be used.
fn content_problem(input: &Input, local: &Path) -> Option<String> {
    let path = &input.config_path;
    // Other files of prompts are not read.
    let prompts = [".prompts", ".negative_prompt"]
        .iter()
        .any(|key| input.key.ends_with(key));
    let triggers = input.key.ends_with(".random_triggers");
    match input.kind {
        InputKind::PromptFile if prompts || triggers => match regular::read_text(local, MAX_TEXT_FILE_BYTES) {
            Ok(text) => (prompts && prompt_lines(&text).is_empty())
                .then(|| format!("{path}: there is no prompt in this file: write one per line")),
            Err(error) => Some(format!("{path}: {error}: expected a text file with one text per line")),
        },
        InputKind::LanguageModel => language_model_problem(path, local),
        InputKind::ControlImages if !input.key.contains(".datasets[") => image_problem(local),
        _ => None,
    }
}

/// Returns why a code model cannot be loaded, from its config and the names and shapes of its tensors.
#[cfg(feature = "embedded")]
fn language_model_problem(path: &str, local: &Path) -> Option<String> {
    use aitk_engine::models::causal_lm::{CausalLm, CausalLmOptions};
    let options = CausalLmOptions {
        shapes_only: true,
        ..CausalLmOptions::cpu()
    };
    let problem = CausalLm::load(local, &options).err()?.to_string();
    Some(match problem.contains(path) {
        true => problem,
        false => format!("{path}: {problem}"),
    })
}

/// Returns why no new code model can be made from the config in a folder.
#[cfg(feature = "embedded")]
fn new_model_problem(local: &Path) -> Option<String> {
    let read = aitk_engine::models::causal_lm::CausalLmConfig::read_new(local);
    read.err().map(|error| error.to_string())
}

/// Nothing: this build cannot read models.
#[cfg(not(feature = "embedded"))]
fn new_model_problem(_: &Path) -> Option<String> {
    None
}

/// Nothing: this build cannot read models.
#[cfg(not(feature = "embedded"))]
fn language_model_problem(_: &str, _: &Path) -> Option<String> {
    None
}

#[cfg(feature = "embedded")]
fn image_problem(local: &Path) -> Option<String> {
    aitk_engine::image_io::dimensions(local)
        .err()
        .map(|error| error.to_string())
}

/// Nothing: this build cannot read images.
#[cfg(not(feature = "embedded"))]
fn image_problem(_: &Path) -> Option<String> {
    None
}

/// Returns the error for a path that does not exist.
pub(super) fn missing_message(input: &Input, local: &Path) -> String {
    let path = &input.config_path;
    if path.starts_with("http://") || path.starts_with("https://") {
        return format!("{path} is a URL: download the file and give its path, or name a repository as ORG/NAME");
    }
    let repository = match input.kind {
        InputKind::Model | InputKind::LanguageModel | InputKind::Vae => {
            ", and it is not the name of a repository (ORG/NAME)"
        }
        _ => "",
    };
    let full_path = match local.display().to_string() {
        local if local == *path => String::new(),
        local => format!(" ({local})"),
    };
    format!("{path}: no such file or folder{full_path}{repository}")
}
