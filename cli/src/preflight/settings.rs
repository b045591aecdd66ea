//! Checks what depends on the files of a model: the settings of trainings, and the prompts and data sets of language models.

use super::location::named_finding;
use super::models::GivenParts;
use crate::context::env;
use crate::paths::expand;
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::{JobSpec, ProcessKind};
use aitk_common::model_files::{Inventory, ModelFileKind, PartPaths, identify};
use aitk_processes::{
    check_control_generator, check_feature_extractor, check_image_adapter, check_language_model, check_settings,
};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Returns the errors of each process that would end after it loaded its model. Models that are not here, or that cannot be read, are
/// reported elsewhere.
pub(super) async fn settings_problems(spec: &JobSpec, directory: &Path) -> Vec<String> {
    let (spec, directory) = (spec.clone(), directory.to_owned());
    let all = move || {
        (0..spec.process.len())
            .flat_map(|index| problems_of(&spec, index, &directory))
            .collect()
    };
    tokio::task::spawn_blocking(all).await.unwrap_or_default()
}

fn problems_of(spec: &JobSpec, index: usize, directory: &Path) -> Vec<String> {
    let Some(process) = spec.process.get(index) else {
        return Vec::new();
    };
    if matches!(
        process.kind,
        ProcessKind::LmTrain(_) | ProcessKind::LmGenerate(_) | ProcessKind::LmExport(_)
    ) {
        return language_model_problem(spec, index, directory).into_iter().collect();
    }
    let Some(process) = process.trainer() else {
        return Vec::new();
    };
    let model = expand(&process.model.name_or_path, directory, &env);
    let parts = GivenParts::of(&process.model).local(directory);
    let parts = parts
        .filter(|parts| model.exists() && aitk_engine::families::check(&model, process.model.arch.name, parts).is_ok());
    let model = parts.as_ref().map(|parts| (model.as_path(), parts));
    let settings = model.and_then(|model| training_problem(process, model, directory));
    let adapter = adapter_problem(process, model, directory);
    let extractor = extractor_problem(process, model, directory);
    let controls = control_generator_problems(process, directory);
    let problems = settings.into_iter().chain(adapter).chain(extractor).chain(controls);
    problems
        .map(|problem| finding(spec, index, directory, problem))
        .collect()
}

/// Why a training cannot start on a model.
fn training_problem(process: &TrainerProcess, (model, parts): (&Path, &PartPaths), directory: &Path) -> Option<String> {
    let network = process.network.as_ref();
    let pretrained = network.and_then(|network| network.pretrained_lora_path.as_ref());
    let pretrained = pretrained
        .map(|path| expand(path, directory, &env))
        .filter(|path| path.exists());
    let error = check_settings(process, model, parts, pretrained.as_deref()).err()?;
    Some(error.to_string())
}

/// Why a training cannot start from its adapter of images. `model`: the base model, if it is here.
fn adapter_problem(process: &TrainerProcess, model: Option<(&Path, &PartPaths)>, directory: &Path) -> Option<String> {
    let path = process.adapter.as_ref()?.name_or_path.as_ref()?;
    let path = expand(path, directory, &env);
    // Pickle files have their error with those of the models.
    if !path.exists() || matches!(identify(&Inventory::open(&path)), ModelFileKind::Pickle { .. }) {
        return None;
    }
    let error = check_image_adapter(process, &path, model).err()?;
    Some(error.to_string())
}

/// Why a training cannot compare the features of its feature extractor. `model`: the base model, if it is here.
fn extractor_problem(process: &TrainerProcess, model: Option<(&Path, &PartPaths)>, directory: &Path) -> Option<String> {
    let source = process.feature_extractor()?;
    let path = expand(source.path, directory, &env);
    let second = source.second.map(|path| expand(path, directory, &env));
    // Pickle files have their error with those of the models.
    let is_readable =
        |path: &PathBuf| path.exists() && !matches!(identify(&Inventory::open(path)), ModelFileKind::Pickle { .. });
    if !is_readable(&path) || !second.iter().all(is_readable) {
        return None;
    }
    let error = check_feature_extractor(process, (&path, second.as_deref()), model).err()?;
    Some(error.to_string())
}

/// Why networks cannot make the control images of a training.
fn control_generator_problems(process: &TrainerProcess, directory: &Path) -> Vec<String> {
    let sources = process.control_generators();
    let problems = sources.filter_map(|source| {
        let path = expand(source.path, directory, &env);
        // Pickle files have their error with those of the models.
        if !path.exists() || matches!(identify(&Inventory::open(&path)), ModelFileKind::Pickle { .. }) {
            return None;
        }
        Some(check_control_generator(&source, &path).err()?.to_string())
    });
    problems.collect()
}

/// Why a process of a language model cannot start. Paths that do not exist are reported elsewhere.
fn language_model_problem(spec: &JobSpec, index: usize, directory: &Path) -> Option<String> {
    let prefix = format!("config.process[{index}].");
    let inputs = spec.inputs().into_iter().filter(|input| input.key.starts_with(&prefix));
    let inputs: BTreeMap<String, PathBuf> = inputs
        .map(|input| {
            let local = expand(&input.config_path, directory, &env);
            (input.config_path, local)
        })
        .collect();
    if inputs.values().any(|path| !path.exists()) {
        return None;
    }
    let error = check_language_model(spec, spec.process.get(index)?, &inputs).err()?;
    Some(finding(spec, index, directory, error.to_string()))
}

/// An error of a process as a finding. Errors of a key begin with it; others may name a key or an input.
fn finding(spec: &JobSpec, index: usize, directory: &Path, message: String) -> String {
    let is_key = |text: &&str| text.chars().all(|c| c.is_ascii_alphanumeric() || "._[]".contains(c));
    let section = format!("config.process[{index}]");
    if let Some((key, rest)) = message.split_once(": ").filter(|(key, _)| is_key(key)) {
        return spec.finding(format!("{section}.{key}"), rest.to_owned()).to_string();
    }
    let named = named_finding(spec, index, directory, &message);
    named.unwrap_or_else(|| spec.finding(section, message)).to_string()
}
