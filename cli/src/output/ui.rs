//! Writes to standard output, standard error and a log file, and adapts to the terminal if there is one.

use super::Table;
use super::format::{printable_lines, wrap, wrap_sentences};
use super::json::{json_line, json_text};
use crate::failure::Failure;
use indicatif::ProgressBar;
use serde::Serialize;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// The format in which a command prints its result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// For people: tables on a terminal, tab-separated text in a pipe.
    #[default]
    Human,
    /// One JSON document, or one line per event for streams.
    Json,
    /// Ids only.
    Quiet,
}

impl Format {
    /// Returns the format for the flags `--json` and `--quiet`.
    #[must_use]
    pub fn from_flags(json: bool, quiet: bool) -> Self {
        match (json, quiet) {
            (true, _) => Self::Json,
            (_, true) => Self::Quiet,
            _ => Self::Human,
        }
    }
}

/// The output of a command, with or without a terminal.
pub struct Ui {
    pub(super) width: Option<usize>,
    /// Columns of the terminals of standard output and standard error; `None` if it is not a terminal.
    out_width: Option<usize>,
    pub(super) err_width: Option<usize>,
    color: bool,
    color_err: bool,
    pub(super) bars: bool,
    pub(super) plain_progress: bool,
    pub(super) verbose: bool,
    pub(super) started: Instant,
    pub(super) bar: Mutex<Option<ProgressBar>>,
    tee: Option<Mutex<File>>,
    /// Writing to the log file failed, and a warning was printed.
    tee_failed: AtomicBool,
}

impl Ui {
    /// Creates the output from standard output, standard error, `NO_COLOR`, `TERM` and `COLUMNS`.
    #[must_use]
    pub fn from_env(env: &dyn Fn(&str) -> Option<String>, no_color: bool, no_progress: bool) -> Self {
        let dumb = env("TERM").is_some_and(|term| term == "dumb");
        let plain = no_color || dumb || env("NO_COLOR").is_some_and(|value| !value.is_empty());
        let (out, err) = (io::stdout().is_terminal(), io::stderr().is_terminal());
        // COLUMNS is set explicitly, so it applies to a pipe too.
        let columns = env("COLUMNS")
            .and_then(|text| text.parse().ok())
            .filter(|&width: &usize| width > 0);
        Self {
            width: columns.or_else(|| out.then(|| terminal_width(io::stdout()).unwrap_or(80))),
            // Text is never wrapped in a pipe.
            out_width: out.then(|| columns.or_else(|| terminal_width(io::stdout())).unwrap_or(80)),
            err_width: err.then(|| columns.or_else(|| terminal_width(io::stderr())).unwrap_or(80)),
            color: out && !plain,
            color_err: err && !plain,
            bars: err && !dumb && !no_progress,
            plain_progress: !no_progress,
            verbose: false,
            started: Instant::now(),
            bar: Mutex::new(None),
            tee: None,
            tee_failed: AtomicBool::new(false),
        }
    }

    /// Creates an output without terminal, colours and progress, for tests and programs.
    #[must_use]
    pub fn silent() -> Self {
        Self {
            width: None,
            out_width: None,
            err_width: None,
            color: false,
            color_err: false,
            bars: false,
            plain_progress: false,
            verbose: false,
            started: Instant::now(),
            bar: Mutex::new(None),
            tee: None,
            tee_failed: AtomicBool::new(false),
        }
    }

    /// Also appends everything that is shown, without bars and colours, to this file.
    ///
    /// # Errors
    /// When the file cannot be opened for appending.
    pub fn tee(mut self, path: &Path) -> Result<Self, Failure> {
        let open = File::options().create(true).append(true).open(path);
        let file = open.map_err(|error| Failure::file("open the log file", path, &error))?;
        self.tee = Some(Mutex::new(file));
        Ok(self)
    }

    /// Sets verbose output: `-v`.
    #[must_use]
    pub fn verbose(mut self, verbose: bool) -> Self {
        self.verbose = verbose;
        self
    }

    /// Whether data on standard output is coloured.
    #[must_use]
    pub fn color(&self) -> bool {
        self.color
    }

    /// Whether messages on standard error are coloured.
    #[must_use]
    pub fn color_err(&self) -> bool {
        self.color_err
    }

    /// Whether progress is shown as a bar.
    #[must_use]
    pub fn has_bars(&self) -> bool {
        self.bars
    }

    /// Returns the width to lay output out for; `None` in a pipe without `COLUMNS`.
    #[must_use]
    pub fn width(&self) -> Option<usize> {
        self.width
    }

    /// Prints one line of data to standard output.
    ///
    /// # Errors
    /// When standard output cannot be written; a closed pipe is [`crate::exit::Exit::BrokenPipe`].
    pub fn data(&self, line: &str) -> Result<(), Failure> {
        self.write_to_log_file(line);
        self.with_bar_suspended(|| {
            let mut out = io::stdout().lock();
            writeln!(out, "{line}").and_then(|()| out.flush())
        })
        .map_err(|error| Failure::output(&error))
    }

    /// Prints a sentence to standard output: wrapped on a terminal, one line in a pipe.
    ///
    /// # Errors
    /// As [`Self::data`].
    pub fn text(&self, line: &str) -> Result<(), Failure> {
        match self.out_width {
            // With a log file the line is not wrapped, because the file gets the same text.
            Some(width) if self.tee.is_none() => self.data(&wrap(line, width)),
            _ => self.data(line),
        }
    }

    /// Prints several lines of data.
    ///
    /// # Errors
    /// As [`Self::data`].
    pub fn data_lines<S: AsRef<str>>(&self, lines: impl IntoIterator<Item = S>) -> Result<(), Failure> {
        let mut text = String::new();
        for line in lines {
            text.push_str(line.as_ref());
            text.push('\n');
        }
        match text.strip_suffix('\n') {
            Some(text) => self.data(text),
            None => Ok(()),
        }
    }

    /// Prints a table: aligned on a terminal, tab-separated in a pipe.
    ///
    /// # Errors
    /// As [`Self::data`].
    pub fn table(&self, table: &Table) -> Result<(), Failure> {
        match self.width {
            Some(width) => {
                let mut lines = table.aligned(width);
                if self.color
                    && let Some(titles) = lines.first_mut()
                {
                    *titles = format!("\x1b[1m{titles}\x1b[0m");
                }
                self.data_lines(lines)
            }
            None => self.data_lines(table.tabbed()),
        }
    }

    /// Prints one indented JSON document with `schema_version`.
    ///
    /// # Errors
    /// As [`Self::data`].
    pub fn json(&self, value: &impl Serialize) -> Result<(), Failure> {
        self.data(&json_text(value)?)
    }

    /// Prints one JSON line of a stream, with `schema_version`.
    ///
    /// # Errors
    /// As [`Self::data`].
    pub fn json_line(&self, value: &impl Serialize) -> Result<(), Failure> {
        self.data(&json_line(value)?)
    }

    /// Prints a notice to standard error. A line that begins with two spaces is not wrapped, because it is a command to
    /// copy.
    pub fn notice(&self, text: &str) {
        self.write_message(text, text, wrap_sentences);
    }

    /// Prints `warning: …` to standard error.
    pub fn warn(&self, text: &str) {
        let text = printable_lines(text);
        let plain = format!("warning: {text}");
        if self.color_err {
            self.print_message(&format!("\x1b[1;33mwarning:\x1b[0m {text}"), &plain);
        } else {
            self.print_message(&plain, &plain);
        }
    }

    /// Prints `hint: …` to standard error.
    pub fn hint(&self, text: &str) {
        let text = printable_lines(text);
        let plain = format!("hint: {text}");
        if self.color_err {
            self.print_message(&format!("\x1b[36mhint:\x1b[0m {text}"), &plain);
        } else {
            self.print_message(&plain, &plain);
        }
    }

    /// Prints an error and its hints to standard error. They may quote names of any origin, such as of tensors in a downloaded file.
    pub fn failure(&self, failure: &Failure) {
        let failure = Failure {
            exit: failure.exit,
            message: printable_lines(&failure.message),
            hints: failure.hints.iter().map(|hint| printable_lines(hint)).collect(),
        };
        let plain = failure.render(false);
        if !plain.is_empty() {
            self.print_message(failure.render(self.color_err).trim_end(), plain.trim_end());
        }
    }

    /// Prints an error of the command line parser.
    pub fn usage(&self, error: &clap::Error) {
        let text = error.render();
        let shown = if self.color_err {
            text.ansi().to_string()
        } else {
            text.to_string()
        };
        self.print_message(shown.trim_end(), text.to_string().trim_end());
    }

    fn print_message(&self, shown: &str, plain: &str) {
        self.write_message(shown, plain, wrap);
    }

    fn write_message(&self, shown: &str, plain: &str, wrap: fn(&str, usize) -> String) {
        self.write_to_log_file(plain);
        let wrapped = self.err_width.map(|width| wrap(shown, width));
        let shown = wrapped.as_deref().unwrap_or(shown);
        // An error of standard error cannot be reported anywhere.
        let _ = self.with_bar_suspended(|| writeln!(io::stderr().lock(), "{shown}"));
    }

    /// Writes a line to the log file only.
    pub fn write_to_log_file(&self, line: &str) {
        if let Some(tee) = &self.tee {
            let mut file = tee.lock().unwrap_or_else(PoisonError::into_inner);
            let written = writeln!(file, "{line}");
            drop(file);
            // A full disk must not stop the job.
            if let Err(error) = written
                && !self.tee_failed.swap(true, Ordering::Relaxed)
            {
                self.warn(&format!(
                    "the log file cannot be written; lines are missing from here on: {error}"
                ));
            }
        }
    }

    fn with_bar_suspended<T>(&self, write: impl FnOnce() -> T) -> T {
        let bar = self.bar.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }

    /// Clears the screen, for `--watch`. Does nothing in a pipe.
    ///
    /// # Errors
    /// As [`Self::data`].
    pub fn clear_screen(&self) -> Result<(), Failure> {
        if !io::stdout().is_terminal() {
            return Ok(());
        }
        let mut out = io::stdout().lock();
        let cleared = write!(out, "\x1b[H\x1b[2J").and_then(|()| out.flush());
        cleared.map_err(|error| Failure::output(&error))
    }
}

/// Returns the columns of the terminal of standard output or standard error.
fn terminal_width(stream: impl std::os::fd::AsFd) -> Option<usize> {
    terminal_size::terminal_size_of(stream)
        .map(|(width, _)| usize::from(width.0))
        .filter(|&width| width > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_is_honoured_in_a_pipe() {
        let env = |name: &str| (name == "COLUMNS").then(|| "57".to_owned());
        assert_eq!(Ui::from_env(&env, false, false).width(), Some(57));
        let env = |name: &str| (name == "COLUMNS").then(|| "zero".to_owned());
        assert_ne!(Ui::from_env(&env, false, false).width(), Some(0));
    }

    #[test]
    fn a_log_file_gets_what_is_shown() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.log");
        for _ in 0..2 {
            let ui = Ui::silent().tee(&path).unwrap();
            ui.warn("careful");
        }
        assert_eq!(
            std::fs::read_to_string(&path).unwrap(),
            "warning: careful\nwarning: careful\n"
        );
    }

    #[test]
    fn errors_and_warnings_send_nothing_that_a_terminal_obeys() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.log");
        let ui = Ui::silent().tee(&path).unwrap();
        ui.failure(&Failure::failed("the layer `\x1b]0;x\x07` is unknown\nand\tmore").hint("see `\x1b[2J`"));
        ui.warn("\x1b[1A");
        ui.hint("\u{202e}");
        assert_eq!(
            std::fs::read_to_string(&path).unwrap(),
            "error: the layer `\u{fffd}]0;x\u{fffd}` is unknown\nand more\nhint: see `\u{fffd}[2J`\nwarning: \u{fffd}[1A\nhint: \u{fffd}\n"
        );
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_of_the_log_file_gives_one_warning() {
        let ui = Ui::silent().tee(Path::new("/dev/full")).unwrap();
        assert!(!ui.tee_failed.load(Ordering::Relaxed));
        ui.notice("a line");
        assert!(ui.tee_failed.load(Ordering::Relaxed));
        ui.notice("and on");
    }
}
