//! The main function of an attempt's process.
//!
//! Exit codes: 0 completed, 1 failed, 2 the specification cannot be read, 3 stopped on request, 4 the daemon ended.
//! The last line on standard output is the outcome as JSON.

use crate::config_location::with_config_location;
use crate::memory_usage::{MemoryUsage, limit_memory};
use crate::outcome::internal_failure;
use crate::path_redactor::PathRedactor;
use crate::privileges::drop_privileges;
use crate::sandbox::{self, SandboxRules};
use crate::spec_file::read_spec;
use aitk_common::attempt::{AttemptSpec, ChildEvent, FailureCause, Outcome};
use aitk_common::confinement::Confinement;
use aitk_common::telemetry;
use aitk_engine::device::threads::on_pool;
use aitk_processes::{EventSink, OutputRequests, StopSignal};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use std::io::{self, BufRead, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// How long a child may take to stop after its daemon has ended.
const ORPHAN_GRACE: Duration = Duration::from_secs(10);

/// The most bytes of a line on standard input that are read at once: far above any request.
const MAX_REQUEST_BYTES: u64 = 4 << 10;

/// Runs the attempt described in a file and returns the exit code of the process.
///
/// Call it only in a process of its own: it changes how signals are handled, reads standard input, and writes events
/// to standard output.
#[must_use]
pub fn run_attempt(spec_path: &Path) -> ExitCode {
    let (umask, warnings) = drop_privileges();
    telemetry::init(telemetry::Options {
        kind: telemetry::Kind::Attempt,
        json: false,
    });
    let mut events = EventWriter::default();
    let (stop, requests) = (StopSignal::new(), OutputRequests::new());
    // Before the first thread starts: a thread that does not block the signals would let them end the process.
    let signals = block_signals();
    for message in warnings {
        events.emit(log("warn", message));
    }
    set_parent_death_signal();
    // Also before the first thread, and before anything that the specification names is opened.
    let spec = read_spec(spec_path).map(|spec| {
        let confinement = sandbox::apply(SandboxRules::for_attempt(&spec, &std::env::temp_dir()).as_ref());
        (spec, confinement)
    });
    match signals {
        Ok(signals) => stop_on_signals(signals, &stop),
        Err(error) => events.emit(log("warn", format!("stop signals cannot be handled: {error}"))),
    }
    read_stdin(&stop, &requests);
    let (outcome, code) = match spec {
        Ok((spec, confinement)) if spec.require_sandbox && !confinement.holds() && spec.output_root.is_some() => {
            (not_confined_outcome(&confinement), 1)
        }
        Ok((spec, confinement)) => {
            if spec.output_root.is_some() || spec.extension.is_some() {
                events.emit(log(
                    log_level(&confinement),
                    format!("sandbox: {}", describe(&confinement)),
                ));
            }
            if let Some(message) = limit_file_size(&spec) {
                events.emit(log("warn", message));
            }
            events.redactor = PathRedactor::for_attempt(&spec);
            if spec.output_root.is_none() {
                umask.restore();
            }
            events.memory_usage.set_device(spec.device);
            let result = catch_unwind(AssertUnwindSafe(|| {
                on_pool(|| {
                    // Only now, because the compute threads have started; their stacks are not part of the job's
                    // memory.
                    if let Some(message) = limit_memory(&spec) {
                        events.emit(log("warn", message));
                    }
                    aitk_processes::run_with_requests(&spec, &mut events, &stop, &requests)
                })
            }));
            let outcome =
                result.unwrap_or_else(|panic| internal_failure(format!("a fault in aitk: {}", panic_message(&*panic))));
            let outcome = match outcome {
                Outcome::Failed {
                    cause: FailureCause::BadInput,
                    message,
                } => Outcome::Failed {
                    cause: FailureCause::BadInput,
                    // With the paths of the config, which are searched for in it.
                    message: with_config_location(&spec.job, &spec.inputs, events.redactor.redact(message)),
                },
                other => other,
            };
            let code = match outcome {
                Outcome::Completed => 0,
                Outcome::Stopped { .. } => 3,
                Outcome::Failed { .. } => 1,
            };
            for event in std::mem::take(&mut events.memory_usage).report(&spec) {
                events.emit(event);
            }
            (outcome, code)
        }
        Err(error) => (
            internal_failure(format!("cannot read {}: {error}", spec_path.display())),
            2,
        ),
    };
    events.emit(ChildEvent::Finished { outcome });
    ExitCode::from(code)
}

/// Asks the kernel to kill this process when its daemon ends, if the system supports that; see also
/// [`read_stdin`].
fn set_parent_death_signal() {
    #[cfg(target_os = "linux")]
    {
        if let Err(error) = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL) {
            tracing::warn!(%error, "the kernel will not kill this process when its daemon ends");
        }
        // When memory is short, the kernel should kill this process and not the daemon.
        let _ = std::fs::write("/proc/self/oom_score_adj", "500");
    }
}

/// Starts a thread that reads the daemon's requests for outputs from standard input. When standard input is closed because the daemon
/// has ended, the thread stops, and then ends, this process. This also covers a daemon that ended before [`set_parent_death_signal`].
fn read_stdin(stop: &StopSignal, requests: &OutputRequests) {
    let (stop, requests) = (stop.clone(), requests.clone());
    std::thread::spawn(move || {
        read_requests(io::stdin().lock(), &requests);
        stop.stop();
        std::thread::sleep(ORPHAN_GRACE);
        std::process::exit(4);
    });
}

/// Reads requests for outputs, one per line, until the input is closed. Lines of another form, which a newer daemon may write, are
/// ignored.
fn read_requests(mut input: impl BufRead, requests: &OutputRequests) {
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut input).take(MAX_REQUEST_BYTES).read_until(b'\n', &mut line) {
            Ok(0) => return,
            Ok(_) => {
                if let Ok(outputs) = serde_json::from_slice(&line) {
                    requests.request(outputs);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// Blocks the stop signals in this thread, and in all threads that it starts later.
fn block_signals() -> nix::Result<SigSet> {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        signals.add(signal);
    }
    // Also blocked: then a file that grows beyond the limit causes a write error instead of the end of the process.
    let mut blocked = signals;
    blocked.add(Signal::SIGXFSZ);
    blocked.thread_block()?;
    Ok(signals)
}

/// Starts a thread that waits for the blocked signals.
fn stop_on_signals(signals: SigSet, stop: &StopSignal) {
    let stop = stop.clone();
    std::thread::spawn(move || {
        while signals.wait().is_ok() {
            stop.stop();
        }
    });
}

/// Limits the size of the files that this process writes. Returns a warning if that failed.
fn limit_file_size(spec: &AttemptSpec) -> Option<String> {
    let (_, max) = getrlimit(Resource::RLIMIT_FSIZE).unwrap_or((0, u64::MAX));
    let bytes = spec.file_size_limit?.min(max);
    let error = setrlimit(Resource::RLIMIT_FSIZE, bytes, bytes).err()?;
    Some(format!("the size of files cannot be limited: {error}"))
}

fn log_level(confinement: &Confinement) -> &'static str {
    if confinement.holds() { "info" } else { "warn" }
}

/// The confinement of this process as one line. The limits are left out: the daemon sets them with a control group.
fn describe(confinement: &Confinement) -> String {
    let known = confinement.parts().into_iter().filter(|(name, _)| *name != "limits");
    known
        .map(|(name, part)| format!("{name}: {part}"))
        .collect::<Vec<_>>()
        .join("; ")
}

fn not_confined_outcome(confinement: &Confinement) -> Outcome {
    Outcome::Failed {
        cause: FailureCause::Machine,
        message: format!(
            "the attempt was ended before it read anything: this worker requires a sandbox (--require-sandbox), but the sandbox is incomplete: {}",
            describe(confinement)
        ),
    }
}

/// Writes each event as a line of JSON, and measures the memory of each phase.
#[derive(Default)]
struct EventWriter {
    memory_usage: MemoryUsage,
    redactor: PathRedactor,
}

impl EventSink for EventWriter {
    fn emit(&mut self, event: ChildEvent) {
        self.memory_usage.record_event(&event);
        let Ok(mut line) = serde_json::to_vec(&self.redactor.redact_event(event)) else {
            return;
        };
        line.push(b'\n');
        let mut stdout = io::stdout().lock();
        // The pipe is closed when the daemon has ended; the thread that reads standard input handles that.
        let _ = stdout.write_all(&line).and_then(|()| stdout.flush());
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
    format!(
        "{}; please report this",
        text.unwrap_or_else(|| "it panicked".to_owned())
    )
}

fn log(level: &str, message: String) -> ChildEvent {
    ChildEvent::Log {
        level: level.to_owned(),
        message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aitk_common::requested_outputs::RequestedOutputs;

    #[test]
    fn requests_are_read_until_the_input_closes() {
        let requests = OutputRequests::new();
        read_requests(&b"{\"save\":true}\nanother form\n{\"later\":1}\n"[..], &requests);
        assert_eq!(requests.take(), RequestedOutputs::SAVE);
        read_requests(&b"{\"samples\":true}\n{\"save\":true}\n{\"save\":true}"[..], &requests);
        let both = RequestedOutputs::SAVE.or(RequestedOutputs::SAMPLES);
        assert_eq!(requests.take(), both);
        assert!(requests.take().is_empty(), "taken once");
    }
}
