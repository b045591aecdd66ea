//! The models of a config: what family their files are of.

use crate::context::env;
use crate::paths::expand;
use aitk_common::checkpoint::{MANIFEST_NAME, step_of_folder};
use aitk_common::hub::{HubError, HubReader};
use aitk_common::job::arch::ArchName;
use aitk_common::job::{Input, InputKind, JobSpec, naming};
use aitk_common::model_files::{
    Identity, Inventory, check_supported, damaged_file, identify, is_adapter, missing_files,
};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long the hub may take: what it says is good to know, and not more.
const HUB_PATIENCE: Duration = Duration::from_secs(20);

/// What was found about a model, or about another file of weights.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ModelReport {
    /// Its key: `config.process[0].model.name_or_path`.
    pub key: String,
    /// As the config names it.
    pub path: String,
    /// The family, for people.
    pub family: Option<String>,
    /// What says so.
    pub evidence: Option<String>,
    /// Where it is not on this machine: the commit that the hub has now.
    pub commit: Option<String>,
    /// Why it cannot be used.
    pub problem: Option<String>,
    /// Why it could not be looked at.
    pub unchecked: Option<String>,
}

/// Looks at every model of a job that is wanted, and at VAEs and LoRAs as far as pickles go.
pub(super) async fn look(spec: &JobSpec, directory: &Path, wanted: impl Fn(&Input) -> bool) -> Vec<ModelReport> {
    let mut found: Vec<ModelReport> = Vec::new();
    for input in spec.inputs() {
        let weights = matches!(input.kind, InputKind::Model | InputKind::Vae | InputKind::Lora);
        if !weights || input.config_path.is_empty() || !wanted(&input) {
            continue;
        }
        let mut report = ModelReport {
            key: input.key.clone(),
            path: input.config_path.clone(),
            ..ModelReport::default()
        };
        // Parts that replace one of the model's are not models.
        let arch = match input.key.ends_with("model.name_or_path") {
            true => arch_of(spec, &input.key),
            false => None,
        };
        let local = expand(&input.config_path, directory, &env);
        if local.exists() {
            let read = tokio::task::spawn_blocking(move || {
                let files = Inventory::open(&local);
                let damaged =
                    arch.and_then(|arch| damaged_file(&local, &files).or_else(|| does_not_load(arch, &local, &files)));
                (files, damaged, model_below(&local))
            });
            let (files, damaged, below) = read.await.unwrap_or_default();
            report.judge(&files, arch);
            if let (Some(problem), Some(below)) = (&mut report.problem, below) {
                problem.push_str(&format!("; there is a model in {}", below.display()));
            }
            if input.kind == InputKind::Lora {
                report.problem = report.problem.or_else(|| not_an_adapter(&input.config_path, &files));
            }
            report.problem = report.problem.or_else(|| {
                let damaged = damaged?;
                // The engine names the file itself.
                let is_named = damaged.contains(&input.config_path);
                Some(if is_named {
                    damaged
                } else {
                    format!("{}: {damaged}", input.config_path)
                })
            });
        } else if input.may_be_repository() {
            match found
                .iter()
                .find(|other| other.path == report.path && other.key.ends_with("model.name_or_path") == arch.is_some())
            {
                Some(other) => {
                    report = ModelReport {
                        key: report.key,
                        ..other.clone()
                    }
                }
                None => report.ask_hub(arch).await,
            }
        } else {
            report.problem = Some(missing(&input, &local));
        }
        if let Some(folder) = begun_in(spec, &input.key, directory)
            && let Some(problem) = report.problem.take()
        {
            report.unchecked = Some(format!(
                "{problem}; `aitk run` does not open it, and goes on from what is in {}; `aitk submit` needs it",
                folder.display()
            ));
        }
        found.push(report);
    }
    for report in &mut found {
        let problem = report.problem.take();
        report.problem = problem.map(|problem| spec.finding(report.key.clone(), problem).to_string());
    }
    found
}

/// The run folder with a checkpoint or a save, of the training that begins with the LoRA at this key where it has neither.
fn begun_in(spec: &JobSpec, key: &str, directory: &Path) -> Option<PathBuf> {
    let rest = key.strip_prefix("config.process[")?;
    let index: usize = rest.strip_suffix("].network.pretrained_lora_path")?.parse().ok()?;
    let process = spec.process.get(index)?.trainer()?;
    let name = process.name.as_deref().filter(|name| !name.is_empty());
    let folder = expand(process.training_folder.as_deref()?, directory, &env).join(name.unwrap_or(&spec.name));
    let names_in = |folder: &Path| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned())
    };
    let checkpoints = folder.join(".aitk/checkpoints");
    let is_checkpoint =
        |name: String| step_of_folder(&name).is_some() && checkpoints.join(name).join(MANIFEST_NAME).is_file();
    let is_save = |name: String| naming::save_file(&spec.name, naming::step_of(&spec.name, &name)) == name;
    (names_in(&checkpoints).any(is_checkpoint) || names_in(&folder).any(is_save)).then_some(folder)
}

/// Why the engine could not load a model that is complete, as far as configs and headers tell: a tensor that is missing or has another
/// shape, parts that do not fit together.
#[cfg(feature = "embedded")]
fn does_not_load(arch: ArchName, local: &Path, files: &Inventory) -> Option<String> {
    let runs_here = arch == ArchName::Sd1 && check_supported("", arch, &identify(files)).is_ok();
    let is_whole = !files.is_folder || missing_files(files).is_empty();
    let checked = (runs_here && is_whole).then(|| aitk_engine::models::sd::SdModel::check(local))?;
    checked.err().map(|error| error.to_string())
}

#[cfg(not(feature = "embedded"))]
fn does_not_load(_: ArchName, _: &Path, _: &Inventory) -> Option<String> {
    None
}

/// A model one or two folders below one that has none, as in the hub's cache (`models--ORG--NAME/snapshots/COMMIT`) or after unpacking.
fn model_below(folder: &Path) -> Option<PathBuf> {
    const INDEX: &str = "model_index.json";
    /// Folders that are looked into.
    const MOST: usize = 100;
    if !folder.is_dir() || folder.join(INDEX).exists() {
        return None;
    }
    let below = |folder: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let mut found: Vec<PathBuf> = entries.take(MOST).map(|entry| entry.path()).collect();
        found.sort();
        found
    };
    let candidates = below(&folder.join("snapshots")).into_iter().chain(below(folder));
    candidates.into_iter().find(|place| place.join(INDEX).is_file())
}

/// What `model.arch` of the process at this key says.
fn arch_of(spec: &JobSpec, key: &str) -> Option<ArchName> {
    let index: usize = key.strip_prefix("config.process[")?.split(']').next()?.parse().ok()?;
    Some(spec.process.get(index)?.model()?.arch.name)
}

/// What is said of the files of prompts and of control images that are not there. Models and data sets have a look of their own.
pub(super) fn missing_inputs(spec: &JobSpec, directory: &Path) -> Vec<String> {
    let small = |input: &Input| matches!(input.kind, InputKind::PromptFile | InputKind::ControlImages);
    let named = spec.inputs().into_iter().filter(small);
    named
        .filter_map(|input| {
            let local = expand(&input.config_path, directory, &env);
            let gone = !input.config_path.is_empty() && !local.exists();
            gone.then(|| spec.finding(input.key.clone(), missing(&input, &local)).to_string())
        })
        .collect()
}

/// Why a file that is there cannot be the LoRA that a config names.
fn not_an_adapter(path: &str, files: &Inventory) -> Option<String> {
    if let Some(problem) = &files.problem {
        return Some(format!("{path}: {problem}"));
    }
    let what = match identify(files) {
        Identity::Model { family, .. } => format!("a {family} model"),
        Identity::Other { what, .. } if !is_adapter(&what) => what,
        _ => return None,
    };
    Some(format!("{path} is {what}, and the weights of a LoRA are expected here"))
}

/// What is said of a path where nothing lies.
fn missing(input: &Input, local: &Path) -> String {
    let path = &input.config_path;
    if path.starts_with("http://") || path.starts_with("https://") {
        return format!("{path} is an address: download the file and give its path, or name a repository as ORG/NAME");
    }
    let repository = match input.kind {
        InputKind::Model | InputKind::Vae => ", and it is no name of a repository (ORG/NAME)",
        _ => "",
    };
    let place = match local.display().to_string() {
        place if place == *path => String::new(),
        place => format!(" ({place})"),
    };
    format!("{path}: no such file or folder{place}{repository}")
}

impl ModelReport {
    fn judge(&mut self, files: &Inventory, arch: Option<ArchName>) {
        let identity = identify(files);
        match &identity {
            Identity::Model { family, evidence, .. } => {
                (self.family, self.evidence) = (Some(family.to_string()), Some(evidence.clone()));
            }
            Identity::Other { what, evidence } => {
                (self.family, self.evidence) = (Some(what.clone()), Some(evidence.clone()));
            }
            Identity::Pickle { evidence } | Identity::Unknown { evidence } => self.evidence = Some(evidence.clone()),
        }
        self.problem = match (arch, &identity) {
            (Some(arch), identity) => check_supported(&self.path, arch, identity)
                .err()
                .map(|refusal| refusal.to_string()),
            (None, Identity::Pickle { .. }) => check_supported(&self.path, ArchName::Sd1, &identity)
                .err()
                .map(|refusal| refusal.to_string()),
            (None, _) => None,
        };
        if self.problem.is_none() && arch == Some(ArchName::Sd1) {
            let missing = missing_files(files);
            self.problem = (!missing.is_empty()).then(|| {
                format!(
                    "{} is not a complete model: it has no {}",
                    self.path,
                    missing.join(", no ")
                )
            });
        }
    }

    async fn ask_hub(&mut self, arch: Option<ArchName>) {
        let set = |name: &str| env(name).filter(|value| !value.trim().is_empty());
        let why = if set("HF_HUB_OFFLINE").is_some_and(|value| !matches!(value.as_str(), "0" | "false")) {
            "HF_HUB_OFFLINE is set".to_owned()
        } else {
            let hub = HubReader::new(set("HF_ENDPOINT"), set("HF_TOKEN"));
            match tokio::time::timeout(HUB_PATIENCE, hub.inventory(&self.path)).await {
                Ok(Ok((commit, files))) => {
                    self.commit = Some(commit);
                    self.judge(&files, arch);
                    return;
                }
                Ok(Err(error @ HubError::NotFound { .. })) => error.to_string(),
                Ok(Err(HubError::Unavailable(problem))) => format!("the hub cannot be reached: {problem}"),
                Err(_) => format!("{} did not answer within {} s", hub.endpoint(), HUB_PATIENCE.as_secs()),
            }
        };
        self.unchecked = Some(format!(
            "{}: there is no such folder here, and the repository of that name could not be checked ({why})",
            self.path
        ));
    }
}
