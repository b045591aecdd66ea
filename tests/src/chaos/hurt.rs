//! How wounds are made, and how they get better.

use super::admission::Admission;
use super::wounds::{HubTrouble, Lost, What};
use super::{Cluster, RESERVE_MIB};
use crate::fault::Fault;
use crate::network::{Direction, Loss};
use crate::processes::{Process, send};
use nix::sys::signal::Signal;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often packets are lost in a burst.
const PERIOD: Duration = Duration::from_millis(250);
/// How often it is looked whether a worker is in again, at the end of a round.
const LOOK: Duration = Duration::from_millis(20);
/// The file with a worker's certificate: without it, it would have to be let in anew.
const IDENTITY: &str = "identity.json";

/// Everything that is not as it should be, and when it gets better.
#[derive(Default)]
pub(super) struct Wounded {
    cures: Vec<Cure>,
    /// Machines that are being let in again.
    admissions: Vec<(usize, JoinHandle<bool>)>,
}

struct Cure {
    at: Instant,
    what: Cured,
}

enum Cured {
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

impl Wounded {
    /// Makes a wound on this machine, if it says which; false if there is nothing to wound, or it is wounded so already.
    pub(super) fn make(&mut self, cluster: &mut Cluster, what: &What, at: usize) -> bool {
        let now = Instant::now();
        match *what {
            What::KillWorker { back, empty, .. } => {
                let Some(mut process) = cluster.machines[at].process.take() else {
                    return false;
                };
                process.kill();
                self.later(now + back, Cured::Machine { at, empty });
                true
            }
            What::KillChild { .. } => {
                let children = cluster.machines[at].process.as_ref().map(Process::children);
                let children = children.unwrap_or_default();
                for child in &children {
                    send(*child, Signal::SIGKILL);
                }
                !children.is_empty()
            }
            What::HangChild { .. } => {
                let children = cluster.machines[at].process.as_ref().map(Process::children);
                let children = children.unwrap_or_default();
                for child in &children {
                    send(*child, Signal::SIGSTOP);
                }
                !children.is_empty()
            }
            What::Refuse { back, .. } => {
                if cluster.machines[at].refused {
                    return false;
                }
                let machine = &cluster.machines[at];
                let admission = Box::new(Admission::of(cluster.pool(), &machine.name, &machine.place));
                if !admission.revoke() {
                    // Perhaps only the answer was lost: it gets another one in any case.
                    cluster.machines[at].refused = true;
                    self.later(now, Cured::Refused { at, admission });
                    return false;
                }
                cluster.machines[at].refused = true;
                self.later(Instant::now() + back, Cured::Refused { at, admission });
                true
            }
            What::FullCoordinatorDisk { all, time } => {
                let at = cluster.leader();
                let full = self.has(|cured| matches!(cured, Cured::CoordinatorDisk { at: other, .. } if *other == at));
                let Some(disk) = cluster.coordinator_disks.get(at).filter(|_| !full) else {
                    return false;
                };
                let filler = match all {
                    true => disk.fill(),
                    false => disk.fill_but((RESERVE_MIB << 20) * 3 / 4),
                };
                cluster.full_disks.insert(at);
                self.later(now + time, Cured::CoordinatorDisk { at, filler });
                true
            }
            What::Hub { trouble, time } => {
                let bad = self.has(|cured| matches!(cured, Cured::Hub));
                let Some(hub) = cluster.hub.as_mut().filter(|_| !bad) else {
                    return false;
                };
                match trouble {
                    HubTrouble::Away => hub.go_away(),
                    HubTrouble::Faulty(fault) => hub.set(fault),
                }
                self.later(now + time, Cured::Hub);
                true
            }
            What::KillCoordinator { leader, back } => {
                let leads = cluster.leader();
                let at = if leader { leads } else { 1 - leads };
                if !cluster.down.insert(at) {
                    return false;
                }
                cluster.coordinators[at].coordinator.kill();
                self.later(now + back, Cured::Coordinator { at });
                true
            }
            What::Freeze { time, .. } => {
                let frozen = self.has(|cured| matches!(cured, Cured::Frozen { at: other, .. } if *other == at));
                let Some(process) = cluster.machines[at].process.as_ref().filter(|_| !frozen) else {
                    return false;
                };
                process.signal(Signal::SIGSTOP);
                let id = process.id();
                self.later(now + time, Cured::Frozen { at, id });
                true
            }
            What::FreezeLeader { time } => {
                let at = cluster.leader();
                let frozen = self.has(|cured| matches!(cured, Cured::FrozenLeader { at: other, .. } if *other == at));
                if frozen || cluster.down.contains(&at) {
                    return false;
                }
                let process = &cluster.coordinators[at].coordinator;
                process.signal(Signal::SIGSTOP);
                let id = process.id();
                self.later(now + time, Cured::FrozenLeader { at, id });
                true
            }
            What::Storage { fault, time } => {
                self.cures.retain(|cure| !matches!(cure.what, Cured::Storage));
                cluster.s3.set(fault);
                self.later(now + time, Cured::Storage);
                true
            }
            What::Line { lost, time, .. } => self.make_line(cluster, lost, time, at),
            What::Database { how, back } => {
                let Some(database) = cluster.database.as_mut().filter(|database| !database.is_stopped()) else {
                    return false;
                };
                database.stop(how);
                self.later(now + back, Cured::Database);
                true
            }
            What::SlowDatabase { rate, time } => {
                let disk = cluster.database.as_ref().and_then(|database| database.disk());
                let slow = self.has(|cured| matches!(cured, Cured::SlowDatabase));
                let Some(disk) = disk.filter(|_| !slow) else {
                    return false;
                };
                disk.slow(Some(rate));
                self.later(now + time, Cured::SlowDatabase);
                true
            }
            What::FullDisk { time } => self.make_disk(cluster, None, time),
            What::SlowDisk { rate, time } => self.make_disk(cluster, Some(rate), time),
        }
    }

    fn make_line(&mut self, cluster: &Cluster, lost: Lost, time: Duration, at: usize) -> bool {
        let cut = self.has(|cured| matches!(cured, Cured::Line { at: other, .. } if *other == at));
        let (Some(network), Some(line), false) = (&cluster.network, cluster.machines[at].line, cut) else {
            return false;
        };
        let mut loss = None;
        match lost {
            Lost::One(direction) => network.set(line, direction, false),
            Lost::Both => {
                network.set(line, Direction::Up, false);
                network.set(line, Direction::Down, false);
            }
            Lost::Some(millis) => loss = Some(network.lossy(line, Duration::from_millis(millis), PERIOD)),
        }
        self.later(Instant::now() + time, Cured::Line { at, loss });
        true
    }

    /// Slow, or full.
    fn make_disk(&mut self, cluster: &Cluster, rate: Option<u64>, time: Duration) -> bool {
        let small = cluster.machines.iter().position(|machine| machine.disk.is_some());
        let Some((at, disk)) = small.and_then(|at| Some((at, cluster.machines[at].disk.as_ref()?))) else {
            return false;
        };
        let wounded = |cured: &Cured| matches!(cured, Cured::FullDisk { .. } | Cured::SlowDisk { .. });
        if self.has(wounded) {
            return false;
        }
        let cured = match rate {
            Some(rate) => {
                disk.slow(Some(rate));
                Cured::SlowDisk { at }
            }
            None => Cured::FullDisk { filler: disk.fill() },
        };
        self.later(Instant::now() + time, cured);
        true
    }

    fn has(&self, wanted: impl Fn(&Cured) -> bool) -> bool {
        self.cures.iter().any(|cure| wanted(&cure.what))
    }

    fn later(&mut self, at: Instant, what: Cured) {
        self.cures.push(Cure { at, what });
    }

    /// Heals what is due.
    pub(super) fn cure(&mut self, cluster: &mut Cluster, now: Instant) {
        let (due, rest): (Vec<Cure>, Vec<Cure>) = std::mem::take(&mut self.cures)
            .into_iter()
            .partition(|cure| cure.at <= now);
        self.cures = rest;
        self.note_admissions(cluster);
        for cure in due {
            match cure.what {
                Cured::Machine { at, empty } => {
                    if empty {
                        empty_folder(&cluster.machines[at].folder);
                    }
                    cluster.start_worker(at);
                }
                Cured::Frozen { at, id } => {
                    if let Some(process) = cluster.machines[at].process.as_ref().filter(|p| p.id() == id) {
                        process.signal(Signal::SIGCONT);
                    }
                }
                Cured::Coordinator { at } => {
                    if cluster.down.remove(&at) {
                        cluster.coordinators[at].spawn_coordinator();
                    }
                }
                Cured::FrozenLeader { at, id } => {
                    let process = &cluster.coordinators[at].coordinator;
                    if process.id() == id {
                        process.signal(Signal::SIGCONT);
                    }
                }
                Cured::Storage => cluster.s3.set(Fault::None),
                Cured::Line { at, loss } => {
                    drop(loss);
                    if let (Some(network), Some(line)) = (&cluster.network, cluster.machines[at].line) {
                        network.set(line, Direction::Up, true);
                        network.set(line, Direction::Down, true);
                    }
                }
                Cured::Database => {
                    if let Some(database) = &mut cluster.database {
                        database.start_again();
                    }
                }
                Cured::SlowDatabase => {
                    if let Some(disk) = cluster.database.as_ref().and_then(|database| database.disk()) {
                        disk.slow(None);
                    }
                }
                Cured::FullDisk { filler } => {
                    let _ = std::fs::remove_file(filler);
                }
                Cured::Refused { at, admission } => self.admissions.push((at, admission.let_in())),
                Cured::CoordinatorDisk { at, filler } => {
                    let _ = std::fs::remove_file(filler);
                    cluster.full_disks.remove(&at);
                }
                Cured::Hub => {
                    if let Some(hub) = &mut cluster.hub {
                        hub.set(Fault::None);
                        hub.come_back();
                    }
                }
                Cured::SlowDisk { at } => {
                    if let Some(disk) = &cluster.machines[at].disk {
                        disk.slow(None);
                    }
                }
            }
        }
    }

    /// Heals everything.
    pub(super) fn cure_all(&mut self, cluster: &mut Cluster) {
        let end_of_time = Instant::now() + Duration::from_secs(3600);
        self.cure(cluster, end_of_time);
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
