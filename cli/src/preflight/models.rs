//! Checks the models of a config: to which family their files belong, and whether they are complete.

use super::inputs::missing_message;
use crate::context::env;
use crate::paths::expand;
use aitk_common::checkpoint::{MANIFEST_NAME, step_of_folder};
use aitk_common::hub::{HubEnvironment, HubError, HubReader};
use aitk_common::job::arch::ArchName;
use aitk_common::job::model::ModelConfig;
use aitk_common::job::{Input, InputKind, JobSpec, naming};
use aitk_common::model_files::{
    Inventory, ModelFileKind, PartPaths, check_supported, damaged_file, identify, is_adapter, missing_files,
    model_parts,
};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long to wait for the hub. The check is optional, so a slow hub does not hold up the command for longer.
const HUB_TIMEOUT: Duration = Duration::from_secs(20);

/// What was found about a model, a VAE or a LoRA.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ModelReport {
    /// Its key in the config: `config.process[0].model.name_or_path`.
    pub key: String,
    /// Its path or repository as the config has it.
    pub path: String,
    /// The family as text: `Stable Diffusion 1.x`.
    pub family: Option<String>,
    /// How the family was recognised.
    pub evidence: Option<String>,
    /// The hub's current commit, for a repository that is not on this machine.
    pub commit: Option<String>,
    /// Why it cannot be used.
    pub problem: Option<String>,
    /// Why it could not be checked.
    pub unchecked: Option<String>,
    /// Whether it could not be checked because it is gated. Then this machine cannot use it; a worker may have another token.
    pub gated: bool,
}

/// Inspects every model, VAE and LoRA of a job for which `wanted` returns true. VAEs are only checked for pickle files.
pub(super) async fn inspect_models(
    spec: &JobSpec,
    directory: &Path,
    wanted: impl Fn(&Input) -> bool,
) -> Vec<ModelReport> {
    let mut reports: Vec<ModelReport> = Vec::new();
    for input in spec.inputs() {
        let weights = match input.kind {
            InputKind::Model | InputKind::Vae | InputKind::Lora => true,
            // Folders of code models are checked with the other inputs.
            InputKind::LanguageModel => {
                input.may_be_repository() && !expand(&input.config_path, directory, &env).exists()
            }
            _ => false,
        };
        if !weights || input.config_path.is_empty() || !wanted(&input) {
            continue;
        }
        let mut report = ModelReport {
            key: input.key.clone(),
            path: input.config_path.clone(),
            ..ModelReport::default()
        };
        // A VAE or a LoRA is not a whole model, so `model.arch` does not describe its file.
        let arch = match input.key.ends_with("model.name_or_path") {
            true => arch_of(spec, &input.key),
            false => None,
        };
        let given = arch.and_then(|_| model_of(spec, &input.key)).map(GivenParts::of);
        let given = given.unwrap_or_default();
        let local = expand(&input.config_path, directory, &env);
        if local.exists() {
            let part_paths = given.local(directory);
            let read = tokio::task::spawn_blocking(move || {
                let files = Inventory::open(&local);
                let parts = part_paths.as_ref();
                let incomplete = arch.and_then(|arch| part_error(arch, &local, &files, parts?));
                let damaged = arch
                    .and_then(|arch| damaged_file(&local, &files).or_else(|| load_error(arch, &local, &files, parts?)));
                (files, incomplete, damaged, find_nested_model(&local))
            });
            let (files, incomplete, damaged, nested) = read.await.unwrap_or_default();
            report.set_identity(&files, arch, &given);
            // It says which part is missing, not only which files.
            report.problem = incomplete.or(report.problem);
            if let (Some(problem), Some(nested)) = (&mut report.problem, nested) {
                problem.push_str(&format!("; there is a model in {}", nested.display()));
            }
            if input.kind == InputKind::Lora {
                report.problem = report.problem.or_else(|| adapter_problem(&input.config_path, &files));
                if report.problem.is_none() {
                    let lora = expand(&input.config_path, directory, &env);
                    report.problem = lora_problem(spec, &input, lora, directory).await;
                }
            }
            report.problem = report.problem.or_else(|| {
                let damaged = damaged?;
                // The engine's errors contain the path already, or that of a part from elsewhere.
                let is_named = damaged.contains(&input.config_path)
                    || key_of_problem(spec, &input.key, &damaged, directory) != input.key;
                Some(if is_named {
                    damaged
                } else {
                    format!("{}: {damaged}", input.config_path)
                })
            });
        } else if input.may_be_repository() {
            match reports
                .iter()
                .find(|other| other.path == report.path && other.key.ends_with("model.name_or_path") == arch.is_some())
            {
                Some(other) => {
                    report = ModelReport {
                        key: report.key,
                        ..other.clone()
                    }
                }
                None => report.inspect_repository(arch, &given).await,
            }
        } else {
            report.problem = Some(missing_message(&input, &local));
        }
        if let Some(folder) = resumable_run_folder(spec, &input.key, directory)
            && let Some(problem) = report.problem.take()
        {
            report.unchecked = Some(format!(
                "{problem}; `aitk run` does not need it, because it resumes from {}; `aitk submit` needs it",
                folder.display()
            ));
        }
        reports.push(report);
    }
    check_same_family(&mut reports);
    for report in &mut reports {
        let problem = report.problem.take();
        report.problem = problem.map(|problem| {
            let key = key_of_problem(spec, &report.key, &problem, directory);
            spec.finding(key, problem).to_string()
        });
    }
    reports
}

/// Reports the fine-tune of an extraction that is of another family than its base model.
fn check_same_family(reports: &mut [ModelReport]) {
    let family = |key: &str| {
        let report = reports.iter().find(|report| report.key == key)?;
        Some((report.path.clone(), report.family.clone()?))
    };
    let (Some((base, base_family)), Some((_, family))) = (family("config.base_model"), family("config.extract_model"))
    else {
        return;
    };
    // FLUX.1 Kontext has the tensors of dev.
    let is_same = family == base_family || family.starts_with("FLUX.1") && base_family.starts_with("FLUX.1");
    let tuned = reports.iter_mut().find(|report| report.key == "config.extract_model");
    if let Some(tuned) = tuned.filter(|_| !is_same) {
        let problem = format!(
            "{} is {family}, and the base model {base} is {base_family}: a LoRA is extracted from a model and its own fine-tune",
            tuned.path
        );
        tuned.problem.get_or_insert(problem);
    }
}

/// Returns the key that a problem of the model at `key` is about. Parts of a model may come from the paths of other keys of its section.
fn key_of_problem(spec: &JobSpec, key: &str, problem: &str, directory: &Path) -> String {
    let local = |input: &Input| Some(expand(&input.config_path, directory, &env).display().to_string());
    let section = key.strip_suffix("model.name_or_path");
    let named = section.and_then(|_| spec.input_named_in(problem, local));
    let is_of_section = |input: &Input| {
        let rest = section.and_then(|section| input.key.strip_prefix(section));
        rest.is_some_and(|rest| rest.starts_with("model.") && input.kind != InputKind::Lora)
    };
    named
        .filter(is_of_section)
        .map_or_else(|| key.to_owned(), |input| input.key)
}

/// Returns the run folder of the training that starts from the LoRA at this key, if the folder has a checkpoint or a
/// save. The training resumes from there, and does not open the LoRA.
fn resumable_run_folder(spec: &JobSpec, key: &str, directory: &Path) -> Option<PathBuf> {
    let rest = key.strip_prefix("config.process[")?;
    let index: usize = rest.strip_suffix("].network.pretrained_lora_path")?.parse().ok()?;
    let process = spec.process.get(index)?.trainer()?;
    let name = process.name.as_deref().filter(|name| !name.is_empty());
    let stem = process.save_stem(&spec.name);
    let folder = expand(process.training_folder.as_deref()?, directory, &env).join(name.unwrap_or(&spec.name));
    let names_in = |folder: &Path| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned())
    };
    let checkpoints = folder.join(".aitk/checkpoints");
    let is_checkpoint =
        |name: String| step_of_folder(&name).is_some() && checkpoints.join(name).join(MANIFEST_NAME).is_file();
    let is_save = |name: String| naming::save_file(stem, naming::step_of(stem, &name)) == name;
    (names_in(&checkpoints).any(is_checkpoint) || names_in(&folder).any(is_save)).then_some(folder)
}

/// The folders of text encoders and tokenizers in diffusers' layout.
const TEXT_FOLDERS: [&str; 6] = [
    "text_encoder",
    "text_encoder_2",
    "text_encoder_3",
    "tokenizer",
    "tokenizer_2",
    "tokenizer_3",
];

/// The keys of a `model` section that give parts of a model from elsewhere.
#[derive(Clone, Debug, Default)]
pub(super) struct GivenParts {
    extras: Option<String>,
    text_encoder: Option<String>,
    /// The folders whose content `text_encoder` may replace.
    text_folders: &'static [&'static str],
    vae: Option<String>,
}

impl GivenParts {
    /// Those of a section; none unless its family takes parts from elsewhere.
    pub(super) fn of(model: &ModelConfig) -> Self {
        if !model.arch.name.takes_parts() {
            return Self::default();
        }
        Self {
            extras: model.extras_name_or_path.clone(),
            text_encoder: model.te_name_or_path.clone(),
            text_folders: match model.arch.name.is_flux() {
                true => &["text_encoder_2"],
                false => &TEXT_FOLDERS,
            },
            vae: model.vae_path.clone(),
        }
    }

    /// Their paths on this machine. `None` if one is not here, such as a repository.
    pub(super) fn local(&self, directory: &Path) -> Option<PartPaths> {
        let local = |path: &Option<String>| match path {
            None => Some(None),
            Some(path) => {
                let path = expand(path, directory, &env);
                path.exists().then_some(Some(path))
            }
        };
        Some(PartPaths {
            extras: local(&self.extras)?,
            text_encoder: local(&self.text_encoder)?,
            vae: local(&self.vae)?,
        })
    }

    /// Whether a file of a model comes from elsewhere if the model does not have it.
    fn replaces(&self, file: &str) -> bool {
        let is_below = |folder: &str| file.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'));
        self.extras.is_some() && !is_below("transformer")
            || self.text_encoder.is_some() && self.text_folders.iter().any(|folder| is_below(folder))
            || self.vae.is_some() && is_below("vae")
    }
}

/// Returns which parts a model lacks and how to give them.
fn part_error(arch: ArchName, local: &Path, files: &Inventory, parts: &PartPaths) -> Option<String> {
    if !arch.takes_parts() || check_supported("", arch, &identify(files)).is_err() {
        return None;
    }
    model_parts(arch, local, parts).err()
}

/// Returns why the engine could not load a complete model, from configs and headers only: a tensor is missing or has
/// another shape, or the parts do not fit together.
#[cfg(feature = "embedded")]
fn load_error(arch: ArchName, local: &Path, files: &Inventory, parts: &PartPaths) -> Option<String> {
    let is_supported = check_supported("", arch, &identify(files)).is_ok();
    let is_whole = !files.is_folder || arch.takes_parts() || missing_files(files).is_empty();
    let result = (is_supported && is_whole).then(|| aitk_engine::families::check(local, arch, parts))?;
    result.err().map(|error| error.to_string())
}

#[cfg(not(feature = "embedded"))]
fn load_error(_: ArchName, _: &Path, _: &Inventory, _: &PartPaths) -> Option<String> {
    None
}

/// Returns why a LoRA does not fit the model of its process, from configs, names and shapes only. `None` too if that
/// model is not on this machine or has a problem of its own, which its own report says.
#[cfg(feature = "embedded")]
async fn lora_problem(spec: &JobSpec, input: &Input, lora: PathBuf, directory: &Path) -> Option<String> {
    let (process, _) = input.key.split_once(']')?;
    let model = process_model(spec, process)?;
    let section = model_of(spec, &model.key)?;
    let (arch, parts) = (section.arch.name, GivenParts::of(section).local(directory)?);
    let model = expand(&model.config_path, directory, &env);
    if !model.exists() {
        return None;
    }
    let keys = [
        ".model.assistant_lora_path",
        ".model.inference_lora_path",
        ".model.accuracy_recovery_adapter",
    ];
    let is_of_denoiser = keys.iter().any(|key| input.key.ends_with(key));
    let check = move || {
        aitk_engine::families::check(&model, arch, &parts).ok()?;
        let fits = match is_of_denoiser {
            true => aitk_engine::adapters::check_denoiser_lora(&lora, &model, arch, &parts),
            false => aitk_engine::adapters::check_lora(&lora, &model, arch, &parts),
        };
        fits.err()
    };
    let error = tokio::task::spawn_blocking(check).await.ok()??;
    Some(error.to_string())
}

/// The base model of the process whose keys begin with `process` (`config.process[0`).
#[cfg(feature = "embedded")]
fn process_model(spec: &JobSpec, process: &str) -> Option<Input> {
    let key = format!("{process}].model.name_or_path");
    spec.inputs().into_iter().find(|input| input.key == key)
}

#[cfg(not(feature = "embedded"))]
async fn lora_problem(_: &JobSpec, _: &Input, _: PathBuf, _: &Path) -> Option<String> {
    None
}

/// Finds a model one or two folders below a folder that has none, as in the hub's cache
/// (`models--ORG--NAME/snapshots/COMMIT`) or after unpacking an archive.
fn find_nested_model(folder: &Path) -> Option<PathBuf> {
    const INDEX: &str = "model_index.json";
    /// The largest number of entries of a folder that are searched.
    const MAX_ENTRIES: usize = 100;
    if !folder.is_dir() || folder.join(INDEX).exists() {
        return None;
    }
    let sorted_entries = |folder: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let mut paths: Vec<PathBuf> = entries.take(MAX_ENTRIES).map(|entry| entry.path()).collect();
        paths.sort();
        paths
    };
    let candidates = sorted_entries(&folder.join("snapshots"))
        .into_iter()
        .chain(sorted_entries(folder));
    candidates.into_iter().find(|folder| folder.join(INDEX).is_file())
}

/// Returns `model.arch` of the process at this key.
fn arch_of(spec: &JobSpec, key: &str) -> Option<ArchName> {
    Some(model_of(spec, key)?.arch.name)
}

/// Returns the `model` section of the process at this key.
fn model_of<'a>(spec: &'a JobSpec, key: &str) -> Option<&'a ModelConfig> {
    let index: usize = key.strip_prefix("config.process[")?.split(']').next()?.parse().ok()?;
    spec.process.get(index)?.model()
}

/// Returns why an existing file cannot be the LoRA that a config names.
fn adapter_problem(path: &str, files: &Inventory) -> Option<String> {
    if let Some(problem) = &files.problem {
        return Some(format!("{path}: {problem}"));
    }
    let what = match identify(files) {
        ModelFileKind::Model { family, .. } => format!("a {family} model"),
        ModelFileKind::Other { what, .. } if !is_adapter(&what) => what,
        _ => return None,
    };
    Some(format!("{path} is {what}, but a LoRA was expected"))
}

impl ModelReport {
    /// Sets family, evidence and problem from a model's files. `given`: parts that come from elsewhere.
    fn set_identity(&mut self, files: &Inventory, arch: Option<ArchName>, given: &GivenParts) {
        let identity = identify(files);
        match &identity {
            ModelFileKind::Model { family, evidence, .. } => {
                (self.family, self.evidence) = (Some(family.to_string()), Some(evidence.clone()));
            }
            ModelFileKind::Other { what, evidence } => {
                (self.family, self.evidence) = (Some(what.clone()), Some(evidence.clone()));
            }
            ModelFileKind::Pickle { evidence } | ModelFileKind::Unknown { evidence } => {
                self.evidence = Some(evidence.clone())
            }
        }
        self.problem = match (arch, &identity) {
            (Some(arch), identity) => check_supported(&self.path, arch, identity)
                .err()
                .map(|refusal| refusal.to_string()),
            (None, ModelFileKind::Pickle { .. }) => check_supported(&self.path, ArchName::Sd1, &identity)
                .err()
                .map(|refusal| refusal.to_string()),
            (None, _) => None,
        };
        if self.problem.is_none() && arch.is_some() {
            let mut missing = missing_files(files);
            missing.retain(|file| !given.replaces(file));
            self.problem = (!missing.is_empty()).then(|| {
                format!(
                    "{} is not a complete model: it has no {}",
                    self.path,
                    missing.join(", no ")
                )
            });
        }
    }

    /// Sets commit, family and problem from the small files of a repository at the hub.
    async fn inspect_repository(&mut self, arch: Option<ArchName>, given: &GivenParts) {
        let environment = HubEnvironment::from_env(&env);
        let why = if environment.offline {
            "HF_HUB_OFFLINE is set".to_owned()
        } else {
            let hub = HubReader::new(Some(environment.endpoint), environment.token);
            match tokio::time::timeout(HUB_TIMEOUT, hub.inventory(&self.path)).await {
                Ok(Ok((commit, files))) => {
                    self.commit = Some(commit);
                    self.set_identity(&files, arch, given);
                    return;
                }
                Ok(Err(error @ HubError::Gated { .. })) => {
                    self.gated = true;
                    self.unchecked = Some(format!(
                        "{error}; for a job that is sent to a worker, a token that its owner keeps (`cluster.hub_token`) does as well; or \
                         download the model and give its folder"
                    ));
                    return;
                }
                Ok(Err(error @ HubError::NotFound { .. })) => error.to_string(),
                Ok(Err(HubError::Unavailable(problem))) => format!("the hub cannot be reached: {problem}"),
                Err(_) => format!("{} did not answer within {} s", hub.endpoint(), HUB_TIMEOUT.as_secs()),
            }
        };
        self.unchecked = Some(format!(
            "{}: there is no such folder here, and the repository with that name could not be checked ({why})",
            self.path
        ));
    }
}
