//! The lines of `aitk logs`: one line per event, each with its time.
//!
//! On a terminal: local time of day, a line with the date where it changes, and long lines folded and indented. In a
//! pipe: RFC 3339 in UTC, and no folding.

use crate::follow::{log_line, notice_without_repetition};
use crate::output::format::{fold, printable};
use crate::views::timestamp;
use aitk_common::control_plane::{EventBody, JobEvent, JobState};
use aitk_common::step_metrics::step_line;
use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use std::collections::BTreeSet;

/// Columns of `12:34:56  `.
const INDENT: usize = 10;
/// The smallest width that text is folded to.
const MIN_TEXT_WIDTH: usize = 20;

/// The severity of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Severity {
    Info,
    Warning,
    Error,
}

/// Formats the events of a job as lines, in order.
pub struct LogFormatter {
    /// Columns of the terminal; `None` in a pipe.
    width: Option<usize>,
    color: bool,
    zone: TimeZone,
    /// The date of the last line.
    day: Date,
    /// The job's number of steps, if known.
    total: Option<u64>,
    /// The message of the last failed attempt.
    last_failure: String,
    /// Phases that were shown since the job last changed its state. Each is shown once, because a training returns to
    /// its phase after every save.
    phases: BTreeSet<String>,
}

impl LogFormatter {
    /// Creates a formatter for output of this width (`None`: a pipe). The date of `now` is not printed.
    #[must_use]
    pub fn new(width: Option<usize>, color: bool, zone: TimeZone, now: Timestamp) -> Self {
        let day = now.to_zoned(zone.clone()).date();
        Self {
            width,
            color,
            zone,
            day,
            total: None,
            last_failure: String::new(),
            phases: BTreeSet::new(),
        }
    }

    /// Sets the job's number of steps.
    pub fn set_total(&mut self, total: Option<u64>) {
        self.total = total.filter(|total| *total > 0);
    }

    /// Whether the event has a line. Call it once per event, because a phase is accepted only the first time.
    pub fn accepts(&mut self, event: &JobEvent) -> bool {
        if event_text(&event.body, self.total, &mut String::new()).is_none() {
            return false;
        }
        match &event.body {
            // Every saved file has an event of its own.
            EventBody::Phase { name } => name != "saving" && self.phases.insert(name.clone()),
            EventBody::State { .. } => {
                self.phases.clear();
                true
            }
            _ => true,
        }
    }

    /// Returns the lines of an event: several if its text is long or has line breaks.
    pub fn lines(&mut self, event: &JobEvent) -> Vec<String> {
        let Some((severity, text)) = event_text(&event.body, self.total, &mut self.last_failure) else {
            return Vec::new();
        };
        let time = timestamp(event.time);
        let Some(width) = self.width else {
            let time = time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
            return text.split('\n').map(|line| format!("{time}  {line}")).collect();
        };
        let local = time.to_zoned(self.zone.clone());
        let mut out = Vec::new();
        if local.date() != self.day {
            self.day = local.date();
            out.push(self.colored("2", &format!("--- {}", local.strftime("%a %Y-%m-%d"))));
        }
        let clock = self.colored("2", &local.strftime("%H:%M:%S").to_string());
        let text_width = width.saturating_sub(INDENT).max(MIN_TEXT_WIDTH);
        for (index, line) in text.split('\n').flat_map(|line| fold(line, text_width)).enumerate() {
            let line = match severity {
                Severity::Info => line,
                Severity::Warning => self.colored("33", &line),
                Severity::Error => self.colored("31", &line),
            };
            out.push(match index {
                0 => format!("{clock}  {line}"),
                _ => format!("{:INDENT$}{line}", ""),
            });
        }
        out
    }

    fn colored(&self, code: &str, text: &str) -> String {
        if self.color {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }
}

/// Returns the text of an event and its severity; `None` for events without a line.
fn event_text(body: &EventBody, total: Option<u64>, last_failure: &mut String) -> Option<(Severity, String)> {
    Some(match body {
        EventBody::Log { level, .. } => {
            let severity = match level.as_str() {
                "warn" => Severity::Warning,
                "error" => Severity::Error,
                _ => Severity::Info,
            };
            (severity, log_line(body)?)
        }
        EventBody::Phase { name } => (Severity::Info, printable(name)),
        EventBody::Metrics { step, values } => (Severity::Info, step_line(*step, total, values)?),
        body => {
            let (warn, line) = notice_without_repetition(last_failure, body)?;
            let severity = match body {
                EventBody::State {
                    state: JobState::Failed,
                    ..
                } => Severity::Error,
                _ if warn => Severity::Warning,
                _ => Severity::Info,
            };
            (severity, printable(&line))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use aitk_common::control_plane::UnixMillis;
    use std::collections::BTreeMap;
    use unicode_width::UnicodeWidthStr;

    fn event(seconds: u64, body: EventBody) -> JobEvent {
        JobEvent {
            cursor: seconds,
            time: UnixMillis(seconds * 1000),
            attempt: None,
            body,
        }
    }

    fn log(seconds: u64, level: &str, message: &str) -> JobEvent {
        let (level, message) = (level.to_owned(), message.to_owned());
        event(seconds, EventBody::Log { level, message })
    }

    fn formatter(width: Option<usize>) -> LogFormatter {
        LogFormatter::new(width, false, TimeZone::UTC, Timestamp::UNIX_EPOCH)
    }

    #[test]
    fn lines_have_their_time_and_fit_the_terminal() {
        let mut formatter = formatter(Some(40));
        assert_eq!(
            formatter.lines(&log(61, "info", "seven images")),
            ["00:01:01  seven images"]
        );
        let long = "a line of words that does not fit, with /a/path/that/is/longer/than/one/whole/line at its end";
        let lines = formatter.lines(&log(62, "warn", long));
        assert!(lines.iter().all(|line| line.width() <= 40), "{lines:#?}");
        assert!(lines[0].starts_with("00:01:02  warning: a line of"), "{lines:#?}");
        assert!(
            lines[1..].iter().all(|line| line.starts_with("          ")),
            "{lines:#?}"
        );
        let rejoined: String = lines.iter().map(|line| line[10..].replace(' ', "")).collect();
        assert_eq!(rejoined, format!("warning:{}", long.replace(' ', "")));
        let next_day = formatter.lines(&log(90_000, "info", "tomorrow"));
        assert_eq!(next_day, ["--- Fri 1970-01-02", "01:00:00  tomorrow"]);
        assert_eq!(
            formatter.lines(&log(90_001, "info", "a\nb")),
            ["01:00:01  a", "          b"]
        );
    }

    #[test]
    fn wide_characters_and_empty_lines_are_folded() {
        assert_eq!(fold("", 20), [""]);
        assert_eq!(fold("赤い丸赤い丸", 4), ["赤い", "丸赤", "い丸"]);
        assert_eq!(fold("赤", 1), ["赤"]);
        assert_eq!(fold("ab cd  ", 3), ["ab", "cd"]);
    }

    #[test]
    fn a_pipe_gets_rfc_3339_times() {
        let mut formatter = formatter(None);
        let lines = formatter.lines(&log(1, "info", "a\nb"));
        assert_eq!(lines, ["1970-01-01T00:00:01Z  a", "1970-01-01T00:00:01Z  b"]);
    }

    #[test]
    fn every_loss_is_shown_and_each_phase_once() {
        let mut formatter = formatter(Some(80));
        let mut phase = |name: &str| formatter.accepts(&event(0, EventBody::Phase { name: name.to_owned() }));
        assert_eq!(
            ["training", "saving", "training", "sampling"].map(&mut phase),
            [true, false, false, true]
        );
        let step = |seconds, step| {
            let values = BTreeMap::from([("loss/loss".to_owned(), 0.25), ("learning_rate".to_owned(), 1e-4)]);
            event(seconds, EventBody::Metrics { step, values })
        };
        assert!((1..=3).all(|at| formatter.accepts(&step(0, at))));
        assert_eq!(
            formatter.lines(&step(10, 3)),
            ["00:00:10  step 3  loss 0.2500  lr 1e-4"]
        );
        formatter.set_total(Some(500));
        assert_eq!(
            formatter.lines(&step(10, 4)),
            ["00:00:10  step 4/500  loss 0.2500  lr 1e-4"]
        );
        let failed = EventBody::State {
            state: JobState::Failed,
            reason: "no disk".to_owned(),
            paused: false,
        };
        assert_eq!(formatter.lines(&event(12, failed)), ["00:00:12  job failed: no disk"]);
    }
}
