//! Inputs of an attempt: brought to this machine, cache first.

pub(crate) mod cache;
pub(crate) mod derived;
pub(crate) mod hub;

use crate::context::Context;
use crate::outcome::{failure, local_failure};
use crate::session::Reporter;
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::capability::DeviceKind;
use aitk_common::control::{Assignment, Report};
use aitk_common::job::{Finding, JobSpec, summary};
use aitk_common::storage::{StorageError, checkpoints};
use cache::Lease;
use derived::DerivedLease;
use hub::{HubError, Wanted};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// What an attempt starts from.
#[derive(Debug, Default)]
pub(crate) struct Staged {
    /// Inputs as the config names them -> where they lie.
    pub(crate) inputs: BTreeMap<String, PathBuf>,
    /// The checkpoint to go on from.
    pub(crate) resume: Option<PathBuf>,
    /// Inputs as the config names them -> where what is computed from them is kept.
    pub(crate) derived: BTreeMap<String, DerivedLease>,
    /// Where CUDA keeps the kernels that it compiles.
    pub(crate) cuda: Option<DerivedLease>,
    /// Keep the inputs in the cache for as long as this lives.
    pub(crate) _leases: Vec<Lease>,
}

/// The job of an assignment, checked as the coordinator checked it: by the keys that this program knows, and before
/// anything is fetched or started. Unless it runs in place, every path of it is an input or a repository.
///
/// # Errors
/// How the attempt ends, with file, line and key of what is wrong.
pub(crate) fn job_of(assignment: &Assignment) -> Result<JobSpec, Outcome> {
    let refused = |findings: &[Finding]| Outcome::Failed {
        cause: FailureCause::BadInput,
        message: format!("this worker does not run the job: {}", summary(findings)),
    };
    let job = JobSpec::from_json(&assignment.job_json).map_err(|error| refused(error.findings()))?;
    let support = job.unsupported();
    if !support.errors.is_empty() {
        return Err(refused(&support.errors));
    }
    if !assignment.local {
        let foreign = job.foreign_paths(|path| assignment.inputs.contains_key(path));
        if !foreign.is_empty() {
            return Err(refused(&foreign));
        }
    }
    Ok(job)
}

/// Brings everything that the job of the assignment names. `folder` is the attempt's own.
pub(crate) async fn inputs(
    context: &Context,
    assignment: &Assignment,
    job: &JobSpec,
    reporter: &Reporter,
    folder: &Path,
) -> Result<Staged, Outcome> {
    let mut staged = Staged::default();
    models(context, assignment, job, reporter, &mut staged).await?;
    if assignment.local {
        return Ok(staged);
    }
    for (config_path, id) in &assignment.inputs {
        let warnings = Mutex::new(Vec::new());
        let warn = |message| warnings.lock().unwrap_or_else(PoisonError::into_inner).push(message);
        let fetched = context
            .cache
            .materialise(&context.storage, context.storage_patience, *id, &warn)
            .await;
        for message in warnings.into_inner().unwrap_or_else(PoisonError::into_inner) {
            reporter.log("warn", message).await;
        }
        let (path, lease) = fetched.map_err(|error| match error {
            // It stays as it is, however often it is fetched.
            StorageError::Malformed { .. } | StorageError::Name(_) | StorageError::TooLarge { .. } => Outcome::Failed {
                cause: FailureCause::BadInput,
                message: format!("the input {config_path:?} cannot be used: {error}"),
            },
            error => failure(&format!("could not fetch the input {config_path:?}"), &error),
        })?;
        staged.inputs.insert(config_path.clone(), path);
        staged._leases.push(lease);
        let derived = context
            .derived
            .of_input(assignment.owner.as_ref(), &assignment.job, *id);
        let derived = derived.map_err(|error| local_failure(&error))?;
        staged.derived.insert(config_path.clone(), derived);
    }
    if assignment.device.kind == DeviceKind::Cuda {
        let cuda = context.derived.of_cuda(assignment.owner.as_ref(), &assignment.job);
        staged.cuda = Some(cuda.map_err(|error| local_failure(&error))?);
    }
    if let Some(manifest) = assignment.resume {
        let target = folder.join("resume");
        let target = &target;
        let fetched = context
            .storage
            .retry(context.storage_patience, |store| {
                Box::pin(async move { checkpoints::fetch(store.as_ref(), manifest, target, &mut |_| {}).await })
            })
            .await;
        let checkpoint = fetched.map_err(|error| failure("could not fetch the checkpoint to go on from", &error))?;
        staged.resume = Some(checkpoint.folder().to_owned());
    }
    Ok(staged)
}

/// Fetches the models that the config names by their repository.
async fn models(
    context: &Context,
    assignment: &Assignment,
    job: &JobSpec,
    reporter: &Reporter,
    staged: &mut Staged,
) -> Result<(), Outcome> {
    for input in job.repositories(|path| assignment.inputs.contains_key(path)) {
        let path = input.config_path;
        // In place, a folder of that name is what is meant.
        if assignment.local && Path::new(&path).exists() {
            continue;
        }
        reporter.phase("downloading model").await;
        let wanted = Wanted {
            repo: &path,
            revision: job.revisions.get(&path).map(String::as_str),
            in_place: assignment.local,
        };
        let say = |message| reporter.log_now("info", message);
        let mut fetched = context.hub.fetch(&wanted, &say).await;
        let own = job.cluster.hub_token.as_ref().filter(|_| !assignment.local);
        if let (Some(name), Err(refused)) = (own, &fetched)
            && matches!(
                refused,
                HubError::NotFound { .. } | HubError::Denied { .. } | HubError::Unavailable { .. }
            )
        {
            let owner = assignment.owner.as_ref();
            match (context.hub_secrets.token(owner, name), owner) {
                (Ok(token), Some(owner)) => {
                    say(format!("{path} is fetched with the token {} of user {owner}", name.0));
                    fetched = context.hub.fetch_for(owner, &token, &wanted, &say).await;
                }
                (Err(message), _) if !matches!(refused, HubError::Unavailable { .. }) => {
                    // What this worker lacks, another may have.
                    return Err(Outcome::Failed {
                        cause: FailureCause::Machine,
                        message: format!("{}: {refused}; {message}", input.key),
                    });
                }
                _ => {}
            }
        }
        let folder = fetched.map_err(|error| {
            let cause = match &error {
                HubError::NotFound { .. } | HubError::Denied { .. } | HubError::Layout { .. } => FailureCause::BadInput,
                HubError::Unavailable { .. } | HubError::Damaged { .. } => FailureCause::Network,
                HubError::Files(error) if error.is_disk_full() => FailureCause::DiskFull,
                HubError::Files(_) => FailureCause::Machine,
            };
            Outcome::Failed {
                cause,
                message: format!("{}: {error}", input.key),
            }
        })?;
        if let Some(commit) = hub::commit_of(&folder).filter(|_| wanted.revision.is_none() && !assignment.local) {
            let message = format!("{path} is used at commit {commit}, now and by later attempts of this job");
            reporter
                .report(Report::Pinned {
                    repository: path.clone(),
                    commit: commit.to_owned(),
                    message,
                })
                .await;
        }
        staged.inputs.insert(path, folder);
    }
    Ok(())
}
