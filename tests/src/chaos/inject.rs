//! Injects faults, and ends them again.

use super::admission::Admission;
use super::faults::{FaultKind, HubFault, PacketLoss};
use super::{Cluster, RESERVE_MIB};
use crate::network::{Direction, Loss};
use crate::processes::{Process, send};
use crate::server_fault::ServerFault;
use nix::sys::signal::Signal;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often packets are lost in a burst.
const PERIOD: Duration = Duration::from_millis(250);
/// How often the end of a round checks whether a worker was admitted again.
const LOOK: Duration = Duration::from_millis(20);
/// The file with a worker's certificate: without it, it would have to be let in anew.
const IDENTITY: &str = "identity.json";

/// The faults that last at the moment, and when each of them ends.
#[derive(Default)]
pub(super) struct FaultInjector {
    recoveries: Vec<Recovery>,
    /// Machines that are being let in again.
    admissions: Vec<(usize, JoinHandle<bool>)>,
}

struct Recovery {
    at: Instant,
    what: RecoveryKind,
}

enum RecoveryKind {
    Machine { at: usize, empty: bool },
    Frozen { at: usize, id: u32 },
    Coordinator { at: usize },
    FrozenLeader { at: usize, id: u32 },
    Storage,
    Line { at: usize, loss: Option<Loss> },
    Database,
    SlowDatabase,
    FullDisk { filler: PathBuf },
    SlowDisk { at: usize },
    Refused { at: usize, admission: Box<Admission> },
    CoordinatorDisk { at: usize, filler: PathBuf },
    Hub,
}

impl FaultInjector {
    /// Injects a fault on machine `at` (where the fault names one). Returns false if there is no target, or if the same fault lasts there already.
    pub(super) fn make(&mut self, cluster: &mut Cluster, what: &FaultKind, at: usize) -> bool {
        let now = Instant::now();
        match *what {
            FaultKind::KillWorker { back, empty, .. } => {
                let Some(mut process) = cluster.machines[at].process.take() else {
                    return false;
                };
                process.kill();
                self.later(now + back, RecoveryKind::Machine { at, empty });
                true
            }
            FaultKind::KillChild { .. } => {
                let children = cluster.machines[at].process.as_ref().map(Process::children);
                let children = children.unwrap_or_default();
                for child in &children {
                    send(*child, Signal::SIGKILL);
                }
                !children.is_empty()
            }
            FaultKind::HangChild { .. } => {
                let children = cluster.machines[at].process.as_ref().map(Process::children);
                let children = children.unwrap_or_default();
                for child in &children {
                    send(*child, Signal::SIGSTOP);
                }
                !children.is_empty()
            }
            FaultKind::Refuse { back, .. } => {
                if cluster.machines[at].refused {
                    return false;
                }
                let machine = &cluster.machines[at];
                let admission = Box::new(Admission::of(cluster.pool(), &machine.name, &machine.place));
                if !admission.revoke() {
                    // Perhaps only the answer was lost: it gets another one in any case.
                    cluster.machines[at].refused = true;
                    self.later(now, RecoveryKind::Refused { at, admission });
                    return false;
                }
                cluster.machines[at].refused = true;
                self.later(Instant::now() + back, RecoveryKind::Refused { at, admission });
                true
            }
            FaultKind::FullCoordinatorDisk { all, time } => {
                let at = cluster.leader();
                let full = self.has(
                    |recovery| matches!(recovery, RecoveryKind::CoordinatorDisk { at: other, .. } if *other == at),
                );
                let Some(disk) = cluster.coordinator_disks.get(at).filter(|_| !full) else {
                    return false;
                };
                let filler = match all {
                    true => disk.fill(),
                    false => disk.fill_but((RESERVE_MIB << 20) * 3 / 4),
                };
                cluster.full_disks.insert(at);
                self.later(now + time, RecoveryKind::CoordinatorDisk { at, filler });
                true
            }
            FaultKind::Hub { fault, time } => {
                let bad = self.has(|recovery| matches!(recovery, RecoveryKind::Hub));
                let Some(hub) = cluster.hub.as_mut().filter(|_| !bad) else {
                    return false;
                };
                match fault {
                    HubFault::Away => hub.go_away(),
                    HubFault::Faulty(fault) => hub.set(fault),
                }
                self.later(now + time, RecoveryKind::Hub);
                true
            }
            FaultKind::KillCoordinator { leader, back } => {
                let leads = cluster.leader();
                let at = if leader { leads } else { 1 - leads };
                if !cluster.down.insert(at) {
                    return false;
                }
                cluster.coordinators[at].coordinator.kill();
                self.later(now + back, RecoveryKind::Coordinator { at });
                true
            }
            FaultKind::Freeze { time, .. } => {
                let frozen =
                    self.has(|recovery| matches!(recovery, RecoveryKind::Frozen { at: other, .. } if *other == at));
                let Some(process) = cluster.machines[at].process.as_ref().filter(|_| !frozen) else {
                    return false;
                };
                process.signal(Signal::SIGSTOP);
                let id = process.id();
                self.later(now + time, RecoveryKind::Frozen { at, id });
                true
            }
            FaultKind::FreezeLeader { time } => {
                let at = cluster.leader();
                let frozen = self
                    .has(|recovery| matches!(recovery, RecoveryKind::FrozenLeader { at: other, .. } if *other == at));
                if frozen || cluster.down.contains(&at) {
                    return false;
                }
                let process = &cluster.coordinators[at].coordinator;
                process.signal(Signal::SIGSTOP);
                let id = process.id();
                self.later(now + time, RecoveryKind::FrozenLeader { at, id });
                true
            }
            FaultKind::Storage { fault, time } => {
                self.recoveries
                    .retain(|recovery| !matches!(recovery.what, RecoveryKind::Storage));
                cluster.s3.set(fault);
                self.later(now + time, RecoveryKind::Storage);
                true
            }
            FaultKind::Line { loss, time, .. } => self.make_line(cluster, loss, time, at),
            FaultKind::Database { how, back } => {
                let Some(database) = cluster.database.as_mut().filter(|database| !database.is_stopped()) else {
                    return false;
                };
                database.stop(how);
                self.later(now + back, RecoveryKind::Database);
                true
            }
            FaultKind::SlowDatabase { rate, time } => {
                let disk = cluster.database.as_ref().and_then(|database| database.disk());
                let slow = self.has(|recovery| matches!(recovery, RecoveryKind::SlowDatabase));
                let Some(disk) = disk.filter(|_| !slow) else {
                    return false;
                };
                disk.slow(Some(rate));
                self.later(now + time, RecoveryKind::SlowDatabase);
                true
            }
            FaultKind::FullDisk { time } => self.make_disk(cluster, None, time),
            FaultKind::SlowDisk { rate, time } => self.make_disk(cluster, Some(rate), time),
        }
    }

    fn make_line(&mut self, cluster: &Cluster, loss: PacketLoss, time: Duration, at: usize) -> bool {
        let cut = self.has(|recovery| matches!(recovery, RecoveryKind::Line { at: other, .. } if *other == at));
        let (Some(network), Some(line), false) = (&cluster.network, cluster.machines[at].line, cut) else {
            return false;
        };
        let mut lossy = None;
        match loss {
            PacketLoss::One(direction) => network.set(line, direction, false),
            PacketLoss::Both => {
                network.set(line, Direction::Up, false);
                network.set(line, Direction::Down, false);
            }
            PacketLoss::Some(millis) => lossy = Some(network.lossy(line, Duration::from_millis(millis), PERIOD)),
        }
        self.later(Instant::now() + time, RecoveryKind::Line { at, loss: lossy });
        true
    }

    /// Slow, or full.
    fn make_disk(&mut self, cluster: &Cluster, rate: Option<u64>, time: Duration) -> bool {
        let small = cluster.machines.iter().position(|machine| machine.disk.is_some());
        let Some((at, disk)) = small.and_then(|at| Some((at, cluster.machines[at].disk.as_ref()?))) else {
            return false;
        };
        let has_fault =
            |recovery: &RecoveryKind| matches!(recovery, RecoveryKind::FullDisk { .. } | RecoveryKind::SlowDisk { .. });
        if self.has(has_fault) {
            return false;
        }
        let cured = match rate {
            Some(rate) => {
                disk.slow(Some(rate));
                RecoveryKind::SlowDisk { at }
            }
            None => RecoveryKind::FullDisk { filler: disk.fill() },
        };
        self.later(Instant::now() + time, cured);
        true
    }

    fn has(&self, wanted: impl Fn(&RecoveryKind) -> bool) -> bool {
        self.recoveries.iter().any(|recovery| wanted(&recovery.what))
    }

    fn later(&mut self, at: Instant, what: RecoveryKind) {
        self.recoveries.push(Recovery { at, what });
    }

    /// Heals what is due.
    pub(super) fn recover(&mut self, cluster: &mut Cluster, now: Instant) {
        let (due, rest): (Vec<Recovery>, Vec<Recovery>) = std::mem::take(&mut self.recoveries)
            .into_iter()
            .partition(|recovery| recovery.at <= now);
        self.recoveries = rest;
        self.note_admissions(cluster);
        for recovery in due {
            match recovery.what {
                RecoveryKind::Machine { at, empty } => {
                    if empty {
                        empty_folder(&cluster.machines[at].folder);
                    }
                    cluster.start_worker(at);
                }
                RecoveryKind::Frozen { at, id } => {
                    if let Some(process) = cluster.machines[at].process.as_ref().filter(|p| p.id() == id) {
                        process.signal(Signal::SIGCONT);
                    }
                }
                RecoveryKind::Coordinator { at } => {
                    if cluster.down.remove(&at) {
                        cluster.coordinators[at].spawn_coordinator();
                    }
                }
                RecoveryKind::FrozenLeader { at, id } => {
                    let process = &cluster.coordinators[at].coordinator;
                    if process.id() == id {
                        process.signal(Signal::SIGCONT);
                    }
                }
                RecoveryKind::Storage => cluster.s3.set(ServerFault::None),
                RecoveryKind::Line { at, loss } => {
                    drop(loss);
                    if let (Some(network), Some(line)) = (&cluster.network, cluster.machines[at].line) {
                        network.set(line, Direction::Up, true);
                        network.set(line, Direction::Down, true);
                    }
                }
                RecoveryKind::Database => {
                    if let Some(database) = &mut cluster.database {
                        database.start_again();
                    }
                }
                RecoveryKind::SlowDatabase => {
                    if let Some(disk) = cluster.database.as_ref().and_then(|database| database.disk()) {
                        disk.slow(None);
                    }
                }
                RecoveryKind::FullDisk { filler } => {
                    let _ = std::fs::remove_file(filler);
                }
                RecoveryKind::Refused { at, admission } => self.admissions.push((at, admission.let_in())),
                RecoveryKind::CoordinatorDisk { at, filler } => {
                    let _ = std::fs::remove_file(filler);
                    cluster.full_disks.remove(&at);
                }
                RecoveryKind::Hub => {
                    if let Some(hub) = &mut cluster.hub {
                        hub.set(ServerFault::None);
                        hub.come_back();
                    }
                }
                RecoveryKind::SlowDisk { at } => {
                    if let Some(disk) = &cluster.machines[at].disk {
                        disk.slow(None);
                    }
                }
            }
        }
    }

    /// Heals everything.
    pub(super) fn recover_all(&mut self, cluster: &mut Cluster) {
        let end_of_time = Instant::now() + Duration::from_secs(3600);
        self.recover(cluster, end_of_time);
        cluster.heal();
        while !self.admissions.is_empty() {
            self.note_admissions(cluster);
            std::thread::sleep(LOOK);
        }
    }

    /// Machines that were let in meanwhile.
    fn note_admissions(&mut self, cluster: &mut Cluster) {
        let (over, going_on): (Vec<_>, Vec<_>) = std::mem::take(&mut self.admissions)
            .into_iter()
            .partition(|(_, thread)| thread.is_finished());
        self.admissions = going_on;
        for (at, thread) in over {
            let machine = &mut cluster.machines[at];
            machine.refused = false;
            if !thread.join().unwrap_or(false) {
                cluster.own_ends.push(format!("{} was not let in again", machine.name));
            }
        }
    }
}

/// As a new disk, but for what lets it in.
fn empty_folder(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        // The file system's own.
        if entry.file_name() == IDENTITY || entry.file_name() == "lost+found" {
            continue;
        }
        let _ = if path.is_dir() {
            std::fs::remove_dir_all(&path)
        } else {
            std::fs::remove_file(&path)
        };
    }
}
