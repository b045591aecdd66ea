//! Checks the textual inversions of a job: files that are no textual inversions, words that do not fit the model's text encoders or that these
//! know already, and words that cannot be distinguished in prompts.

use crate::context::env;
use crate::paths::expand;
use aitk_common::job::JobSpec;
use aitk_common::job::arch::ArchName;
use aitk_common::job::model::ModelConfig;
use aitk_engine::families::{LearnedEmbedding, check_embeddings, embedding_names};
use aitk_engine::models::clip::word_conflict;
use std::path::Path;

/// Returns an error for each file, and each word to train, that cannot be used. Files that do not exist are reported elsewhere.
pub(super) async fn embedding_problems(spec: &JobSpec, directory: &Path) -> Vec<String> {
    let (spec, directory) = (spec.clone(), directory.to_owned());
    let all = move || {
        (0..spec.process.len())
            .flat_map(|index| problems_of(&spec, index, &directory))
            .collect()
    };
    tokio::task::spawn_blocking(all).await.unwrap_or_default()
}

/// A word of a process, with its key.
struct Word {
    key: String,
    /// The path of its file in the config.
    path: String,
    learned: LearnedEmbedding,
}

impl Word {
    fn vectors(&self) -> u32 {
        let first = self.learned.vectors.first();
        first.map_or(0, |vectors| u32::try_from(vectors.dims()[0]).unwrap_or(u32::MAX))
    }
}

fn problems_of(spec: &JobSpec, index: usize, directory: &Path) -> Vec<String> {
    let Some(process) = spec.process.get(index) else {
        return Vec::new();
    };
    let Some(model) = process.model() else {
        return Vec::new();
    };
    let mut problems = Vec::new();
    let mut words: Vec<Word> = Vec::new();
    for (number, path) in model.embedding_paths.iter().enumerate() {
        let local = expand(path, directory, &env);
        if !local.exists() {
            continue;
        }
        let key = match model.embedding_paths.len() {
            1 => format!("config.process[{index}].model.embedding_paths"),
            _ => format!("config.process[{index}].model.embedding_paths[{number}]"),
        };
        let word = LearnedEmbedding::read(&local).map_err(|error| error.to_string());
        let word = word.map(|learned| Word {
            key: key.clone(),
            path: path.clone(),
            learned,
        });
        match word.and_then(|word| check_word(word, &words, model)) {
            Ok(word) => words.push(word),
            Err(problem) => problems.push(spec.finding(key, problem).to_string()),
        }
    }
    let embedding = process.trainer().and_then(|trainer| trainer.embedding.as_ref());
    let trained = embedding.map(|embedding| (embedding.trigger.as_str(), embedding.tokens));
    if let Some(conflict) = trained.and_then(|trained| conflict_with(&words, trained)) {
        let key = format!("config.process[{index}].embedding.trigger");
        problems.push(spec.finding(key, conflict).to_string());
    }
    let local = expand(&model.name_or_path, directory, &env);
    if !local.exists() || words.is_empty() {
        return problems;
    }
    let learned: Vec<LearnedEmbedding> = words.iter().map(|word| word.learned.clone()).collect();
    // A model that cannot be read has its own report.
    let found = check_embeddings(&local, model.arch.name, &learned).unwrap_or_default();
    for (word, problem) in words.iter().zip(found) {
        if let Some(problem) = problem {
            problems.push(
                spec.finding(word.key.clone(), format!("{}: {problem}", word.path))
                    .to_string(),
            );
        }
    }
    problems
}

/// Checks a word by its file alone, and against those before it.
fn check_word(word: Word, before: &[Word], model: &ModelConfig) -> Result<Word, String> {
    let (path, trigger) = (&word.path, &word.learned.trigger);
    if let Some(conflict) = conflict_with(before, (trigger, word.vectors())) {
        return Err(format!("{path}: {conflict}"));
    }
    let encoders = if model.arch.name == ArchName::Sdxl { 2 } else { 1 };
    if word.learned.vectors.len() != encoders {
        return Err(format!(
            "{path}: the word `{trigger}` is for another family of models: `arch: {}` needs {}",
            model.arch,
            embedding_names(encoders).join(" and ")
        ));
    }
    Ok(word)
}

fn conflict_with(words: &[Word], new: (&str, u32)) -> Option<String> {
    let conflict = |word: &Word| {
        let why = word_conflict(new, (&word.learned.trigger, word.vectors()))?;
        Some(format!("{why} (the other one: {})", word.path))
    };
    words.iter().find_map(conflict)
}
