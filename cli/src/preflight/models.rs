//! The models of a config: what family their files are of.

use crate::commands::env;
use crate::paths::expand;
use aitk_common::hub::{HubError, HubReader};
use aitk_common::job::arch::ArchName;
use aitk_common::job::{Input, InputKind, JobSpec};
use aitk_common::model_files::{Identity, Inventory, check, identify};
use serde::Serialize;
use std::path::Path;
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
            let files = tokio::task::spawn_blocking(move || Inventory::open(&local)).await;
            report.judge(&files.unwrap_or_default(), arch);
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
            // Whoever needs the file says that it is missing.
            continue;
        }
        found.push(report);
    }
    found
}

/// What `model.arch` of the process at this key says.
fn arch_of(spec: &JobSpec, key: &str) -> Option<ArchName> {
    let index: usize = key.strip_prefix("config.process[")?.split(']').next()?.parse().ok()?;
    Some(spec.process.get(index)?.model()?.arch.name)
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
            (Some(arch), identity) => check(&self.path, arch, identity)
                .err()
                .map(|refusal| refusal.to_string()),
            (None, Identity::Pickle { .. }) => check(&self.path, ArchName::Sd1, &identity)
                .err()
                .map(|refusal| refusal.to_string()),
            (None, _) => None,
        };
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
        self.unchecked = Some(format!("{}: its family could not be checked ({why})", self.path));
    }
}
