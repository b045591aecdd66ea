//! Stages the inputs of an attempt on this machine: from the cache, or from storage.

pub(crate) mod cache;
pub(crate) mod derived;
pub(crate) mod hub;

use crate::context::Context;
use crate::outcome::{file_failure, storage_failure};
use crate::session::Reporter;
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::capability::DeviceKind;
use aitk_common::control_plane::{Assignment, Report};
use aitk_common::job::{Finding, JobSpec, summary};
use aitk_common::storage::{StorageError, checkpoints};
use cache::InputGuard;
use derived::DerivedGuard;
use hub::{HubError, ModelRequest, RepositoryParts};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The staged inputs of an attempt.
#[derive(Debug, Default)]
pub(crate) struct StagedInputs {
    /// Inputs as the config names them -> local paths.
    pub(crate) inputs: BTreeMap<String, PathBuf>,
    /// The checkpoint to resume from.
    pub(crate) resume: Option<PathBuf>,
    /// Inputs as the config names them -> folders for files that are computed from them.
    pub(crate) derived: BTreeMap<String, DerivedGuard>,
    /// The folder for kernels that CUDA compiles.
    pub(crate) cuda_cache: Option<DerivedGuard>,
    /// Guards that keep the inputs in the cache while this value exists.
    pub(crate) _guards: Vec<InputGuard>,
}

/// Parses the job of an assignment and makes the coordinator's checks again, by the keys that this program knows,
/// before anything is fetched or started. Unless the job runs in place, each of its paths must be an input or a
/// repository.
///
/// # Errors
/// The outcome of the attempt, with file, line and key of what is wrong.
pub(crate) fn parse_job(assignment: &Assignment) -> Result<JobSpec, Outcome> {
    let refusal = |findings: &[Finding]| Outcome::Failed {
        cause: FailureCause::BadInput,
        message: format!("this worker does not run the job: {}", summary(findings)),
    };
    let job = JobSpec::from_json(&assignment.job_json).map_err(|error| refusal(error.findings()))?;
    let support = job.unsupported();
    if !support.errors.is_empty() {
        return Err(refusal(&support.errors));
    }
    if !assignment.local {
        let foreign = job.foreign_paths(|path| assignment.inputs.contains_key(path));
        if !foreign.is_empty() {
            return Err(refusal(&foreign));
        }
    }
    Ok(job)
}

/// Stages everything that the job of the assignment names. `folder` is the attempt's own.
pub(crate) async fn stage_inputs(
    context: &Context,
    assignment: &Assignment,
    job: &JobSpec,
    reporter: &Reporter,
    folder: &Path,
) -> Result<StagedInputs, Outcome> {
    let mut staged = StagedInputs::default();
    stage_models(context, assignment, job, reporter, &mut staged).await?;
    if assignment.local {
        return Ok(staged);
    }
    for (config_path, id) in &assignment.inputs {
        let warnings = Mutex::new(Vec::new());
        let warn = |message| warnings.lock().unwrap_or_else(PoisonError::into_inner).push(message);
        let fetched = context
            .cache
            .materialise(&context.storage, context.storage_timeout, *id, &warn)
            .await;
        for message in warnings.into_inner().unwrap_or_else(PoisonError::into_inner) {
            reporter.log("warn", message).await;
        }
        let (path, guard) = fetched.map_err(|error| match error {
            // Fetching it again would not help.
            StorageError::Malformed { .. } | StorageError::Name(_) | StorageError::TooLarge { .. } => Outcome::Failed {
                cause: FailureCause::BadInput,
                message: at_path(
                    job,
                    config_path,
                    format!("the input {config_path:?} cannot be used: {error}"),
                ),
            },
            error => storage_failure(&format!("could not fetch the input {config_path:?}"), &error),
        })?;
        staged.inputs.insert(config_path.clone(), path);
        staged._guards.push(guard);
        let derived = context
            .derived
            .for_input(assignment.owner.as_ref(), &assignment.job, *id);
        let derived = derived.map_err(|error| file_failure(&error))?;
        staged.derived.insert(config_path.clone(), derived);
    }
    if assignment.device.kind == DeviceKind::Cuda && job.extension().is_none() {
        let cuda_cache = context.derived.for_cuda(assignment.owner.as_ref(), &assignment.job);
        staged.cuda_cache = Some(cuda_cache.map_err(|error| file_failure(&error))?);
    }
    if let Some(manifest) = assignment.resume {
        let target = folder.join("resume");
        let target = &target;
        let fetched = context
            .storage
            .retry(context.storage_timeout, |store| {
                Box::pin(async move { checkpoints::fetch(store.as_ref(), manifest, target, &mut |_| {}).await })
            })
            .await;
        let checkpoint =
            fetched.map_err(|error| storage_failure("could not fetch the checkpoint to resume from", &error))?;
        staged.resume = Some(checkpoint.folder().to_owned());
    }
    Ok(staged)
}

/// The message with the file and line of a key of the config.
fn at_key(job: &JobSpec, key: &str, message: String) -> String {
    job.finding(key.to_owned(), message).to_string()
}

/// The message with the file, line and key at which the config names this path.
fn at_path(job: &JobSpec, config_path: &str, message: String) -> String {
    let input = job.inputs().into_iter().find(|input| input.config_path == config_path);
    match input {
        Some(input) => at_key(job, &input.key, message),
        None => message,
    }
}

/// Fetches the models that the config names by their repository.
async fn stage_models(
    context: &Context,
    assignment: &Assignment,
    job: &JobSpec,
    reporter: &Reporter,
    staged: &mut StagedInputs,
) -> Result<(), Outcome> {
    for input in job.repositories(|path| assignment.inputs.contains_key(path)) {
        let path = input.config_path;
        // For a job in place, a folder of that name takes precedence.
        if assignment.local && Path::new(&path).exists() {
            continue;
        }
        reporter.phase("downloading model").await;
        let request = ModelRequest {
            repo: &path,
            revision: job.revisions.get(&path).map(String::as_str),
            parts: RepositoryParts::of_key(&input.key),
            in_place: assignment.local,
        };
        let log = |message| reporter.log_now("info", message);
        let mut fetched = context.hub.fetch(&request, &log).await;
        let token_name = job.cluster.hub_token.as_ref().filter(|_| !assignment.local);
        if let (Some(name), Err(refusal)) = (token_name, &fetched)
            && matches!(
                refusal,
                HubError::NotFound { .. }
                    | HubError::Denied { .. }
                    | HubError::Unavailable { .. }
                    | HubError::Offline { .. }
            )
        {
            let owner = assignment.owner.as_ref();
            match (context.hub_tokens.token(owner, name), owner) {
                (Ok(token), Some(owner)) => {
                    log(format!("{path} is fetched with the token {} of user {owner}", name.0));
                    fetched = context.hub.fetch_for(owner, &token, &request, &log).await;
                }
                (Err(message), _) if !matches!(refusal, HubError::Unavailable { .. } | HubError::Offline { .. }) => {
                    return Err(token_failure(job, &input.key, refusal, &message));
                }
                _ => {}
            }
        }
        let folder = fetched.map_err(|error| {
            let cause = match &error {
                HubError::NotFound { .. } | HubError::Denied { .. } | HubError::Layout { .. } => FailureCause::BadInput,
                HubError::Unavailable { .. } | HubError::Damaged { .. } => FailureCause::Network,
                // Another worker may allow it; the device is not at fault.
                HubError::TooLarge { .. } | HubError::Offline { .. } => FailureCause::Job,
                HubError::DiskFull { .. } => FailureCause::DiskFull,
                HubError::Files(error) if error.is_disk_full() => FailureCause::DiskFull,
                HubError::Files(_) => FailureCause::Machine,
            };
            Outcome::Failed {
                cause,
                message: at_key(job, &input.key, error.to_string()),
            }
        })?;
        if let Some(commit) = hub::commit_of(&folder).filter(|_| request.revision.is_none() && !assignment.local) {
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

/// The failure of a job that names a token which this worker cannot use. Another worker may have it. The device is not at fault: with
/// [`FailureCause::Machine`] any user could have it quarantined.
fn token_failure(job: &JobSpec, key: &str, refusal: &HubError, message: &str) -> Outcome {
    Outcome::Failed {
        cause: FailureCause::Job,
        message: at_key(job, key, format!("{refusal}; {message}")),
    }
}

#[cfg(test)]
mod tests {
    use super::hub::HubError;
    use super::{at_key, at_path, token_failure};
    use aitk_common::attempt::{FailureCause, Outcome};
    use aitk_common::job::{Format, LoadOptions, parse};

    #[test]
    fn what_cannot_be_staged_is_named_with_its_line_in_the_config() {
        let config = "job: extension\nconfig:\n  name: x\n  process:\n    - type: sd_trainer\n      training_folder: out\n      model:\n        \
                      name_or_path: o/n\n      network: {type: lora}\n      datasets:\n        - folder_path: data/cats\n";
        let job = parse(config, Format::Yaml, Some("my.yaml"), &LoadOptions::default());
        let job = job.unwrap().spec;
        assert_eq!(
            at_path(&job, "data/cats", "it cannot be used".to_owned()),
            "my.yaml:11:11: config.process[0].datasets[0].folder_path: it cannot be used"
        );
        assert_eq!(
            at_path(&job, "dogs", "it cannot be used".to_owned()),
            "it cannot be used"
        );
        assert_eq!(
            at_key(&job, "config.process[0].model.name_or_path", "not found".to_owned()),
            "my.yaml:8:9: config.process[0].model.name_or_path: not found"
        );
        // The device is not at fault.
        let refusal = HubError::Denied {
            repo: "o/n".to_owned(),
            endpoint: "https://hub".to_owned(),
        };
        let failed = token_failure(&job, "config.process[0].model.name_or_path", &refusal, "no token hf");
        let Outcome::Failed { cause, message } = failed else {
            panic!("it failed");
        };
        assert_eq!(cause, FailureCause::Job);
        assert!(
            message.starts_with("my.yaml:8:9: ") && message.ends_with("no token hf"),
            "{message}"
        );
    }
}
