//! Whether a child still gets on. Without clocks and processes: whoever owns the child says what time it is, what the child said,
//! and how much CPU time it has used.
//!
//! What is usual comes from the child itself: the slowest of the recent gaps between two signs of life in the same phase. A
//! phase that has shown nothing yet (a model that loads, the first step) gets a generous limit, unless the process does not
//! even compute. Time in which this daemon did not run either (the machine slept, the daemon was stopped) is not counted, and
//! neither is time in which the child waits for us to take its events.

use aitk_common::attempt::ChildEvent;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// A child is ended after so many times the slowest recent gap, if that is longer than the timeout.
const TIMES_SLOWEST: u32 = 20;
/// So many timeouts may pass in a phase that has shown nothing yet.
const FIRST_SIGN: u32 = 12;
/// Gaps of a phase that count as recent.
const GAPS: usize = 16;
/// Phases whose gaps are remembered: far more than the engine has.
const PHASES: usize = 32;
/// A process that used less than this share of the time does not compute.
const IDLE_SHARE: u32 = 1000;
/// What was announced is said again when the silence has grown by a quarter.
const AGAIN: u32 = 4;

/// What a look at a child shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Finding {
    /// Nothing to say.
    Fine,
    /// It has been silent for unusually long.
    Silent {
        /// For the place where its phase is shown.
        phase: String,
        /// For the log.
        message: String,
        /// Steps done and steps in all, whose rate is not true any more.
        progress: Option<(u64, u64)>,
    },
    /// It gets on again.
    Back {
        /// The phase that it is in.
        phase: Option<String>,
        /// For the log.
        message: String,
    },
    /// It is to be ended.
    Hung(String),
}

/// Watches one child.
#[derive(Debug)]
pub(super) struct Watchdog {
    timeout: Duration,
    /// A longer time between two calls means that this daemon did not run.
    longest_step: Duration,
    last_call: Duration,
    phase: Option<String>,
    gaps: BTreeMap<String, VecDeque<Duration>>,
    progress: Option<(u64, u64)>,
    silent: Duration,
    /// CPU time at the last sign of life.
    used_before: Option<Duration>,
    waits_for_us: bool,
    announced: Option<Duration>,
    came_back: Option<Duration>,
}

impl Watchdog {
    /// Watches from `now` on. `period`: how often it will be asked.
    pub(super) fn new(timeout: Duration, period: Duration, now: Duration) -> Self {
        Self {
            timeout,
            longest_step: period * 3,
            last_call: now,
            phase: None,
            gaps: BTreeMap::new(),
            progress: None,
            silent: Duration::ZERO,
            used_before: None,
            waits_for_us: false,
            announced: None,
            came_back: None,
        }
    }

    fn pass(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.last_call);
        self.last_call = now;
        if !self.waits_for_us && passed <= self.longest_step {
            self.silent += passed;
        }
    }

    /// The child said something.
    pub(super) fn heard(&mut self, now: Duration, event: &ChildEvent) {
        self.pass(now);
        let gap = std::mem::take(&mut self.silent);
        self.used_before = None;
        if let Some(announced) = self.announced.take() {
            self.came_back = Some(gap.max(announced));
        } else if let Some(phase) = &self.phase
            && (self.gaps.len() < PHASES || self.gaps.contains_key(phase))
        {
            // A gap that had to be announced is no measure of what is usual.
            let gaps = self.gaps.entry(phase.clone()).or_default();
            if gaps.len() == GAPS {
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

    /// Its events find no room, or do again: that is not its fault.
    pub(super) fn waits_for_us(&mut self, now: Duration, waits: bool) {
        self.pass(now);
        self.waits_for_us = waits;
    }

    /// Looks at it. `used`: CPU time of its process so far, where the system tells.
    pub(super) fn look(&mut self, now: Duration, used: Option<Duration>) -> Finding {
        self.pass(now);
        if let Some(gap) = self.came_back.take() {
            return Finding::Back {
                phase: self.phase.clone(),
                message: format!("it makes progress again after {}", span(gap)),
            };
        }
        let used_before = *self.used_before.get_or_insert(used.unwrap_or_default());
        let computes = used.is_none_or(|used| used.saturating_sub(used_before) > self.silent / IDLE_SHARE);
        let limit = self.limit(computes);
        if self.silent >= limit {
            return Finding::Hung(format!("no progress for {}{}", span(self.silent), self.usual()));
        }
        let due = match self.announced {
            None => limit / 2,
            Some(last) => last + last / AGAIN,
        };
        if self.silent < due {
            return Finding::Fine;
        }
        self.announced = Some(self.silent);
        let phase = format!("no progress for {}", span(self.silent));
        Finding::Silent {
            message: format!(
                "{phase}{}; after {} it is ended and tried again",
                self.usual(),
                span(limit)
            ),
            phase,
            progress: self.progress,
        }
    }

    fn recent(&self) -> Option<&VecDeque<Duration>> {
        self.gaps.get(self.phase.as_ref()?)
    }

    fn limit(&self, computes: bool) -> Duration {
        let slowest = self.recent().and_then(|gaps| gaps.iter().max());
        match slowest {
            Some(slowest) => self.timeout.max(slowest.saturating_mul(TIMES_SLOWEST)),
            None if computes => self.timeout.saturating_mul(FIRST_SIGN),
            None => self.timeout,
        }
    }

    fn usual(&self) -> String {
        let phase = self.phase.as_deref().unwrap_or("the start");
        let usual = self.recent().and_then(|gaps| {
            let mut sorted: Vec<_> = gaps.iter().copied().collect();
            sorted.sort_unstable();
            sorted.get(sorted.len() / 2).copied()
        });
        match usual {
            Some(usual) if phase == "training" => format!(" (usually a step takes {})", span(usual)),
            Some(usual) => format!(
                " in the phase `{phase}` (usually a sign of life comes every {})",
                span(usual)
            ),
            None => format!(" in the phase `{phase}`, which has shown nothing yet"),
        }
    }
}

/// A length of time for people.
fn span(time: Duration) -> String {
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

    /// A child and a clock that a test moves.
    struct Bench {
        dog: Watchdog,
        now: Duration,
        used: Option<Duration>,
    }

    impl Bench {
        fn new() -> Self {
            let period = Duration::from_secs(2);
            Self {
                dog: Watchdog::new(Duration::from_secs(10 * MINUTE), period, Duration::ZERO),
                now: Duration::ZERO,
                used: Some(Duration::ZERO),
            }
        }

        fn phase(&mut self, name: &str) {
            self.dog.heard(self.now, &ChildEvent::Phase { name: name.into() });
        }

        fn step(&mut self, done: u64) {
            let event = ChildEvent::Progress {
                done,
                total: 100,
                seconds_per_step: Some(5.0),
            };
            self.dog.heard(self.now, &event);
        }

        /// Looks every two seconds; a busy child computes all the time.
        fn pass(&mut self, seconds: u64, busy: bool) -> Vec<Finding> {
            let mut found = Vec::new();
            for _ in 0..seconds / 2 {
                self.now += Duration::from_secs(2);
                if busy {
                    self.used = self.used.map(|used| used + Duration::from_secs(2));
                }
                match self.dog.look(self.now, self.used) {
                    Finding::Fine => {}
                    other => found.push(other),
                }
            }
            found
        }

        /// Twenty steps of so many seconds.
        fn trains(&mut self, seconds: u64) {
            self.phase("training");
            for done in 0..20 {
                assert_eq!(self.pass(seconds, true), []);
                self.step(done);
            }
        }
    }

    fn is_hung(found: &[Finding]) -> bool {
        matches!(found.last(), Some(Finding::Hung(_)))
    }

    #[test]
    fn a_silent_child_is_announced_and_then_ended() {
        let mut bench = Bench::new();
        bench.trains(6);
        let found = bench.pass(5 * MINUTE, false);
        let Some(Finding::Silent {
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
        let more = bench.pass(5 * MINUTE, false);
        assert!(
            matches!(more.first(), Some(Finding::Silent { .. })),
            "said again: {more:?}"
        );
        assert_eq!(
            more.last(),
            Some(&Finding::Hung(
                "no progress for 10 min (usually a step takes 6.0 s)".into()
            ))
        );
    }

    #[test]
    fn slow_steps_make_a_long_limit() {
        let mut bench = Bench::new();
        bench.trains(5 * MINUTE);
        // Twenty times five minutes.
        assert!(!is_hung(&bench.pass(99 * MINUTE, true)));
        assert!(is_hung(&bench.pass(MINUTE, true)));
    }

    #[test]
    fn a_phase_that_has_shown_nothing_gets_time_if_its_process_computes() {
        let mut bench = Bench::new();
        bench.phase("loading model");
        assert!(!is_hung(&bench.pass(119 * MINUTE, true)));
        assert!(is_hung(&bench.pass(MINUTE, true)));
        let mut bench = Bench::new();
        bench.phase("loading model");
        assert!(is_hung(&bench.pass(10 * MINUTE, false)));
        // A system that does not tell CPU times.
        let mut bench = Bench::new();
        bench.used = None;
        assert!(!is_hung(&bench.pass(119 * MINUTE, false)));
    }

    #[test]
    fn a_machine_that_slept_is_no_hang() {
        let mut bench = Bench::new();
        bench.trains(6);
        bench.now += Duration::from_secs(12 * 3600);
        assert_eq!(bench.pass(4 * MINUTE, false), []);
        // Again and again, as a laptop does.
        for _ in 0..20 {
            bench.now += Duration::from_secs(3600);
            bench.dog.look(bench.now, bench.used);
        }
        // The look that spans the sleep counts nothing, not even its own two seconds.
        assert_eq!(bench.dog.silent, Duration::from_secs(4 * MINUTE - 2));
    }

    #[test]
    fn a_child_that_waits_for_us_is_not_hung() {
        let mut bench = Bench::new();
        bench.trains(6);
        bench.dog.waits_for_us(bench.now, true);
        assert_eq!(bench.pass(60 * MINUTE, false), []);
        bench.dog.waits_for_us(bench.now, false);
        assert!(is_hung(&bench.pass(10 * MINUTE, false)));
    }

    #[test]
    fn a_child_that_comes_back_says_so_and_its_pause_does_not_become_usual() {
        let mut bench = Bench::new();
        bench.trains(6);
        assert!(!is_hung(&bench.pass(9 * MINUTE, false)));
        bench.step(20);
        let found = bench.pass(2, true);
        let back = Finding::Back {
            phase: Some("training".into()),
            message: "it makes progress again after 9 min".into(),
        };
        assert_eq!(found, [back]);
        assert!(
            is_hung(&bench.pass(10 * MINUTE, false)),
            "20 times 9 minutes would be 3 hours"
        );
    }

    #[test]
    fn each_phase_has_its_own_measure() {
        let mut bench = Bench::new();
        bench.trains(6);
        bench.phase("sampling");
        assert_eq!(
            bench.pass(30 * MINUTE, true),
            [],
            "it has shown nothing yet, and computes"
        );
        bench.phase("training");
        assert!(is_hung(&bench.pass(10 * MINUTE, true)));
    }
}
