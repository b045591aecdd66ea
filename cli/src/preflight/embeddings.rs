//! Checks the textual inversions of a job: files that are none, words that the model's text encoders do not fit, two files of one word.

use crate::context::env;
use crate::paths::expand;
use aitk_common::job::JobSpec;
use aitk_common::job::arch::ArchName;
use aitk_engine::families::{LearnedWord, embedding_names};
use std::path::Path;

/// Returns an error for each file that cannot be used. Files that do not exist are reported elsewhere.
pub(super) fn embedding_problems(spec: &JobSpec, directory: &Path) -> Vec<String> {
    let mut problems = Vec::new();
    for (index, process) in spec.process.iter().enumerate() {
        let Some(model) = process.model() else { continue };
        let mut words: Vec<String> = Vec::new();
        for (number, path) in model.embedding_paths.iter().enumerate() {
            let local = expand(path, directory, &env);
            if !local.exists() {
                continue;
            }
            let problem = match LearnedWord::read(&local) {
                Err(error) => Some(error.to_string()),
                Ok(word) if words.contains(&word.trigger.to_lowercase()) => Some(format!(
                    "{path}: another file has the word `{}` too: keep one of them",
                    word.trigger
                )),
                Ok(word) => {
                    let encoders = if model.arch.name == ArchName::Sdxl { 2 } else { 1 };
                    let fits = word.vectors.len() == encoders;
                    words.push(word.trigger.to_lowercase());
                    (!fits).then(|| {
                        format!(
                            "{path}: the word `{}` is for another family of models: `arch: {}` needs {}",
                            word.trigger,
                            model.arch,
                            embedding_names(encoders).join(" and ")
                        )
                    })
                }
            };
            if let Some(problem) = problem {
                let key = match model.embedding_paths.len() {
                    1 => format!("config.process[{index}].model.embedding_paths"),
                    _ => format!("config.process[{index}].model.embedding_paths[{number}]"),
                };
                problems.push(spec.finding(key, problem).to_string());
            }
        }
    }
    problems
}
