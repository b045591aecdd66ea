//! What can go wrong, and for how long.

use crate::fault::Fault;
use crate::network::Direction;
use crate::postgres::Stop;
use std::time::Duration;

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
    /// Images are being drawn.
    Sampling,
}

/// Whose machine: the number counts among those that are meant, round and round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// One with an attempt.
    Busy(u8),
    /// One without.
    Idle(u8),
}

/// What packets are lost on a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// All in one direction.
    One(Direction),
    /// All.
    Both,
    /// All of a burst of so many milliseconds, four times a second.
    Some(u64),
}

/// What is wrong with the hub of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HubTrouble {
    /// It refuses connections.
    Away,
    /// It answers, in a way.
    Faulty(Fault),
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
    KillChild {
        /// Whose.
        whose: Whose,
    },
    /// SIGSTOP for the child alone, for good: its worker has to find out that it makes no progress.
    HangChild {
        /// Whose.
        whose: Whose,
    },
    /// A worker's certificate or token is revoked; later it gets another one.
    Refuse {
        /// Which.
        whose: Whose,
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
        trouble: HubTrouble,
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
        whose: Whose,
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
        fault: Fault,
        /// For how long.
        time: Duration,
    },
    /// The line of a worker to everybody else goes wrong.
    Line {
        /// Whose.
        whose: Whose,
        /// How.
        lost: Lost,
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

impl What {
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
                trouble: HubTrouble::Away,
                ..
            } => "hub refuses connections",
            Self::Hub {
                trouble: HubTrouble::Faulty(fault),
                ..
            } => match fault {
                Fault::Fail => "hub: every request 500",
                Fault::Flaky(_) => "hub: some requests 500",
                Fault::Hang => "hub: hangs, then cuts",
                Fault::CutAnswer(_) => "hub: cuts answers",
                _ => "hub: slow",
            },
            Self::KillCoordinator { leader: true, .. } => "leader killed",
            Self::KillCoordinator { leader: false, .. } => "standby killed",
            Self::Freeze { time, .. } if *time >= MINUTES => "worker frozen for minutes",
            Self::Freeze { .. } => "worker frozen",
            Self::FreezeLeader { time } if *time >= MINUTES => "leader frozen for minutes",
            Self::FreezeLeader { .. } => "leader frozen",
            Self::Storage { fault, .. } => match fault {
                Fault::None => "storage healed",
                Fault::Fail => "storage: every request 500",
                Fault::Flaky(_) => "storage: some requests 500",
                Fault::Hang => "storage: hangs, then cuts",
                Fault::Late => "storage: hangs, then answers",
                Fault::CutUpload(_) => "storage: cuts uploads",
                Fault::CutAnswer(_) => "storage: cuts answers",
                Fault::Slow(_) => "storage: slow",
            },
            Self::Line { lost, .. } => match lost {
                Lost::One(Direction::Up) => "line cut, from worker",
                Lost::One(Direction::Down) => "line cut, to worker",
                Lost::Both => "line cut, both directions",
                Lost::Some(_) => "line loses packets",
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
