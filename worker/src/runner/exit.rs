//! Derives the outcome of an attempt from the exit of its child process.

use aitk_common::attempt::{FailureCause, Outcome};
use nix::sys::signal::Signal;
use std::collections::VecDeque;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// The number of lines of standard error that are kept for the message about a crash.
const TAIL_LINES: usize = 12;

/// Messages that Rust's allocator prints before it aborts, and the standard library when a thread cannot get its
/// signal stack.
const REFUSED_MEMORY_MESSAGES: [&str; 2] = ["memory allocation of", "failed to allocate an alternative stack"];

/// The last lines of a child's standard error.
#[derive(Debug, Default, Clone)]
pub(super) struct StderrTail {
    lines: VecDeque<String>,
    /// Whether any line said that memory was refused; a backtrace may have pushed that line out.
    refused_memory: bool,
}

impl StderrTail {
    /// Adds a line, and drops the oldest one if there are too many.
    pub(super) fn push(&mut self, line: &str) {
        self.refused_memory |= REFUSED_MEMORY_MESSAGES.iter().any(|message| line.contains(message));
        if self.lines.len() == TAIL_LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(line.to_owned());
    }

    fn text(&self) -> String {
        self.lines.iter().map(String::as_str).collect::<Vec<_>>().join("\n")
    }
}

/// What we did to the child before it exited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StopAction {
    /// Nothing.
    Nothing,
    /// It was asked to save and stop, and was not killed.
    Stop,
    /// It was killed: the steps since its last checkpoint are lost.
    Kill,
}

/// Everything that is known about the exit of a child.
#[derive(Debug)]
pub(super) struct ChildExit {
    /// The exit status of the process.
    pub status: ExitStatus,
    /// The outcome that the child reported, if it did.
    pub finished: Option<Outcome>,
    /// What we did to stop it.
    pub stop_action: StopAction,
    /// Why the watchdog stopped it, if it did.
    pub hang_reason: Option<String>,
    /// Whether the machine ran out of memory.
    pub memory_ran_out: bool,
    /// The last lines of its standard error.
    pub tail: StderrTail,
    /// The causes of a hang and of a crash.
    pub causes: FailureCauses,
}

/// The causes of failures of a child that hangs or crashes. They decide whether the failure counts against the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailureCauses {
    /// It makes no progress.
    pub hang: FailureCause,
    /// It is killed by a signal, or exits with an unknown code.
    pub crash: FailureCause,
}

impl Default for FailureCauses {
    /// Those of the engine, whose hangs and crashes may be the device's.
    fn default() -> Self {
        Self {
            hang: FailureCause::NoProgress,
            crash: FailureCause::Machine,
        }
    }
}

impl FailureCauses {
    /// The causes for a job. `has_extension`: it runs a program of its own, which can make its attempt's process hang and
    /// crash. `has_short_timeout`: it set a `progress_timeout` below that of the worker.
    pub(crate) fn of_job(has_extension: bool, has_short_timeout: bool) -> Self {
        let device = Self::default();
        Self {
            hang: match has_extension || has_short_timeout {
                true => FailureCause::Job,
                false => device.hang,
            },
            crash: match has_extension {
                true => FailureCause::Job,
                false => device.crash,
            },
        }
    }
}

/// Decides the outcome of the attempt. An outcome that the child reported counts; a child without one crashed.
#[must_use]
pub(super) fn outcome(exit: ChildExit) -> Outcome {
    if let Some(reason) = exit.hang_reason
        && matches!(exit.finished, None | Some(Outcome::Stopped { .. }))
    {
        let how = match exit.finished {
            Some(_) => "it stopped when it was asked to",
            None => "it was killed",
        };
        return Outcome::Failed {
            cause: exit.causes.hang,
            message: format!("{reason}; {how}"),
        };
    }
    if let Some(finished) = exit.finished {
        return finished;
    }
    if exit.stop_action == StopAction::Kill {
        return Outcome::stopped();
    }
    let signal = exit.status.signal();
    let is_killed = signal == Some(Signal::SIGKILL as i32);
    // An abort has no other sign of a refused allocation.
    let is_refused_allocation = signal == Some(Signal::SIGABRT as i32) && exit.tail.refused_memory;
    let (cause, what) = if (is_killed && exit.memory_ran_out) || is_refused_allocation {
        let what = match is_refused_allocation {
            true => "the attempt asked for more memory than it may use, and was ended",
            false => "the machine ran out of memory, and the attempt was ended",
        };
        (FailureCause::OutOfMemory, what.to_owned())
    } else if let Some(signal) = signal {
        let name = Signal::try_from(signal).map_or_else(|_| format!("signal {signal}"), |name| name.to_string());
        (exit.causes.crash, format!("the attempt's process was ended by {name}"))
    } else {
        match exit.status.code().unwrap_or(-1) {
            101 => (
                FailureCause::Internal,
                "the attempt's process panicked; please report this".to_owned(),
            ),
            0 => (
                FailureCause::Internal,
                "the attempt's process ended without reporting an outcome".to_owned(),
            ),
            code => (
                exit.causes.crash,
                format!("the attempt's process ended with exit code {code}"),
            ),
        }
    };
    let tail = exit.tail.text();
    // The allocator's message says the same.
    let message = if tail.is_empty() || is_refused_allocation {
        what
    } else {
        // As one line, for lists and logs.
        let lines: Vec<&str> = tail.lines().filter(|line| !line.trim().is_empty()).collect();
        format!("{what}; its last output: {}", lines.join(" | "))
    };
    Outcome::Failed { cause, message }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cause(raw_status: i32, memory_ran_out: bool, last: &str) -> (FailureCause, String) {
        let mut tail = StderrTail::default();
        tail.push(last);
        let status = ExitStatus::from_raw(raw_status);
        match outcome(ChildExit {
            status,
            finished: None,
            stop_action: StopAction::Nothing,
            hang_reason: None,
            memory_ran_out,
            tail,
            causes: FailureCauses::default(),
        }) {
            Outcome::Failed { cause, message } => (cause, message),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_cause_follows_signal_status_and_memory() {
        assert_eq!(cause(9, true, "").0, FailureCause::OutOfMemory);
        assert_eq!(cause(9, false, "").0, FailureCause::Machine);
        assert_eq!(cause(11, true, "").0, FailureCause::Machine);
        assert_eq!(
            cause(6, false, "memory allocation of 8589934592 bytes failed").0,
            FailureCause::OutOfMemory
        );
        assert_eq!(
            cause(
                6,
                false,
                "failed to allocate an alternative stack: Cannot allocate memory (os error 12)"
            )
            .0,
            FailureCause::OutOfMemory
        );
        assert_eq!(cause(6, false, "assertion").0, FailureCause::Machine);
        assert_eq!(cause(101 << 8, false, "panicked at x.rs").0, FailureCause::Internal);
        assert_eq!(cause(0, false, "").0, FailureCause::Internal);
        let (cause, message) = cause(7 << 8, false, "driver gone");
        assert_eq!(cause, FailureCause::Machine);
        assert!(
            message.contains("exit code 7") && message.contains("driver gone"),
            "{message}"
        );
    }

    #[test]
    fn a_reported_outcome_counts_and_a_killed_child_counts_as_stopped() {
        let exit = |finished, stop_action| ChildExit {
            status: ExitStatus::from_raw(9),
            finished,
            stop_action,
            hang_reason: None,
            memory_ran_out: true,
            tail: StderrTail::default(),
            causes: FailureCauses::default(),
        };
        assert_eq!(
            outcome(exit(Some(Outcome::Completed), StopAction::Kill)),
            Outcome::Completed
        );
        assert_eq!(outcome(exit(None, StopAction::Kill)), Outcome::stopped());
        for (finished, how) in [(None, "killed"), (Some(Outcome::stopped()), "asked to")] {
            let ended = outcome(ChildExit {
                hang_reason: Some("no progress for 10 min".into()),
                ..exit(finished, StopAction::Nothing)
            });
            assert!(
                matches!(&ended, Outcome::Failed { cause: FailureCause::NoProgress, message } if message.contains(how)),
                "{ended:?}"
            );
        }
    }

    #[test]
    fn hangs_and_crashes_of_a_jobs_own_program_are_failures_of_the_job() {
        let cause = |raw_status: i32, hang_reason: Option<&str>, has_extension, has_short_timeout| {
            let exit = ChildExit {
                status: ExitStatus::from_raw(raw_status),
                finished: None,
                stop_action: StopAction::Nothing,
                hang_reason: hang_reason.map(str::to_owned),
                memory_ran_out: false,
                tail: StderrTail::default(),
                causes: FailureCauses::of_job(has_extension, has_short_timeout),
            };
            match outcome(exit) {
                Outcome::Failed { cause, .. } => cause,
                other => panic!("{other:?}"),
            }
        };
        let hang = Some("no progress for 10 min");
        // A program can stop its attempt's process, and end it.
        for (raw_status, reason) in [(9, hang), (9, None), (11, None), (7 << 8, None)] {
            assert_eq!(cause(raw_status, reason, true, false), FailureCause::Job);
        }
        assert_eq!(cause(9, hang, false, true), FailureCause::Job);
        assert_eq!(cause(11, None, false, true), FailureCause::Machine);
        assert_eq!(cause(9, hang, false, false), FailureCause::NoProgress);
    }

    #[test]
    fn the_kept_lines_of_standard_error_are_bounded() {
        let mut tail = StderrTail::default();
        for line in 0..1000 {
            tail.push(&line.to_string());
        }
        assert_eq!(tail.lines.len(), TAIL_LINES);
        assert!(tail.text().contains("999"));
    }
}
