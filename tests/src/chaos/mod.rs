//! Rounds of chaos: a pool does work while machines die, freeze and come back and lines, disks, storage and the database go
//! wrong, as a [`plan::Plan`] says that is drawn from a seed. After each round [`check`] looks at everything that must hold.
//!
//! The plain pool is one coordinator with SQLite and two workers, on loopback. The whole cluster is two coordinators with an
//! authority on one PostgreSQL, and three workers that joined, each at the end of a line of its own and one with a small,
//! slow disk; of that it has what the machine grants.

pub mod check;
pub mod events;
mod hurt;
pub mod plan;
pub mod round;
pub mod work;
mod wounds;

use crate::disks::SmallDisk;
use crate::fault::Fault;
use crate::members;
use crate::network::{Direction, HUB, Network};
use crate::place::Place;
use crate::pool::{Pool, Setup};
use crate::postgres::Postgres;
use crate::processes::{LogTail, Process, free_address};
use crate::s3::S3;
use plan::Means;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use work::Work;

/// Of the small disk: several times what a worker needs.
const SMALL: u64 = 96 << 20;
const LEASE: Duration = Duration::from_secs(4);

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
}

/// Everything that runs.
pub struct Cluster {
    /// One, or several; the command line goes through the first one's folder.
    pub coordinators: Vec<Pool>,
    /// Whose process is not to run.
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
    /// Everything lies below it.
    pub root: PathBuf,
    /// What the machine does not grant, and why.
    pub left_out: Vec<String>,
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
    pub fn plain(s3_server: &str, root: &Path) -> Self {
        let work = vec![Work::training(root)];
        let s3 = S3::start(s3_server, root);
        let setup = Setup::new(root).storage(s3.url(), s3.environment());
        let coordinators = vec![Pool::start_with(patient(setup))];
        let mut cluster = Self::new(root, work, s3, coordinators);
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
    pub fn whole(s3_server: &str, root: &Path) -> Self {
        let work = vec![
            Work::training(root),
            Work::pictures(root, None),
            Work::pictures(root, Some(3)),
        ];
        let mut left_out = Vec::new();
        let mut granted = |what: &str, why: String| left_out.push(format!("{what}: {why}"));
        let network = Network::new(3).map_err(|why| granted("lines", why)).ok();
        let database = Postgres::start(true)
            .map_err(|why| granted("several coordinators", why))
            .ok();
        let small = root.join("small");
        std::fs::create_dir(&small).expect("the folder can be made");
        let disk = SmallDisk::on_device(&small, SMALL, &root.join("small.image"))
            .map_err(|why| granted("slow disks", why))
            .or_else(|_| SmallDisk::mount(&small, SMALL))
            .map_err(|why| granted("a small disk", why))
            .ok();
        let hub = network.as_ref().map_or(Place::Here, Network::hub);
        let address = |port| match hub {
            Place::Here => free_address(),
            _ => SocketAddr::new(HUB, port),
        };
        let s3 = S3::start_in(s3_server, root, address(9000), &hub);
        let setup = |folder: &Path, port| {
            let mut setup = Setup {
                storage: Some(s3.url()),
                place: hub.clone(),
                address: address(port),
                ..patient(Setup::new(folder))
            };
            match database {
                // Workers that joined need no key of the storage: they go through the coordinator.
                Some(_) => setup.own_environment = s3.environment(),
                None => setup.environment = s3.environment(),
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
        (cluster.network, cluster.database, cluster.left_out) = (network, database, left_out);
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
            root: root.to_path_buf(),
            left_out: Vec::new(),
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
        if self.pool().setup().door.is_some() {
            members::join(self.pool(), name, &place);
        }
        let folder = disk.as_ref().map(SmallDisk::seen_from_here);
        self.machines.push(Machine {
            name: name.to_owned(),
            process: Some(self.pool().worker_in(name, &place)),
            folder: folder.unwrap_or_else(|| self.pool().worker_dir(name)),
            disk,
            place,
            line,
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
        for machine in &mut self.machines {
            if machine.process.as_mut().is_some_and(Process::ended) {
                let tail = machine.process.as_ref().map(Process::tail).unwrap_or_default();
                self.own_ends.push(format!("worker {}:\n{tail}", machine.name));
                machine.process = Some(self.coordinators[0].worker_in(&machine.name, &machine.place));
            }
        }
        if let Some(database) = self.database.as_mut().filter(|database| !database.is_stopped()) {
            database.start_again();
        }
    }

    fn start_worker(&mut self, at: usize) {
        let machine = &self.machines[at];
        let process = self.pool().worker_in(&machine.name, &machine.place);
        self.machines[at].process = Some(process);
    }

    /// Puts everything right again.
    pub fn heal(&mut self) {
        self.s3.set(Fault::None);
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
        ..setup
    }
}
