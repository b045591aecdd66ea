//! Injects faults and ends them.

use super::admission::Admission;
use super::faults::{FaultKind, HubFault, PacketLoss};
use super::{Cluster, RESERVE_MIB};
use crate::network::{Direction, PacketLossGuard};
use crate::processes::{Process, send};
use crate::server_fault::ServerFault;
use nix::sys::signal::Signal;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The period of bursts of packet loss.
const BURST_PERIOD: Duration = Duration::from_millis(250);
/// How often the end of a round checks whether a worker was admitted again.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The file with a worker's certificate. Without it, the worker would have to join again.
const IDENTITY: &str = "identity.json";

/// The active faults, with the time at which each of them ends.
#[derive(Default)]
pub(super) struct FaultInjector {
    recoveries: Vec<Recovery>,
    /// Machines that are being admitted again.
    admissions: Vec<(usize, JoinHandle<bool>)>,
}

struct Recovery {
    due: Instant,
    kind: RecoveryKind,
}

enum RecoveryKind {
    Machine { at: usize, empty: bool },
    Frozen { at: usize, id: u32 },
    Coordinator { at: usize },
    FrozenLeader { at: usize, id: u32 },
    Storage,
    Link { at: usize, loss: Option<PacketLossGuard> },
    Database,
    SlowDatabase,
    FullDisk { filler: PathBuf },
    SlowDisk { at: usize },
    Revoked { at: usize, admission: Box<Admission> },
    CoordinatorDisk { at: usize, filler: PathBuf },
    Hub,
}

impl FaultInjector {
    /// Injects a fault; `at` is the machine of a fault that has one. Returns false if there is no target, or if the same fault is
    /// already active there.
    pub(super) fn inject(&mut self, cluster: &mut Cluster, fault: &FaultKind, at: usize) -> bool {
        let now = Instant::now();
        match *fault {
            FaultKind::KillWorker { downtime, empty, .. } => {
                let Some(mut process) = cluster.machines[at].process.take() else {
                    return false;
                };
                process.kill();
                self.schedule(now + downtime, RecoveryKind::Machine { at, empty });
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
            FaultKind::Revoke { downtime, .. } => {
                if cluster.machines[at].is_revoked {
                    return false;
                }
                let machine = &cluster.machines[at];
                let admission = Box::new(Admission::of(
                    cluster.test_cluster(),
                    &machine.name,
                    &machine.namespaces,
                ));
                if !admission.revoke() {
                    // Perhaps only the answer was lost, so it gets a new token or certificate in any case.
                    cluster.machines[at].is_revoked = true;
                    self.schedule(now, RecoveryKind::Revoked { at, admission });
                    return false;
                }
                cluster.machines[at].is_revoked = true;
                self.schedule(Instant::now() + downtime, RecoveryKind::Revoked { at, admission });
                true
            }
            FaultKind::FullCoordinatorDisk { include_reserve, time } => {
                let at = cluster.leader();
                let full = self.is_active(
                    |recovery| matches!(recovery, RecoveryKind::CoordinatorDisk { at: other, .. } if *other == at),
                );
                let Some(disk) = cluster.coordinator_disks.get(at).filter(|_| !full) else {
                    return false;
                };
                let filler = match include_reserve {
                    true => disk.fill(),
                    false => disk.fill_except((RESERVE_MIB << 20) * 3 / 4),
                };
                cluster.full_disks.insert(at);
                self.schedule(now + time, RecoveryKind::CoordinatorDisk { at, filler });
                true
            }
            FaultKind::Hub { fault, time } => {
                let active = self.is_active(|recovery| matches!(recovery, RecoveryKind::Hub));
                let Some(hub) = cluster.hub.as_mut().filter(|_| !active) else {
                    return false;
                };
                match fault {
                    HubFault::Down => hub.stop(),
                    HubFault::Faulty(fault) => hub.set_fault(fault),
                }
                self.schedule(now + time, RecoveryKind::Hub);
                true
            }
            FaultKind::KillCoordinator { leader, downtime } => {
                let leads = cluster.leader();
                let at = if leader { leads } else { 1 - leads };
                if !cluster.down.insert(at) {
                    return false;
                }
                cluster.coordinators[at].coordinator.kill();
                self.schedule(now + downtime, RecoveryKind::Coordinator { at });
                true
            }
            FaultKind::Freeze { time, .. } => {
                let frozen = self
                    .is_active(|recovery| matches!(recovery, RecoveryKind::Frozen { at: other, .. } if *other == at));
                let Some(process) = cluster.machines[at].process.as_ref().filter(|_| !frozen) else {
                    return false;
                };
                process.signal(Signal::SIGSTOP);
                let id = process.id();
                self.schedule(now + time, RecoveryKind::Frozen { at, id });
                true
            }
            FaultKind::FreezeLeader { time } => {
                let at = cluster.leader();
                let frozen = self.is_active(
                    |recovery| matches!(recovery, RecoveryKind::FrozenLeader { at: other, .. } if *other == at),
                );
                if frozen || cluster.down.contains(&at) {
                    return false;
                }
                let process = &cluster.coordinators[at].coordinator;
                process.signal(Signal::SIGSTOP);
                let id = process.id();
                self.schedule(now + time, RecoveryKind::FrozenLeader { at, id });
                true
            }
            FaultKind::Storage { fault, time } => {
                self.recoveries
                    .retain(|recovery| !matches!(recovery.kind, RecoveryKind::Storage));
                cluster.s3.set_fault(fault);
                self.schedule(now + time, RecoveryKind::Storage);
                true
            }
            FaultKind::Link { loss, time, .. } => self.inject_link_fault(cluster, loss, time, at),
            FaultKind::Database { how, downtime } => {
                let Some(database) = cluster.database.as_mut().filter(|database| !database.is_stopped()) else {
                    return false;
                };
                database.stop(how);
                self.schedule(now + downtime, RecoveryKind::Database);
                true
            }
            FaultKind::SlowDatabase { rate, time } => {
                let disk = cluster.database.as_ref().and_then(|database| database.disk());
                let slow = self.is_active(|recovery| matches!(recovery, RecoveryKind::SlowDatabase));
                let Some(disk) = disk.filter(|_| !slow) else {
                    return false;
                };
                disk.throttle(Some(rate));
                self.schedule(now + time, RecoveryKind::SlowDatabase);
                true
            }
            FaultKind::FullDisk { time } => self.inject_disk_fault(cluster, None, time),
            FaultKind::SlowDisk { rate, time } => self.inject_disk_fault(cluster, Some(rate), time),
        }
    }

    fn inject_link_fault(&mut self, cluster: &Cluster, loss: PacketLoss, time: Duration, at: usize) -> bool {
        let cut = self.is_active(|recovery| matches!(recovery, RecoveryKind::Link { at: other, .. } if *other == at));
        let (Some(network), Some(link), false) = (&cluster.network, cluster.machines[at].link, cut) else {
            return false;
        };
        let mut packet_loss = None;
        match loss {
            PacketLoss::OneWay(direction) => network.set_link(link, direction, false),
            PacketLoss::Both => {
                network.set_link(link, Direction::Up, false);
                network.set_link(link, Direction::Down, false);
            }
            PacketLoss::Bursts(millis) => {
                packet_loss = Some(network.lose_packets(link, Duration::from_millis(millis), BURST_PERIOD))
            }
        }
        self.schedule(Instant::now() + time, RecoveryKind::Link { at, loss: packet_loss });
        true
    }

    /// Throttles the small disk to `rate` bytes per second, or fills it.
    fn inject_disk_fault(&mut self, cluster: &Cluster, rate: Option<u64>, time: Duration) -> bool {
        let small = cluster.machines.iter().position(|machine| machine.disk.is_some());
        let Some((at, disk)) = small.and_then(|at| Some((at, cluster.machines[at].disk.as_ref()?))) else {
            return false;
        };
        let has_fault =
            |recovery: &RecoveryKind| matches!(recovery, RecoveryKind::FullDisk { .. } | RecoveryKind::SlowDisk { .. });
        if self.is_active(has_fault) {
            return false;
        }
        let recovery = match rate {
            Some(rate) => {
                disk.throttle(Some(rate));
                RecoveryKind::SlowDisk { at }
            }
            None => RecoveryKind::FullDisk { filler: disk.fill() },
        };
        self.schedule(Instant::now() + time, recovery);
        true
    }

    fn is_active(&self, matches: impl Fn(&RecoveryKind) -> bool) -> bool {
        self.recoveries.iter().any(|recovery| matches(&recovery.kind))
    }

    fn schedule(&mut self, due: Instant, kind: RecoveryKind) {
        self.recoveries.push(Recovery { due, kind });
    }

    /// Ends the faults that are due.
    pub(super) fn recover(&mut self, cluster: &mut Cluster, now: Instant) {
        let (due, rest): (Vec<Recovery>, Vec<Recovery>) = std::mem::take(&mut self.recoveries)
            .into_iter()
            .partition(|recovery| recovery.due <= now);
        self.recoveries = rest;
        self.finish_admissions(cluster);
        for recovery in due {
            match recovery.kind {
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
                RecoveryKind::Storage => cluster.s3.set_fault(ServerFault::None),
                RecoveryKind::Link { at, loss } => {
                    drop(loss);
                    if let (Some(network), Some(link)) = (&cluster.network, cluster.machines[at].link) {
                        network.set_link(link, Direction::Up, true);
                        network.set_link(link, Direction::Down, true);
                    }
                }
                RecoveryKind::Database => {
                    if let Some(database) = &mut cluster.database {
                        database.start_again();
                    }
                }
                RecoveryKind::SlowDatabase => {
                    if let Some(disk) = cluster.database.as_ref().and_then(|database| database.disk()) {
                        disk.throttle(None);
                    }
                }
                RecoveryKind::FullDisk { filler } => {
                    let _ = std::fs::remove_file(filler);
                }
                RecoveryKind::Revoked { at, admission } => self.admissions.push((at, admission.admit())),
                RecoveryKind::CoordinatorDisk { at, filler } => {
                    let _ = std::fs::remove_file(filler);
                    cluster.full_disks.remove(&at);
                }
                RecoveryKind::Hub => {
                    if let Some(hub) = &mut cluster.hub {
                        hub.set_fault(ServerFault::None);
                        hub.start_again();
                    }
                }
                RecoveryKind::SlowDisk { at } => {
                    if let Some(disk) = &cluster.machines[at].disk {
                        disk.throttle(None);
                    }
                }
            }
        }
    }

    /// Ends all faults, and waits for the admissions of revoked workers.
    pub(super) fn recover_all(&mut self, cluster: &mut Cluster) {
        let after_all = Instant::now() + Duration::from_secs(3600);
        self.recover(cluster, after_all);
        cluster.recover();
        while !self.admissions.is_empty() {
            self.finish_admissions(cluster);
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Takes the results of the admissions that have finished.
    fn finish_admissions(&mut self, cluster: &mut Cluster) {
        let (finished, running): (Vec<_>, Vec<_>) = std::mem::take(&mut self.admissions)
            .into_iter()
            .partition(|(_, thread)| thread.is_finished());
        self.admissions = running;
        for (at, thread) in finished {
            let machine = &mut cluster.machines[at];
            machine.is_revoked = false;
            if !thread.join().unwrap_or(false) {
                cluster
                    .unexpected_exits
                    .push(format!("{} was not admitted again", machine.name));
            }
        }
    }
}

/// Empties a data folder, except for the worker's certificate.
fn empty_folder(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        // `lost+found` belongs to the file system.
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
