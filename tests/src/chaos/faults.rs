//! What can go wrong, and for how long.

use crate::network::Direction;
use crate::postgres::Stop;
use crate::server_fault::ServerFault;
use std::time::Duration;

/// When a fault is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// After the one before it, or after the submission.
    Next,
    /// An attempt was just given to a worker, which now brings its inputs.
    Staging,
    /// Something is being stored.
    Upload,
    /// A checkpoint was just committed.
    Commit,
    /// Images are being drawn.
    Sampling,
}

/// Target machine: the number counts among those that are meant, round and round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// One with an attempt.
    Busy(u8),
    /// One without.
    Idle(u8),
}

/// What packets are lost on a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketLoss {
    /// All in one direction.
    One(Direction),
    /// All.
    Both,
    /// All of a burst of so many milliseconds, four times a second.
    Some(u64),
}

/// What is wrong with the hub of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HubFault {
    /// It refuses connections.
    Away,
    /// It answers, in a way.
    Faulty(ServerFault),
}

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// SIGKILL for a worker, whose child goes with it. It starts again later, perhaps on an empty disk.
    KillWorker {
        /// Which.
        target: Target,
        /// When it comes back.
        back: Duration,
        /// As another machine would: with nothing.
        empty: bool,
    },
    /// SIGKILL for the child alone.
    KillChild {
        /// Target.
        target: Target,
    },
    /// SIGSTOP for the child alone, for good: its worker has to find out that it makes no progress.
    HangChild {
        /// Target.
        target: Target,
    },
    /// A worker's certificate or token is revoked; later it gets another one.
    Refuse {
        /// Which.
        target: Target,
        /// When it is let in again.
        back: Duration,
    },
    /// The disk of the coordinator that leads has no room.
    FullCoordinatorDisk {
        /// None at all, or only what is reserved for the database.
        all: bool,
        /// For how long.
        time: Duration,
    },
    /// The hub of models goes wrong.
    Hub {
        /// How.
        fault: HubFault,
        /// For how long.
        time: Duration,
    },
    /// SIGKILL for a coordinator, which starts again later.
    KillCoordinator {
        /// The one that leads, or the other one.
        leader: bool,
        /// When it comes back.
        back: Duration,
    },
    /// SIGSTOP for a worker, SIGCONT later. Its child is not told.
    Freeze {
        /// Which.
        target: Target,
        /// For how long.
        time: Duration,
    },
    /// SIGSTOP for the coordinator that leads.
    FreezeLeader {
        /// For how long.
        time: Duration,
    },
    /// Storage goes wrong.
    Storage {
        /// How.
        fault: ServerFault,
        /// For how long.
        time: Duration,
    },
    /// The line of a worker to everybody else goes wrong.
    Line {
        /// Target.
        target: Target,
        /// How.
        loss: PacketLoss,
        /// For how long.
        time: Duration,
    },
    /// PostgreSQL is stopped, and started again later.
    Database {
        /// In which way.
        how: Stop,
        /// When it comes back.
        back: Duration,
    },
    /// PostgreSQL's disk is slow.
    SlowDatabase {
        /// Bytes per second.
        rate: u64,
        /// For how long.
        time: Duration,
    },
    /// The worker's disk has no room.
    FullDisk {
        /// For how long.
        time: Duration,
    },
    /// The worker's disk is slow.
    SlowDisk {
        /// Bytes per second.
        rate: u64,
        /// For how long.
        time: Duration,
    },
}

/// Longer than this is minutes.
pub(super) const MINUTES: Duration = Duration::from_secs(60);

impl FaultKind {
    /// Under which name it is counted.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::KillWorker { empty: false, .. } => "worker killed",
            Self::KillWorker { empty: true, .. } => "worker killed, its disk emptied",
            Self::KillChild { .. } => "child process killed",
            Self::HangChild { .. } => "child process hangs",
            Self::Refuse { .. } => "worker refused for a while",
            Self::FullCoordinatorDisk { all: true, .. } => "coordinator's disk full",
            Self::FullCoordinatorDisk { all: false, .. } => "coordinator's disk full but for the reserve",
            Self::Hub {
                fault: HubFault::Away, ..
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
            Self::Freeze { time, .. } if *time >= MINUTES => "worker frozen for minutes",
            Self::Freeze { .. } => "worker frozen",
            Self::FreezeLeader { time } if *time >= MINUTES => "leader frozen for minutes",
            Self::FreezeLeader { .. } => "leader frozen",
            Self::Storage { fault, .. } => match fault {
                ServerFault::None => "storage healed",
                ServerFault::Fail => "storage: every request 500",
                ServerFault::Flaky(_) => "storage: some requests 500",
                ServerFault::Hang => "storage: hangs, then cuts",
                ServerFault::Late => "storage: hangs, then answers",
                ServerFault::CutUpload(_) => "storage: cuts uploads",
                ServerFault::CutAnswer(_) => "storage: cuts answers",
                ServerFault::Slow(_) => "storage: slow",
            },
            Self::Line { loss, .. } => match loss {
                PacketLoss::One(Direction::Up) => "line cut, from worker",
                PacketLoss::One(Direction::Down) => "line cut, to worker",
                PacketLoss::Both => "line cut, both directions",
                PacketLoss::Some(_) => "line loses packets",
            },
            Self::Database { how: Stop::Fast, .. } => "PostgreSQL stopped, fast",
            Self::Database { .. } => "PostgreSQL stopped, immediate",
            Self::SlowDatabase { .. } => "PostgreSQL's disk slow",
            Self::FullDisk { .. } => "worker's disk full",
            Self::SlowDisk { .. } => "worker's disk slow",
        }
    }

    /// Whether it lasts for minutes.
    #[must_use]
    pub fn is_long(&self) -> bool {
        matches!(self, Self::Freeze { time, .. } | Self::FreezeLeader { time } if *time >= MINUTES)
    }
}
