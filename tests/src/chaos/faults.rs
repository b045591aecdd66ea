//! The kinds of faults, with their durations.

use crate::network::Direction;
use crate::postgres::Stop;
use crate::server_fault::ServerFault;
use std::time::Duration;

/// The event that triggers a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// No event: the fault follows the one before it, or the submission.
    Next,
    /// An attempt was assigned, and its worker now stages the inputs.
    Staging,
    /// An upload to storage has begun.
    Upload,
    /// A checkpoint was committed.
    Commit,
    /// A job generates images.
    Sampling,
}

/// The target machine. The number is an index among the busy or idle machines, modulo their count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A machine with an attempt.
    Busy(u8),
    /// A machine without an attempt.
    Idle(u8),
}

/// Which packets are lost on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketLoss {
    /// All packets in one direction.
    OneWay(Direction),
    /// All packets in both directions.
    Both,
    /// All packets in a burst of this many milliseconds, four times a second.
    Bursts(u64),
}

/// A fault of the model hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HubFault {
    /// The hub refuses connections.
    Down,
    /// The hub answers with this fault.
    Faulty(ServerFault),
}

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// SIGKILL for a worker, whose child process ends with it. It starts again later, possibly with an empty disk.
    KillWorker {
        /// The worker.
        target: Target,
        /// How long it is down.
        downtime: Duration,
        /// Whether its data folder is emptied, as on a new machine.
        empty: bool,
    },
    /// SIGKILL for the child process only.
    KillChild {
        /// The worker.
        target: Target,
    },
    /// SIGSTOP for the child process, without SIGCONT: its worker has to notice that it makes no progress.
    HangChild {
        /// The worker.
        target: Target,
    },
    /// A worker's certificate or token is revoked. Later the worker gets a new one.
    Revoke {
        /// The worker.
        target: Target,
        /// How long it has no access.
        downtime: Duration,
    },
    /// The leader's disk is full.
    FullCoordinatorDisk {
        /// Whether the reserve for the database is used up, too.
        include_reserve: bool,
        /// The duration.
        time: Duration,
    },
    /// A fault of the model hub.
    Hub {
        /// The fault.
        fault: HubFault,
        /// The duration.
        time: Duration,
    },
    /// SIGKILL for a coordinator, which starts again later.
    KillCoordinator {
        /// Whether it is the leader or the standby.
        leader: bool,
        /// How long it is down.
        downtime: Duration,
    },
    /// SIGSTOP for a worker, SIGCONT later. Its child process goes on.
    Freeze {
        /// The worker.
        target: Target,
        /// The duration.
        time: Duration,
    },
    /// SIGSTOP for the leader, SIGCONT later.
    FreezeLeader {
        /// The duration.
        time: Duration,
    },
    /// A fault of the object storage.
    Storage {
        /// The fault.
        fault: ServerFault,
        /// The duration.
        time: Duration,
    },
    /// A worker's network link loses packets.
    Link {
        /// The worker.
        target: Target,
        /// The lost packets.
        loss: PacketLoss,
        /// The duration.
        time: Duration,
    },
    /// PostgreSQL is stopped, and started again later.
    Database {
        /// The shutdown mode.
        how: Stop,
        /// How long it is down.
        downtime: Duration,
    },
    /// PostgreSQL's disk is slow.
    SlowDatabase {
        /// Bytes per second.
        rate: u64,
        /// The duration.
        time: Duration,
    },
    /// The worker's disk is full.
    FullDisk {
        /// The duration.
        time: Duration,
    },
    /// The worker's disk is slow.
    SlowDisk {
        /// Bytes per second.
        rate: u64,
        /// The duration.
        time: Duration,
    },
}

/// The shortest duration that counts as long.
const LONG: Duration = Duration::from_secs(60);

impl FaultKind {
    /// The name under which faults of this kind are counted.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::KillWorker { empty: false, .. } => "worker killed",
            Self::KillWorker { empty: true, .. } => "worker killed, its disk emptied",
            Self::KillChild { .. } => "child process killed",
            Self::HangChild { .. } => "child process hangs",
            Self::Revoke { .. } => "worker's access revoked for a while",
            Self::FullCoordinatorDisk {
                include_reserve: true, ..
            } => "coordinator's disk full",
            Self::FullCoordinatorDisk {
                include_reserve: false, ..
            } => "coordinator's disk full but for the reserve",
            Self::Hub {
                fault: HubFault::Down, ..
            } => "hub refuses connections",
            Self::Hub {
                fault: HubFault::Faulty(fault),
                ..
            } => match fault {
                ServerFault::Fail => "hub: every request 500",
                ServerFault::Flaky(_) => "hub: some requests 500",
                ServerFault::Hang => "hub: hangs, then cuts",
                ServerFault::CutAnswer(_) => "hub: cuts answers",
                _ => "hub: slow",
            },
            Self::KillCoordinator { leader: true, .. } => "leader killed",
            Self::KillCoordinator { leader: false, .. } => "standby killed",
            Self::Freeze { time, .. } if *time >= LONG => "worker frozen for minutes",
            Self::Freeze { .. } => "worker frozen",
            Self::FreezeLeader { time } if *time >= LONG => "leader frozen for minutes",
            Self::FreezeLeader { .. } => "leader frozen",
            Self::Storage { fault, .. } => match fault {
                ServerFault::None => "storage recovered",
                ServerFault::Fail => "storage: every request 500",
                ServerFault::Flaky(_) => "storage: some requests 500",
                ServerFault::Hang => "storage: hangs, then cuts",
                ServerFault::Late => "storage: hangs, then answers",
                ServerFault::CutUpload(_) => "storage: cuts uploads",
                ServerFault::CutAnswer(_) => "storage: cuts answers",
                ServerFault::Slow(_) => "storage: slow",
                ServerFault::DenyCoordinator => "storage: refuses the coordinator",
            },
            Self::Link { loss, .. } => match loss {
                PacketLoss::OneWay(Direction::Up) => "link cut, from worker",
                PacketLoss::OneWay(Direction::Down) => "link cut, to worker",
                PacketLoss::Both => "link cut, both directions",
                PacketLoss::Bursts(_) => "link loses packets",
            },
            Self::Database { how: Stop::Fast, .. } => "PostgreSQL stopped, fast",
            Self::Database { .. } => "PostgreSQL stopped, immediate",
            Self::SlowDatabase { .. } => "PostgreSQL's disk slow",
            Self::FullDisk { .. } => "worker's disk full",
            Self::SlowDisk { .. } => "worker's disk slow",
        }
    }

    /// Whether it is a freeze that lasts for minutes.
    #[must_use]
    pub fn is_long(&self) -> bool {
        matches!(self, Self::Freeze { time, .. } | Self::FreezeLeader { time } if *time >= LONG)
    }
}
