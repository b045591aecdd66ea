//! The other side of the pipe: the main function of an attempt's process.
//!
//! Exit codes: 0 completed, 1 failed, 2 the specification cannot be read, 3 stopped as it was asked to, 4 the daemon
//! went away. The last line of standard output says the same in full.

use crate::config_place::with_place;
use crate::confine::confine;
use crate::path_redactor::PathRedactor;
use crate::sandbox::{self, Rules};
use crate::usage::{Usage, keep_to_budget};
use aitk_common::attempt::{AttemptSpec, ChildEvent, FailureCause, Outcome};
use aitk_common::confinement::Confinement;
use aitk_common::telemetry;
use aitk_engine::device::threads::on_pool;
use aitk_engine::processes::{self, EventSink, StopSignal};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use std::io::{self, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// How long a child whose daemon went away may take to come to its senses.
const ORPHAN_GRACE: Duration = Duration::from_secs(10);
/// The largest specification: a config of a few MiB in several forms.
const SPEC_BYTES: u64 = 64 << 20;

/// Runs the attempt described in a file and returns the exit code of the process.
///
/// The process must belong to this call: it changes how signals are handled, reads standard input, and writes events
/// on standard output.
#[must_use]
pub fn run_attempt(spec_path: &Path) -> ExitCode {
    let (privacy, unconfined) = confine();
    telemetry::init(telemetry::Options {
        kind: telemetry::Kind::Attempt,
        json: false,
    });
    let mut events = Lines::default();
    let stop = StopSignal::new();
    // Before the first thread: one that does not block the signals would end the process with them.
    let signals = block_signals();
    for message in unconfined {
        events.emit(log("warn", message));
    }
    die_with_daemon();
    // Before the first thread, too, and before anything that the specification names is opened.
    let spec = read_spec(spec_path).map(|spec| {
        let confinement = sandbox::enter(Rules::of(&spec, &std::env::temp_dir()).as_ref());
        (spec, confinement)
    });
    match signals {
        Ok(signals) => stop_on(signals, &stop),
        Err(error) => events.emit(log("warn", format!("signals cannot be caught: {error}"))),
    }
    stop_without_daemon(&stop);
    let (outcome, code) = match spec {
        Ok((spec, confinement)) if spec.require_sandbox && !confinement.holds() && spec.output_root.is_some() => {
            (not_confined(&confinement), 1)
        }
        Ok((spec, confinement)) => {
            if spec.output_root.is_some() {
                events.emit(log(
                    level_of(&confinement),
                    format!("sandbox: {}", as_line(&confinement)),
                ));
            }
            if let Some(message) = limit_files(&spec) {
                events.emit(log("warn", message));
            }
            events.names = PathRedactor::of(&spec);
            if spec.output_root.is_none() {
                privacy.end();
            }
            events.usage.watch(spec.device);
            let ran = catch_unwind(AssertUnwindSafe(|| {
                on_pool(|| {
                    // Here, because the threads and their stacks are there now and no part of the work.
                    if let Some(message) = keep_to_budget(&spec) {
                        events.emit(log("warn", message));
                    }
                    processes::run(&spec, &mut events, &stop)
                })
            }));
            let outcome = ran.unwrap_or_else(|panic| internal(format!("a fault in aitk: {}", words(&*panic))));
            let outcome = match outcome {
                Outcome::Failed {
                    cause: FailureCause::BadInput,
                    message,
                } => Outcome::Failed {
                    cause: FailureCause::BadInput,
                    // In the words of the config, which is what is looked for in it.
                    message: with_place(&spec.job, events.names.text(message)),
                },
                other => other,
            };
            let code = match outcome {
                Outcome::Completed => 0,
                Outcome::Stopped { .. } => 3,
                Outcome::Failed { .. } => 1,
            };
            for event in std::mem::take(&mut events.usage).report(&spec) {
                events.emit(event);
            }
            (outcome, code)
        }
        Err(error) => (internal(format!("cannot read {}: {error}", spec_path.display())), 2),
    };
    events.emit(ChildEvent::Finished { outcome });
    ExitCode::from(code)
}

pub(crate) fn read_spec(path: &Path) -> io::Result<AttemptSpec> {
    let mut text = Vec::new();
    std::fs::File::open(path)?.take(SPEC_BYTES).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

/// Asks the kernel to kill this process when its daemon ends, where it can do that; see also [`stop_without_daemon`].
fn die_with_daemon() {
    #[cfg(target_os = "linux")]
    {
        if let Err(error) = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL) {
            tracing::warn!(%error, "the kernel will not end this process with its daemon");
        }
        // When memory is short, this process goes, not the daemon.
        let _ = std::fs::write("/proc/self/oom_score_adj", "500");
    }
}

/// Stops, and then ends, this process when the end of standard input says that the daemon is gone. Also covers a daemon
/// that ended before [`die_with_daemon`].
fn stop_without_daemon(stop: &StopSignal) {
    let stop = stop.clone();
    std::thread::spawn(move || {
        let mut buffer = [0_u8; 64];
        let mut stdin = io::stdin().lock();
        loop {
            match stdin.read(&mut buffer) {
                Ok(0) => break,
                Err(error) if error.kind() != io::ErrorKind::Interrupted => break,
                _ => {}
            }
        }
        stop.stop();
        std::thread::sleep(ORPHAN_GRACE);
        std::process::exit(4);
    });
}

/// Blocks the signals that ask for a stop in this thread, and so in all that it starts later.
fn block_signals() -> nix::Result<SigSet> {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        signals.add(signal);
    }
    // Blocked as well: a file that grows beyond the limit is then an error of the write, and not the end of the process.
    let mut blocked = signals;
    blocked.add(Signal::SIGXFSZ);
    blocked.thread_block()?;
    Ok(signals)
}

/// Waits for blocked signals in a thread of its own.
fn stop_on(signals: SigSet, stop: &StopSignal) {
    let stop = stop.clone();
    std::thread::spawn(move || {
        while signals.wait().is_ok() {
            stop.stop();
        }
    });
}

/// Limits the size of the files that this process writes. Says what could not be done.
fn limit_files(spec: &AttemptSpec) -> Option<String> {
    let (_, most) = getrlimit(Resource::RLIMIT_FSIZE).unwrap_or((0, u64::MAX));
    let bytes = spec.file_size_limit?.min(most);
    let error = setrlimit(Resource::RLIMIT_FSIZE, bytes, bytes).err()?;
    Some(format!("the size of files cannot be limited: {error}"))
}

fn level_of(confinement: &Confinement) -> &'static str {
    if confinement.holds() { "info" } else { "warn" }
}

/// What this process knows of its confinement; its control group is the daemon's.
fn as_line(confinement: &Confinement) -> String {
    let known = confinement.parts().into_iter().filter(|(name, _)| *name != "limits");
    known
        .map(|(name, part)| format!("{name}: {part}"))
        .collect::<Vec<_>>()
        .join("; ")
}

fn not_confined(confinement: &Confinement) -> Outcome {
    Outcome::Failed {
        cause: FailureCause::Machine,
        message: format!(
            "the attempt was ended before it read anything: this worker demands a sandbox (--require-sandbox), and has: {}",
            as_line(confinement)
        ),
    }
}

/// Writes each event as a line of JSON, and looks at the memory between phases.
#[derive(Default)]
struct Lines {
    usage: Usage,
    names: PathRedactor,
}

impl EventSink for Lines {
    fn emit(&mut self, event: ChildEvent) {
        self.usage.see(&event);
        let Ok(mut line) = serde_json::to_vec(&self.names.event(event)) else {
            return;
        };
        line.push(b'\n');
        let mut stdout = io::stdout().lock();
        // A closed pipe: the daemon is gone, and the thread at standard input knows.
        let _ = stdout.write_all(&line).and_then(|()| stdout.flush());
    }
}

fn words(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
    format!(
        "{}; please report this",
        text.unwrap_or_else(|| "it panicked".to_owned())
    )
}

fn internal(message: String) -> Outcome {
    Outcome::Failed {
        cause: FailureCause::Internal,
        message,
    }
}

fn log(level: &str, message: String) -> ChildEvent {
    ChildEvent::Log {
        level: level.to_owned(),
        message,
    }
}
