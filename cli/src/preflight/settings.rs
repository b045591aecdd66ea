//! Checks the settings of trainings that depend on the files of their model.

use super::models::GivenParts;
use crate::context::env;
use crate::paths::expand;
use aitk_common::job::JobSpec;
use std::path::Path;

/// Returns an error for each training that would end after it loaded its model. Models that are not here, or that cannot be read, are
/// reported elsewhere.
pub(super) async fn settings_problems(spec: &JobSpec, directory: &Path) -> Vec<String> {
    let (spec, directory) = (spec.clone(), directory.to_owned());
    let all = move || {
        (0..spec.process.len())
            .filter_map(|index| problem_of(&spec, index, &directory))
            .collect()
    };
    tokio::task::spawn_blocking(all).await.unwrap_or_default()
}

fn problem_of(spec: &JobSpec, index: usize, directory: &Path) -> Option<String> {
    let process = spec.process.get(index)?.trainer()?;
    let model = expand(&process.model.name_or_path, directory, &env);
    let parts = GivenParts::of(&process.model).local(directory)?;
    if !model.exists() || aitk_engine::families::check(&model, process.model.arch.name, &parts).is_err() {
        return None;
    }
    let network = process.network.as_ref();
    let pretrained = network.and_then(|network| network.pretrained_lora_path.as_ref());
    let pretrained = pretrained
        .map(|path| expand(path, directory, &env))
        .filter(|path| path.exists());
    let error = aitk_engine::processes::check_settings(process, &model, &parts, pretrained.as_deref()).err()?;
    let message = error.to_string();
    // Errors of a key begin with it.
    let is_key =
        |text: &&str| text.contains('.') && text.chars().all(|c| c.is_ascii_alphanumeric() || "._".contains(c));
    let (key, message) = match message.split_once(": ").filter(|(key, _)| is_key(key)) {
        Some((key, rest)) => (format!("config.process[{index}].{key}"), rest.to_owned()),
        None => (format!("config.process[{index}]"), message),
    };
    Some(spec.finding(key, message).to_string())
}
