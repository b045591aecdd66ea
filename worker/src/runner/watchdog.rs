//! Detects whether a child still makes progress. It uses no clock and no process functions: the caller passes the
//! time, the child's events and its CPU time.
//!
//! The limit follows from the child itself: the slowest of the recent gaps between two events in the same phase. A
//! phase without events so far (a model that loads, the first step) gets a generous limit, unless the process has used
//! no CPU time lately. Time in which this daemon did not run either (the machine slept, the daemon was stopped) is not counted,
//! and neither is time in which the child waits for us to read its events.

use aitk_common::attempt::ChildEvent;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// A child is stopped after this many times the slowest recent gap, if that is longer than the timeout.
const SLOWEST_GAP_FACTOR: u32 = 20;
/// A phase without events so far may last this many timeouts.
const FIRST_EVENT_FACTOR: u32 = 12;
/// Fewer gaps than this, all of them below [`SHORT_GAP`], say nothing about a phase: a phase, its first progress and a
/// notice follow each other at once, and the first step of a model of billions of parameters may take half an hour.
const FEW_GAPS: usize = 4;
/// See [`FEW_GAPS`].
const SHORT_GAP: Duration = Duration::from_secs(1);
/// The number of recent gaps that are kept per phase.
const MAX_GAPS: usize = 16;
/// The most phases whose gaps are kept: far more than the engine has.
const MAX_PHASES: usize = 32;
/// A process that used less than 1/1000 of the time as CPU time counts as idle.
const IDLE_DIVISOR: u32 = 1000;
/// A warning is repeated when the silence has grown by 1/4.
const REPEAT_DIVISOR: u32 = 4;

/// The result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum WatchdogStatus {
    /// Nothing to report.
    Fine,
    /// It has been silent for unusually long.
    Silent {
        /// The text to show as its phase.
        phase: String,
        /// The text for the log.
        message: String,
        /// Steps done and the total, whose rate is no longer valid.
        progress: Option<(u64, u64)>,
    },
    /// It makes progress again.
    Resumed {
        /// Its current phase.
        phase: Option<String>,
        /// The text for the log.
        message: String,
    },
    /// It has to be stopped, for this reason.
    Hung(String),
}

/// What was known at a check.
#[derive(Clone, Copy, Debug)]
struct CpuMark {
    silent_for: Duration,
    /// CPU time of the process so far.
    used: Duration,
}

/// Watches one child.
#[derive(Debug)]
pub(super) struct Watchdog {
    timeout: Duration,
    /// If more time than this passes between two calls, this daemon did not run.
    max_check_gap: Duration,
    last_call: Duration,
    phase: Option<String>,
    gaps: BTreeMap<String, VecDeque<Duration>>,
    progress: Option<(u64, u64)>,
    silent_for: Duration,
    /// Silence and CPU time at two earlier checks since the last event, at least `timeout` apart: the CPU time since the first tells
    /// whether the process computes. It is between one and two `timeout`s ago, or the first check after the event.
    cpu_marks: Option<[CpuMark; 2]>,
    is_blocked: bool,
    warned_after: Option<Duration>,
    resumed_after: Option<Duration>,
}

impl Watchdog {
    /// Starts to watch at `now`. `period` is the interval between checks.
    pub(super) fn new(timeout: Duration, period: Duration, now: Duration) -> Self {
        Self {
            timeout,
            max_check_gap: period * 3,
            last_call: now,
            phase: None,
            gaps: BTreeMap::new(),
            progress: None,
            silent_for: Duration::ZERO,
            cpu_marks: None,
            is_blocked: false,
            warned_after: None,
            resumed_after: None,
        }
    }

    fn advance(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.last_call);
        self.last_call = now;
        if !self.is_blocked && passed <= self.max_check_gap {
            self.silent_for += passed;
        }
    }

    /// Records an event of the child.
    pub(super) fn record_event(&mut self, now: Duration, event: &ChildEvent) {
        self.advance(now);
        let gap = std::mem::take(&mut self.silent_for);
        self.cpu_marks = None;
        if let Some(warned_after) = self.warned_after.take() {
            self.resumed_after = Some(gap.max(warned_after));
        } else if let Some(phase) = &self.phase
            && (self.gaps.len() < MAX_PHASES || self.gaps.contains_key(phase))
        {
            // A gap that caused a warning does not count as usual.
            let gaps = self.gaps.entry(phase.clone()).or_default();
            if gaps.len() == MAX_GAPS {
                gaps.pop_front();
            }
            gaps.push_back(gap);
        }
        match event {
            ChildEvent::Phase { name } => self.phase = Some(name.clone()),
            ChildEvent::Progress { done, total, .. } => self.progress = Some((*done, *total)),
            _ => {}
        }
    }

    /// Records whether the child is blocked because we do not read its events.
    pub(super) fn set_blocked(&mut self, now: Duration, is_blocked: bool) {
        self.advance(now);
        self.is_blocked = is_blocked;
    }

    /// Checks the child. `used` is the CPU time of its process so far, if the system reports it.
    pub(super) fn check(&mut self, now: Duration, used: Option<Duration>) -> WatchdogStatus {
        self.advance(now);
        if let Some(gap) = self.resumed_after.take() {
            return WatchdogStatus::Resumed {
                phase: self.phase.clone(),
                message: format!("it makes progress again after {}", format_duration(gap)),
            };
        }
        let uses_cpu = used.is_none_or(|used| self.uses_cpu(used));
        let limit = self.limit(uses_cpu);
        if self.silent_for >= limit {
            return WatchdogStatus::Hung(format!(
                "no progress for {}{}",
                format_duration(self.silent_for),
                self.describe_usual_gap()
            ));
        }
        let due = match self.warned_after {
            None => limit / 2,
            Some(last) => last + last / REPEAT_DIVISOR,
        };
        if self.silent_for < due {
            return WatchdogStatus::Fine;
        }
        self.warned_after = Some(self.silent_for);
        let phase = format!("no progress for {}", format_duration(self.silent_for));
        WatchdogStatus::Silent {
            message: format!(
                "{phase}{}; after {} it is ended and tried again",
                self.describe_usual_gap(),
                format_duration(limit)
            ),
            phase,
            progress: self.progress,
        }
    }

    /// Whether the process has computed lately. `used` is its CPU time so far.
    fn uses_cpu(&mut self, used: Duration) -> bool {
        let now = CpuMark {
            silent_for: self.silent_for,
            used,
        };
        let [earlier, later] = self.cpu_marks.get_or_insert([now; 2]);
        if now.silent_for.saturating_sub(later.silent_for) >= self.timeout {
            (*earlier, *later) = (*later, now);
        }
        used.saturating_sub(earlier.used) > now.silent_for.saturating_sub(earlier.silent_for) / IDLE_DIVISOR
    }

    /// The gaps of this phase, if they tell how long one takes.
    fn recent_gaps(&self) -> Option<&VecDeque<Duration>> {
        let gaps = self.gaps.get(self.phase.as_ref()?)?;
        let are_telling = gaps.len() >= FEW_GAPS || gaps.iter().any(|gap| *gap >= SHORT_GAP);
        are_telling.then_some(gaps)
    }

    fn limit(&self, uses_cpu: bool) -> Duration {
        let slowest = self.recent_gaps().and_then(|gaps| gaps.iter().max());
        match slowest {
            Some(slowest) => self.timeout.max(slowest.saturating_mul(SLOWEST_GAP_FACTOR)),
            None if uses_cpu => self.timeout.saturating_mul(FIRST_EVENT_FACTOR),
            None => self.timeout,
        }
    }

    fn describe_usual_gap(&self) -> String {
        let phase = self.phase.as_deref().unwrap_or("the start");
        let usual = self.recent_gaps().and_then(|gaps| {
            let mut sorted: Vec<_> = gaps.iter().copied().collect();
            sorted.sort_unstable();
            sorted.get(sorted.len() / 2).copied()
        });
        match usual {
            Some(usual) if phase == "training" => format!(" (usually a step takes {})", format_duration(usual)),
            Some(usual) => format!(
                " in the phase `{phase}` (usually an event comes every {})",
                format_duration(usual)
            ),
            None => format!(" in the phase `{phase}`, which has shown no progress yet"),
        }
    }
}

/// Formats a duration for display.
fn format_duration(time: Duration) -> String {
    match time.as_secs() {
        0..=9 => format!("{:.1} s", time.as_secs_f64()),
        seconds @ 10..=119 => format!("{seconds} s"),
        seconds @ 120..=7199 => format!("{} min", seconds / 60),
        seconds => format!("{:.1} h", seconds as f64 / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: u64 = 60;

    /// A simulated child with a clock.
    struct Simulation {
        watchdog: Watchdog,
        now: Duration,
        used: Option<Duration>,
    }

    impl Simulation {
        fn new() -> Self {
            let period = Duration::from_secs(2);
            Self {
                watchdog: Watchdog::new(Duration::from_secs(10 * MINUTE), period, Duration::ZERO),
                now: Duration::ZERO,
                used: Some(Duration::ZERO),
            }
        }

        fn phase(&mut self, name: &str) {
            self.watchdog
                .record_event(self.now, &ChildEvent::Phase { name: name.into() });
        }

        fn step(&mut self, done: u64) {
            let event = ChildEvent::Progress {
                done,
                total: 100,
                seconds_per_step: Some(5.0),
            };
            self.watchdog.record_event(self.now, &event);
        }

        /// Checks every two seconds; a busy child uses CPU time all the time.
        fn pass(&mut self, seconds: u64, busy: bool) -> Vec<WatchdogStatus> {
            let mut found = Vec::new();
            for _ in 0..seconds / 2 {
                self.now += Duration::from_secs(2);
                if busy {
                    self.used = self.used.map(|used| used + Duration::from_secs(2));
                }
                match self.watchdog.check(self.now, self.used) {
                    WatchdogStatus::Fine => {}
                    other => found.push(other),
                }
            }
            found
        }

        /// Trains for twenty steps of this many seconds.
        fn train(&mut self, seconds: u64) {
            self.phase("training");
            for done in 0..20 {
                assert_eq!(self.pass(seconds, true), []);
                self.step(done);
            }
        }
    }

    fn is_hung(found: &[WatchdogStatus]) -> bool {
        matches!(found.last(), Some(WatchdogStatus::Hung(_)))
    }

    #[test]
    fn a_silent_child_causes_a_warning_and_is_then_stopped() {
        let mut simulation = Simulation::new();
        simulation.train(6);
        let found = simulation.pass(5 * MINUTE, false);
        let Some(WatchdogStatus::Silent {
            phase,
            message,
            progress,
        }) = found.first()
        else {
            panic!("{found:?}");
        };
        assert_eq!(phase, "no progress for 5 min");
        assert_eq!(
            message,
            "no progress for 5 min (usually a step takes 6.0 s); after 10 min it is ended and tried again"
        );
        assert_eq!(*progress, Some((19, 100)));
        let more = simulation.pass(5 * MINUTE, false);
        assert!(
            matches!(more.first(), Some(WatchdogStatus::Silent { .. })),
            "the warning is repeated: {more:?}"
        );
        assert_eq!(
            more.last(),
            Some(&WatchdogStatus::Hung(
                "no progress for 10 min (usually a step takes 6.0 s)".into()
            ))
        );
    }

    #[test]
    fn slow_steps_make_a_long_limit() {
        let mut simulation = Simulation::new();
        simulation.train(5 * MINUTE);
        // Twenty times five minutes.
        assert!(!is_hung(&simulation.pass(99 * MINUTE, true)));
        assert!(is_hung(&simulation.pass(MINUTE, true)));
    }

    #[test]
    fn a_phase_without_events_gets_more_time_if_its_process_uses_cpu_time() {
        let mut simulation = Simulation::new();
        simulation.phase("loading model");
        assert!(!is_hung(&simulation.pass(119 * MINUTE, true)));
        assert!(is_hung(&simulation.pass(MINUTE, true)));
        let mut simulation = Simulation::new();
        simulation.phase("loading model");
        assert!(is_hung(&simulation.pass(10 * MINUTE, false)));
        // A system that does not report CPU times.
        let mut simulation = Simulation::new();
        simulation.used = None;
        assert!(!is_hung(&simulation.pass(119 * MINUTE, false)));
    }

    #[test]
    fn cpu_time_from_long_ago_is_no_sign_of_work() {
        let mut simulation = Simulation::new();
        simulation.phase("loading model");
        assert!(!is_hung(&simulation.pass(MINUTE, true)));
        // It computed for a minute, which is more than a thousandth of two hours, and waits for itself since.
        assert!(is_hung(&simulation.pass(20 * MINUTE, false)));
        let mut simulation = Simulation::new();
        simulation.phase("loading model");
        for _ in 0..11 {
            assert!(!is_hung(&simulation.pass(9 * MINUTE, false)), "it may wait for a disk");
            assert!(!is_hung(&simulation.pass(MINUTE, true)));
        }
    }

    #[test]
    fn a_first_step_may_take_long_after_events_that_came_at_once() {
        let mut simulation = Simulation::new();
        simulation.phase("training");
        simulation.step(0);
        simulation.step(0);
        assert!(!is_hung(&simulation.pass(30 * MINUTE, true)));
        simulation.step(1);
        // Twenty times half an hour.
        assert!(!is_hung(&simulation.pass(599 * MINUTE, true)));
        assert!(is_hung(&simulation.pass(MINUTE, true)));
        let mut simulation = Simulation::new();
        simulation.phase("training");
        simulation.step(0);
        assert!(is_hung(&simulation.pass(10 * MINUTE, false)), "an idle process");
        // Many events that came at once do tell how long a step takes.
        let mut simulation = Simulation::new();
        simulation.phase("training");
        (0..10).for_each(|done| simulation.step(done));
        assert!(is_hung(&simulation.pass(10 * MINUTE, true)));
    }

    #[test]
    fn time_in_which_the_machine_slept_does_not_count() {
        let mut simulation = Simulation::new();
        simulation.train(6);
        simulation.now += Duration::from_secs(12 * 3600);
        assert_eq!(simulation.pass(4 * MINUTE, false), []);
        // Many times, as a laptop does.
        for _ in 0..20 {
            simulation.now += Duration::from_secs(3600);
            simulation.watchdog.check(simulation.now, simulation.used);
        }
        // The check after each sleep counts nothing, not even its own two seconds.
        assert_eq!(simulation.watchdog.silent_for, Duration::from_secs(4 * MINUTE - 2));
    }

    #[test]
    fn a_child_that_is_blocked_by_the_daemon_is_not_hung() {
        let mut simulation = Simulation::new();
        simulation.train(6);
        simulation.watchdog.set_blocked(simulation.now, true);
        assert_eq!(simulation.pass(60 * MINUTE, false), []);
        simulation.watchdog.set_blocked(simulation.now, false);
        assert!(is_hung(&simulation.pass(10 * MINUTE, false)));
    }

    #[test]
    fn resumed_progress_is_reported_and_the_pause_does_not_raise_the_limit() {
        let mut simulation = Simulation::new();
        simulation.train(6);
        assert!(!is_hung(&simulation.pass(9 * MINUTE, false)));
        simulation.step(20);
        let found = simulation.pass(2, true);
        let back = WatchdogStatus::Resumed {
            phase: Some("training".into()),
            message: "it makes progress again after 9 min".into(),
        };
        assert_eq!(found, [back]);
        assert!(
            is_hung(&simulation.pass(10 * MINUTE, false)),
            "20 times 9 minutes would be 3 hours"
        );
    }

    #[test]
    fn each_phase_has_its_own_limit() {
        let mut simulation = Simulation::new();
        simulation.train(6);
        simulation.phase("sampling");
        assert_eq!(
            simulation.pass(30 * MINUTE, true),
            [],
            "the phase has no events yet, and the process uses CPU time"
        );
        simulation.phase("training");
        assert!(is_hung(&simulation.pass(10 * MINUTE, true)));
    }
}
