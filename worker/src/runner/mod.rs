//! Runs one child process for one attempt: starts it, reads its events, stops it, and decides its outcome.
//!
//! The child has a process group of its own, so that a Ctrl-C in the daemon's terminal does not reach it and
//! everything that it starts ends with it. Its standard input stays open while the daemon wants it to run.

mod control_groups;
mod environment;
mod exit;
mod lines;
mod memory;
mod pending_outputs;
mod spawner;
mod watchdog;

use crate::memory_usage;
use crate::spec_file::read_spec;
use aitk_common::attempt::{ChildEvent, FailureCause, Outcome};
pub use control_groups::{ControlGroups, detect_control_groups, max_attempt_memory};
pub use exit::FailureCauses;
use exit::{ChildExit, StderrTail, StopAction};
use lines::{BoundedLines, Line};
use memory::MemoryWatch;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
pub use pending_outputs::PendingOutputs;
pub use spawner::Spawner;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::AsyncRead;
use tokio::process::{Child, Command};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use watchdog::{Watchdog, WatchdogStatus};

/// The longest line of JSON that is read, in bytes: far above any real event.
const MAX_EVENT_BYTES: usize = 1 << 20;
/// The longest line of text that is kept, in bytes.
const MAX_TEXT_BYTES: usize = 8 << 10;
/// How long a pipe may stay open after its child ended, if a process that left the group still holds it.
const PIPE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a child may take to exit after its SIGKILL, while its memory is freed, before its device counts as stuck.
const KILL_TIMEOUT: Duration = Duration::from_secs(60);
/// How often a child is checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// How long a child may take to exit after it reported its outcome.
const EXIT_TIMEOUT: Duration = Duration::from_secs(20);

/// The program that confines a process on macOS.
pub(crate) const SANDBOX_EXEC: &str = "/usr/bin/sandbox-exec";

/// The environment variable for the folder of CUDA's kernel cache.
pub(crate) const CUDA_CACHE: &str = "CUDA_CACHE_PATH";

/// The child to start, and its limits.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The program and its first arguments; `attempt --spec FILE` is added.
    pub command: Vec<OsString>,
    /// The attempt's specification.
    pub spec: PathBuf,
    /// The working directory of the child. `None`: the daemon's.
    pub work_dir: Option<PathBuf>,
    /// The child's own folder for temporary files.
    pub temp_dir: PathBuf,
    /// How long it may take to save and stop.
    pub grace: Duration,
    /// How long it may show no progress before it is stopped; phases with slow steps get a longer limit. `None`:
    /// without limit.
    pub progress_timeout: Option<Duration>,
    /// Whether its memory is limited. Then its allocator reserves address space only as needed, because the limit
    /// counts that.
    pub memory_limited: bool,
    /// The `sandbox-exec` profile that it starts in, on macOS.
    pub sandbox_profile: Option<String>,
    /// The folder where CUDA caches compiled kernels. `None`: CUDA's default.
    pub cuda_cache: Option<PathBuf>,
    /// Creates a control group for it. `None`: it shares its daemon's.
    pub control_groups: Option<ControlGroups>,
    /// The causes of its failures when it hangs or crashes.
    pub causes: FailureCauses,
}

/// The state that a running child should reach. It only increases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum DesiredState {
    /// Run to the end.
    #[default]
    Run,
    /// Save, then stop.
    Stop,
    /// Exit at once.
    Kill,
}

/// Runs a child to its end. Sends its events to `events`, except the last one, which decides the outcome. Passes on to the child
/// what is asked for through `outputs`.
///
/// Dropping the future kills the child and its group.
pub async fn run(
    spawner: &Spawner,
    launch: Launch,
    mut desired: watch::Receiver<DesiredState>,
    events: mpsc::Sender<ChildEvent>,
    outputs: PendingOutputs,
) -> Outcome {
    let mut child = match start(spawner, &launch).await {
        Ok(child) => child,
        Err(outcome) => return outcome,
    };
    let Some(pid) = child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw) else {
        return machine_failure("the attempt's process ended before it could be watched".to_owned());
    };
    let process_group = ProcessGroup(pid);
    // As early as possible: memory that it allocates from now on counts for its group.
    let control_group = launch
        .control_groups
        .as_ref()
        .map(|groups| groups.add_process(pid.as_raw()));
    if let Some(Err(error)) = &control_group {
        tracing::warn!(%error, "an attempt could not get a control group of its own");
    }
    // A task of its own, because a child that is stopped by SIGSTOP does not read.
    let stdin = child.stdin.take().map(|pipe| tokio::spawn(outputs.send_to(pipe)));
    let stdin_open = AbortOnDrop::of(&stdin);
    let started_at = Instant::now();
    let period = launch
        .progress_timeout
        .map_or(CHECK_INTERVAL, |timeout| CHECK_INTERVAL.min(timeout / 8));
    let period = period.max(Duration::from_millis(20));
    let watchdog = SharedWatchdog {
        watchdog: launch
            .progress_timeout
            .map(|timeout| Arc::new(Mutex::new(Watchdog::new(timeout, period, Duration::ZERO)))),
        started_at,
    };
    let exited = CancellationToken::new();
    let (outcome_sender, mut outcome_seen) = watch::channel(None);
    let stdout = child.stdout.take().map(|pipe| {
        tokio::spawn(read_events(
            pipe,
            events.clone(),
            outcome_sender,
            watchdog.clone(),
            exited.clone(),
        ))
    });
    let stderr = child
        .stderr
        .take()
        .map(|pipe| tokio::spawn(read_text(pipe, events.clone(), exited.clone())));
    let _aborts = (AbortOnDrop::of(&stdout), AbortOnDrop::of(&stderr));

    // A state that was set before the child existed counts, too.
    desired.mark_changed();
    let mut stop_action = StopAction::Nothing;
    let mut deadline: Option<Instant> = None;
    let mut memory = MemoryWatch::start();
    let mut ticks = tokio::time::interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut hang_reason: Option<String> = None;
    // The deadline for the exit after a SIGKILL.
    let mut exit_deadline: Option<Instant> = None;
    let status = loop {
        tokio::select! {
            status = child.wait() => break Some(status),
            () = sleep_until_deadline(exit_deadline) => break None,
            () = sleep_until_deadline(deadline) => {
                deadline = None;
                stop_action = if outcome_seen.borrow().is_some() { stop_action } else { StopAction::Kill };
                process_group.signal(Signal::SIGKILL);
                exit_deadline.get_or_insert(Instant::now() + KILL_TIMEOUT);
            }
            Ok(()) = desired.changed() => match *desired.borrow_and_update() {
                DesiredState::Run => {}
                DesiredState::Stop if stop_action == StopAction::Nothing => {
                    stop_action = StopAction::Stop;
                    deadline = Some(Instant::now() + launch.grace);
                    let _ = kill(pid, Signal::SIGTERM);
                }
                DesiredState::Stop => {}
                DesiredState::Kill => {
                    stop_action = StopAction::Kill;
                    process_group.signal(Signal::SIGKILL);
                    exit_deadline.get_or_insert(Instant::now() + KILL_TIMEOUT);
                }
            },
            // Once: the outcome is sent once. Whether it is there already says nothing, because another branch may have run meanwhile.
            Ok(()) = outcome_seen.changed() => {
                deadline = Some(Instant::now() + EXIT_TIMEOUT);
            }
            _ = ticks.tick() => {
                memory.sample();
                let is_watched = hang_reason.is_none() && outcome_seen.borrow().is_none();
                let verdict = if is_watched { watchdog.check(pid) } else { WatchdogStatus::Fine };
                if let Some(reason) = report_watchdog_status(verdict, &events) {
                    hang_reason = Some(reason);
                    deadline.get_or_insert(Instant::now() + launch.grace);
                    let _ = kill(pid, Signal::SIGTERM);
                    // A child that was stopped by SIGSTOP can then still save.
                    process_group.signal(Signal::SIGCONT);
                }
            }
        }
    };
    drop(events);
    // Kill the group first: its other processes must not see the closed pipe and act on it.
    process_group.signal(Signal::SIGKILL);
    drop(stdin_open);
    exited.cancel();
    let finished = match stdout {
        Some(task) => task.await.unwrap_or_default(),
        None => None,
    };
    let tail = match stderr {
        Some(task) => task.await.unwrap_or_default(),
        None => StderrTail::default(),
    };
    let Some(status) = status else {
        return stuck_outcome(pid, hang_reason);
    };
    match status {
        Ok(status) => {
            let memory_ran_out = finished.is_none() && memory.ran_out();
            let outcome = exit::outcome(ChildExit {
                status,
                finished,
                stop_action,
                hang_reason,
                memory_ran_out,
                tail,
                causes: launch.causes,
            });
            add_memory_advice(outcome, &launch.spec)
        }
        Err(error) => finished.unwrap_or_else(|| machine_failure(format!("the attempt's process was lost: {error}"))),
    }
}

/// Adds the memory numbers and advice to an out-of-memory failure.
fn add_memory_advice(outcome: Outcome, spec: &Path) -> Outcome {
    match outcome {
        Outcome::Failed {
            cause: cause @ FailureCause::OutOfMemory,
            message,
        } => {
            let numbers =
                read_spec(spec).map(|spec| memory_usage::out_of_memory_advice(&spec, crate::probe::memory().total));
            let message = match numbers {
                Ok(numbers) => format!("{message}; {numbers}"),
                Err(_) => message,
            };
            Outcome::Failed { cause, message }
        }
        other => other,
    }
}

/// Sends events for the watchdog's verdict. Returns the reason if the child has to be stopped.
fn report_watchdog_status(verdict: WatchdogStatus, events: &mpsc::Sender<ChildEvent>) -> Option<String> {
    // Events are dropped while the channel is full: then the receiver is behind, and silence has no meaning.
    let send = |event| drop(events.try_send(event));
    match verdict {
        WatchdogStatus::Fine => {}
        WatchdogStatus::Silent {
            phase,
            message,
            progress,
        } => {
            send(log("warn", message));
            send(ChildEvent::Phase { name: phase });
            if let Some((done, total)) = progress {
                send(ChildEvent::Progress {
                    done,
                    total,
                    seconds_per_step: None,
                });
            }
        }
        WatchdogStatus::Resumed { phase, message } => {
            send(log("info", message));
            if let Some(name) = phase {
                send(ChildEvent::Phase { name });
            }
        }
        WatchdogStatus::Hung(reason) => {
            send(log("error", format!("{reason}: its process is ended")));
            return Some(reason);
        }
    }
    None
}

/// The outcome of an attempt whose process does not exit after SIGKILL.
fn stuck_outcome(pid: Pid, hang_reason: Option<String>) -> Outcome {
    let before = hang_reason.map(|reason| format!("{reason}, and ")).unwrap_or_default();
    Outcome::Failed {
        cause: FailureCause::DeviceStuck,
        message: format!(
            "{before}its process {pid} did not exit within {} s after SIGKILL: a driver or a disk of this machine hangs; \
             look at the machine, then free the device with `aitk worker undrain`",
            KILL_TIMEOUT.as_secs()
        ),
    }
}

/// The watchdog of a child, if it has one, and the start of its clock.
#[derive(Clone)]
struct SharedWatchdog {
    watchdog: Option<Arc<Mutex<Watchdog>>>,
    started_at: Instant,
}

impl SharedWatchdog {
    fn with<T>(&self, act: impl FnOnce(&mut Watchdog, Duration) -> T) -> Option<T> {
        let watchdog = self.watchdog.as_ref()?;
        let mut watchdog = watchdog.lock().unwrap_or_else(PoisonError::into_inner);
        Some(act(&mut watchdog, self.started_at.elapsed()))
    }

    fn check(&self, pid: Pid) -> WatchdogStatus {
        self.with(|watchdog, now| watchdog.check(now, cpu_time(pid)))
            .unwrap_or(WatchdogStatus::Fine)
    }
}

/// The CPU time that a process has used; `None` if the system does not report it.
fn cpu_time(pid: Pid) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The process name before may contain spaces and brackets.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut times = fields.split_whitespace().skip(11).map(str::parse::<u64>);
    let (user, system) = (times.next()?.ok()?, times.next()?.ok()?);
    // Linux reports these in hundredths of a second, independent of the kernel's clock rate.
    Some(Duration::from_millis(user.saturating_add(system).saturating_mul(10)))
}

async fn start(spawner: &Spawner, launch: &Launch) -> Result<Child, Outcome> {
    let Some((program, arguments)) = launch.command.split_first() else {
        return Err(Outcome::Failed {
            cause: FailureCause::Internal,
            message: "the worker was started without a program for its attempts".to_owned(),
        });
    };
    let mut command = match &launch.sandbox_profile {
        Some(profile) => {
            let mut command = Command::new(SANDBOX_EXEC);
            command.arg("-p").arg(profile).arg(program);
            command
        }
        None => Command::new(program),
    };
    command
        .args(arguments)
        .args(["attempt", "--spec"])
        .arg(&launch.spec)
        .env_clear()
        // candle's own thread pool spins while it waits and takes the cores from our kernels, which use rayon and
        // gemm. A value in the daemon's environment overrides this.
        .env("CANDLE_NUM_THREADS", "1")
        // Set explicitly, because candle otherwise counts the cores before each matrix product, from files of the
        // kernel.
        .env("RAYON_NUM_THREADS", cores().to_string())
        .envs(environment::for_child(std::env::vars_os()))
        .env("TMPDIR", &launch.temp_dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true);
    if launch.memory_limited {
        command.env("MIMALLOC_ARENA_EAGER_COMMIT", "0");
    }
    if let Some(folder) = &launch.cuda_cache {
        command.env(CUDA_CACHE, folder);
    }
    if let Some(folder) = &launch.work_dir {
        command.current_dir(folder);
    }
    spawner
        .spawn(command)
        .await
        .map_err(|error| machine_failure(format!("could not start {}: {error}", program.display())))
}

/// The number of physical cores that a child may use: hyper-threads slow each other down.
fn cores() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, usize::from);
    sysinfo::System::physical_core_count().map_or(allowed, |physical| physical.clamp(1, allowed))
}

fn machine_failure(message: String) -> Outcome {
    Outcome::Failed {
        cause: FailureCause::Machine,
        message,
    }
}

async fn sleep_until_deadline(deadline: Option<Instant>) {
    match deadline {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Reads events until the pipe closes. Returns the outcome that the child reported.
async fn read_events(
    pipe: impl AsyncRead + Unpin,
    events: mpsc::Sender<ChildEvent>,
    outcome_sender: watch::Sender<Option<()>>,
    watchdog: SharedWatchdog,
    exited: CancellationToken,
) -> Option<Outcome> {
    let mut lines = BoundedLines::new(pipe, MAX_EVENT_BYTES);
    let mut finished = None;
    while let Some(line) = next_line(&mut lines, &exited).await {
        let event = match line {
            Line::Text(text) if text.trim().is_empty() => continue,
            Line::Text(text) => match serde_json::from_str::<ChildEvent>(&text) {
                Ok(event) => event,
                Err(_) => log("info", truncate(&text, MAX_TEXT_BYTES)),
            },
            Line::TooLong { beginning, bytes } => log(
                "warn",
                format!("a line of {bytes} bytes was left out: {}…", truncate(&beginning, 200)),
            ),
        };
        if finished.is_some() {
            continue;
        }
        if let ChildEvent::Finished { outcome } = event {
            finished = Some(outcome);
            outcome_sender.send_replace(Some(()));
        } else {
            watchdog.with(|watchdog, now| watchdog.record_event(now, &event));
            // A full channel blocks the child. A closed one means that nobody needs the events any more.
            if let Err(TrySendError::Full(event)) = events.try_send(event) {
                watchdog.with(|watchdog, now| watchdog.set_blocked(now, true));
                let _ = events.send(event).await;
                watchdog.with(|watchdog, now| watchdog.set_blocked(now, false));
            }
        }
    }
    finished
}

/// Reads log text until the pipe closes. Returns its last lines.
async fn read_text(
    pipe: impl AsyncRead + Unpin,
    events: mpsc::Sender<ChildEvent>,
    exited: CancellationToken,
) -> StderrTail {
    let mut lines = BoundedLines::new(pipe, MAX_TEXT_BYTES);
    let mut tail = StderrTail::default();
    while let Some(line) = next_line(&mut lines, &exited).await {
        let (Line::Text(text) | Line::TooLong { beginning: text, .. }) = line;
        if text.trim().is_empty() {
            continue;
        }
        tail.push(truncate(&text, 500).as_str());
        // Log text may be dropped when the channel is full; it must not block the events.
        let _ = events.try_send(log("info", text));
    }
    tail
}

async fn next_line<R: AsyncRead + Unpin>(lines: &mut BoundedLines<R>, exited: &CancellationToken) -> Option<Line> {
    let abandoned = async {
        exited.cancelled().await;
        sleep(PIPE_TIMEOUT).await;
    };
    tokio::select! {
        line = lines.next() => line.unwrap_or_default(),
        () = abandoned => None,
    }
}

fn log(level: &str, message: String) -> ChildEvent {
    ChildEvent::Log {
        level: level.to_owned(),
        message,
    }
}

/// The beginning of a text, at most `bytes` long, cut at a character boundary.
fn truncate(text: &str, bytes: usize) -> String {
    let end = (0..=bytes.min(text.len()))
        .rev()
        .find(|&at| text.is_char_boundary(at))
        .unwrap_or(0);
    text[..end].to_owned()
}

/// A process group that is killed when this value is dropped.
struct ProcessGroup(Pid);

impl ProcessGroup {
    fn signal(&self, signal: Signal) {
        // ESRCH means that all its processes have exited.
        let _ = killpg(self.0, signal);
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        self.signal(Signal::SIGKILL);
    }
}

struct AbortOnDrop(Option<tokio::task::AbortHandle>);

impl AbortOnDrop {
    fn of<T>(task: &Option<tokio::task::JoinHandle<T>>) -> Self {
        Self(task.as_ref().map(tokio::task::JoinHandle::abort_handle))
    }
}

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        if let Some(task) = &self.0 {
            task.abort();
        }
    }
}
