//! Runs one child process for one attempt: starts it, reads what it says, stops it, and tells how it ended.
//!
//! The child lives in a process group of its own, so that a Ctrl-C in the daemon's terminal does not reach it and so
//! that everything it started ends with it. Its standard input stays open for as long as the daemon wants it to live.

mod ending;
mod environment;
mod groups;
mod lines;
mod memory;
mod spawner;
mod watchdog;

use crate::spec_file::read_spec;
use crate::usage;
use aitk_common::attempt::{ChildEvent, FailureCause, Outcome};
use ending::{Asked, Ending, Tail};
pub use groups::{Groups, limit_attempts, most_memory};
use lines::{BoundedLines, Line};
use memory::MemoryWatch;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
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
use watchdog::{Finding, Watchdog};

/// The longest line of JSON that is read: far above any real event.
const EVENT_BYTES: usize = 1 << 20;
/// The longest line of text that is kept.
const TEXT_BYTES: usize = 8 << 10;
/// How long a pipe may stay open after its child ended, when something that left the group still holds it.
const PIPE_LINGER: Duration = Duration::from_secs(2);
/// How long a child may take to go after its SIGKILL, with all its memory to be given back, before its device counts as stuck.
const LAST_BREATH: Duration = Duration::from_secs(60);
/// How often a child is looked at.
const LOOK: Duration = Duration::from_secs(2);
/// How long a child may take to exit after it said how it ended.
const EXIT_LINGER: Duration = Duration::from_secs(20);

/// What confines a process on a Mac.
pub(crate) const SANDBOX_EXEC: &str = "/usr/bin/sandbox-exec";

/// What tells CUDA where to keep the kernels that it compiles.
pub(crate) const CUDA_CACHE: &str = "CUDA_CACHE_PATH";

/// What to start.
#[derive(Clone, Debug)]
pub struct Launch {
    /// A program and its first arguments; `attempt --spec FILE` is added.
    pub command: Vec<OsString>,
    /// The attempt's specification.
    pub spec: PathBuf,
    /// Where the child starts; unset: where the daemon is.
    pub work_dir: Option<PathBuf>,
    /// The child's own folder for temporary files.
    pub temp_dir: PathBuf,
    /// How long it may take to save and stop.
    pub grace: Duration,
    /// How long it may show no progress before it is ended; longer where its own steps take long. None: for ever.
    pub progress_timeout: Option<Duration>,
    /// Its memory has a limit: its allocator takes address space only as it is needed, because the limit counts that.
    pub memory_limited: bool,
    /// The rules of `sandbox-exec` that it starts under, on a Mac.
    pub sandbox_profile: Option<String>,
    /// Where CUDA keeps the kernels that it compiles. Unset: where it does by itself.
    pub cuda_cache: Option<PathBuf>,
    /// Makes a control group for it. Unset: it has its daemon's.
    pub groups: Option<Groups>,
}

/// What is wanted of a running child. It only goes from one to the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wanted {
    /// Run to the end.
    #[default]
    Run,
    /// Save, then stop.
    Stop,
    /// End at once.
    Kill,
}

/// Runs a child to its end. Its events go to `events`, all but the last one, which decides the outcome.
///
/// Dropping the future kills the child and its group.
pub async fn run(
    spawner: &Spawner,
    launch: Launch,
    mut wanted: watch::Receiver<Wanted>,
    events: mpsc::Sender<ChildEvent>,
) -> Outcome {
    let mut child = match start(spawner, &launch).await {
        Ok(child) => child,
        Err(outcome) => return outcome,
    };
    let Some(pid) = child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw) else {
        return machine("the attempt's process ended before it could be watched".to_owned());
    };
    let group = Group(pid);
    // At once: it has hardly begun, and what it takes from now on counts for it.
    let control_group = launch.groups.as_ref().map(|groups| groups.start(pid.as_raw()));
    if let Some(Err(error)) = &control_group {
        tracing::warn!(%error, "an attempt has no control group of its own");
    }
    let stdin = child.stdin.take();
    let began = Instant::now();
    let period = launch.progress_timeout.map_or(LOOK, |timeout| LOOK.min(timeout / 8));
    let period = period.max(Duration::from_millis(20));
    let watch = Watch {
        dog: launch
            .progress_timeout
            .map(|timeout| Arc::new(Mutex::new(Watchdog::new(timeout, period, Duration::ZERO)))),
        began,
    };
    let exited = CancellationToken::new();
    let (said, mut has_said) = watch::channel(None);
    let stdout = child
        .stdout
        .take()
        .map(|pipe| tokio::spawn(read_events(pipe, events.clone(), said, watch.clone(), exited.clone())));
    let stderr = child
        .stderr
        .take()
        .map(|pipe| tokio::spawn(read_text(pipe, events.clone(), exited.clone())));
    let _aborts = (AbortOnDrop::of(&stdout), AbortOnDrop::of(&stderr));

    // What was wanted before the child existed counts, too.
    wanted.mark_changed();
    let mut asked = Asked::Nothing;
    let mut deadline: Option<Instant> = None;
    let mut memory = MemoryWatch::start();
    let mut ticks = tokio::time::interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut hung: Option<String> = None;
    // After a SIGKILL: when it is time to give up waiting.
    let mut gone_by: Option<Instant> = None;
    let status = loop {
        tokio::select! {
            status = child.wait() => break Some(status),
            () = until(gone_by) => break None,
            () = until(deadline) => {
                deadline = None;
                asked = if has_said.borrow().is_some() { asked } else { Asked::Killed };
                group.signal(Signal::SIGKILL);
                gone_by.get_or_insert(Instant::now() + LAST_BREATH);
            }
            Ok(()) = wanted.changed() => match *wanted.borrow_and_update() {
                Wanted::Run => {}
                Wanted::Stop if asked == Asked::Nothing => {
                    asked = Asked::Stop;
                    deadline = Some(Instant::now() + launch.grace);
                    let _ = kill(pid, Signal::SIGTERM);
                }
                Wanted::Stop => {}
                Wanted::Kill => {
                    asked = Asked::Killed;
                    group.signal(Signal::SIGKILL);
                    gone_by.get_or_insert(Instant::now() + LAST_BREATH);
                }
            },
            Ok(()) = has_said.changed(), if has_said.borrow().is_none() => {
                deadline = Some(Instant::now() + EXIT_LINGER);
            }
            _ = ticks.tick() => {
                memory.sample();
                let watched = hung.is_none() && has_said.borrow().is_none();
                let found = if watched { watch.look(pid) } else { Finding::Fine };
                if let Some(why) = announce(found, &events) {
                    hung = Some(why);
                    deadline.get_or_insert(Instant::now() + launch.grace);
                    let _ = kill(pid, Signal::SIGTERM);
                    // One that was stopped by a signal may still save.
                    group.signal(Signal::SIGCONT);
                }
            }
        }
    };
    drop(events);
    // In this order: what the child left behind must not take a closed pipe for a word from us, and act on it.
    group.signal(Signal::SIGKILL);
    drop(stdin);
    exited.cancel();
    let finished = match stdout {
        Some(task) => task.await.unwrap_or_default(),
        None => None,
    };
    let tail = match stderr {
        Some(task) => task.await.unwrap_or_default(),
        None => Tail::default(),
    };
    let Some(status) = status else {
        return stuck(pid, hung);
    };
    match status {
        Ok(status) => {
            let memory_ran_out = finished.is_none() && memory.ran_out();
            let outcome = ending::outcome(Ending {
                status,
                finished,
                asked,
                hung,
                memory_ran_out,
                tail,
            });
            advised(outcome, &launch.spec)
        }
        Err(error) => finished.unwrap_or_else(|| machine(format!("the attempt's process was lost: {error}"))),
    }
}

/// To an attempt that ran out of memory: the numbers, and what to try next.
fn advised(outcome: Outcome, spec: &Path) -> Outcome {
    match outcome {
        Outcome::Failed {
            cause: cause @ FailureCause::OutOfMemory,
            message,
        } => {
            let numbers = read_spec(spec).map(|spec| usage::advice(&spec, crate::probe::memory().total));
            let message = match numbers {
                Ok(numbers) => format!("{message}; {numbers}"),
                Err(_) => message,
            };
            Outcome::Failed { cause, message }
        }
        other => other,
    }
}

/// Tells what the watchdog found. Returns why the child is to be ended, if it is.
fn announce(found: Finding, events: &mpsc::Sender<ChildEvent>) -> Option<String> {
    // What finds no room is lost: whoever reads the events is behind, and then silence says nothing.
    let say = |event| drop(events.try_send(event));
    match found {
        Finding::Fine => {}
        Finding::Silent {
            phase,
            message,
            progress,
        } => {
            say(log("warn", message));
            say(ChildEvent::Phase { name: phase });
            if let Some((done, total)) = progress {
                say(ChildEvent::Progress {
                    done,
                    total,
                    seconds_per_step: None,
                });
            }
        }
        Finding::Back { phase, message } => {
            say(log("info", message));
            if let Some(name) = phase {
                say(ChildEvent::Phase { name });
            }
        }
        Finding::Hung(why) => {
            say(log("error", format!("{why}: its process is ended")));
            return Some(why);
        }
    }
    None
}

/// The end of an attempt whose process outlives its SIGKILL.
fn stuck(pid: Pid, hung: Option<String>) -> Outcome {
    let before = hung.map(|why| format!("{why}, and ")).unwrap_or_default();
    Outcome::Failed {
        cause: FailureCause::DeviceStuck,
        message: format!(
            "{before}its process {pid} does not end although it was killed {} s ago: a driver or a disk of this machine hangs; \
             look at the machine, then free the device with `aitk worker undrain`",
            LAST_BREATH.as_secs()
        ),
    }
}

/// The watchdog of a child, if it has one, and the clock that it goes by.
#[derive(Clone)]
struct Watch {
    dog: Option<Arc<Mutex<Watchdog>>>,
    began: Instant,
}

impl Watch {
    fn with<T>(&self, act: impl FnOnce(&mut Watchdog, Duration) -> T) -> Option<T> {
        let dog = self.dog.as_ref()?;
        let mut dog = dog.lock().unwrap_or_else(PoisonError::into_inner);
        Some(act(&mut dog, self.began.elapsed()))
    }

    fn look(&self, pid: Pid) -> Finding {
        self.with(|dog, now| dog.look(now, processor_time(pid)))
            .unwrap_or(Finding::Fine)
    }
}

/// CPU time that a process has used; none where the system does not tell.
fn processor_time(pid: Pid) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before may hold anything, spaces and brackets as well.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut times = fields.split_whitespace().skip(11).map(str::parse::<u64>);
    let (user, system) = (times.next()?.ok()?, times.next()?.ok()?);
    // Linux shows these in hundredths of a second, whatever its own clock is.
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
        // candle's own pool waits by spinning and takes the cores from our kernels, which use rayon and gemm.
        // Who sets it for the daemon keeps the last word.
        .env("CANDLE_NUM_THREADS", "1")
        // Said once: candle counts the cores anew, from files of the kernel, before each matrix product.
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
        .map_err(|error| machine(format!("could not start {}: {error}", program.display())))
}

/// Cores that a child may compute on: hyper-threads only hold each other up.
fn cores() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, usize::from);
    sysinfo::System::physical_core_count().map_or(allowed, |physical| physical.clamp(1, allowed))
}

fn machine(message: String) -> Outcome {
    Outcome::Failed {
        cause: FailureCause::Machine,
        message,
    }
}

async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Reads events to the end of the pipe. Returns what the child said last about itself.
async fn read_events(
    pipe: impl AsyncRead + Unpin,
    events: mpsc::Sender<ChildEvent>,
    said: watch::Sender<Option<()>>,
    watched: Watch,
    exited: CancellationToken,
) -> Option<Outcome> {
    let mut lines = BoundedLines::new(pipe, EVENT_BYTES);
    let mut finished = None;
    while let Some(line) = next_line(&mut lines, &exited).await {
        let event = match line {
            Line::Text(text) if text.trim().is_empty() => continue,
            Line::Text(text) => match serde_json::from_str::<ChildEvent>(&text) {
                Ok(event) => event,
                Err(_) => log("info", cut(&text, TEXT_BYTES)),
            },
            Line::TooLong { beginning, bytes } => log(
                "warn",
                format!("a line of {bytes} bytes was left out: {}…", cut(&beginning, 200)),
            ),
        };
        if finished.is_some() {
            continue;
        }
        if let ChildEvent::Finished { outcome } = event {
            finished = Some(outcome);
            said.send_replace(Some(()));
        } else {
            watched.with(|dog, now| dog.heard(now, &event));
            // A full queue holds the child back. A closed one means that nobody wants the events any more.
            if let Err(TrySendError::Full(event)) = events.try_send(event) {
                watched.with(|dog, now| dog.waits_for_us(now, true));
                let _ = events.send(event).await;
                watched.with(|dog, now| dog.waits_for_us(now, false));
            }
        }
    }
    finished
}

/// Reads log text to the end of the pipe. Returns its last lines.
async fn read_text(pipe: impl AsyncRead + Unpin, events: mpsc::Sender<ChildEvent>, exited: CancellationToken) -> Tail {
    let mut lines = BoundedLines::new(pipe, TEXT_BYTES);
    let mut tail = Tail::default();
    while let Some(line) = next_line(&mut lines, &exited).await {
        let (Line::Text(text) | Line::TooLong { beginning: text, .. }) = line;
        if text.trim().is_empty() {
            continue;
        }
        tail.push(cut(&text, 500).as_str());
        // Log text may be lost when the queue is full; it must not hold back the events.
        let _ = events.try_send(log("info", text));
    }
    tail
}

async fn next_line<R: AsyncRead + Unpin>(lines: &mut BoundedLines<R>, exited: &CancellationToken) -> Option<Line> {
    let abandoned = async {
        exited.cancelled().await;
        sleep(PIPE_LINGER).await;
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

/// The beginning of a text, at most `bytes` long, cut between characters.
fn cut(text: &str, bytes: usize) -> String {
    let end = (0..=bytes.min(text.len()))
        .rev()
        .find(|&at| text.is_char_boundary(at))
        .unwrap_or(0);
    text[..end].to_owned()
}

/// A process group that is killed when this goes away.
struct Group(Pid);

impl Group {
    fn signal(&self, signal: Signal) {
        // ESRCH: everybody has gone already.
        let _ = killpg(self.0, signal);
    }
}

impl Drop for Group {
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
