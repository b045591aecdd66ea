//! Runs one attempt from its assignment to its end: stage, run, upload, report, clean up.

use crate::announcement::PendingAnnouncement;
use crate::context::Context;
use crate::outbox::Request;
use crate::outcome::{file_failure, internal_failure};
use crate::pins::{self, PinFolder};
use crate::probe;
use crate::runner::{self, DesiredState, FailureCauses, Launch, PendingOutputs};
use crate::sandbox::{self, SandboxRules};
use crate::session::Reporter;
use crate::spec_file::SPEC_FILE;
use crate::stage::{self, StagedInputs};
use crate::trace::{AttemptTrace, trace_id_of};
use crate::upload::{self, ResultItem};
use aitk_common::attempt::{AttemptSpec, ChildEvent, DeviceMemory, FailureCause, Outcome};
use aitk_common::capability::DeviceKind;
use aitk_common::control_plane::{Artifact, Assignment, Progress, Report};
use aitk_common::fsutil::{self, FsError, names};
use aitk_common::job::JobSpec;
use futures::FutureExt;
use futures::future::BoxFuture;
use serde::Deserialize;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

/// Capacity of the channel from the child's pipe to the event handler, which takes microseconds per event. The child
/// blocks while it is full.
const EVENT_CAPACITY: usize = 256;
/// The longest name that we send, in bytes; below the protocol's limit.
const MAX_NAME_BYTES: usize = 200;
/// The longest message of an outcome or a log line, in bytes.
const MAX_MESSAGE_BYTES: usize = 16 << 10;

/// How much longer the watchdog waits than an attempt waits for its extension, which also may take 60 seconds to exit.
const EXTENSION_MARGIN: Duration = Duration::from_secs(90);

/// How long the child of a fenced attempt may take to exit after its SIGKILL; a hanging disk can delay it.
const KILL_TIMEOUT: Duration = Duration::from_secs(20);

/// Runs an attempt until the coordinator has its outcome, or until it is fenced and its child has exited.
pub(crate) async fn run(
    context: Arc<Context>,
    assignment: Assignment,
    reporter: Reporter,
    mut desired: watch::Receiver<DesiredState>,
    outputs: PendingOutputs,
    fence: CancellationToken,
) {
    let folder = context.data_folder.attempt(&assignment.attempt);
    // An error span, so that log lines of every level carry the job, the attempt and the trace.
    let (job, attempt, trace_id) = (&assignment.job, &assignment.attempt, trace_id_of(&assignment));
    let span = tracing::error_span!("attempt", %job, %attempt, %trace_id);
    run_to_end(&context, &assignment, &reporter, &mut desired, outputs, &fence, &folder)
        .instrument(span)
        .await;
    let (cleanup, attempt) = (Arc::clone(&context), assignment.attempt.clone());
    let removed = tokio::task::spawn_blocking(move || {
        cleanup.derived.clean_up();
        // These go first, to make room for a checkpoint that is kept.
        for part in ["output", "tmp", "resume"] {
            fsutil::remove(&folder.join(part))?;
        }
        match cleanup.uncommitted.finish_attempt(&attempt) {
            true => fsutil::remove(&folder),
            // The next start of the worker tries again to keep the checkpoint in it.
            false => Ok(()),
        }
    });
    let removed = removed.await;
    if let Ok(Err(error)) = removed {
        tracing::warn!(%error, "the folder of an attempt was not removed; the next start tries again");
    }
}

async fn run_to_end(
    context: &Context,
    assignment: &Assignment,
    reporter: &Reporter,
    desired: &mut watch::Receiver<DesiredState>,
    outputs: PendingOutputs,
    fence: &CancellationToken,
    folder: &Path,
) {
    let trace = AttemptTrace::begin(&context.spans, assignment);
    // The state that the session wants; a fence also sets it to `Kill`.
    let (to_execute, desired_rx) = watch::channel(*desired.borrow());
    let executed: BoxFuture<'_, Outcome> = Box::pin(execute(
        context, assignment, reporter, &trace, desired_rx, outputs, folder,
    ));
    let mut executed = std::pin::pin!(AssertUnwindSafe(executed).catch_unwind());
    let ended = tokio::select! {
        ended = &mut executed => Some(ended),
        () = fence.cancelled() => None,
        () = forward_desired_state(desired, &to_execute) => None,
    };
    match ended {
        Some(ended) => {
            let outcome =
                ended.unwrap_or_else(|_| internal_failure("the worker failed; its log has details".to_owned()));
            tracing::info!(?outcome, "attempt ended");
            trace.set_outcome(&outcome);
            tokio::select! {
                answer = reporter.request(Request::Finished(truncate_message(outcome))) => if !answer.accepted {
                    tracing::warn!(message = %answer.message, "the coordinator did not accept the end of an attempt");
                },
                () = fence.cancelled() => {}
            }
        }
        None => {
            trace.set_fenced();
            to_execute.send_replace(DesiredState::Kill);
            // Wait for the child, so that it cannot write into the folder while the folder is removed.
            if tokio::time::timeout(KILL_TIMEOUT, executed).await.is_err() {
                tracing::warn!("the child of a fenced attempt did not exit after SIGKILL");
            }
        }
    }
}

/// Forwards the desired state until the sender is gone, then waits forever.
async fn forward_desired_state(desired: &mut watch::Receiver<DesiredState>, to: &watch::Sender<DesiredState>) {
    while desired.changed().await.is_ok() {
        let next = *desired.borrow_and_update();
        to.send_if_modified(|now| {
            let is_further = next > *now;
            *now = (*now).max(next);
            is_further
        });
    }
    std::future::pending::<()>().await;
}

async fn execute(
    context: &Context,
    assignment: &Assignment,
    reporter: &Reporter,
    trace: &AttemptTrace,
    mut desired: watch::Receiver<DesiredState>,
    outputs: PendingOutputs,
    folder: &Path,
) -> Outcome {
    let job = match stage::parse_job(assignment) {
        Ok(job) => job,
        Err(outcome) => return outcome,
    };
    for part in ["tmp", "pins", "output"] {
        if let Err(error) = fsutil::create_dir_all(&folder.join(part)) {
            return file_failure(&error);
        }
    }
    reporter.phase("staging").await;
    let mut staging = trace.start_step("staging");
    let staged = tokio::select! {
        staged = stage::stage_inputs(context, assignment, &job, reporter, folder) => match staged {
            Ok(staged) => staged,
            Err(outcome) => {
                if let Outcome::Failed { message, .. } = &outcome {
                    staging.set_error(message.as_str());
                }
                return outcome;
            }
        },
        _ = desired.wait_for(|desired| *desired > DesiredState::Run) => return Outcome::stopped(),
    };
    drop(staging);
    let cluster = ClusterSettings::of(&assignment.job_json);
    let spec_file = folder.join(SPEC_FILE);
    let silence = cluster.progress_timeout.unwrap_or(context.progress_timeout);
    // An attempt with an extension ends a program that hangs, with a message that names it.
    let watchdog_timeout = match job.extension() {
        Some(_) => silence.saturating_add(EXTENSION_MARGIN),
        None => silence,
    };
    let prepared = build_spec(context, assignment, &job, &staged, folder, silence).and_then(|spec| {
        fsutil::write_private(&spec_file, &serialise_spec(&spec)?).map_err(|error| file_failure(&error))?;
        let budget = cluster.memory_budget.is_some() && spec.device.kind == DeviceKind::Cpu;
        Ok((
            sandbox_profile(context, &spec, folder)?,
            budget || spec.memory_limit.is_some(),
        ))
    });
    let (sandbox_profile, memory_limited) = match prepared {
        Ok(prepared) => prepared,
        Err(outcome) => return outcome,
    };
    let temp_dir = folder.join("tmp");
    let cuda_cache = match job.extension() {
        // Not the one that other jobs of the user read.
        Some(_) => Some(temp_dir.join("cuda")),
        None => staged.cuda_cache.as_ref().map(|guard| guard.path().to_owned()),
    };
    let launch = Launch {
        command: context.attempt_command.clone(),
        spec: spec_file,
        work_dir: (!assignment.local).then(|| folder.to_owned()),
        temp_dir,
        grace: context.grace,
        progress_timeout: Some(watchdog_timeout),
        memory_limited,
        sandbox_profile,
        control_groups: context.control_groups.clone(),
        cuda_cache,
        causes: FailureCauses::of_job(job.extension().is_some(), silence < context.progress_timeout),
    };
    let (events, event_receiver) = mpsc::channel(EVENT_CAPACITY);
    let (items, queue) = mpsc::channel(upload::QUEUE_CAPACITY);
    // The child follows the session's desired state. We change it too, when results cannot be stored.
    let (to_child, desired_rx) = watch::channel(*desired.borrow());
    let stopped_by_refusal = AtomicBool::new(false);
    let child = runner::run(&context.spawner, launch, desired_rx, events, outputs);
    let pins = PinFolder::new(folder.join("pins"));
    let forward_events = async {
        let mut steps = ReportedSteps::default();
        let on_checkpoint = |step: u64, pinned: &Path| {
            context.uncommitted.add_pending(reporter.held(), step, pinned);
            // A refused worker stops after this checkpoint: it is kept and offered when the worker is accepted again.
            if context.refusal.borrow().is_some() {
                stopped_by_refusal.store(true, Ordering::Relaxed);
                to_child.send_if_modified(|now| {
                    let is_further = *now < DesiredState::Stop;
                    *now = (*now).max(DesiredState::Stop);
                    is_further
                });
            }
        };
        let output = folder.join("output");
        let output = (!assignment.local).then_some(output.as_path());
        let forwarded = forward_events(
            event_receiver,
            items,
            reporter,
            trace,
            output,
            &pins,
            &on_checkpoint,
            &mut steps,
        )
        .await;
        trace.end_phase();
        if forwarded.is_err() {
            to_child.send_replace(DesiredState::Kill);
        }
        (forwarded, steps)
    };
    let uploaded = async {
        let mut kill_watch = to_child.subscribe();
        let uploaded = tokio::select! {
            uploaded = upload::run(context, reporter, trace, assignment.local, queue, &pins) => uploaded,
            // The results of a killed attempt are not needed.
            _ = kill_watch.wait_for(|desired| *desired == DesiredState::Kill) => Ok(()),
        };
        if uploaded.is_err() {
            to_child.send_replace(DesiredState::Kill);
        }
        uploaded
    };
    tokio::select! {
        (outcome, (forwarded, steps), uploaded) = async { tokio::join!(child, forward_events, uploaded) } => {
            let outcome = forwarded.and(uploaded).err().unwrap_or_else(|| steps.fill_in(outcome));
            match outcome {
                Outcome::Stopped { .. } if stopped_by_refusal.load(Ordering::Relaxed) => Outcome::Failed {
                    cause: FailureCause::Interrupted,
                    message: "the coordinator refused the worker for a while; the attempt saved and stopped".to_owned(),
                },
                other => other,
            }
        }
        () = forward_desired_state(&mut desired, &to_child) => internal_failure("unreachable".to_owned()),
    }
}

/// Settings for the worker in a job's `cluster` section.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ClusterSettings {
    progress_timeout: Option<Duration>,
    memory_budget: Option<u64>,
}

impl ClusterSettings {
    /// Reads the settings. An unreadable job gets the defaults; the child reports the error.
    fn of(job: &str) -> Self {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Job {
            cluster: ClusterSettings,
        }
        let mut cluster = serde_json::from_str::<Job>(job).unwrap_or_default().cluster;
        cluster.progress_timeout = cluster.progress_timeout.map(|limit| limit.max(Duration::from_secs(1)));
        cluster
    }
}

fn build_spec(
    context: &Context,
    assignment: &Assignment,
    job: &JobSpec,
    staged: &StagedInputs,
    folder: &Path,
    silence: Duration,
) -> Result<AttemptSpec, Outcome> {
    let extension = job
        .extension()
        .and_then(|name| context.extensions.program(name, silence));
    // Serialise the checked job, so that the child does not interpret the original text in another way.
    let job = serde_json::to_value(job)
        .map_err(|error| internal_failure(format!("the job cannot be serialised: {error}")))?;
    Ok(AttemptSpec {
        job_id: assignment.job.clone(),
        attempt_id: assignment.attempt.clone(),
        epoch: assignment.epoch,
        job,
        config_text: assignment.config_text.clone(),
        config_format: assignment.config_format.clone(),
        inputs: staged.inputs.clone(),
        output_root: (!assignment.local).then(|| folder.join("output")),
        resume_from: staged.resume.clone(),
        device: assignment.device,
        profile: assignment.profile,
        seed: assignment.seed,
        generated: assignment.generated.clone(),
        derived: staged
            .derived
            .iter()
            .map(|(name, guard)| (name.clone(), guard.path().to_owned()))
            .collect(),
        require_sandbox: context.require_sandbox && !assignment.local,
        file_size_limit: (!assignment.local).then_some(context.largest_file),
        memory_limit: (!assignment.local
            && context.control_groups.is_none()
            && assignment.device.kind == DeviceKind::Cpu)
            .then(runner::max_attempt_memory),
        device_memory: device_memory(context, assignment),
        extension,
    })
}

/// The memory of its device that an attempt may use. `None`: the worker does not offer the device.
fn device_memory(context: &Context, assignment: &Assignment) -> Option<DeviceMemory> {
    let mut devices = context.devices.iter();
    let offered = devices.find(|offered| offered.id == assignment.device)?.memory_budget;
    let on_cpu = assignment.device.kind == DeviceKind::Cpu;
    let free = on_cpu.then(|| probe::memory().available);
    let limit = on_cpu.then(runner::max_attempt_memory);
    let budget = ClusterSettings::of(&assignment.job_json).memory_budget;
    Some(DeviceMemory::new(offered, free, budget.into_iter().chain(limit)))
}

/// The `sandbox-exec` profile for the child on macOS; `None` on other systems, where the child confines itself.
fn sandbox_profile(context: &Context, spec: &AttemptSpec, folder: &Path) -> Result<Option<String>, Outcome> {
    let Some(rules) = SandboxRules::for_attempt(spec, &folder.join("tmp")) else {
        return Ok(None);
    };
    if !cfg!(target_os = "macos") || !context.files_are_confined {
        return Ok(None);
    }
    let program = context.attempt_command.first().map(Path::new).unwrap_or(Path::new(""));
    let mut rules = rules;
    rules.read.push(folder.join(SPEC_FILE));
    let profile = sandbox::profile(&rules, program);
    profile.map(Some).map_err(|message| Outcome::Failed {
        cause: FailureCause::Machine,
        message,
    })
}

fn serialise_spec(spec: &AttemptSpec) -> Result<Vec<u8>, Outcome> {
    serde_json::to_vec_pretty(spec)
        .map_err(|error| internal_failure(format!("the attempt's specification cannot be serialised: {error}")))
}

/// The training steps that a child reported. A killed child cannot report them in its outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct ReportedSteps {
    training: bool,
    done: Option<u64>,
    /// The newest checkpoint of a job that runs in place; for other jobs the coordinator knows what was committed.
    saved: Option<u64>,
}

impl ReportedSteps {
    fn record_event(&mut self, event: &ChildEvent, local: bool) {
        match event {
            ChildEvent::Phase { name } => self.training = name == "training",
            // In other phases progress counts something else: images, latents.
            ChildEvent::Progress { done, .. } if self.training => self.done = Some(*done),
            ChildEvent::Checkpoint { step, .. } => {
                self.done = self.done.max(Some(*step));
                if local {
                    self.saved = Some(*step);
                }
            }
            _ => {}
        }
    }

    /// Fills in the steps that a stopped child did not report.
    fn fill_in(self, outcome: Outcome) -> Outcome {
        match outcome {
            Outcome::Stopped { saved_step, at_step } => Outcome::Stopped {
                saved_step: saved_step.or(self.saved),
                at_step: at_step.or(self.done),
            },
            other => other,
        }
    }
}

/// Forwards a child's events: reports to the session, files to the uploader. Only results inside `output` count;
/// `None` for a local job, whose results stay where its user wants them.
///
/// # Errors
/// The outcome of the attempt if a result cannot be kept: a job must not count as complete without its results.
#[expect(
    clippy::too_many_arguments,
    reason = "each argument is a different part of an attempt"
)]
async fn forward_events(
    mut events: mpsc::Receiver<ChildEvent>,
    items: mpsc::Sender<ResultItem>,
    reporter: &Reporter,
    trace: &AttemptTrace,
    output: Option<&Path>,
    pins: &PinFolder,
    on_checkpoint: &(dyn Fn(u64, &Path) + Sync),
    steps: &mut ReportedSteps,
) -> Result<(), Outcome> {
    let local = output.is_none();
    let (mut number, mut sent_to_upload) = (0_u64, 0_u64);
    // Set when something is queued that a later daemon would not know of.
    let mut has_unsaved_announcement = false;
    while let Some(event) = events.recv().await {
        steps.record_event(&event, local);
        if let ChildEvent::Artifact { path, .. } | ChildEvent::Checkpoint { path, .. } = &event
            && output.is_some_and(|output| !pins::is_inside(output, path))
        {
            let message = format!(
                "a result was left out: {} is not in the attempt's own folder",
                path.display()
            );
            reporter.log("error", message).await;
            continue;
        }
        let pinned = match &event {
            ChildEvent::Artifact { path, .. } | ChildEvent::Checkpoint { path, .. } if !local => {
                number += 1;
                match pins.pin(path.clone(), number).await {
                    Ok(pinned) => pinned,
                    // The previous checkpoint is still valid. A file that is gone was removed by the child itself.
                    Err(error) if matches!(event, ChildEvent::Checkpoint { .. }) || is_not_found(&error) => {
                        reporter
                            .log("warn", format!("a result could not be kept: {error}"))
                            .await;
                        continue;
                    }
                    Err(error) => return Err(file_failure(&error)),
                }
            }
            ChildEvent::Artifact { path, .. } | ChildEvent::Checkpoint { path, .. } => path.clone(),
            _ => Default::default(),
        };
        let item = match event {
            ChildEvent::Phase { name } => {
                let name = one_line(&name);
                trace.start_phase(&name);
                reporter.phase(&name).await;
                continue;
            }
            ChildEvent::Progress {
                done,
                total,
                seconds_per_step,
            } => {
                reporter
                    .report(Report::Progress(Progress {
                        done,
                        total,
                        seconds_per_step,
                    }))
                    .await;
                continue;
            }
            ChildEvent::Metrics { step, mut values } => {
                // Limits of the protocol.
                values.retain(|name, _| name.len() <= MAX_NAME_BYTES && !name.chars().any(char::is_control));
                while values.len() > 1000 {
                    values.pop_last();
                }
                reporter.report(Report::Metrics { step, values }).await;
                continue;
            }
            ChildEvent::Log { level, message } => {
                reporter
                    .log(&one_line(&level), truncate(message, MAX_MESSAGE_BYTES))
                    .await;
                continue;
            }
            ChildEvent::Finished { .. } => continue,
            ChildEvent::Checkpoint { step, .. } => {
                has_unsaved_announcement &= !pins.are_all_settled(sent_to_upload);
                if has_unsaved_announcement {
                    let message =
                        format!("the checkpoint of step {step} is lost if this worker ends before it is uploaded");
                    reporter.log("warn", message).await;
                } else if !local {
                    on_checkpoint(step, &pinned);
                }
                ResultItem::Checkpoint { pinned, step }
            }
            ChildEvent::ArtifactRemoved { name } => match names::check(&name) {
                Ok(()) => {
                    let mut pinned = PathBuf::new();
                    if !local {
                        number += 1;
                        pinned = pins.path(number);
                        let result = pins
                            .save_announcement(PendingAnnouncement::Removed(name.clone()), number)
                            .await;
                        has_unsaved_announcement |= log_if_unsaved(reporter, result).await;
                    }
                    ResultItem::Removed { name, pinned }
                }
                Err(_) => continue,
            },
            ChildEvent::Artifact {
                kind,
                path,
                name,
                step,
                index,
            } => {
                if let Err(error) = names::check(&name) {
                    reporter.log("error", format!("a result was left out: {error}")).await;
                    continue;
                }
                let bytes = std::fs::metadata(&path).map_or(0, |data| data.len());
                let local_path = Some(path.display().to_string());
                let artifact = Artifact {
                    name,
                    kind: one_line(&kind),
                    hash: None,
                    bytes,
                    step,
                    index,
                    local_path,
                };
                if !local {
                    let result = pins
                        .save_announcement(PendingAnnouncement::Artifact(artifact.clone()), number)
                        .await;
                    has_unsaved_announcement |= log_if_unsaved(reporter, result).await;
                }
                ResultItem::Artifact { artifact, pinned }
            }
        };
        // The queue is closed when storing failed for good; the child is being killed then.
        if items.send(item).await.is_ok() {
            sent_to_upload += 1;
        }
    }
    Ok(())
}

/// Logs a warning if an announcement could not be saved, for example on a full disk. That is no reason to end a
/// running attempt. Returns whether it failed.
async fn log_if_unsaved(reporter: &Reporter, result: Result<(), FsError>) -> bool {
    let Err(error) = result else { return false };
    reporter
        .log("warn", format!("the announcement of a result could not be saved: {error}; the result is lost if this worker ends before it is uploaded"))
        .await;
    true
}

fn is_not_found(error: &FsError) -> bool {
    error.io().kind() == std::io::ErrorKind::NotFound
}

/// Shortens a name to the protocol's limit and replaces control characters by spaces.
fn one_line(text: &str) -> String {
    let clean: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    truncate(clean, MAX_NAME_BYTES)
}

fn truncate(mut text: String, bytes: usize) -> String {
    if text.len() > bytes {
        let end = (0..=bytes).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}

fn truncate_message(outcome: Outcome) -> Outcome {
    match outcome {
        Outcome::Failed { cause, message } => Outcome::Failed {
            cause,
            message: truncate(message, MAX_MESSAGE_BYTES),
        },
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cluster_settings_of_a_job_are_read() {
        let cluster = ClusterSettings::of(
            r#"{"job":"x","cluster":{"progress_timeout":{"secs":90,"nanos":0},"memory_budget":1024,"priority":3}}"#,
        );
        assert_eq!(cluster.progress_timeout, Some(Duration::from_secs(90)));
        assert_eq!(cluster.memory_budget, Some(1024));
        assert_eq!(ClusterSettings::of("{}").progress_timeout, None);
        assert_eq!(ClusterSettings::of("no JSON").memory_budget, None);
    }

    #[test]
    fn a_killed_child_gets_the_steps_that_it_reported() {
        let progress = |done| ChildEvent::Progress {
            done,
            total: 1000,
            seconds_per_step: None,
        };
        let phase = |name: &str| ChildEvent::Phase { name: name.into() };
        let checkpoint = |step| ChildEvent::Checkpoint {
            path: Default::default(),
            step,
        };
        let reported = |local: bool| {
            let mut steps = ReportedSteps::default();
            for event in [
                phase("caching latents"),
                progress(12),
                phase("training"),
                progress(437),
                checkpoint(400),
                phase("sampling"),
                progress(999),
            ] {
                steps.record_event(&event, local);
            }
            steps.fill_in(Outcome::stopped())
        };
        let stopped = |saved_step| Outcome::Stopped {
            saved_step,
            at_step: Some(437),
        };
        assert_eq!(
            reported(false),
            stopped(None),
            "the coordinator knows what was committed"
        );
        assert_eq!(reported(true), stopped(Some(400)));
        let steps = ReportedSteps::default();
        assert_eq!(steps.fill_in(Outcome::Completed), Outcome::Completed);
    }

    #[test]
    fn names_are_shortened_to_the_protocols_limit() {
        assert_eq!(one_line("a\nb\u{7}c"), "a b c");
        assert!(one_line(&"é".repeat(1000)).len() <= 256);
        assert_eq!(truncate("short".into(), 10), "short");
    }
}
