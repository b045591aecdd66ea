//! One attempt from its assignment to its end: stage, run, sync, report, clean up.

use crate::context::Context;
use crate::outbox::Request;
use crate::runner::{self, Launch, Wanted};
use crate::sandbox::{self, Rules};
use crate::session::Reporter;
use crate::stage::{self, Staged};
use crate::sync::{self, Item, Pins};
use crate::trace::{AttemptTrace, trace_of};
use crate::unsent::Unsent;
use aitk_common::attempt::{AttemptSpec, ChildEvent, FailureCause, Outcome};
use aitk_common::capability::DeviceKind;
use aitk_common::control::{Artifact, Assignment, Progress, Report};
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

/// The name of an attempt's specification in its folder.
const SPEC: &str = "spec.json";
/// Events between the child's pipe and their handling, which takes microseconds; a full queue holds the child back.
const EVENTS: usize = 256;
/// The longest name that the protocol takes, and some room.
const NAME_BYTES: usize = 200;
/// The longest message of an outcome or a log line.
const MESSAGE_BYTES: usize = 16 << 10;

/// How long the child of a fenced attempt may take to go after its SIGKILL; a disk that hangs can hold it.
const LAST_BREATH: Duration = Duration::from_secs(20);

/// Runs an attempt until its outcome has arrived at the coordinator, or until it is fenced and its child is gone.
pub(crate) async fn run(
    context: Arc<Context>,
    assignment: Assignment,
    reporter: Reporter,
    mut wanted: watch::Receiver<Wanted>,
    fence: CancellationToken,
) {
    let folder = context.folders.attempt(&assignment.attempt);
    // Every line of the log says what it is about, at whatever level lines are wanted.
    let (job, attempt, trace_id) = (&assignment.job, &assignment.attempt, trace_of(&assignment));
    let about = tracing::error_span!("attempt", %job, %attempt, %trace_id);
    run_to_end(&context, &assignment, &reporter, &mut wanted, &fence, &folder)
        .instrument(about)
        .await;
    let (after, attempt) = (Arc::clone(&context), assignment.attempt.clone());
    let removed = tokio::task::spawn_blocking(move || {
        after.derived.tidy();
        // First, so that there is room for what is kept.
        for part in ["output", "tmp", "resume"] {
            fsutil::remove(&folder.join(part))?;
        }
        match after.kept.attempt_ended(&attempt) {
            true => fsutil::remove(&folder),
            // The next start tries to keep what lies in it.
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
    wanted: &mut watch::Receiver<Wanted>,
    fence: &CancellationToken,
    folder: &Path,
) {
    let trace = AttemptTrace::begin(&context.spans, assignment);
    // What the session wants, and the end that a fence means.
    let (wish, wishes) = watch::channel(*wanted.borrow());
    let executed: BoxFuture<'_, Outcome> = Box::pin(execute(context, assignment, reporter, &trace, wishes, folder));
    let mut executed = std::pin::pin!(AssertUnwindSafe(executed).catch_unwind());
    let ended = tokio::select! {
        ended = &mut executed => Some(ended),
        () = fence.cancelled() => None,
        () = pass_on(wanted, &wish) => None,
    };
    match ended {
        Some(ended) => {
            let outcome = ended.unwrap_or_else(|_| internal("the worker failed; its log says where".to_owned()));
            tracing::info!(?outcome, "attempt ended");
            trace.ended(&outcome);
            tokio::select! {
                answer = reporter.request(Request::Finished(bounded(outcome))) => if !answer.accepted {
                    tracing::warn!(message = %answer.message, "the coordinator did not accept the end of an attempt");
                },
                () = fence.cancelled() => {}
            }
        }
        None => {
            trace.fenced();
            wish.send_replace(Wanted::Kill);
            // Waited for, so that it cannot write into the folder that goes next.
            if tokio::time::timeout(LAST_BREATH, executed).await.is_err() {
                tracing::warn!("the child of a fenced attempt does not go");
            }
        }
    }
}

/// Passes wishes on for as long as there is somebody to have them.
async fn pass_on(wanted: &mut watch::Receiver<Wanted>, to: &watch::Sender<Wanted>) {
    while wanted.changed().await.is_ok() {
        let wish = *wanted.borrow_and_update();
        to.send_if_modified(|now| {
            let further = wish > *now;
            *now = (*now).max(wish);
            further
        });
    }
    std::future::pending::<()>().await;
}

async fn execute(
    context: &Context,
    assignment: &Assignment,
    reporter: &Reporter,
    trace: &AttemptTrace,
    mut wanted: watch::Receiver<Wanted>,
    folder: &Path,
) -> Outcome {
    let job = match stage::job_of(assignment) {
        Ok(job) => job,
        Err(outcome) => return outcome,
    };
    for part in ["tmp", "pins", "output"] {
        if let Err(error) = fsutil::create_dir_all(&folder.join(part)) {
            return local_failure(&error);
        }
    }
    reporter.phase("staging").await;
    let mut staging = trace.step("staging");
    let staged = tokio::select! {
        staged = stage::inputs(context, assignment, &job, reporter, folder) => match staged {
            Ok(staged) => staged,
            Err(outcome) => {
                if let Outcome::Failed { message, .. } = &outcome {
                    staging.failed(message.as_str());
                }
                return outcome;
            }
        },
        _ = wanted.wait_for(|wanted| *wanted > Wanted::Run) => return Outcome::stopped(),
    };
    drop(staging);
    let wishes = ClusterWishes::of(&assignment.job_json);
    let spec_file = folder.join(SPEC);
    let prepared = specification(context, assignment, &job, &staged, folder).and_then(|spec| {
        fsutil::write_private(&spec_file, &written(&spec)?).map_err(|error| local_failure(&error))?;
        let budget = wishes.memory_budget.is_some() && spec.device.kind == DeviceKind::Cpu;
        Ok((
            sandbox_profile(context, &spec, folder)?,
            budget || spec.memory_limit.is_some(),
        ))
    });
    let (sandbox_profile, memory_limited) = match prepared {
        Ok(prepared) => prepared,
        Err(outcome) => return outcome,
    };
    let launch = Launch {
        command: context.attempt_command.clone(),
        spec: spec_file,
        work_dir: (!assignment.local).then(|| folder.to_owned()),
        temp_dir: folder.join("tmp"),
        grace: context.grace,
        progress_timeout: Some(wishes.progress_timeout.unwrap_or(context.progress_timeout)),
        memory_limited,
        sandbox_profile,
        groups: context.groups.clone(),
        cuda_cache: staged.cuda.as_ref().map(|lease| lease.path().to_owned()),
    };
    let (events, heard) = mpsc::channel(EVENTS);
    let (items, queue) = mpsc::channel(sync::QUEUE);
    // The child hears the session's wishes, and ours when its results cannot be stored.
    let (to_child, wishes) = watch::channel(*wanted.borrow());
    let interrupted = AtomicBool::new(false);
    let child = runner::run(&context.spawner, launch, wishes, events);
    let pins = Pins::new(folder.join("pins"));
    let pump = async {
        let mut steps = Steps::default();
        let saved = |step: u64, pinned: &Path| {
            context.kept.made(reporter.held(), step, pinned);
            // A refused worker does not train into the blue: what it has is kept, and waits to be let in.
            if context.refused.borrow().is_some() {
                interrupted.store(true, Ordering::Relaxed);
                to_child.send_if_modified(|now| {
                    let further = *now < Wanted::Stop;
                    *now = (*now).max(Wanted::Stop);
                    further
                });
            }
        };
        let output = folder.join("output");
        let output = (!assignment.local).then_some(output.as_path());
        let pumped = pump(heard, items, reporter, trace, output, &pins, &saved, &mut steps).await;
        trace.no_phase();
        if pumped.is_err() {
            to_child.send_replace(Wanted::Kill);
        }
        (pumped, steps)
    };
    let synced = async {
        let mut hurry = to_child.subscribe();
        let synced = tokio::select! {
            synced = sync::run(context, reporter, trace, assignment.local, queue, &pins) => synced,
            // Nobody wants the results of an attempt that is ended at once.
            _ = hurry.wait_for(|wanted| *wanted == Wanted::Kill) => Ok(()),
        };
        if synced.is_err() {
            to_child.send_replace(Wanted::Kill);
        }
        synced
    };
    tokio::select! {
        (outcome, (pumped, steps), synced) = async { tokio::join!(child, pump, synced) } => {
            let outcome = pumped.and(synced).err().unwrap_or_else(|| steps.complete(outcome));
            match outcome {
                Outcome::Stopped { .. } if interrupted.load(Ordering::Relaxed) => Outcome::Failed {
                    cause: FailureCause::Interrupted,
                    message: "the coordinator refused its worker for a while; it saved and waited".to_owned(),
                },
                other => other,
            }
        }
        () = pass_on(&mut wanted, &to_child) => internal("unreachable".to_owned()),
    }
}

/// What a job's `cluster` section asks of the worker.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ClusterWishes {
    progress_timeout: Option<Duration>,
    memory_budget: Option<u64>,
}

impl ClusterWishes {
    /// A job that cannot be read is the child's to explain.
    fn of(job: &str) -> Self {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Job {
            cluster: ClusterWishes,
        }
        let mut wishes = serde_json::from_str::<Job>(job).unwrap_or_default().cluster;
        wishes.progress_timeout = wishes.progress_timeout.map(|asked| asked.max(Duration::from_secs(1)));
        wishes
    }
}

fn specification(
    context: &Context,
    assignment: &Assignment,
    job: &JobSpec,
    staged: &Staged,
    folder: &Path,
) -> Result<AttemptSpec, Outcome> {
    // As it was checked, not as it was sent: nothing is read twice in two ways.
    let job =
        serde_json::to_value(job).map_err(|error| internal(format!("the job cannot be written down: {error}")))?;
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
            .map(|(name, lease)| (name.clone(), lease.path().to_owned()))
            .collect(),
        require_sandbox: context.require_sandbox && !assignment.local,
        file_size_limit: (!assignment.local).then_some(context.largest_file),
        memory_limit: (!assignment.local && context.groups.is_none() && assignment.device.kind == DeviceKind::Cpu)
            .then(runner::most_memory),
    })
}

/// On a Mac, the rules around the child; elsewhere it confines itself.
fn sandbox_profile(context: &Context, spec: &AttemptSpec, folder: &Path) -> Result<Option<String>, Outcome> {
    let Some(rules) = Rules::of(spec, &folder.join("tmp")) else {
        return Ok(None);
    };
    if !cfg!(target_os = "macos") || !context.files_are_confined {
        return Ok(None);
    }
    let program = context.attempt_command.first().map(Path::new).unwrap_or(Path::new(""));
    let mut rules = rules;
    rules.read.push(folder.join(SPEC));
    let profile = sandbox::profile(&rules, program);
    profile.map(Some).map_err(|message| Outcome::Failed {
        cause: FailureCause::Machine,
        message,
    })
}

fn written(spec: &AttemptSpec) -> Result<Vec<u8>, Outcome> {
    serde_json::to_vec_pretty(spec).map_err(|error| internal(format!("the attempt cannot be written down: {error}")))
}

/// How far a child came, by what it said. One that is killed cannot sum it up itself.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Steps {
    training: bool,
    done: Option<u64>,
    /// The newest checkpoint of a job in place; of others the coordinator knows what was committed.
    saved: Option<u64>,
}

impl Steps {
    fn see(&mut self, event: &ChildEvent, local: bool) {
        match event {
            ChildEvent::Phase { name } => self.training = name == "training",
            // In other phases something else is counted: images, latents.
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

    /// Adds what a stopped child did not say.
    fn complete(self, outcome: Outcome) -> Outcome {
        match outcome {
            Outcome::Stopped { saved_step, at_step } => Outcome::Stopped {
                saved_step: saved_step.or(self.saved),
                at_step: at_step.or(self.done),
            },
            other => other,
        }
    }
}

/// Passes on what the child says: reports to the session, files to the sync. Results count that lie in the attempt's `own` folder;
/// `None` for a local job, whose results lie where its user wants them.
///
/// # Errors
/// How the attempt ends when a file that it made cannot be kept: a job must not pass for complete without its results.
#[expect(clippy::too_many_arguments, reason = "what an attempt consists of")]
async fn pump(
    mut events: mpsc::Receiver<ChildEvent>,
    items: mpsc::Sender<Item>,
    reporter: &Reporter,
    trace: &AttemptTrace,
    own: Option<&Path>,
    pins: &Pins,
    saved: &(dyn Fn(u64, &Path) + Sync),
    steps: &mut Steps,
) -> Result<(), Outcome> {
    let local = own.is_none();
    let (mut number, mut handed_on) = (0_u64, 0_u64);
    // Something waits of which a later daemon would not know.
    let mut unnoted = false;
    while let Some(event) = events.recv().await {
        steps.see(&event, local);
        if let ChildEvent::Artifact { path, .. } | ChildEvent::Checkpoint { path, .. } = &event
            && own.is_some_and(|own| !sync::is_below(own, path))
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
                    // The checkpoint before it stands; a file that is gone already was removed by its maker.
                    Err(error) if matches!(event, ChildEvent::Checkpoint { .. }) || is_gone(&error) => {
                        reporter.log("warn", format!("not kept: {error}")).await;
                        continue;
                    }
                    Err(error) => return Err(local_failure(&error)),
                }
            }
            ChildEvent::Artifact { path, .. } | ChildEvent::Checkpoint { path, .. } => path.clone(),
            _ => Default::default(),
        };
        let item = match event {
            ChildEvent::Phase { name } => {
                let name = one_line(&name);
                trace.phase(&name);
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
                // The protocol's bounds.
                values.retain(|name, _| name.len() <= NAME_BYTES && !name.chars().any(char::is_control));
                while values.len() > 1000 {
                    values.pop_last();
                }
                reporter.report(Report::Metrics { step, values }).await;
                continue;
            }
            ChildEvent::Log { level, message } => {
                reporter.log(&one_line(&level), cut(message, MESSAGE_BYTES)).await;
                continue;
            }
            ChildEvent::Finished { .. } => continue,
            ChildEvent::Checkpoint { step, .. } => {
                unnoted &= !pins.all_settled(handed_on);
                if unnoted {
                    let words = format!("the checkpoint of step {step} is lost if this worker ends before it is sent");
                    reporter.log("warn", words).await;
                } else if !local {
                    saved(step, &pinned);
                }
                Item::Checkpoint { pinned, step }
            }
            ChildEvent::ArtifactRemoved { name } => match names::check(&name) {
                Ok(()) => {
                    let mut pinned = PathBuf::new();
                    if !local {
                        number += 1;
                        pinned = pins.at(number);
                        let noted = pins.note(Unsent::Removed(name.clone()), number).await;
                        unnoted |= not_noted(reporter, noted).await;
                    }
                    Item::Removed { name, pinned }
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
                    let noted = pins.note(Unsent::Artifact(artifact.clone()), number).await;
                    unnoted |= not_noted(reporter, noted).await;
                }
                Item::Artifact { artifact, pinned }
            }
        };
        // A closed queue: storing has failed for good, and the child is being ended.
        if items.send(item).await.is_ok() {
            handed_on += 1;
        }
    }
    Ok(())
}

/// Says that a note could not be made, on a full disk for example; that is no reason to end an attempt that runs.
async fn not_noted(reporter: &Reporter, noted: Result<(), FsError>) -> bool {
    let Err(error) = noted else { return false };
    reporter
        .log("warn", format!("not noted for later: {error}; it is sent now"))
        .await;
    true
}

fn is_gone(error: &FsError) -> bool {
    error.io().kind() == std::io::ErrorKind::NotFound
}

/// A short name without control characters, as the protocol wants it.
fn one_line(text: &str) -> String {
    let clean: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    cut(clean, NAME_BYTES)
}

fn cut(mut text: String, bytes: usize) -> String {
    if text.len() > bytes {
        let end = (0..=bytes).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}

fn bounded(outcome: Outcome) -> Outcome {
    match outcome {
        Outcome::Failed { cause, message } => Outcome::Failed {
            cause,
            message: cut(message, MESSAGE_BYTES),
        },
        other => other,
    }
}

fn internal(message: String) -> Outcome {
    Outcome::Failed {
        cause: FailureCause::Internal,
        message,
    }
}

pub(crate) fn local_failure(error: &FsError) -> Outcome {
    let cause = if error.is_disk_full() {
        FailureCause::DiskFull
    } else {
        FailureCause::Machine
    };
    Outcome::Failed {
        cause,
        message: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wishes_of_a_job_are_read() {
        let wishes = ClusterWishes::of(
            r#"{"job":"x","cluster":{"progress_timeout":{"secs":90,"nanos":0},"memory_budget":1024,"priority":3}}"#,
        );
        assert_eq!(wishes.progress_timeout, Some(Duration::from_secs(90)));
        assert_eq!(wishes.memory_budget, Some(1024));
        assert_eq!(ClusterWishes::of("{}").progress_timeout, None);
        assert_eq!(ClusterWishes::of("no JSON").memory_budget, None);
    }

    #[test]
    fn a_child_that_was_killed_is_said_to_have_come_as_far_as_it_said() {
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
        let after = |local: bool| {
            let mut steps = Steps::default();
            for event in [
                phase("caching latents"),
                progress(12),
                phase("training"),
                progress(437),
                checkpoint(400),
                phase("sampling"),
                progress(999),
            ] {
                steps.see(&event, local);
            }
            steps.complete(Outcome::stopped())
        };
        let stopped = |saved_step| Outcome::Stopped {
            saved_step,
            at_step: Some(437),
        };
        assert_eq!(after(false), stopped(None), "the coordinator knows what was committed");
        assert_eq!(after(true), stopped(Some(400)));
        let steps = Steps::default();
        assert_eq!(steps.complete(Outcome::Completed), Outcome::Completed);
    }

    #[test]
    fn names_fit_the_protocol() {
        assert_eq!(one_line("a\nb\u{7}c"), "a b c");
        assert!(one_line(&"é".repeat(1000)).len() <= 256);
        assert_eq!(cut("short".into(), 10), "short");
    }
}
