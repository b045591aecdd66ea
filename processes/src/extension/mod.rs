//! Processes of the type `extension:NAME`: runs a program that the worker's owner allows, and speaks the protocol of
//! docs/extensions.md with it.
//!
//! The program is a child of the attempt's process, in its process group and inside its sandbox. The attempt never
//! signals it: when the attempt ends, the daemon kills the whole group.

mod artifact;
mod message;
mod program;
mod schema;
mod session;
#[cfg(test)]
mod tests;

use super::context::{Context, artifact_name};
use crate::error::{EngineError, Result};
use aitk_common::attempt::{ChildEvent, ExtensionProgram, FailureCause, Outcome};
use aitk_common::job::extension::ExtensionProcess;
use message::{HostMessage, VERSION};
use program::{Line, Program};
use schema::SchemaError;
use session::{Received, Session};
use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

/// How long the program may take until its `hello`.
const HELLO_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the program may take to save and end after `stop`: less than the daemon gives the attempt.
const STOP_TIMEOUT: Duration = Duration::from_secs(50);
/// How long the program may take to exit after `done`.
const EXIT_TIMEOUT: Duration = Duration::from_secs(60);
/// How long output may follow the exit of the program, from processes that it started.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// How often deadlines are checked while no message comes.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// The shortest time between two progress events.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// Log lines at once, and per second, that are forwarded. Others are counted.
const LOG_LINES: f64 = 200.0;
const LOG_LINES_PER_SECOND: f64 = 10.0;
/// The largest file that a program may announce where the attempt has no limit of its own, in bytes.
const MAX_FILE_BYTES: u64 = 512 << 30;

/// Runs the extension of a process.
///
/// # Errors
/// When its folder cannot be made, or an input is not one of the job.
pub(super) fn run(process: &ExtensionProcess, cx: &mut Context<'_>) -> Result<Outcome> {
    let name = process.kind.extension();
    let allowed = cx.spec.extension.clone().filter(|allowed| allowed.name == name);
    let Some(allowed) = allowed else {
        return Err(EngineError::bad_input(not_allowed_message(name)));
    };
    let root = cx.output_root(process.training_folder.as_deref());
    let root = std::path::absolute(&root).map_err(|error| EngineError::io(&root, error))?;
    let output = root.join(process.name.as_deref().unwrap_or(&cx.job.name));
    std::fs::create_dir_all(&output).map_err(|error| EngineError::io(&output, error))?;
    let mut inputs = BTreeMap::new();
    for (input, path) in &process.inputs.0 {
        let here = cx.local_path(path)?;
        let here = here
            .canonicalize()
            .map_err(|error| EngineError::bad_input(format!("inputs.{input}: {path}: {error}")))?;
        inputs.insert(input.as_str(), here);
    }
    cx.phase("starting extension");
    let started = Program::start(&allowed.program, &output, &std::env::temp_dir());
    let program = started.map_err(|error| {
        let shown = allowed.program.display();
        EngineError::bad_input(format!(
            "the extension `{name}`: its program {shown} could not be started: {error}; the worker's owner can check that it is \
             executable, and that its interpreter is in /usr or in its own folder"
        ))
    })?;
    let conversation = Conversation {
        cx,
        process,
        allowed: &allowed,
        program,
        root: &root,
        output: &output,
        inputs: &inputs,
        session: Session::new(),
        started_at: Instant::now(),
        heard_at: Instant::now(),
        progress_sent_at: None,
        first_progress: None,
        log_limit: LogLimit::new(),
    };
    Ok(conversation.run())
}

/// The message about an extension that the worker's owner did not allow.
fn not_allowed_message(name: &str) -> String {
    format!(
        "this worker does not allow the extension `{name}`: its owner can allow it with --allow-extension {name}=/PATH/OF/PROGRAM \
         (docs/extensions.md)"
    )
}

/// Why a program is expected to exit, and until when.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ending {
    /// It sent `done`.
    Done(Instant),
    /// It was told to stop.
    Stopped(Instant),
}

struct Conversation<'a, 'c> {
    cx: &'a mut Context<'c>,
    process: &'a ExtensionProcess,
    allowed: &'a ExtensionProgram,
    program: Program,
    /// The folder that the names of results are relative to.
    root: &'a Path,
    /// The program's output folder.
    output: &'a Path,
    inputs: &'a BTreeMap<&'a str, PathBuf>,
    session: Session,
    started_at: Instant,
    /// When the last message came.
    heard_at: Instant,
    progress_sent_at: Option<Instant>,
    /// The time and the step of the first progress.
    first_progress: Option<(Instant, u64)>,
    log_limit: LogLimit,
}

impl Conversation<'_, '_> {
    /// Speaks with the program until it has ended, or did something wrong.
    fn run(mut self) -> Outcome {
        let outcome = self.converse().unwrap_or_else(|failure| failure);
        // Inside a sandbox this is refused; the daemon kills the attempt's process group when the attempt has ended.
        let _ = self.program.child.kill();
        self.forward_last_errors();
        self.log_limit.left_out += self.program.take_left_out();
        if let Some(left_out) = self.log_limit.take_left_out() {
            self.cx.log("warn", left_out);
        }
        outcome
    }

    /// # Errors
    /// The outcome of a failure.
    fn converse(&mut self) -> Result<Outcome, Outcome> {
        let mut ending: Option<Ending> = None;
        let mut exited: Option<(ExitStatus, Instant)> = None;
        loop {
            let received = self.program.lines.recv_timeout(CHECK_INTERVAL);
            let is_closed = matches!(received, Err(RecvTimeoutError::Disconnected));
            match received {
                Ok(Line::Complete(line)) => {
                    self.heard_at = Instant::now();
                    if self.handle_line(&line)? {
                        ending = Some(Ending::Done(Instant::now() + EXIT_TIMEOUT));
                    }
                }
                Ok(Line::TooLong) => {
                    let max = program::MAX_LINE_BYTES;
                    return Err(self.wrong(&format!("sent a line of more than {max} bytes")));
                }
                Err(RecvTimeoutError::Timeout) => {}
                // Wait for its exit.
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(CHECK_INTERVAL),
            }
            self.forward_errors();
            if ending.is_none() && self.cx.stop.is_set() {
                if !self.session.has_hello() {
                    // It has done nothing yet, and would take `stop` for the `start` that it waits for.
                    return Ok(Outcome::stopped());
                }
                self.program.send(&HostMessage::Stop);
                self.cx.phase("stopping extension");
                ending = Some(Ending::Stopped(Instant::now() + STOP_TIMEOUT));
            }
            if exited.is_none()
                && let Ok(Some(status)) = self.program.child.try_wait()
            {
                exited = Some((status, Instant::now()));
            }
            match exited {
                // What it wrote before its exit counts.
                Some((status, at)) if is_closed || at.elapsed() > DRAIN_TIMEOUT => {
                    return self.conclude(status, ending);
                }
                Some(_) => {}
                None => {
                    if let Some(outcome) = self.check_deadlines(ending)? {
                        return Ok(outcome);
                    }
                }
            }
        }
    }

    /// Handles one message. Returns whether the program says that it is done.
    ///
    /// # Errors
    /// The outcome of a failure.
    fn handle_line(&mut self, line: &[u8]) -> Result<bool, Outcome> {
        let received = self.session.receive(line, self.started_at.elapsed());
        match received.map_err(|why| self.wrong(&why))? {
            Received::Hello(name, schema) => self.start_work(name, schema)?,
            Received::Progress(step, total, loss) => self.report_progress(step, total, loss),
            Received::Log(level, message) => self.log(level, message),
            Received::Artifact(name, number) => self.announce(&name, number)?,
            Received::Done => return Ok(true),
            Received::Error(message) => return Err(self.failure(FailureCause::BadInput, &format!("failed: {message}"))),
        }
        Ok(false)
    }

    fn start_work(&mut self, name: Option<String>, schema: Option<serde_json::Value>) -> Result<(), Outcome> {
        let config = serde_json::Value::Object(self.process.config.clone());
        let checked = schema.map_or(Ok(()), |schema| schema::check(&schema, &config, "config"));
        checked.map_err(|error| match error {
            SchemaError::Value(why) => {
                self.failure(FailureCause::BadInput, &format!("does not accept its config: {why}"))
            }
            SchemaError::Schema(why) => self.wrong(&format!("sent a schema that cannot be checked: {why}")),
        })?;
        if let Some(name) = name {
            self.log("info", format!("the program says that it is {name}"));
        }
        let device = self.cx.spec.device;
        let device = match device.kind.name() {
            "cpu" => "cpu".to_owned(),
            kind => format!("{kind}:{}", device.index),
        };
        let seed = self.process.training_seed.and_then(|seed| u64::try_from(seed).ok());
        let inputs = self.inputs.iter().map(|(name, path)| (*name, path.as_path())).collect();
        self.program.send(&HostMessage::Start {
            version: VERSION,
            config: &self.process.config,
            inputs: &inputs,
            output: self.output,
            device: &device,
            seed: seed.unwrap_or(self.cx.spec.seed),
            resume: None,
        });
        self.cx.phase("training");
        Ok(())
    }

    fn report_progress(&mut self, step: u64, total: u64, loss: Option<f64>) {
        let now = Instant::now();
        let (began_at, first) = *self.first_progress.get_or_insert((now, step));
        let steps = step.saturating_sub(first);
        let seconds = (steps > 0).then(|| (now - began_at).as_secs_f64() / steps as f64);
        let is_due = self.progress_sent_at.is_none_or(|at| now - at >= PROGRESS_INTERVAL);
        if !is_due && step < total {
            return;
        }
        self.progress_sent_at = Some(now);
        self.cx.events.emit(ChildEvent::Progress {
            done: step,
            total,
            seconds_per_step: seconds,
        });
        if let Some(loss) = loss {
            self.cx.events.emit(ChildEvent::Metrics {
                step,
                values: BTreeMap::from([("loss/loss".to_owned(), loss)]),
            });
        }
    }

    fn announce(&mut self, name: &str, number: u64) -> Result<(), Outcome> {
        let max = self.cx.spec.file_size_limit.unwrap_or(MAX_FILE_BYTES);
        let path = artifact::check(self.output, name, max).map_err(|why| self.wrong(&why))?;
        self.cx.events.emit(ChildEvent::Artifact {
            kind: "file".to_owned(),
            name: artifact_name(self.root, &path),
            path,
            step: None,
            index: Some(number),
        });
        Ok(())
    }

    fn log(&mut self, level: &str, message: String) {
        if self.log_limit.allows(self.started_at.elapsed()) {
            self.cx.log(level, message);
        }
    }

    fn forward_errors(&mut self) {
        while let Ok(line) = self.program.errors.try_recv() {
            self.log("info", line);
        }
    }

    /// Forwards standard error to its end, if the program has exited. Processes that it started may keep it open.
    fn forward_last_errors(&mut self) {
        let until = Instant::now() + DRAIN_TIMEOUT;
        while matches!(self.program.child.try_wait(), Ok(Some(_))) {
            let left = until.saturating_duration_since(Instant::now());
            match self.program.errors.recv_timeout(left) {
                Ok(line) => self.log("info", line),
                Err(_) => return,
            }
        }
        self.forward_errors();
    }

    /// Checks how long the program has been silent, or has been ending.
    ///
    /// # Errors
    /// The outcome of a program that hangs.
    fn check_deadlines(&mut self, ending: Option<Ending>) -> Result<Option<Outcome>, Outcome> {
        let now = Instant::now();
        let silence = self.allowed.silence;
        let seconds = |time: Duration| format!("{} s", time.as_secs_f64().ceil());
        match ending {
            Some(Ending::Done(until)) if now > until => {
                let why = format!("sent `done`, but did not exit within {}", seconds(EXIT_TIMEOUT));
                Err(self.failure(FailureCause::Job, &why))
            }
            Some(Ending::Stopped(until)) if now > until => {
                let name = &self.allowed.name;
                let message = format!(
                    "the extension `{name}` did not end within {} of `stop`: it is killed",
                    seconds(STOP_TIMEOUT)
                );
                self.cx.log("warn", message);
                Ok(Some(Outcome::stopped()))
            }
            Some(_) => Ok(None),
            None => {
                let (limit, why) = match self.session.has_hello() {
                    true => (silence, "sent no message for"),
                    false => (silence.min(HELLO_TIMEOUT), "did not send `hello` within"),
                };
                if now - self.heard_at <= limit {
                    return Ok(None);
                }
                let why = format!("hangs: it {why} {}{}", seconds(limit), self.at_step());
                Err(self.failure(FailureCause::Job, &why))
            }
        }
    }

    /// The outcome of a program that has exited.
    fn conclude(&self, status: ExitStatus, ending: Option<Ending>) -> Result<Outcome, Outcome> {
        let how = match (status.signal(), status.code()) {
            (Some(signal), _) => format!("was killed by signal {signal}{}", signal_name(signal)),
            (None, code) => format!("exited with code {}", code.unwrap_or(-1)),
        };
        match ending {
            Some(Ending::Done(_)) if status.success() => Ok(Outcome::Completed),
            Some(Ending::Stopped(_)) if status.success() => Ok(Outcome::stopped()),
            Some(Ending::Done(_)) => Err(self.failure(FailureCause::BadInput, &format!("sent `done`, but then {how}"))),
            _ => {
                // SIGKILL comes from outside: from people, or from the kernel when memory runs out.
                let cause = match status.signal() {
                    Some(9) => FailureCause::Job,
                    _ => FailureCause::BadInput,
                };
                Err(self.failure(cause, &format!("{how}{}, before it sent `done`", self.at_step())))
            }
        }
    }

    fn at_step(&self) -> String {
        let progress = self.session.progress();
        progress.map_or(String::new(), |(step, total)| format!(" at step {step} of {total}"))
    }

    /// The failure of a program that broke a rule of the protocol.
    fn wrong(&self, why: &str) -> Outcome {
        self.failure(FailureCause::BadInput, why)
    }

    fn failure(&self, cause: FailureCause, why: &str) -> Outcome {
        // Its last words may still be in the pipe.
        std::thread::sleep(CHECK_INTERVAL);
        Outcome::Failed {
            cause,
            message: format!(
                "the extension `{}` {why}{}",
                self.allowed.name,
                self.program.error_tail()
            ),
        }
    }
}

/// The name of a signal, for messages.
fn signal_name(signal: i32) -> &'static str {
    match signal {
        4 => " (illegal instruction)",
        6 => " (abort)",
        9 => " (SIGKILL)",
        11 => " (segmentation fault)",
        15 => " (SIGTERM)",
        _ => "",
    }
}

/// Limits how many log lines are forwarded, and counts the others.
#[derive(Debug)]
struct LogLimit {
    allowance: f64,
    counted_at: Duration,
    left_out: u64,
}

impl LogLimit {
    fn new() -> Self {
        Self {
            allowance: LOG_LINES,
            counted_at: Duration::ZERO,
            left_out: 0,
        }
    }

    fn allows(&mut self, now: Duration) -> bool {
        let passed = now.saturating_sub(self.counted_at).as_secs_f64();
        self.counted_at = now;
        self.allowance = (self.allowance + passed * LOG_LINES_PER_SECOND).min(LOG_LINES);
        if self.allowance < 1.0 {
            self.left_out += 1;
            return false;
        }
        self.allowance -= 1.0;
        true
    }

    /// The message about lines that were left out, if there were any.
    fn take_left_out(&mut self) -> Option<String> {
        let count = std::mem::take(&mut self.left_out);
        (count > 0).then(|| format!("{count} lines of the extension were left out of the log: it wrote too many"))
    }
}
