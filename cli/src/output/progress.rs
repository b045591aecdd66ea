//! One line that says how far a job is, made from its events; and how often it is said without a terminal.

use super::format::{duration, number, rate};
use std::collections::BTreeMap;
use std::time::Duration;

/// How far a job is. Pure: it knows nothing of terminals and clocks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JobProgress {
    /// `loading model`, `training`, ….
    pub phase: String,
    /// Steps (or images) done.
    pub done: u64,
    /// Steps (or images) in all; 0 while unknown.
    pub total: u64,
    /// The newest loss.
    pub loss: Option<f64>,
    /// The newest learning rate.
    pub learning_rate: Option<f64>,
    /// Wall time in seconds that each of the last steps took, as the attempt says; none where that is not true at the moment.
    pub seconds_per_step: Option<f64>,
}

impl JobProgress {
    /// A phase began.
    pub fn phase(&mut self, name: &str) {
        name.clone_into(&mut self.phase);
    }

    /// It is in another state now; where no attempt is at work, nothing has a rate.
    pub fn state(&mut self, name: &str, at_work: bool) {
        self.phase(name);
        self.seconds_per_step = self.seconds_per_step.filter(|_| at_work);
    }

    /// Steps were done.
    pub fn steps(&mut self, done: u64, total: u64, seconds_per_step: Option<f64>) {
        self.done = done;
        self.total = total;
        self.seconds_per_step = seconds_per_step.filter(|s| s.is_finite() && *s >= 0.0);
    }

    /// Numbers of a step: `loss/loss` or `loss`, `learning_rate` or `lr`.
    pub fn metrics(&mut self, values: &BTreeMap<String, f64>) {
        let first = |names: [&str; 2]| names.iter().find_map(|name| values.get(*name)).copied();
        self.loss = first(["loss/loss", "loss"]).or(self.loss);
        self.learning_rate = first(["learning_rate", "lr"]).or(self.learning_rate);
    }

    /// How long it will still take, if that can be said.
    #[must_use]
    pub fn eta(&self) -> Option<Duration> {
        let left = self.total.checked_sub(self.done).filter(|_| self.total > 0)?;
        Duration::try_from_secs_f64(self.seconds_per_step? * left as f64).ok()
    }

    /// What stands right of the bar: `loss 0.1234  lr 1.0e-4  2.31 it/s  ETA 2m 40s`.
    #[must_use]
    pub fn numbers(&self) -> String {
        self.numbers_within(usize::MAX)
    }

    /// As many of them as fit into so many columns: the learning rate is left out first, then the rate, then the loss.
    #[must_use]
    pub fn numbers_within(&self, columns: usize) -> String {
        let eta = self.eta().filter(|_| self.done < self.total);
        // With the order in which they are left out.
        let mut parts: Vec<(u8, String)> = [
            self.loss.map(|loss| (2, format!("loss {}", number(loss)))),
            self.learning_rate.map(|lr| (0, format!("lr {}", number(lr)))),
            self.seconds_per_step.map(|seconds| (1, rate(seconds))),
            eta.map(|eta| (3, format!("ETA {}", duration(eta)))),
        ]
        .into_iter()
        .flatten()
        .collect();
        let joined = |parts: &[(u8, String)]| {
            let texts: Vec<&str> = parts.iter().map(|(_, text)| text.as_str()).collect();
            texts.join("  ")
        };
        while joined(&parts).len() > columns
            && let Some(least) = parts.iter().map(|(weight, _)| *weight).min()
        {
            parts.retain(|(weight, _)| *weight != least);
        }
        joined(&parts)
    }

    /// The whole as a plain line, for logs and pipes.
    #[must_use]
    pub fn line(&self) -> String {
        let mut line = if self.phase.is_empty() {
            "working".to_owned()
        } else {
            self.phase.clone()
        };
        if self.total > 0 {
            line.push_str(&format!("  {}/{}", self.done, self.total));
        }
        let numbers = self.numbers();
        if !numbers.is_empty() {
            line.push_str("  ");
            line.push_str(&numbers);
        }
        line
    }
}

/// Decides when a plain progress line is due: first, last, and in between not more than once per interval.
#[derive(Clone, Debug)]
pub struct Pace {
    interval: Duration,
    last: Option<Duration>,
}

impl Pace {
    /// At most one line per `interval`.
    #[must_use]
    pub fn new(interval: Duration) -> Self {
        Self { interval, last: None }
    }

    /// Whether a line is due at `now` (time since any fixed start). `last`: nothing comes after it.
    pub fn due(&mut self, now: Duration, last: bool) -> bool {
        let due = last
            || self
                .last
                .is_none_or(|before| now.saturating_sub(before) >= self.interval);
        if due {
            self.last = Some(now);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_step_loss_rate_and_eta() {
        let mut progress = JobProgress::default();
        assert_eq!(progress.line(), "working");
        progress.phase("training");
        progress.steps(100, 500, Some(0.5));
        progress.metrics(&BTreeMap::from([
            ("loss/loss".to_owned(), 0.1234),
            ("learning_rate".to_owned(), 1e-4),
        ]));
        assert_eq!(
            progress.line(),
            "training  100/500  loss 0.1234  lr 1.0e-4  2.00 it/s  ETA 3m 20s"
        );
        assert!(progress.line().len() < 80);
        for (columns, shown) in [
            (45, "loss 0.1234  lr 1.0e-4  2.00 it/s  ETA 3m 20s"),
            (44, "loss 0.1234  2.00 it/s  ETA 3m 20s"),
            (25, "loss 0.1234  ETA 3m 20s"),
            (10, "ETA 3m 20s"),
            (9, ""),
        ] {
            assert_eq!(progress.numbers_within(columns), shown, "{columns}");
        }
        progress.steps(500, 500, Some(0.5));
        assert_eq!(progress.line(), "training  500/500  loss 0.1234  lr 1.0e-4  2.00 it/s");
        // A rate that is not true any more, and the time that would follow from it, are not shown.
        progress.state("queued", false);
        assert_eq!(progress.line(), "queued  500/500  loss 0.1234  lr 1.0e-4");
        progress.phase("no progress for 6 min");
        progress.steps(100, 500, None);
        assert_eq!(
            progress.line(),
            "no progress for 6 min  100/500  loss 0.1234  lr 1.0e-4"
        );
    }

    #[test]
    fn nonsense_from_a_peer_does_no_harm() {
        let mut progress = JobProgress::default();
        progress.steps(9, 3, Some(f64::INFINITY));
        assert_eq!(progress.eta(), None);
        progress.steps(0, u64::MAX, Some(1e300));
        assert_eq!(progress.eta(), None);
        let _ = progress.line();
    }

    #[test]
    fn plain_lines_keep_their_distance() {
        let mut pace = Pace::new(Duration::from_secs(10));
        let at = |s| Duration::from_secs(s);
        assert!(pace.due(at(0), false));
        assert!(!pace.due(at(9), false));
        assert!(pace.due(at(10), false));
        assert!(pace.due(at(11), true));
    }
}
