//! Writes to standard output, standard error and a log file, and adapts to the terminal if there is one.

use super::format::{wrap, wrap_sentences};
use super::progress::{JobProgress, LineThrottle};
use super::{SCHEMA_VERSION, Table};
use crate::failure::Failure;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Template for a job whose number of steps is known. The bar is short, so that loss, rate and remaining time fit into
/// 80 columns.
const JOB_TEMPLATE: &str = "{prefix} [{bar:8}] {pos}/{len}  {wide_msg}";
/// The same for a terminal of less than [`NARROW_COLUMNS`].
const NARROW_JOB_TEMPLATE: &str = "{prefix} {pos}/{len}  {wide_msg}";
const NARROW_COLUMNS: usize = 60;
/// Template for a job that waits, loads or caches.
const JOB_TEMPLATE_WITHOUT_STEPS: &str = "{prefix} {elapsed}";

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

/// Formats a JSON document with `schema_version`.
///
/// # Errors
/// When the value cannot be serialised.
pub fn json_text(value: &impl Serialize) -> Result<String, Failure> {
    let text = serde_json::to_string_pretty(&versioned(value)?);
    text.map_err(|error| Failure::failed(format!("cannot write JSON: {error}")))
}

/// The output of a command, with or without a terminal.
pub struct Ui {
    width: Option<usize>,
    /// Columns of the terminals of standard output and standard error; `None` if it is not a terminal.
    out_width: Option<usize>,
    err_width: Option<usize>,
    color: bool,
    color_err: bool,
    bars: bool,
    plain_progress: bool,
    verbose: bool,
    started: Instant,
    bar: Mutex<Option<ProgressBar>>,
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
        self.data(&versioned(value)?.to_string())
    }

    /// Prints a notice to standard error. A line that begins with two spaces is not wrapped, because it is a command to
    /// copy.
    pub fn notice(&self, text: &str) {
        self.write_message(text, text, wrap_sentences);
    }

    /// Prints `warning: …` to standard error.
    pub fn warn(&self, text: &str) {
        let plain = format!("warning: {text}");
        if self.color_err {
            self.print_message(&format!("\x1b[1;33mwarning:\x1b[0m {text}"), &plain);
        } else {
            self.print_message(&plain, &plain);
        }
    }

    /// Prints `hint: …` to standard error.
    pub fn hint(&self, text: &str) {
        let plain = format!("hint: {text}");
        if self.color_err {
            self.print_message(&format!("\x1b[36mhint:\x1b[0m {text}"), &plain);
        } else {
            self.print_message(&plain, &plain);
        }
    }

    /// Prints an error and its hints to standard error.
    pub fn failure(&self, failure: &Failure) {
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

    /// Shows progress in bytes: a bar on a terminal, otherwise a line every few seconds.
    #[must_use]
    pub fn byte_progress(&self, what: &str, total: u64) -> ProgressIndicator<'_> {
        let template = "{msg:<18!} [{bar:10}] {bytes:>10}/{total_bytes:<10} {binary_bytes_per_sec} {eta}";
        self.indicator(what, total, Unit::Bytes, template)
    }

    /// Shows progress in items.
    #[must_use]
    pub fn item_progress(&self, what: &str, total: u64) -> ProgressIndicator<'_> {
        self.indicator(what, total, Unit::Items, "{msg:<22!} [{bar:24}] {pos}/{len} {eta}")
    }

    /// Shows a spinner for an operation of unknown length.
    #[must_use]
    pub fn spinner(&self, what: &str) -> ProgressIndicator<'_> {
        let indicator = self.indicator(what, 0, Unit::Items, "{spinner} {msg} {elapsed}");
        if let Some(bar) = &indicator.bar {
            bar.enable_steady_tick(Duration::from_millis(120));
        }
        indicator
    }

    /// Shows lines that are replaced at each update.
    #[must_use]
    pub fn live_lines(&self) -> ProgressIndicator<'_> {
        self.indicator("", 0, Unit::Job, "{msg}")
    }

    /// Shows the progress of a job.
    #[must_use]
    pub fn job_progress(&self) -> ProgressIndicator<'_> {
        let indicator = self.indicator("", 0, Unit::Job, JOB_TEMPLATE_WITHOUT_STEPS);
        if let Some(bar) = &indicator.bar {
            bar.enable_steady_tick(Duration::from_millis(250));
        }
        indicator
    }

    fn indicator(&self, what: &str, total: u64, unit: Unit, template: &'static str) -> ProgressIndicator<'_> {
        let bar = self.bars.then(|| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(8));
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.set_message(what.to_owned());
            bar
        });
        *self.bar.lock().unwrap_or_else(PoisonError::into_inner) = bar.clone();
        let interval = Duration::from_secs(if unit == Unit::Job { 10 } else { 5 });
        let mut throttle = LineThrottle::new(interval);
        // A short operation prints no line before its end.
        let _ = unit == Unit::Job || throttle.is_due(self.started.elapsed(), false);
        ProgressIndicator {
            ui: self,
            what: what.to_owned(),
            unit,
            total,
            done: 0,
            bar,
            template,
            throttle,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Unit {
    Bytes,
    Items,
    Job,
}

/// The progress of an operation, shown until this is dropped.
pub struct ProgressIndicator<'a> {
    ui: &'a Ui,
    what: String,
    unit: Unit,
    total: u64,
    done: u64,
    bar: Option<ProgressBar>,
    template: &'static str,
    throttle: LineThrottle,
}

impl ProgressIndicator<'_> {
    /// Sets the amount done and the total.
    pub fn set(&mut self, done: u64, total: u64) {
        (self.done, self.total) = (done, total);
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(done);
        } else if self.ui.plain_progress && self.throttle.is_due(self.ui.started.elapsed(), false) {
            let text = match self.unit {
                Unit::Bytes => format!("{}/{}", super::format::size(done), super::format::size(total)),
                Unit::Items | Unit::Job => format!("{done}/{total}"),
            };
            self.ui.notice(&format!("{}  {text}", self.what));
        }
    }

    /// Adds to the amount done.
    pub fn add(&mut self, more: u64) {
        self.set(self.done.saturating_add(more), self.total);
    }

    /// Sets the text beside the bar.
    pub fn set_message(&mut self, what: &str) {
        what.clone_into(&mut self.what);
        if let Some(bar) = &self.bar {
            bar.set_message(self.what.clone());
        }
    }

    /// Replaces the lines of [`Ui::live_lines`]. Without a terminal, prints the lines at most every ten seconds.
    pub fn show_lines(&mut self, lines: &[String]) {
        match &self.bar {
            Some(bar) => {
                let width = self.ui.width.unwrap_or(80).saturating_sub(1);
                let lines: Vec<String> = lines.iter().map(|line| super::table::shorten(line, width)).collect();
                bar.set_message(lines.join("\n"));
            }
            None if self.ui.plain_progress && self.throttle.is_due(self.ui.started.elapsed(), false) => {
                lines.iter().for_each(|line| self.ui.notice(line));
            }
            None => {}
        }
    }

    /// Prints the metrics of a step, which the job reports every `logging.log_every` steps. With a bar and without `-v`
    /// the line goes only to the log file, because the bar shows the numbers.
    pub fn step_line(&mut self, line: &str) {
        let shown = self.ui.verbose || (self.bar.is_none() && self.ui.plain_progress);
        if !shown {
            self.ui.write_to_log_file(line);
            return;
        }
        self.ui.notice(line);
        // The next progress line would repeat the same numbers.
        let _ = self.throttle.is_due(self.ui.started.elapsed(), true);
    }

    /// Updates the progress of a job. `last`: no update follows, so a plain line is printed now.
    pub fn show_job(&mut self, progress: &JobProgress, last: bool) {
        match &self.bar {
            Some(bar) => {
                bar.set_prefix(super::format::printable(&progress.phase));
                let columns = self.ui.err_width.unwrap_or(80);
                let (style, bar_columns) = match columns {
                    _ if progress.total == 0 => (JOB_TEMPLATE_WITHOUT_STEPS, 0),
                    ..NARROW_COLUMNS => (NARROW_JOB_TEMPLATE, 0),
                    _ => (JOB_TEMPLATE, 11),
                };
                let steps = format!("{}/{}", progress.done, progress.total).len();
                // The spaces between the parts, and the last column, which stays empty.
                let left = progress.phase.len() + 1 + bar_columns + steps + 3;
                if self.template != style
                    && let Ok(new) = ProgressStyle::with_template(style)
                {
                    bar.set_style(new.progress_chars("=> "));
                    self.template = style;
                }
                bar.set_length(progress.total);
                bar.set_position(progress.done.min(progress.total));
                bar.set_message(progress.numbers_within(columns.saturating_sub(left)));
            }
            None if self.ui.plain_progress && self.throttle.is_due(self.ui.started.elapsed(), last) => {
                self.ui.notice(&super::format::printable(&progress.line()));
            }
            None => {}
        }
    }
}

impl Drop for ProgressIndicator<'_> {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
            *self.ui.bar.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }
}

/// Adds `schema_version` as the first field; a list becomes `{schema_version, items}`.
fn versioned(value: &impl Serialize) -> Result<serde_json::Value, Failure> {
    let value = serde_json::to_value(value).map_err(|error| Failure::failed(format!("cannot write JSON: {error}")))?;
    let mut object = serde_json::Map::new();
    object.insert("schema_version".to_owned(), SCHEMA_VERSION.into());
    match value {
        serde_json::Value::Object(fields) => object.extend(fields),
        other => {
            object.insert("items".to_owned(), other);
        }
    }
    Ok(serde_json::Value::Object(object))
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
    fn json_carries_a_schema_version_first() {
        let text = versioned(&serde_json::json!({"id": "j1"})).unwrap().to_string();
        assert_eq!(text, r#"{"schema_version":1,"id":"j1"}"#);
        let text = versioned(&[1, 2]).unwrap().to_string();
        assert_eq!(text, r#"{"schema_version":1,"items":[1,2]}"#);
    }

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
