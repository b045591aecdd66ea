//! How fast work goes: wall time over the last steps, with everything that they took. Times are arguments.

use super::Context;
use aitk_common::attempt::ChildEvent;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Steps that a rate is taken over.
const WINDOW: usize = 20;
/// Progress is told at most this often.
const OFTEN: Duration = Duration::from_millis(100);

/// Wall time per step over the last steps.
#[derive(Debug)]
pub(super) struct Rate {
    /// When the work began, then the ends of the last steps.
    ends: VecDeque<Instant>,
}

impl Rate {
    /// The first step begins `now`.
    pub(super) fn begin(now: Instant) -> Self {
        Self {
            ends: VecDeque::from([now]),
        }
    }

    /// A step ended. Returns seconds per step.
    pub(super) fn step(&mut self, now: Instant) -> f64 {
        self.ends.push_back(now);
        if self.ends.len() > WINDOW + 1 {
            self.ends.pop_front();
        }
        self.seconds().unwrap_or_default()
    }

    /// Seconds per step; none before the first one.
    pub(super) fn seconds(&self) -> Option<f64> {
        let (first, last) = (self.ends.front()?, self.ends.back()?);
        let steps = self.ends.len() - 1;
        (steps > 0).then(|| last.saturating_duration_since(*first).as_secs_f64() / steps as f64)
    }

    /// Leaves out time that is shown on its own.
    pub(super) fn leave_out(&mut self, time: Duration) {
        for end in &mut self.ends {
            *end += time;
        }
    }
}

/// Tells progress with its rate: at most ten times a second, and always at the end.
pub(super) struct Progress {
    rate: Rate,
    told: Option<Instant>,
}

impl Progress {
    /// Work begins now.
    pub(super) fn new() -> Self {
        Self {
            rate: Rate::begin(Instant::now()),
            told: None,
        }
    }

    /// A step ended.
    pub(super) fn step(&mut self, cx: &mut Context<'_>, done: u64, total: u64) {
        let now = Instant::now();
        self.rate.step(now);
        if done == total || self.told.is_none_or(|told| now.duration_since(told) >= OFTEN) {
            self.tell(cx, done, total);
        }
    }

    /// Says how far the work is.
    pub(super) fn tell(&mut self, cx: &mut Context<'_>, done: u64, total: u64) {
        self.told = Some(Instant::now());
        cx.events.emit(ChildEvent::Progress {
            done,
            total,
            seconds_per_step: self.rate.seconds(),
        });
    }

    /// Leaves out time that is shown on its own.
    pub(super) fn leave_out(&mut self, time: Duration) {
        self.rate.leave_out(time);
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
        // What lies between two steps counts as well: only ends are looked at.
        assert!((rate.step(at(8.0)) - 8.0).abs() < 1e-9);
        assert!((rate.step(at(16.3)) - 8.15).abs() < 1e-9);
        for step in 0..100 {
            rate.step(at(20.0 + f64::from(step)));
        }
        assert!(
            (rate.seconds().unwrap() - 1.0).abs() < 1e-9,
            "slow steps of long ago are forgotten"
        );
    }

    #[test]
    fn what_is_shown_on_its_own_is_left_out() {
        let begin = Instant::now();
        let mut rate = Rate::begin(begin);
        rate.step(begin + Duration::from_secs(1));
        rate.leave_out(Duration::from_secs(600));
        let seconds = rate.step(begin + Duration::from_secs(602));
        assert!((seconds - 1.0).abs() < 1e-9, "{seconds}");
    }
}
