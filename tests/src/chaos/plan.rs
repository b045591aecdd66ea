//! What happens in a round, drawn from its seed.

pub use super::faults::{FaultKind, HubFault, PacketLoss, Target, Trigger};
use crate::network::Direction;
use crate::postgres::Stop;
use crate::server_fault::ServerFault;
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

    /// One of so many.
    fn one_in(&mut self, count: u64) -> bool {
        self.between(1, count) == 1
    }

    fn millis(&mut self, first: u64, last: u64) -> Duration {
        Duration::from_millis(self.between(first, last))
    }

    /// Mostly short.
    fn span(&mut self, first: u64, last: u64) -> Duration {
        let shorter = self.between(first, last).min(self.between(first, last));
        Duration::from_millis(shorter.min(self.between(first, last)))
    }
}

/// What there is to go wrong, besides workers and their right to be there, their children, a coordinator and storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Means {
    /// Lines that can be cut.
    pub lines: bool,
    /// Several coordinators on a PostgreSQL.
    pub members: bool,
    /// PostgreSQL's disk can be slow.
    pub slow_database: bool,
    /// A worker with a disk that can be full.
    pub small_disk: bool,
    /// Coordinators with disks that can be full.
    pub coordinator_disks: bool,
    /// A job whose model comes from a hub.
    pub hub: bool,
    /// And slow.
    pub slow_disk: bool,
}

/// How a round is drawn.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// That of the pool.
    pub lease: Duration,
    /// Storage, lines, disks and the database go wrong for at most so long.
    pub outage: Duration,
    /// Faults, from and to.
    pub faults: (u64, u64),
    /// How many wait for their moments at the same time.
    pub tracks: u8,
    /// Work that is in the pool at a time.
    pub jobs: usize,
    /// New jobs come until the last fault was made.
    pub keep_busy: bool,
    /// Somebody may be frozen for minutes.
    pub minutes: bool,
    /// How long a whole round may take: every outage, several leases, and a machine with other work to do.
    pub limit: Duration,
}

/// A fault with its moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedFault {
    /// What it waits for.
    pub when: Trigger,
    /// How long after that.
    pub delay: Duration,
    /// What happens.
    pub what: FaultKind,
}

/// A round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Draws the same plan again.
    pub seed: u64,
    /// In their order.
    pub faults: Vec<PlannedFault>,
}

impl Plan {
    /// Draws a plan.
    #[must_use]
    pub fn draw(seed: u64, terms: &Terms, means: Means) -> Self {
        let mut random = Random::new(seed);
        let count = random.between(terms.faults.0, terms.faults.1);
        let mut faults: Vec<PlannedFault> = (0..count).map(|_| random_fault(&mut random, terms, means)).collect();
        if terms.minutes && random.one_in(2) {
            // Early, so that most of the round happens meanwhile.
            let time = random.millis(60_000, 150_000);
            let target = random_target(&mut random);
            let leader = means.members && random.one_in(3);
            faults[0].what = match leader {
                true => FaultKind::FreezeLeader { time },
                false => FaultKind::Freeze { target, time },
            };
        }
        Self { seed, faults }
    }
}

fn random_fault(random: &mut Random, terms: &Terms, means: Means) -> PlannedFault {
    let (when, latest) = match random.between(0, 9) {
        0..=2 => (Trigger::Next, 4000),
        3..=4 => (Trigger::Staging, 400),
        5..=6 => (Trigger::Upload, 30),
        7..=8 => (Trigger::Commit, 30),
        _ => (Trigger::Sampling, 400),
    };
    let delay = random.millis(0, latest);
    let what = loop {
        if let Some(what) = random_kind(random, terms, means) {
            break what;
        }
    };
    PlannedFault { when, delay, what }
}

/// None where there is nothing of what was drawn.
fn random_kind(random: &mut Random, terms: &Terms, means: Means) -> Option<FaultKind> {
    let lease = millis(terms.lease);
    let outage = millis(terms.outage);
    Some(match random.between(0, 31) {
        0..=2 => FaultKind::KillWorker {
            target: random_target(random),
            back: random.millis(0, 2 * lease),
            empty: random.one_in(3),
        },
        3..=4 => FaultKind::KillChild {
            target: random_target(random),
        },
        5..=6 => FaultKind::KillCoordinator {
            leader: true,
            back: random.millis(0, 2 * lease),
        },
        // From a hiccup to long after the attempt was given to somebody else.
        7..=9 => FaultKind::Freeze {
            target: random_target(random),
            time: random.millis(lease / 4, 3 * lease),
        },
        10..=13 => FaultKind::Storage {
            fault: random_server_fault(random),
            time: random.span(1000, outage),
        },
        14 if means.members => FaultKind::KillCoordinator {
            leader: false,
            back: random.millis(0, 2 * lease),
        },
        15 if means.members => FaultKind::FreezeLeader {
            time: random.millis(lease / 4, 3 * lease),
        },
        16..=17 if means.members => FaultKind::Database {
            how: if random.one_in(2) { Stop::Fast } else { Stop::Immediate },
            // A restart, or an outage.
            back: if random.one_in(2) {
                Duration::ZERO
            } else {
                random.span(1000, outage)
            },
        },
        18 if means.slow_database => FaultKind::SlowDatabase {
            rate: random.between(100_000, 2_000_000),
            time: random.span(1000, outage),
        },
        19..=21 if means.lines => FaultKind::Line {
            target: random_target(random),
            loss: match random.between(0, 3) {
                0 => PacketLoss::One(Direction::Up),
                1 => PacketLoss::One(Direction::Down),
                2 => PacketLoss::Both,
                _ => PacketLoss::Some(random.between(20, 160)),
            },
            time: random.span(1000, outage),
        },
        22 if means.small_disk => FaultKind::FullDisk {
            time: random.span(1000, outage),
        },
        23 if means.slow_disk => FaultKind::SlowDisk {
            rate: random.between(50_000, 1_000_000),
            time: random.span(1000, outage),
        },
        24..=25 => FaultKind::HangChild {
            target: random_target(random),
        },
        26..=27 => FaultKind::Refuse {
            target: random_target(random),
            back: random.millis(0, 2 * lease),
        },
        28..=29 if means.coordinator_disks => FaultKind::FullCoordinatorDisk {
            all: random.one_in(2),
            time: random.span(1000, outage),
        },
        30..=31 if means.hub => FaultKind::Hub {
            fault: random_hub_fault(random),
            time: random.span(1000, outage),
        },
        _ => return None,
    })
}

fn random_hub_fault(random: &mut Random) -> HubFault {
    match random.between(0, 6) {
        0..=1 => HubFault::Away,
        2..=3 => HubFault::Faulty(ServerFault::Fail),
        4 => HubFault::Faulty(ServerFault::Flaky(random.between(2, 4))),
        5 => HubFault::Faulty(ServerFault::Hang),
        _ => HubFault::Faulty(ServerFault::CutAnswer(random.between(0, 40_000))),
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn random_target(random: &mut Random) -> Target {
    let number = u8::try_from(random.between(0, 11)).unwrap_or(0);
    match random.between(0, 4) {
        0 => Target::Idle(number),
        _ => Target::Busy(number),
    }
}

fn random_server_fault(random: &mut Random) -> ServerFault {
    match random.between(0, 7) {
        0..=1 => ServerFault::Fail,
        2 => ServerFault::Flaky(random.between(2, 4)),
        3 => ServerFault::Hang,
        4 => ServerFault::Late,
        5 => ServerFault::CutUpload(random.between(0, 40_000)),
        6 => ServerFault::CutAnswer(random.between(0, 40_000)),
        _ => ServerFault::Slow(random.between(10_000, 200_000)),
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}:", self.seed)?;
        for fault in &self.faults {
            write!(f, "\n  {fault}")?;
        }
        Ok(())
    }
}

impl fmt::Display for PlannedFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { when, delay, what } = self;
        write!(f, "{when:?} + {delay:?}: {what:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const EVERYTHING: Means = Means {
        lines: true,
        members: true,
        slow_database: true,
        small_disk: true,
        coordinator_disks: true,
        hub: true,
        slow_disk: true,
    };

    fn terms() -> Terms {
        Terms {
            lease: Duration::from_secs(4),
            outage: Duration::from_secs(30),
            faults: (2, 5),
            tracks: 1,
            jobs: 1,
            keep_busy: false,
            minutes: true,
            limit: Duration::from_secs(1),
        }
    }

    fn kinds(means: Means) -> BTreeSet<&'static str> {
        let faults = (0..400).flat_map(|seed| Plan::draw(seed, &terms(), means).faults);
        faults.map(|fault| fault.what.kind()).collect()
    }

    #[test]
    fn a_seed_draws_the_same_plan_and_another_seed_another() {
        let draw = |seed| Plan::draw(seed, &terms(), EVERYTHING);
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7).faults, draw(8).faults);
        let all = (0..200).flat_map(|seed| draw(seed).faults);
        let long =
            all.filter(|fault| matches!(fault.what, FaultKind::Storage { time, .. } if time > Duration::from_secs(15)));
        assert!(long.count() > 0);
    }

    #[test]
    fn everything_is_drawn_that_there_is_and_nothing_else() {
        let all = kinds(EVERYTHING);
        for kind in [
            "worker killed, its disk emptied",
            "leader frozen for minutes",
            "worker frozen for minutes",
            "standby killed",
            "PostgreSQL stopped, immediate",
            "line cut, to worker",
            "worker's disk full",
            "storage: every request 500",
            "child process hangs",
            "worker refused for a while",
            "coordinator's disk full",
            "coordinator's disk full but for the reserve",
            "hub refuses connections",
            "hub: hangs, then cuts",
        ] {
            assert!(all.contains(kind), "{kind} of {all:?}");
        }
        assert_eq!(all.len(), 34, "{all:?}");
        let few = kinds(Means::default());
        let of_others = |kind: &&str| {
            ["line", "worker's disk", "coordinator's disk", "hub"]
                .iter()
                .any(|what| kind.starts_with(what))
                || kind.contains("PostgreSQL")
        };
        assert!(!few.iter().any(of_others), "{few:?}");
        assert!(
            few.contains("worker refused for a while")
                && few.contains("leader killed")
                && !few.contains("standby killed"),
            "{few:?}"
        );
    }
}
