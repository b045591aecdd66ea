//! Runs one child process for one attempt: starts it, reads what it says, stops it, and tells how it ended.
//!
//! The child lives in a process group of its own, so that a Ctrl-C in the daemon's terminal does not reach it and so
//! that everything it started ends with it. Its standard input stays open for as long as the daemon wants it to live.

mod ending;
mod environment;
mod lines;
mod memory;
mod spawner;

use crate::usage;
use aitk_common::attempt::{ChildEvent, FailureCause, Outcome};
use ending::{Asked, Ending, Tail};
use lines::{BoundedLines, Line};
use memory::MemoryWatch;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
pub use spawner::Spawner;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::io::AsyncRead;
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

/// The longest line of JSON that is read: far above any real event.
const EVENT_BYTES: usize = 1 << 20;
/// The longest line of text that is kept.
const TEXT_BYTES: usize = 8 << 10;
/// How long a pipe may stay open after its child ended, when something that left the group still holds it.
const PIPE_LINGER: Duration = Duration::from_secs(2);
/// How long a child may take to exit after it said how it ended.
const EXIT_LINGER: Duration = Duration::from_secs(20);

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
    let stdin = child.stdin.take();
    let exited = CancellationToken::new();
    let (said, mut has_said) = watch::channel(None);
    let stdout = child
        .stdout
        .take()
        .map(|pipe| tokio::spawn(read_events(pipe, events.clone(), said, exited.clone())));
    let stderr = child
        .stderr
        .take()
        .map(|pipe| tokio::spawn(read_text(pipe, events, exited.clone())));
    let _aborts = (AbortOnDrop::of(&stdout), AbortOnDrop::of(&stderr));

    // What was wanted before the child existed counts, too.
    wanted.mark_changed();
    let mut asked = Asked::Nothing;
    let mut deadline: Option<Instant> = None;
    let mut memory = MemoryWatch::start();
    let mut ticks = tokio::time::interval(Duration::from_secs(2));
    let status = loop {
        tokio::select! {
            status = child.wait() => break status,
            () = until(deadline) => {
                deadline = None;
                asked = if has_said.borrow().is_some() { asked } else { Asked::Killed };
                group.signal(Signal::SIGKILL);
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
                }
            },
            Ok(()) = has_said.changed(), if has_said.borrow().is_none() => {
                deadline = Some(Instant::now() + EXIT_LINGER);
            }
            _ = ticks.tick() => memory.sample(),
        }
    };
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
    match status {
        Ok(status) => {
            let memory_ran_out = finished.is_none() && memory.ran_out();
            let outcome = ending::outcome(Ending {
                status,
                finished,
                asked,
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
            let numbers = crate::child::read_spec(spec).map(|spec| usage::advice(&spec, crate::probe::memory().total));
            let message = match numbers {
                Ok(numbers) => format!("{message}; {numbers}"),
                Err(_) => message,
            };
            Outcome::Failed { cause, message }
        }
        other => other,
    }
}

async fn start(spawner: &Spawner, launch: &Launch) -> Result<Child, Outcome> {
    let Some((program, arguments)) = launch.command.split_first() else {
        return Err(Outcome::Failed {
            cause: FailureCause::Internal,
            message: "the worker was started without a program for its attempts".to_owned(),
        });
    };
    let mut command = Command::new(program);
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
            // A full queue holds the child back. A closed one means that nobody wants the events any more.
            let _ = events.send(event).await;
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
