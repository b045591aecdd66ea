//! Rounds of chaos: a pool does work while machines die, freeze and come back and lines, disks, storage and the database go
//! wrong, as a [`plan::Plan`] says that is drawn from a seed. After each round [`check`] looks at everything that must hold.
//!
//! The plain pool is one coordinator with SQLite and two workers, on loopback. The whole cluster is two coordinators with an
//! authority on one PostgreSQL, and three workers that joined, each at the end of a line of its own and one with a small,
//! slow disk; of that it has what the machine grants.

mod admission;
pub mod check;
pub mod events;
mod faults;
mod inject;
pub mod plan;
pub mod round;
pub mod work;

use crate::disks::SmallDisk;
use crate::hub::Hub;
use crate::members;
use crate::network::{Direction, HUB, Network};
use crate::place::Place;
use crate::pool::{DataDisk, Pool, Setup};
use crate::postgres::Postgres;
use crate::processes::{LogTail, Process, free_address};
use crate::s3::S3;
use crate::server_fault::ServerFault;
use crate::skip::skip;
use admission::Admission;
use plan::Means;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use work::Work;

/// Of the small disk: several times what a worker needs.
const SMALL: u64 = 96 << 20;
/// Of a coordinator's disk.
const COORDINATOR_DISK: u64 = 96 << 20;
/// What a coordinator keeps of it for its database.
const RESERVE_MIB: u64 = 24;
const LEASE: Duration = Duration::from_secs(4);
/// How long a child may show no progress: far more than a step takes, on a machine with other work as well.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(10);
/// The exit code of a worker that is refused and has nothing to lose, and how long its service manager waits then.
const REFUSED: i32 = 4;
const RESTART: Duration = Duration::from_secs(3);

/// The server programs of the tests, `env!("CARGO_BIN_EXE_…")` there.
#[derive(Clone, Copy, Debug)]
pub struct Servers {
    /// `s3-server`.
    pub s3: &'static str,
    /// `hub-server`.
    pub hub: &'static str,
}

/// One machine with a worker: its data folder stays when its process dies.
pub struct Machine {
    /// Its name and that of its folder.
    pub name: String,
    /// None while it is down.
    pub process: Option<Process>,
    /// Its data folder, as this process sees it.
    pub folder: PathBuf,
    /// A small disk for that folder.
    pub disk: Option<SmallDisk>,
    place: Place,
    /// The number of its line.
    line: Option<u8>,
    /// Its certificate or token is revoked.
    refused: bool,
    /// It was refused in this round: it may have ended for that.
    was_refused: bool,
    /// When it is started again after that.
    again: Option<Instant>,
}

/// Everything that runs.
pub struct Cluster {
    /// One, or several; the command line goes through the first one's folder.
    pub coordinators: Vec<Pool>,
    /// Target process is not to run.
    down: BTreeSet<usize>,
    logs: Vec<LogTail>,
    /// Which one leads, as far as is known.
    leader: usize,
    /// With a worker each.
    pub machines: Vec<Machine>,
    /// Storage.
    pub s3: S3,
    /// What is done here.
    pub work: Vec<Work>,
    /// The database of several coordinators.
    pub database: Option<Postgres>,
    /// The lines.
    pub network: Option<Network>,
    /// Where models come from.
    pub hub: Option<Hub>,
    /// Those of the coordinators, in their order; none where the machine does not grant them.
    coordinator_disks: Vec<SmallDisk>,
    /// Which of them are full.
    full_disks: BTreeSet<usize>,
    /// Everything lies below it.
    pub root: PathBuf,
    /// Ids of everything that was acknowledged.
    pub acknowledged: BTreeSet<String>,
    /// Processes that ended by themselves, and were started again.
    pub own_ends: Vec<String>,
}

impl Cluster {
    /// Runs the work once undisturbed on this machine (`aitk run`), then starts the plain pool.
    ///
    /// # Panics
    /// When anything of that fails.
    #[must_use]
    pub fn plain(servers: Servers, root: &Path) -> Self {
        let work = vec![Work::training(root)];
        let s3 = S3::start(servers.s3, root);
        let mut disks = Vec::new();
        let mut setup = patient(Setup::new(root).storage(s3.url(), s3.environment()));
        setup.worker_tokens = true;
        setup.own_environment.push(direct_storage());
        match data_disk(root, &Place::Here) {
            Ok((disk, data_disk)) => {
                disks.push(disk);
                setup.data_disk = Some(data_disk);
            }
            Err(why) => skip("tmpfs", format!("no coordinator has a small disk: {why}")),
        }
        let coordinators = vec![Pool::start_with(setup)];
        let mut cluster = Self::new(root, work, s3, coordinators);
        cluster.coordinator_disks = disks;
        for name in ["left", "right"] {
            cluster.add_machine(name, None, None);
        }
        cluster
    }

    /// Runs the work once undisturbed, then starts the whole cluster, as far as the machine grants it.
    ///
    /// # Panics
    /// When anything of that fails.
    #[must_use]
    pub fn whole(servers: Servers, root: &Path) -> Self {
        let work = vec![
            Work::training(root),
            Work::of_hub(root),
            Work::images(root, None),
            Work::images(root, Some(3)),
        ];
        let network = Network::new(3)
            .map_err(|why| skip("network-namespace", format!("no line is cut: {why}")))
            .ok();
        let database = Postgres::start(true)
            .map_err(|why| skip("postgresql", format!("there is one coordinator: {why}")))
            .ok();
        let small = root.join("small");
        std::fs::create_dir(&small).expect("the folder can be made");
        let disk = SmallDisk::on_device(&small, SMALL, &root.join("small.image"))
            .map_err(|why| skip("loop-device", format!("no disk is slow: {why}")))
            .or_else(|_| SmallDisk::mount(&small, SMALL))
            .map_err(|why| skip("tmpfs", format!("no worker has a small disk: {why}")))
            .ok();
        let hub = network.as_ref().map_or(Place::Here, Network::hub);
        let address = |port| match hub {
            Place::Here => free_address(),
            _ => SocketAddr::new(HUB, port),
        };
        let s3 = S3::start_in(servers.s3, root, address(9000), &hub);
        let models = Hub::start_in(servers.hub, root, address(9100), &hub);
        let mut disks = Vec::new();
        let mut setup = |folder: &Path, port| {
            let mut setup = Setup {
                storage: Some(s3.url()),
                place: hub.clone(),
                address: address(port),
                environment: models.environment(),
                worker_tokens: database.is_none(),
                ..patient(Setup::new(folder))
            };
            match database {
                // Workers that joined need no key of the storage: they go through the coordinator.
                Some(_) => setup.own_environment = s3.environment(),
                None => {
                    setup.environment.extend(s3.environment());
                    setup.own_environment.push(direct_storage());
                }
            }
            match data_disk(folder, &hub) {
                Ok((disk, data_disk)) => {
                    disks.push(disk);
                    setup.data_disk = Some(data_disk);
                }
                Err(why) => skip("tmpfs", format!("no coordinator has a small disk: {why}")),
            }
            setup
        };
        let coordinators = match &database {
            Some(database) => members::start(
                &database.url(),
                vec![setup(root, 7420), setup(&root.join("second"), 7421)],
            ),
            None => vec![Pool::start_with(setup(root, 7420))],
        };
        let mut cluster = Self::new(root, work, s3, coordinators);
        (cluster.network, cluster.database) = (network, database);
        (cluster.hub, cluster.coordinator_disks) = (Some(models), disks);
        cluster.add_machine("left", Some(1), None);
        cluster.add_machine("right", Some(2), None);
        cluster.add_machine("small", Some(3), disk);
        cluster
    }

    fn new(root: &Path, work: Vec<Work>, s3: S3, coordinators: Vec<Pool>) -> Self {
        let logs = coordinators
            .iter()
            .map(|pool| pool.coordinator.log_from_start())
            .collect();
        Self {
            coordinators,
            down: BTreeSet::new(),
            logs,
            leader: 0,
            machines: Vec::new(),
            s3,
            work,
            database: None,
            network: None,
            hub: None,
            coordinator_disks: Vec::new(),
            full_disks: BTreeSet::new(),
            root: root.to_path_buf(),
            acknowledged: BTreeSet::new(),
            own_ends: Vec::new(),
        }
    }

    fn add_machine(&mut self, name: &str, line: Option<u8>, disk: Option<SmallDisk>) {
        let line = line.filter(|_| self.network.is_some());
        let network = match (&self.network, line) {
            (Some(network), Some(line)) => network.end(line),
            _ => Place::Here,
        };
        let place = disk.as_ref().map_or(network.clone(), |disk| disk.place_in(&network));
        if self.pool().setup().endpoint.is_some() {
            members::join(self.pool(), name, &place);
        } else {
            let let_in = Admission::of(self.pool(), name, &place).let_in().join();
            assert!(let_in.unwrap_or(false), "{name} gets no token");
        }
        let folder = disk.as_ref().map(SmallDisk::seen_from_here);
        self.machines.push(Machine {
            name: name.to_owned(),
            process: Some(self.pool().worker_in(name, &place)),
            folder: folder.unwrap_or_else(|| self.pool().worker_dir(name)),
            disk,
            place,
            line,
            refused: false,
            was_refused: false,
            again: None,
        });
    }

    /// For commands.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.coordinators[0]
    }

    /// What there is to go wrong.
    #[must_use]
    pub fn means(&self) -> Means {
        let disks = || self.machines.iter().filter_map(|machine| machine.disk.as_ref());
        let database = self.database.as_ref();
        Means {
            lines: self.network.is_some(),
            members: database.is_some(),
            slow_database: database.and_then(Postgres::disk).is_some(),
            small_disk: disks().count() > 0,
            coordinator_disks: !self.coordinator_disks.is_empty(),
            hub: self.hub.is_some(),
            slow_disk: disks().any(SmallDisk::is_device),
        }
    }

    /// Which coordinator leads, as far as their logs say.
    fn leader(&mut self) -> usize {
        for (at, log) in self.logs.iter_mut().enumerate() {
            if log.lines().iter().any(|line| members::leads(line)) {
                self.leader = at;
            }
        }
        self.leader
    }

    /// As a service manager does: who ended without having been killed is started again.
    fn supervise(&mut self) {
        for (at, pool) in self.coordinators.iter_mut().enumerate() {
            if !self.down.contains(&at) && pool.coordinator.ended() {
                self.own_ends
                    .push(format!("coordinator {at}:\n{}", pool.coordinator.tail()));
                pool.spawn_coordinator();
            }
        }
        for at in 0..self.machines.len() {
            let machine = &mut self.machines[at];
            machine.was_refused |= machine.refused;
            if machine.again.is_some_and(|again| again <= Instant::now()) {
                machine.again = None;
                self.start_worker(at);
                continue;
            }
            let code = machine.process.as_mut().and_then(Process::exit_code);
            if machine.was_refused && code == Some(REFUSED) {
                machine.process = None;
                machine.again = Some(Instant::now() + RESTART);
            } else if machine.process.as_mut().is_some_and(Process::ended) {
                let tail = machine.process.as_ref().map(Process::tail).unwrap_or_default();
                self.own_ends.push(format!("worker {}:\n{tail}", machine.name));
                machine.process = Some(self.coordinators[0].worker_in(&machine.name, &machine.place));
            }
        }
        if let Some(database) = self.database.as_mut().filter(|database| !database.is_stopped()) {
            database.start_again();
        }
    }

    /// Unless it runs already.
    fn start_worker(&mut self, at: usize) {
        let machine = &self.machines[at];
        if machine.process.is_some() {
            return;
        }
        let process = self.pool().worker_in(&machine.name, &machine.place);
        self.machines[at].process = Some(process);
    }

    /// Before a round: no worker has a model of the hub, no device is held back for what went wrong before, and nobody is excused
    /// for an end of his own.
    fn begin_round(&mut self) {
        for machine in &mut self.machines {
            machine.was_refused = machine.refused;
            let models = std::fs::read_dir(machine.folder.join("cache/hub"));
            for model in models.into_iter().flatten().flatten() {
                let _ = std::fs::remove_dir_all(model.path());
            }
        }
        for machine in &self.machines {
            let _ = self.pool().aitk(["worker", "undrain", &machine.name]);
        }
    }

    /// Puts everything right again.
    pub fn heal(&mut self) {
        self.s3.set(ServerFault::None);
        if let Some(hub) = &mut self.hub {
            hub.set(ServerFault::None);
            hub.come_back();
        }
        if let Some(database) = &mut self.database {
            if let Some(disk) = database.disk() {
                disk.slow(None);
            }
            database.start_again();
        }
        for at in std::mem::take(&mut self.down) {
            self.coordinators[at].spawn_coordinator();
        }
        for pool in &self.coordinators {
            pool.coordinator.signal(nix::sys::signal::Signal::SIGCONT);
        }
        for at in 0..self.machines.len() {
            if let (Some(network), Some(line)) = (&self.network, self.machines[at].line) {
                network.set(line, Direction::Up, true);
                network.set(line, Direction::Down, true);
            }
            if let Some(disk) = &self.machines[at].disk {
                disk.slow(None);
            }
            match &self.machines[at].process {
                Some(process) => process.signal(nix::sys::signal::Signal::SIGCONT),
                None => self.start_worker(at),
            }
        }
    }

    /// The ends of all logs, for a message.
    #[must_use]
    pub fn tails(&self) -> String {
        let mut tails: Vec<String> = self.coordinators.iter().map(|pool| pool.coordinator.tail()).collect();
        for machine in self.machines.iter().filter_map(|machine| machine.process.as_ref()) {
            tails.push(machine.tail());
        }
        tails.extend(self.database.as_ref().map(Postgres::tail));
        tails.join("\n")
    }
}

/// A round may hit the same stretch of work many times.
fn patient(setup: Setup) -> Setup {
    Setup {
        lease: LEASE,
        retries: 50,
        progress_timeout: Some(PROGRESS_TIMEOUT),
        ..setup
    }
}

/// Workers with tokens of their own use the bucket themselves.
fn direct_storage() -> (String, String) {
    ("AITK_DIRECT_STORAGE".to_owned(), "true".to_owned())
}

/// A small disk for the data folder of the coordinator of this folder, which runs there.
///
/// # Errors
/// Why this machine does not let us.
fn data_disk(folder: &Path, place: &Place) -> Result<(SmallDisk, DataDisk), String> {
    let data = folder.join("coordinator");
    std::fs::create_dir_all(&data).map_err(|error| error.to_string())?;
    let disk = SmallDisk::mount(&data, COORDINATOR_DISK)?;
    let data_disk = DataDisk {
        place: disk.place_in(place),
        seen_from_here: disk.seen_from_here(),
        reserve_mib: RESERVE_MIB,
    };
    Ok((disk, data_disk))
}
