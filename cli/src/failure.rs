//! The one error type of the command line: a sentence, what to do about it, and an exit code.

use crate::exit::Exit;
use std::io;

/// Why a command could not do what it was asked to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// The code the program ends with.
    pub exit: Exit,
    /// What, where, expected what. One sentence without a full stop, or several lines for a list.
    pub message: String,
    /// What to do about it, one line each.
    pub hints: Vec<String>,
}

/// What commands return: how the program ends, or why it could not go on.
pub type CommandResult = Result<Exit, Failure>;

impl Failure {
    /// A failure with this code and sentence.
    #[must_use]
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self {
            exit,
            message: message.into(),
            hints: Vec::new(),
        }
    }

    /// The command failed (code 1).
    #[must_use]
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(Exit::Failed, message)
    }

    /// The command line is wrong (code 2).
    #[must_use]
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(Exit::Usage, message)
    }

    /// Something named does not exist (code 3).
    #[must_use]
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(Exit::NotFound, message)
    }

    /// Adds a line that says what to do.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hints.push(hint.into());
        self
    }

    /// A file could not be read or written.
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

    /// Standard output could not be written. A closed pipe is no error to talk about.
    #[must_use]
    pub fn output(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::new(Exit::BrokenPipe, String::new()),
            _ => Self::failed(format!("cannot write the output: {error}")),
        }
    }

    /// How it is shown: `error: …` and a `hint: …` line for each thing to do. Empty for a closed pipe.
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

/// An error and what caused it, as one sentence.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut inner = error.source();
    while let Some(cause) = inner {
        let cause_text = cause.to_string();
        // Some errors repeat their cause in their own text.
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        inner = cause.source();
    }
    text
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
