//! Shows progress on standard error: a bar on a terminal, otherwise a line now and then.

use super::progress::{JobProgress, LineThrottle};
use super::ui::Ui;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::PoisonError;
use std::time::Duration;

/// Template for a job whose number of steps is known. The bar is short, so that loss, rate and remaining time fit into
/// 80 columns.
const JOB_TEMPLATE: &str = "{prefix} [{bar:8}] {pos}/{len}  {wide_msg}";
/// The same for a terminal of less than [`NARROW_COLUMNS`].
const NARROW_JOB_TEMPLATE: &str = "{prefix} {pos}/{len}  {wide_msg}";
const NARROW_COLUMNS: usize = 60;
/// Template for a job that waits, loads or caches.
const JOB_TEMPLATE_WITHOUT_STEPS: &str = "{prefix} {elapsed}";

impl Ui {
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
