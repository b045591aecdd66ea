//! Exit codes: one table, from which the help, the documentation and the program all take theirs.

use std::fmt::Write as _;
use std::process::ExitCode;

/// How the program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Exit {
    /// It worked. For a command that follows a job: the job completed.
    Ok = 0,
    /// The command failed. For a command that follows a job: the job failed.
    Failed = 1,
    /// The command line is wrong.
    Usage = 2,
    /// A config file, job, or artifact that was named does not exist.
    NotFound = 3,
    /// The token is missing, wrong, or not allowed to do this.
    Unauthorised = 4,
    /// No coordinator answers.
    Unreachable = 5,
    /// Not possible in the state things are in.
    Conflict = 6,
    /// No machine can run this.
    NothingFits = 7,
    /// The time given with `--timeout` is over.
    TimedOut = 124,
    /// The machinery failed, not the job.
    Runner = 125,
    /// Ctrl-C.
    Interrupted = 130,
    /// A second Ctrl-C: killed without a save.
    Killed = 137,
    /// Whoever read our output went away.
    BrokenPipe = 141,
    /// SIGTERM, or the job was stopped with `aitk stop`.
    Terminated = 143,
}

impl Exit {
    /// Every code, in order, with its meaning for help and documentation.
    pub const ALL: [(Self, &'static str); 14] = [
        (Self::Ok, "it worked; a followed job completed"),
        (Self::Failed, "the command failed; a followed job failed"),
        (Self::Usage, "the command line is wrong"),
        (Self::NotFound, "no such config file, job or artifact"),
        (
            Self::Unauthorised,
            "the token is missing, wrong or not allowed to do this",
        ),
        (Self::Unreachable, "no coordinator answers"),
        (
            Self::Conflict,
            "not possible in the present state, or another protocol version",
        ),
        (Self::NothingFits, "no machine can run this"),
        (Self::TimedOut, "the time given with --timeout is over"),
        (
            Self::Runner,
            "the machinery failed, not the job (worker lost, storage unreachable)",
        ),
        (
            Self::Interrupted,
            "Ctrl-C: detached from a submitted job; `run` stopped after a save",
        ),
        (Self::Killed, "`run`: killed by a second Ctrl-C, without a save"),
        (Self::BrokenPipe, "whoever read the output went away"),
        (Self::Terminated, "a followed job was stopped; or SIGTERM"),
    ];

    /// The number.
    #[must_use]
    pub fn code(self) -> u8 {
        self as u8
    }

    /// What the number means, in a few words.
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

/// The table as it stands in `aitk --help`.
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
        assert_eq!(Exit::TimedOut.meaning(), "the time given with --timeout is over");
    }
}
