//! Exit codes. The help and the documentation are generated from the table here.

use std::fmt::Write as _;
use std::process::ExitCode;

/// An exit code of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Exit {
    /// Success. For a command that follows a job: the job completed.
    Ok = 0,
    /// The command failed. For a command that follows a job: the job failed.
    Failed = 1,
    /// The command line is wrong.
    Usage = 2,
    /// The config file, job or artifact does not exist.
    NotFound = 3,
    /// The token is missing or wrong, or lacks the permission.
    Unauthorised = 4,
    /// No coordinator can be reached, or it is too busy to answer.
    Unreachable = 5,
    /// The operation is not possible in the current state.
    Conflict = 6,
    /// No machine can run the job.
    NothingFits = 7,
    /// The time of `--timeout` has passed.
    TimedOut = 124,
    /// aitk itself failed, not the job.
    Internal = 125,
    /// Ctrl-C.
    Interrupted = 130,
    /// A second Ctrl-C: killed without saving.
    Killed = 137,
    /// The reader of the output closed the pipe.
    BrokenPipe = 141,
    /// SIGTERM, or the job was stopped with `aitk stop`.
    Terminated = 143,
}

impl Exit {
    /// Every code in ascending order, with its meaning for help and documentation.
    pub const ALL: [(Self, &'static str); 14] = [
        (Self::Ok, "success; the followed job completed"),
        (Self::Failed, "the command failed; the followed job failed"),
        (Self::Usage, "the command line is wrong"),
        (Self::NotFound, "no such config file, job or artifact"),
        (
            Self::Unauthorised,
            "the token is missing or wrong, or lacks the permission",
        ),
        (
            Self::Unreachable,
            "no coordinator can be reached, or it is too busy to answer",
        ),
        (
            Self::Conflict,
            "not possible in the current state, or another protocol version",
        ),
        (Self::NothingFits, "no machine can run the job"),
        (Self::TimedOut, "the time of --timeout has passed"),
        (
            Self::Internal,
            "aitk failed, not the job (worker lost, storage unreachable)",
        ),
        (
            Self::Interrupted,
            "Ctrl-C: detached from a submitted job; `run` saved and stopped",
        ),
        (Self::Killed, "`run`: killed by a second Ctrl-C, without saving"),
        (Self::BrokenPipe, "the reader of the output closed the pipe"),
        (Self::Terminated, "the followed job was stopped; or SIGTERM"),
    ];

    /// Returns the number.
    #[must_use]
    pub fn code(self) -> u8 {
        self as u8
    }

    /// Returns the meaning as a short text.
    #[must_use]
    pub fn meaning(self) -> &'static str {
        Self::ALL
            .iter()
            .find(|(exit, _)| *exit == self)
            .map_or("", |(_, text)| text)
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

/// Returns the table for `aitk --help`.
#[must_use]
pub fn help_table() -> String {
    let mut text = String::from("Exit codes:");
    for (exit, meaning) in Exit::ALL {
        let _ = write!(text, "\n  {:>3}  {meaning}", exit.code());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_listed_once_and_fits_a_narrow_terminal() {
        let mut codes: Vec<u8> = Exit::ALL.iter().map(|(exit, _)| exit.code()).collect();
        codes.dedup();
        assert_eq!(codes, [0, 1, 2, 3, 4, 5, 6, 7, 124, 125, 130, 137, 141, 143]);
        for line in help_table().lines() {
            assert!(line.len() <= 80, "{line}");
        }
        assert_eq!(Exit::TimedOut.meaning(), "the time of --timeout has passed");
    }
}
