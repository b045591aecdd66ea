//! What happens in a round, drawn from its seed.

use crate::fault::Fault;
use std::fmt;
use std::time::Duration;

/// Small reproducible random numbers (splitmix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// From a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from `first` to `last`, both included.
    pub fn between(&mut self, first: u64, last: u64) -> u64 {
        first + self.next() % (last - first + 1)
    }

    fn millis(&mut self, first: u64, last: u64) -> Duration {
        Duration::from_millis(self.between(first, last))
    }
}

/// When a wound is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// After the one before it, or after the submission.
    Next,
    /// An attempt was just given to a worker, which now brings its inputs.
    Staging,
    /// Something is being stored.
    Upload,
    /// A checkpoint was just committed.
    Commit,
    /// Pictures are being drawn.
    Sampling,
}

/// Whose machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// The one with the attempt.
    Busy,
    /// The other one.
    Idle,
}

/// A wound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// SIGKILL for a worker, whose child goes with it. It starts again later, perhaps on an empty disk.
    KillWorker {
        /// Which.
        whose: Whose,
        /// When it comes back.
        back: Duration,
        /// As another machine would: with nothing.
        empty: bool,
    },
    /// SIGKILL for the child alone.
    KillChild,
    /// SIGKILL for the coordinator, which starts again later.
    KillCoordinator {
        /// When it comes back.
        back: Duration,
    },
    /// SIGSTOP for a worker, SIGCONT later. Its child is not told.
    Freeze {
        /// Which.
        whose: Whose,
        /// For how long.
        time: Duration,
    },
    /// Storage goes wrong.
    Storage {
        /// How.
        fault: Fault,
        /// For how long.
        time: Duration,
    },
}

/// A wound with its moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wound {
    /// What it waits for.
    pub when: When,
    /// How long after that.
    pub delay: Duration,
    /// What happens.
    pub what: What,
}

/// A round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Draws the same plan again.
    pub seed: u64,
    /// In their order.
    pub wounds: Vec<Wound>,
}

impl Plan {
    /// Draws a plan. `lease` is that of the pool; storage goes wrong for at most `outage`.
    #[must_use]
    pub fn draw(seed: u64, lease: Duration, outage: Duration) -> Self {
        let mut random = Random::new(seed);
        let count = random.between(2, 5);
        let wounds = (0..count).map(|_| wound(&mut random, lease, outage)).collect();
        Self { seed, wounds }
    }
}

fn wound(random: &mut Random, lease: Duration, outage: Duration) -> Wound {
    let (when, latest) = match random.between(0, 9) {
        0..=2 => (When::Next, 4000),
        3..=4 => (When::Staging, 400),
        5..=6 => (When::Upload, 30),
        7..=8 => (When::Commit, 30),
        _ => (When::Sampling, 400),
    };
    let delay = random.millis(0, latest);
    let lease = u64::try_from(lease.as_millis()).unwrap_or(u64::MAX);
    let outage = u64::try_from(outage.as_millis()).unwrap_or(u64::MAX);
    let what = match random.between(0, 9) {
        0..=2 => What::KillWorker {
            whose: whose(random),
            back: random.millis(0, 2 * lease),
            empty: random.between(0, 2) == 0,
        },
        3 => What::KillChild,
        4 => What::KillCoordinator {
            back: random.millis(0, 2 * lease),
        },
        // From a hiccup to long after the attempt was given to somebody else.
        5..=6 => What::Freeze {
            whose: whose(random),
            time: random.millis(lease / 4, 3 * lease),
        },
        _ => What::Storage {
            fault: fault(random),
            time: random.millis(1000, outage),
        },
    };
    Wound { when, delay, what }
}

fn whose(random: &mut Random) -> Whose {
    match random.between(0, 4) {
        0 => Whose::Idle,
        _ => Whose::Busy,
    }
}

fn fault(random: &mut Random) -> Fault {
    match random.between(0, 7) {
        0..=1 => Fault::Fail,
        2 => Fault::Flaky(random.between(2, 4)),
        3 => Fault::Hang,
        4 => Fault::Late,
        5 => Fault::CutUpload(random.between(0, 40_000)),
        6 => Fault::CutAnswer(random.between(0, 40_000)),
        _ => Fault::Slow(random.between(10_000, 200_000)),
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}:", self.seed)?;
        for wound in &self.wounds {
            write!(f, "\n  {wound}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Wound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { when, delay, what } = self;
        write!(f, "{when:?} + {delay:?}: {what:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_draws_the_same_plan_and_another_seed_another() {
        let draw = |seed| Plan::draw(seed, Duration::from_secs(4), Duration::from_secs(30));
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7).wounds, draw(8).wounds);
        let all: Vec<Wound> = (0..200).flat_map(|seed| draw(seed).wounds).collect();
        let some = |is: fn(&What) -> bool| all.iter().any(|wound| is(&wound.what));
        assert!(some(|what| matches!(what, What::KillWorker { empty: true, .. })));
        assert!(some(|what| matches!(what, What::KillChild)));
        assert!(some(|what| matches!(what, What::KillCoordinator { .. })));
        assert!(some(
            |what| matches!(what, What::Freeze { time, .. } if *time > Duration::from_secs(8))
        ));
        assert!(some(
            |what| matches!(what, What::Storage { fault: Fault::Fail, time } if *time > Duration::from_secs(20))
        ));
    }
}
