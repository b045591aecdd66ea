//! The progress line of a job, computed from its events, and how often it is printed without a terminal.

use super::format::{duration, number, rate};
use std::collections::BTreeMap;
use std::time::Duration;

/// The progress of a job. It does no IO and reads no clock.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JobProgress {
    /// `loading model`, `training`, ….
    pub phase: String,
    /// Steps or images done.
    pub done: u64,
    /// Total steps or images; 0 while unknown.
    pub total: u64,
    /// The latest loss.
    pub loss: Option<f64>,
    /// The latest learning rate.
    pub learning_rate: Option<f64>,
    /// Wall time in seconds per step, as the attempt reports it; `None` when the job is not making steps.
    pub seconds_per_step: Option<f64>,
}

impl JobProgress {
    /// Sets the phase.
    pub fn phase(&mut self, name: &str) {
        name.clone_into(&mut self.phase);
    }

    /// Sets the state. The rate is removed unless an attempt is running.
    pub fn state(&mut self, name: &str, is_running: bool) {
        self.phase(name);
        self.seconds_per_step = self.seconds_per_step.filter(|_| is_running);
    }

    /// Sets the steps done, the total, and the time per step.
    pub fn steps(&mut self, done: u64, total: u64, seconds_per_step: Option<f64>) {
        self.done = done;
        self.total = total;
        self.seconds_per_step = seconds_per_step.filter(|s| s.is_finite() && *s >= 0.0);
    }

    /// Sets loss and learning rate from the metrics of a step: `loss/loss` or `loss`, `learning_rate` or `lr`.
    pub fn metrics(&mut self, values: &BTreeMap<String, f64>) {
        let first = |names: [&str; 2]| names.iter().find_map(|name| values.get(*name)).copied();
        self.loss = first(["loss/loss", "loss"]).or(self.loss);
        self.learning_rate = first(["learning_rate", "lr"]).or(self.learning_rate);
    }

    /// Returns the estimated remaining time, if it is known.
    #[must_use]
    pub fn eta(&self) -> Option<Duration> {
        let remaining = self.total.checked_sub(self.done).filter(|_| self.total > 0)?;
        Duration::try_from_secs_f64(self.seconds_per_step? * remaining as f64).ok()
    }

    /// Returns the text to the right of the bar: `loss 0.1234  lr 1.0e-4  2.31 it/s  ETA 2m 40s`.
    #[must_use]
    pub fn numbers(&self) -> String {
        self.numbers_within(usize::MAX)
    }

    /// As [`Self::numbers`], limited to `columns`: the learning rate is left out first, then the rate, then the loss.
    #[must_use]
    pub fn numbers_within(&self, columns: usize) -> String {
        let eta = self.eta().filter(|_| self.done < self.total);
        // The first number is the priority: the lowest is left out first.
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
            && let Some(min) = parts.iter().map(|(priority, _)| *priority).min()
        {
            parts.retain(|(priority, _)| *priority != min);
        }
        joined(&parts)
    }

    /// Returns the progress as a plain line, for logs and pipes.
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

/// Limits plain progress lines: the first and the last one, and in between at most one per interval.
#[derive(Clone, Debug)]
pub struct LineThrottle {
    interval: Duration,
    last: Option<Duration>,
}

impl LineThrottle {
    /// Creates a throttle that allows one line per `interval`.
    #[must_use]
    pub fn new(interval: Duration) -> Self {
        Self { interval, last: None }
    }

    /// Whether to print a line at `now` (time since any fixed start). `last`: no line follows.
    pub fn is_due(&mut self, now: Duration, last: bool) -> bool {
        let is_due = last
            || self
                .last
                .is_none_or(|before| now.saturating_sub(before) >= self.interval);
        if is_due {
            self.last = Some(now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_step_loss_rate_and_eta() {
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
        // Rate and remaining time are not shown when the job is not running.
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
    fn invalid_numbers_from_a_peer_do_not_panic() {
        let mut progress = JobProgress::default();
        progress.steps(9, 3, Some(f64::INFINITY));
        assert_eq!(progress.eta(), None);
        progress.steps(0, u64::MAX, Some(1e300));
        assert_eq!(progress.eta(), None);
        let _ = progress.line();
    }

    #[test]
    fn plain_lines_are_at_least_an_interval_apart() {
        let mut throttle = LineThrottle::new(Duration::from_secs(10));
        let at = |s| Duration::from_secs(s);
        assert!(throttle.is_due(at(0), false));
        assert!(!throttle.is_due(at(9), false));
        assert!(throttle.is_due(at(10), false));
        assert!(throttle.is_due(at(11), true));
    }
}
