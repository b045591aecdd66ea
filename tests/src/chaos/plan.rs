//! The plan of a round: its faults, drawn from a seed.

pub use super::faults::{FaultKind, HubFault, PacketLoss, Target, Trigger};
use crate::network::Direction;
use crate::postgres::Stop;
use crate::server_fault::ServerFault;
use std::fmt;
use std::time::Duration;

/// A seeded random number generator (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Seeds the generator.
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

    /// True with probability 1/`count`.
    fn one_in(&mut self, count: u64) -> bool {
        self.between(1, count) == 1
    }

    fn millis(&mut self, first: u64, last: u64) -> Duration {
        Duration::from_millis(self.between(first, last))
    }

    /// A duration in milliseconds, the smallest of three draws, so most are short.
    fn short_millis(&mut self, first: u64, last: u64) -> Duration {
        let shorter = self.between(first, last).min(self.between(first, last));
        Duration::from_millis(shorter.min(self.between(first, last)))
    }
}

/// Which parts of the cluster can have faults, besides workers, their access, their child processes, a coordinator and storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Network links that can be cut.
    pub links: bool,
    /// Several coordinators on one PostgreSQL.
    pub standby: bool,
    /// PostgreSQL's disk can be throttled.
    pub slow_database: bool,
    /// A worker has a small disk that can be filled.
    pub small_disk: bool,
    /// The coordinators have small disks that can be filled.
    pub coordinator_disks: bool,
    /// A job fetches its model from a hub.
    pub hub: bool,
    /// A worker's disk can be throttled.
    pub slow_disk: bool,
}

/// The parameters of a round.
#[derive(Clone, Copy, Debug)]
pub struct RoundConfig {
    /// The lease of the cluster.
    pub lease: Duration,
    /// The longest fault of storage, links, disks and the database.
    pub outage: Duration,
    /// The smallest and the largest number of faults.
    pub faults: (u64, u64),
    /// How many faults wait for their triggers at the same time.
    pub fault_queues: u8,
    /// How many jobs run at a time.
    pub jobs: usize,
    /// Whether new jobs are submitted until the last fault was injected.
    pub keep_busy: bool,
    /// Whether a process may be frozen for minutes.
    pub minutes: bool,
    /// The time limit of a round: every outage, several leases, and other load on the machine.
    pub limit: Duration,
}

/// A fault with the time at which it is injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedFault {
    /// The event that it waits for.
    pub trigger: Trigger,
    /// The delay after that event.
    pub delay: Duration,
    /// The fault.
    pub kind: FaultKind,
}

/// The faults of a round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The seed, which draws the same plan again.
    pub seed: u64,
    /// The faults in their order.
    pub faults: Vec<PlannedFault>,
}

impl Plan {
    /// Draws a plan.
    #[must_use]
    pub fn draw(seed: u64, config: &RoundConfig, capabilities: Capabilities) -> Self {
        let mut random = Random::new(seed);
        let count = random.between(config.faults.0, config.faults.1);
        let mut faults: Vec<PlannedFault> = (0..count)
            .map(|_| random_fault(&mut random, config, capabilities))
            .collect();
        if config.minutes && random.one_in(2) {
            // The first fault, so that most of the round happens meanwhile.
            let time = random.millis(60_000, 150_000);
            let target = random_target(&mut random);
            let leader = capabilities.standby && random.one_in(3);
            faults[0].kind = match leader {
                true => FaultKind::FreezeLeader { time },
                false => FaultKind::Freeze { target, time },
            };
        }
        Self { seed, faults }
    }
}

fn random_fault(random: &mut Random, config: &RoundConfig, capabilities: Capabilities) -> PlannedFault {
    let (trigger, max_delay) = match random.between(0, 9) {
        0..=2 => (Trigger::Next, 4000),
        3..=4 => (Trigger::Staging, 400),
        5..=6 => (Trigger::Upload, 30),
        7..=8 => (Trigger::Commit, 30),
        _ => (Trigger::Sampling, 400),
    };
    let delay = random.millis(0, max_delay);
    let kind = loop {
        if let Some(kind) = random_kind(random, config, capabilities) {
            break kind;
        }
    };
    PlannedFault { trigger, delay, kind }
}

/// Draws a fault; `None` if the cluster lacks the part that was drawn.
fn random_kind(random: &mut Random, config: &RoundConfig, capabilities: Capabilities) -> Option<FaultKind> {
    let lease = millis(config.lease);
    let outage = millis(config.outage);
    Some(match random.between(0, 31) {
        0..=2 => FaultKind::KillWorker {
            target: random_target(random),
            downtime: random.millis(0, 2 * lease),
            empty: random.one_in(3),
        },
        3..=4 => FaultKind::KillChild {
            target: random_target(random),
        },
        5..=6 => FaultKind::KillCoordinator {
            leader: true,
            downtime: random.millis(0, 2 * lease),
        },
        // From a short pause to long after the attempt was assigned to another worker.
        7..=9 => FaultKind::Freeze {
            target: random_target(random),
            time: random.millis(lease / 4, 3 * lease),
        },
        10..=13 => FaultKind::Storage {
            fault: random_server_fault(random),
            time: random.short_millis(1000, outage),
        },
        14 if capabilities.standby => FaultKind::KillCoordinator {
            leader: false,
            downtime: random.millis(0, 2 * lease),
        },
        15 if capabilities.standby => FaultKind::FreezeLeader {
            time: random.millis(lease / 4, 3 * lease),
        },
        16..=17 if capabilities.standby => FaultKind::Database {
            how: if random.one_in(2) { Stop::Fast } else { Stop::Immediate },
            // Zero is a restart, otherwise an outage.
            downtime: if random.one_in(2) {
                Duration::ZERO
            } else {
                random.short_millis(1000, outage)
            },
        },
        18 if capabilities.slow_database => FaultKind::SlowDatabase {
            rate: random.between(100_000, 2_000_000),
            time: random.short_millis(1000, outage),
        },
        19..=21 if capabilities.links => FaultKind::Link {
            target: random_target(random),
            loss: match random.between(0, 3) {
                0 => PacketLoss::OneWay(Direction::Up),
                1 => PacketLoss::OneWay(Direction::Down),
                2 => PacketLoss::Both,
                _ => PacketLoss::Bursts(random.between(20, 160)),
            },
            time: random.short_millis(1000, outage),
        },
        22 if capabilities.small_disk => FaultKind::FullDisk {
            time: random.short_millis(1000, outage),
        },
        23 if capabilities.slow_disk => FaultKind::SlowDisk {
            rate: random.between(50_000, 1_000_000),
            time: random.short_millis(1000, outage),
        },
        24..=25 => FaultKind::HangChild {
            target: random_target(random),
        },
        26..=27 => FaultKind::Revoke {
            target: random_target(random),
            downtime: random.millis(0, 2 * lease),
        },
        28..=29 if capabilities.coordinator_disks => FaultKind::FullCoordinatorDisk {
            include_reserve: random.one_in(2),
            time: random.short_millis(1000, outage),
        },
        30..=31 if capabilities.hub => FaultKind::Hub {
            fault: random_hub_fault(random),
            time: random.short_millis(1000, outage),
        },
        _ => return None,
    })
}

fn random_hub_fault(random: &mut Random) -> HubFault {
    match random.between(0, 6) {
        0..=1 => HubFault::Down,
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
        let Self { trigger, delay, kind } = self;
        write!(f, "{trigger:?} + {delay:?}: {kind:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const ALL: Capabilities = Capabilities {
        links: true,
        standby: true,
        slow_database: true,
        small_disk: true,
        coordinator_disks: true,
        hub: true,
        slow_disk: true,
    };

    fn config() -> RoundConfig {
        RoundConfig {
            lease: Duration::from_secs(4),
            outage: Duration::from_secs(30),
            faults: (2, 5),
            fault_queues: 1,
            jobs: 1,
            keep_busy: false,
            minutes: true,
            limit: Duration::from_secs(1),
        }
    }

    fn kinds(capabilities: Capabilities) -> BTreeSet<&'static str> {
        let faults = (0..400).flat_map(|seed| Plan::draw(seed, &config(), capabilities).faults);
        faults.map(|fault| fault.kind.name()).collect()
    }

    #[test]
    fn a_seed_determines_the_plan() {
        let draw = |seed| Plan::draw(seed, &config(), ALL);
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7).faults, draw(8).faults);
        let all = (0..200).flat_map(|seed| draw(seed).faults);
        let long =
            all.filter(|fault| matches!(fault.kind, FaultKind::Storage { time, .. } if time > Duration::from_secs(15)));
        assert!(long.count() > 0);
    }

    #[test]
    fn all_possible_faults_are_drawn_and_no_others() {
        let all = kinds(ALL);
        for kind in [
            "worker killed, its disk emptied",
            "leader frozen for minutes",
            "worker frozen for minutes",
            "standby killed",
            "PostgreSQL stopped, immediate",
            "link cut, to worker",
            "worker's disk full",
            "storage: every request 500",
            "child process hangs",
            "worker's access revoked for a while",
            "coordinator's disk full",
            "coordinator's disk full but for the reserve",
            "hub refuses connections",
            "hub: hangs, then cuts",
        ] {
            assert!(all.contains(kind), "{kind} is not in {all:?}");
        }
        assert_eq!(all.len(), 34, "{all:?}");
        let few = kinds(Capabilities::default());
        let is_impossible = |kind: &&str| {
            ["link", "worker's disk", "coordinator's disk", "hub"]
                .iter()
                .any(|what| kind.starts_with(what))
                || kind.contains("PostgreSQL")
        };
        assert!(!few.iter().any(is_impossible), "{few:?}");
        assert!(
            few.contains("worker's access revoked for a while")
                && few.contains("leader killed")
                && !few.contains("standby killed"),
            "{few:?}"
        );
    }
}
