//! Progress and speed: wall time per step over the last steps. Times are arguments.

use super::context::Context;
use aitk_common::attempt::ChildEvent;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The number of steps that the rate is averaged over.
const WINDOW: usize = 20;
/// The shortest time between two progress events.
const MIN_INTERVAL: Duration = Duration::from_millis(100);
/// During an image, progress is reported at least this often, between two sampling steps.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);

/// Wall time per step over the last steps.
#[derive(Debug)]
pub(super) struct Rate {
    /// The start of the work, then the ends of the last steps.
    ends: VecDeque<Instant>,
}

impl Rate {
    /// A rate whose first step begins at `now`.
    pub(super) fn begin(now: Instant) -> Self {
        Self {
            ends: VecDeque::from([now]),
        }
    }

    /// Records the end of a step. Returns seconds per step.
    pub(super) fn step(&mut self, now: Instant) -> f64 {
        self.ends.push_back(now);
        if self.ends.len() > WINDOW + 1 {
            self.ends.pop_front();
        }
        self.seconds().unwrap_or_default()
    }

    /// Seconds per step; `None` before the end of the first step.
    pub(super) fn seconds(&self) -> Option<f64> {
        let (first, last) = (self.ends.front()?, self.ends.back()?);
        let steps = self.ends.len() - 1;
        (steps > 0).then(|| last.saturating_duration_since(*first).as_secs_f64() / steps as f64)
    }

    /// Excludes time that has its own progress.
    pub(super) fn exclude(&mut self, time: Duration) {
        for end in &mut self.ends {
            *end += time;
        }
    }
}

/// Emits progress events with the rate: at most ten per second, and always one at the end.
pub(super) struct Progress {
    rate: Rate,
    last_report: Option<Instant>,
}

impl Progress {
    /// Progress of work that begins now.
    pub(super) fn new() -> Self {
        Self {
            rate: Rate::begin(Instant::now()),
            last_report: None,
        }
    }

    /// Records the end of a step and emits progress if it is due.
    pub(super) fn step(&mut self, cx: &mut Context<'_>, done: u64, total: u64) {
        let now = Instant::now();
        self.rate.step(now);
        if done == total
            || self
                .last_report
                .is_none_or(|last_report| now.duration_since(last_report) >= MIN_INTERVAL)
        {
            self.report(cx, done, total);
        }
    }

    /// Emits progress.
    pub(super) fn report(&mut self, cx: &mut Context<'_>, done: u64, total: u64) {
        self.last_report = Some(Instant::now());
        cx.events.emit(ChildEvent::Progress {
            done,
            total,
            seconds_per_step: self.rate.seconds(),
        });
    }

    /// Reports the same progress again if the last report is [`KEEP_ALIVE_INTERVAL`] old: one image or step may take longer
    /// than the worker waits for an event.
    pub(super) fn keep_alive(&mut self, cx: &mut Context<'_>, done: u64, total: u64) {
        let is_recent = |report: Instant| report.elapsed() < KEEP_ALIVE_INTERVAL;
        if !self.last_report.is_some_and(is_recent) {
            self.report(cx, done, total);
        }
    }

    /// Excludes time that has its own progress.
    pub(super) fn exclude(&mut self, time: Duration) {
        self.rate.exclude(time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_wall_time_over_recent_steps() {
        let begin = Instant::now();
        let at = |seconds: f64| begin + Duration::from_secs_f64(seconds);
        let mut rate = Rate::begin(begin);
        assert_eq!(rate.seconds(), None);
        // Time between two steps counts too, because only the ends of steps are recorded.
        assert!((rate.step(at(8.0)) - 8.0).abs() < 1e-9);
        assert!((rate.step(at(16.3)) - 8.15).abs() < 1e-9);
        for step in 0..100 {
            rate.step(at(20.0 + f64::from(step)));
        }
        assert!(
            (rate.seconds().unwrap() - 1.0).abs() < 1e-9,
            "earlier slow steps do not count"
        );
    }

    #[test]
    fn excluded_time_does_not_count() {
        let begin = Instant::now();
        let mut rate = Rate::begin(begin);
        rate.step(begin + Duration::from_secs(1));
        rate.exclude(Duration::from_secs(600));
        let seconds = rate.step(begin + Duration::from_secs(602));
        assert!((seconds - 1.0).abs() < 1e-9, "{seconds}");
    }
}
