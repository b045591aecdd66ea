//! The error type of the command line: a message, hints about what to do, and an exit code.

use crate::exit::Exit;
pub use aitk_common::error_chain::error_chain as chain;
use std::io;

/// The error of a command.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// The exit code of the program.
    pub exit: Exit,
    /// What failed, where, and what was expected. One sentence without a full stop, or several lines for a list.
    pub message: String,
    /// What the user can do about it, one line each.
    pub hints: Vec<String>,
}

/// The result of a command: an exit code, or an error.
pub type CommandResult = Result<Exit, Failure>;

impl Failure {
    /// Creates a failure with this exit code and message.
    #[must_use]
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self {
            exit,
            message: message.into(),
            hints: Vec::new(),
        }
    }

    /// Creates a failure of the command itself (code 1).
    #[must_use]
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(Exit::Failed, message)
    }

    /// Creates a failure for a wrong command line (code 2).
    #[must_use]
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(Exit::Usage, message)
    }

    /// Creates a failure for something that does not exist (code 3).
    #[must_use]
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(Exit::NotFound, message)
    }

    /// Adds a hint.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hints.push(hint.into());
        self
    }

    /// Creates a failure for an IO error of a file: `cannot DOING PATH: …` (code 3 if it does not exist, else 1).
    #[must_use]
    pub fn file(doing: &str, path: &std::path::Path, error: &io::Error) -> Self {
        let exit = match error.kind() {
            io::ErrorKind::NotFound => Exit::NotFound,
            _ => Exit::Failed,
        };
        let failure = Self::new(exit, format!("cannot {doing} {}: {error}", path.display()));
        match error.kind() {
            io::ErrorKind::StorageFull => failure.hint("the disk is full: free some space, or choose another folder"),
            io::ErrorKind::PermissionDenied => failure.hint("check who owns the file and its folder"),
            _ => failure,
        }
    }

    /// Creates a failure for an IO error of standard output. A closed pipe gives an empty message, which is not shown.
    #[must_use]
    pub fn output(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::new(Exit::BrokenPipe, String::new()),
            _ => Self::failed(format!("cannot write the output: {error}")),
        }
    }

    /// Formats the failure as `error: …` and a `hint: …` line for each hint. Empty for a closed pipe.
    #[must_use]
    pub fn render(&self, color: bool) -> String {
        if self.message.is_empty() {
            return String::new();
        }
        let (red, cyan, end) = if color {
            ("\x1b[1;31m", "\x1b[36m", "\x1b[0m")
        } else {
            ("", "", "")
        };
        let mut text = format!("{red}error:{end} {}\n", self.message);
        for hint in &self.hints {
            text.push_str(&format!("{cyan}hint:{end} {hint}\n"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_render_with_hints_and_a_closed_pipe_is_silent() {
        let failure = Failure::not_found("no job 'x'").hint("`aitk ps -a` lists them");
        assert_eq!(
            failure.render(false),
            "error: no job 'x'\nhint: `aitk ps -a` lists them\n"
        );
        assert!(failure.render(true).contains("\x1b[1;31merror:\x1b[0m"));
        let closed = Failure::output(&io::ErrorKind::BrokenPipe.into());
        assert_eq!((closed.exit, closed.render(false).as_str()), (Exit::BrokenPipe, ""));
        let missing = Failure::file("read", std::path::Path::new("a.yaml"), &io::ErrorKind::NotFound.into());
        assert_eq!(missing.exit, Exit::NotFound);
    }
}
