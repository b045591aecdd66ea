//! From how a child process ended to how its attempt ended.

use aitk_common::attempt::{FailureCause, Outcome};
use nix::sys::signal::Signal;
use std::collections::VecDeque;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// Lines of standard error that are kept for the message about a crash.
const TAIL_LINES: usize = 12;

/// What Rust's allocator prints before it aborts, and what the standard library does when a thread cannot get its
/// signal stack.
const REFUSED: [&str; 2] = ["memory allocation of", "failed to allocate an alternative stack"];

/// The last lines of a child's standard error.
#[derive(Debug, Default, Clone)]
pub(super) struct Tail {
    lines: VecDeque<String>,
    /// A line said that memory was refused; a backtrace may have pushed it out since.
    refused_memory: bool,
}

impl Tail {
    /// Adds a line, forgetting the oldest.
    pub(super) fn push(&mut self, line: &str) {
        self.refused_memory |= REFUSED.iter().any(|words| line.contains(words));
        if self.lines.len() == TAIL_LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(line.to_owned());
    }

    fn text(&self) -> String {
        self.lines.iter().map(String::as_str).collect::<Vec<_>>().join("\n")
    }
}

/// What we did to the child before it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    /// Nothing.
    Nothing,
    /// To save and stop; it did so in time, or ended otherwise.
    Stop,
    /// It did not stop in time and was killed: what it did since its last checkpoint is lost.
    Killed,
}

/// Everything known about the end of a child.
#[derive(Debug)]
pub(super) struct Ending {
    /// How the process ended.
    pub status: ExitStatus,
    /// The outcome it reported itself, if it did.
    pub finished: Option<Outcome>,
    /// What was asked of it.
    pub asked: Asked,
    /// Why it was ended, if it made no progress.
    pub hung: Option<String>,
    /// Whether the machine ran out of memory.
    pub memory_ran_out: bool,
    /// Its last words.
    pub tail: Tail,
}

/// Decides how the attempt ended. What the child said itself counts; a child that said nothing crashed.
#[must_use]
pub(super) fn outcome(ending: Ending) -> Outcome {
    if let Some(why) = ending.hung
        && matches!(ending.finished, None | Some(Outcome::Stopped { .. }))
    {
        let how = match ending.finished {
            Some(_) => "it stopped when it was told to",
            None => "it was killed",
        };
        return Outcome::Failed {
            cause: FailureCause::NoProgress,
            message: format!("{why}; {how}"),
        };
    }
    if let Some(finished) = ending.finished {
        return finished;
    }
    if ending.asked == Asked::Killed {
        return Outcome::stopped();
    }
    let signal = ending.status.signal();
    let killed = signal == Some(Signal::SIGKILL as i32);
    // There is no other sign of it.
    let allocation = signal == Some(Signal::SIGABRT as i32) && ending.tail.refused_memory;
    let (cause, what) = if (killed && ending.memory_ran_out) || allocation {
        let what = match allocation {
            true => "the attempt asked for more memory than it may have, and was ended",
            false => "the machine ran out of memory, and the attempt was ended",
        };
        (FailureCause::OutOfMemory, what.to_owned())
    } else if let Some(signal) = signal {
        let name = Signal::try_from(signal).map_or_else(|_| format!("signal {signal}"), |name| name.to_string());
        (
            FailureCause::Machine,
            format!("the attempt's process was ended by {name}"),
        )
    } else {
        match ending.status.code().unwrap_or(-1) {
            101 => (
                FailureCause::Internal,
                "the attempt's process panicked; please report this".to_owned(),
            ),
            0 => (
                FailureCause::Internal,
                "the attempt's process ended without saying how".to_owned(),
            ),
            code => (
                FailureCause::Machine,
                format!("the attempt's process ended with exit code {code}"),
            ),
        }
    };
    let tail = ending.tail.text();
    // The allocator's last words say the same.
    let message = if tail.is_empty() || allocation {
        what
    } else {
        // In one line, as lists and logs show it.
        let lines: Vec<&str> = tail.lines().filter(|line| !line.trim().is_empty()).collect();
        format!("{what}; its last words: {}", lines.join(" | "))
    };
    Outcome::Failed { cause, message }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cause(raw_status: i32, memory_ran_out: bool, last: &str) -> (FailureCause, String) {
        let mut tail = Tail::default();
        tail.push(last);
        let status = ExitStatus::from_raw(raw_status);
        match outcome(Ending {
            status,
            finished: None,
            asked: Asked::Nothing,
            hung: None,
            memory_ran_out,
            tail,
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
    fn what_the_child_said_counts_and_a_late_one_counts_as_stopped() {
        let ending = |finished, asked| Ending {
            status: ExitStatus::from_raw(9),
            finished,
            asked,
            hung: None,
            memory_ran_out: true,
            tail: Tail::default(),
        };
        assert_eq!(
            outcome(ending(Some(Outcome::Completed), Asked::Killed)),
            Outcome::Completed
        );
        assert_eq!(outcome(ending(None, Asked::Killed)), Outcome::stopped());
        for (finished, how) in [(None, "killed"), (Some(Outcome::stopped()), "told to")] {
            let ended = outcome(Ending {
                hung: Some("no progress for 10 min".into()),
                ..ending(finished, Asked::Nothing)
            });
            assert!(
                matches!(&ended, Outcome::Failed { cause: FailureCause::NoProgress, message } if message.contains(how)),
                "{ended:?}"
            );
        }
    }

    #[test]
    fn the_tail_is_bounded() {
        let mut tail = Tail::default();
        for line in 0..1000 {
            tail.push(&line.to_string());
        }
        assert_eq!(tail.lines.len(), TAIL_LINES);
        assert!(tail.text().contains("999"));
    }
}
