//! What `aitk logs` shows: what happened to a job, one thing per line, each with its time.
//!
//! On a terminal: the time of day here, the day where it changes, and long lines folded below themselves. In a pipe:
//! RFC 3339 in UTC and one line per thing.

use crate::follow::{log_line, next_notice};
use crate::output::format::{fold, printable};
use crate::views::moment;
use aitk_common::control::{EventBody, JobEvent, JobState};
use aitk_common::step_metrics::step_line;
use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use std::collections::BTreeSet;

/// Columns of `12:34:56  `.
const INDENT: usize = 10;
/// Text is not folded into columns narrower than this.
const NARROWEST: usize = 20;

/// How loud a line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tone {
    Plain,
    Warning,
    Error,
}

/// Turns events into lines, in order.
pub struct Journal {
    /// Columns of the terminal; none in a pipe.
    width: Option<usize>,
    color: bool,
    zone: TimeZone,
    /// The day of the last line.
    day: Date,
    /// How many steps the job has, where that is known.
    total: Option<u64>,
    /// What the last attempt that failed said.
    said: String,
    /// Phases that were shown since the job changed its state: a training is interrupted by every save.
    phases: BTreeSet<String>,
}

impl Journal {
    /// For output of this width (`None`: a pipe). `now` decides which day goes without saying.
    #[must_use]
    pub fn new(width: Option<usize>, color: bool, zone: TimeZone, now: Timestamp) -> Self {
        let day = now.to_zoned(zone.clone()).date();
        Self {
            width,
            color,
            zone,
            day,
            total: None,
            said: String::new(),
            phases: BTreeSet::new(),
        }
    }

    /// How many steps the job has.
    pub fn set_total(&mut self, total: Option<u64>) {
        self.total = total.filter(|total| *total > 0);
    }

    /// Whether the event has a line. Ask once per event: a phase has one only where it is new. Of losses all have that the
    /// job told: how often it does is its `logging.log_every`.
    pub fn wants(&mut self, event: &JobEvent) -> bool {
        if text(&event.body, self.total, &mut String::new()).is_none() {
            return false;
        }
        match &event.body {
            // What was saved is told by itself.
            EventBody::Phase { name } => name != "saving" && self.phases.insert(name.clone()),
            EventBody::State { .. } => {
                self.phases.clear();
                true
            }
            _ => true,
        }
    }

    /// The lines of an event; several where its text is long or has line breaks.
    pub fn lines(&mut self, event: &JobEvent) -> Vec<String> {
        let Some((tone, text)) = text(&event.body, self.total, &mut self.said) else {
            return Vec::new();
        };
        let time = moment(event.time);
        let Some(width) = self.width else {
            let time = time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
            return text.split('\n').map(|line| format!("{time}  {line}")).collect();
        };
        let here = time.to_zoned(self.zone.clone());
        let mut out = Vec::new();
        if here.date() != self.day {
            self.day = here.date();
            out.push(self.painted("2", &format!("--- {}", here.strftime("%a %Y-%m-%d"))));
        }
        let clock = self.painted("2", &here.strftime("%H:%M:%S").to_string());
        let room = width.saturating_sub(INDENT).max(NARROWEST);
        for (index, line) in text.split('\n').flat_map(|line| fold(line, room)).enumerate() {
            let line = match tone {
                Tone::Plain => line,
                Tone::Warning => self.painted("33", &line),
                Tone::Error => self.painted("31", &line),
            };
            out.push(match index {
                0 => format!("{clock}  {line}"),
                _ => format!("{:INDENT$}{line}", ""),
            });
        }
        out
    }

    fn painted(&self, code: &str, text: &str) -> String {
        if self.color {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }
}

/// What is said about an event, if anything.
fn text(body: &EventBody, total: Option<u64>, said: &mut String) -> Option<(Tone, String)> {
    Some(match body {
        EventBody::Log { level, .. } => {
            let tone = match level.as_str() {
                "warn" => Tone::Warning,
                "error" => Tone::Error,
                _ => Tone::Plain,
            };
            (tone, log_line(body)?)
        }
        EventBody::Phase { name } => (Tone::Plain, printable(name)),
        EventBody::Metrics { step, values } => (Tone::Plain, step_line(*step, total, values)?),
        body => {
            let (warn, line) = next_notice(said, body)?;
            let tone = match body {
                EventBody::State {
                    state: JobState::Failed,
                    ..
                } => Tone::Error,
                _ if warn => Tone::Warning,
                _ => Tone::Plain,
            };
            (tone, printable(&line))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use aitk_common::control::UnixMillis;
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

    fn journal(width: Option<usize>) -> Journal {
        Journal::new(width, false, TimeZone::UTC, Timestamp::UNIX_EPOCH)
    }

    #[test]
    fn lines_have_their_time_and_fit_the_terminal() {
        let mut journal = journal(Some(40));
        assert_eq!(
            journal.lines(&log(61, "info", "seven images")),
            ["00:01:01  seven images"]
        );
        let long = "a line of words that does not fit, with /a/path/that/is/longer/than/one/whole/line at its end";
        let lines = journal.lines(&log(62, "warn", long));
        assert!(lines.iter().all(|line| line.width() <= 40), "{lines:#?}");
        assert!(lines[0].starts_with("00:01:02  warning: a line of"), "{lines:#?}");
        assert!(
            lines[1..].iter().all(|line| line.starts_with("          ")),
            "{lines:#?}"
        );
        let whole: String = lines.iter().map(|line| line[10..].replace(' ', "")).collect();
        assert_eq!(whole, format!("warning:{}", long.replace(' ', "")));
        let next_day = journal.lines(&log(90_000, "info", "tomorrow"));
        assert_eq!(next_day, ["--- Fri 1970-01-02", "01:00:00  tomorrow"]);
        assert_eq!(
            journal.lines(&log(90_001, "info", "a\nb")),
            ["01:00:01  a", "          b"]
        );
    }

    #[test]
    fn wide_letters_and_empty_lines_are_no_trouble() {
        assert_eq!(fold("", 20), [""]);
        assert_eq!(fold("赤い丸赤い丸", 4), ["赤い", "丸赤", "い丸"]);
        assert_eq!(fold("赤", 1), ["赤"]);
        assert_eq!(fold("ab cd  ", 3), ["ab", "cd"]);
    }

    #[test]
    fn a_pipe_gets_whole_moments() {
        let mut journal = journal(None);
        let lines = journal.lines(&log(1, "info", "a\nb"));
        assert_eq!(lines, ["1970-01-01T00:00:01Z  a", "1970-01-01T00:00:01Z  b"]);
    }

    #[test]
    fn every_loss_that_was_told_is_shown_and_phases_once() {
        let mut journal = journal(Some(80));
        let mut phase = |name: &str| journal.wants(&event(0, EventBody::Phase { name: name.to_owned() }));
        assert_eq!(
            ["training", "saving", "training", "sampling"].map(&mut phase),
            [true, false, false, true]
        );
        let step = |seconds, step| {
            let values = BTreeMap::from([("loss/loss".to_owned(), 0.25), ("learning_rate".to_owned(), 1e-4)]);
            event(seconds, EventBody::Metrics { step, values })
        };
        assert!((1..=3).all(|at| journal.wants(&step(0, at))));
        assert_eq!(journal.lines(&step(10, 3)), ["00:00:10  step 3  loss 0.2500  lr 1e-4"]);
        journal.set_total(Some(500));
        assert_eq!(
            journal.lines(&step(10, 4)),
            ["00:00:10  step 4/500  loss 0.2500  lr 1e-4"]
        );
        let failed = EventBody::State {
            state: JobState::Failed,
            reason: "no disk".to_owned(),
            paused: false,
        };
        assert_eq!(journal.lines(&event(12, failed)), ["00:00:12  job failed: no disk"]);
    }
}
