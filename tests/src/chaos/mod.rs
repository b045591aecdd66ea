//! Chaos tests: a cluster runs jobs while processes are killed or frozen, and network links, disks, storage and the database fail.
//! A [`plan::Plan`], drawn from a seed, says which faults happen. After each round [`check`] verifies all invariants.
//!
//! The small cluster is one coordinator with SQLite and two workers, on loopback. The full cluster is two coordinators with a
//! certificate authority on one PostgreSQL, and three workers that joined, each with a network link of its own and one with a
//! small disk that can be throttled. Parts for which the machine lacks permissions are left out.

mod admission;
pub mod check;
pub mod events;
mod faults;
pub mod files;
mod inject;
pub mod plan;
pub mod round;
pub mod work;

use crate::cluster::{DataDisk, Setup, TestCluster};
use crate::coordinators;
use crate::disks::SmallDisk;
use crate::hub::Hub;
use crate::namespaces::Namespaces;
use crate::network::{Direction, Network, SWITCH};
use crate::postgres::Postgres;
use crate::processes::{LogTail, Process, free_address};
use crate::s3::S3;
use crate::server_fault::ServerFault;
use crate::skip::skip;
use admission::Admission;
use plan::Capabilities;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use work::Workload;

/// Size of the worker's small disk: several times what a worker needs.
const WORKER_DISK: u64 = 96 << 20;
/// Size of a coordinator's disk.
const COORDINATOR_DISK: u64 = 96 << 20;
/// MiB of it that a coordinator reserves for its database.
const RESERVE_MIB: u64 = 24;
const LEASE: Duration = Duration::from_secs(4);
/// How long a child process may make no progress: far longer than a step takes, even on a busy machine.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(10);
/// The exit code of a worker that is refused and has nothing to save.
const EXIT_REFUSED: i32 = 4;
/// How long a service manager waits before it restarts such a worker.
const RESTART_DELAY: Duration = Duration::from_secs(3);

/// The paths of the server programs, `env!("CARGO_BIN_EXE_…")` in a test.
#[derive(Clone, Copy, Debug)]
pub struct Servers {
    /// `s3-server`.
    pub s3: &'static str,
    /// `hub-server`.
    pub hub: &'static str,
}

/// A machine with a worker. Its data folder stays when its process ends.
pub struct Machine {
    /// The name of the worker and of its folder.
    pub name: String,
    /// The worker; `None` while it is down.
    pub process: Option<Process>,
    /// Its data folder, as this process sees it.
    pub folder: PathBuf,
    /// The small disk on which that folder is.
    pub disk: Option<SmallDisk>,
    namespaces: Namespaces,
    /// The number of its network link.
    link: Option<u8>,
    /// Whether its certificate or token is revoked.
    is_revoked: bool,
    /// Whether it was revoked in this round, so that it may have exited for that reason.
    was_revoked: bool,
    /// When it is restarted after that.
    restart_at: Option<Instant>,
}

/// All processes of a chaos test.
pub struct Cluster {
    /// One coordinator or two. Commands run in the folder of the first.
    pub coordinators: Vec<TestCluster>,
    /// The coordinators that are down.
    down: BTreeSet<usize>,
    logs: Vec<LogTail>,
    /// The index of the leader, as far as is known.
    leader: usize,
    /// The machines, each with a worker.
    pub machines: Vec<Machine>,
    /// The object storage.
    pub s3: S3,
    /// The jobs that are submitted, in turn.
    pub workloads: Vec<Workload>,
    /// The database of several coordinators.
    pub database: Option<Postgres>,
    /// The network links of the workers.
    pub network: Option<Network>,
    /// The model hub.
    pub hub: Option<Hub>,
    /// The disks of the coordinators, in their order; empty without the permissions for them.
    coordinator_disks: Vec<SmallDisk>,
    /// The indices of the full ones.
    full_disks: BTreeSet<usize>,
    /// The folder with everything.
    pub root: PathBuf,
    /// The ids of all acknowledged jobs.
    pub acknowledged: BTreeSet<String>,
    /// Processes that exited on their own, and were restarted.
    pub unexpected_exits: Vec<String>,
}

impl Cluster {
    /// Runs the workload once without faults (`aitk run`), then starts the small cluster.
    ///
    /// # Panics
    /// When any of that fails.
    #[must_use]
    pub fn small(servers: Servers, root: &Path) -> Self {
        let workloads = vec![Workload::training(root)];
        let s3 = S3::start(servers.s3, root);
        let mut disks = Vec::new();
        let mut setup = tolerant(Setup::new(root).storage(s3.url(), s3.environment()));
        setup.worker_tokens = true;
        setup.coordinator_environment.push(direct_storage());
        match data_disk(root, &Namespaces::Host) {
            Ok((disk, data_disk)) => {
                disks.push(disk);
                setup.data_disk = Some(data_disk);
            }
            Err(why) => skip("tmpfs", format!("no coordinator has a small disk: {why}")),
        }
        let coordinators = vec![TestCluster::start_with(setup)];
        let mut cluster = Self::new(root, workloads, s3, coordinators);
        cluster.coordinator_disks = disks;
        for name in ["left", "right"] {
            cluster.add_machine(name, None, None);
        }
        cluster
    }

    /// Runs the workloads once without faults, then starts the full cluster, without the parts for which permissions are missing.
    ///
    /// # Panics
    /// When any of that fails.
    #[must_use]
    pub fn full(servers: Servers, root: &Path) -> Self {
        let workloads = vec![
            Workload::training(root),
            Workload::with_hub_model(root),
            Workload::images(root, None),
            Workload::images(root, Some(3)),
        ];
        let network = Network::new(3)
            .map_err(|why| skip("network-namespace", format!("no network link is cut: {why}")))
            .ok();
        let database = Postgres::start(true)
            .map_err(|why| skip("postgresql", format!("only one coordinator runs: {why}")))
            .ok();
        let small = root.join("small");
        std::fs::create_dir(&small).expect("the folder can be made");
        let disk = SmallDisk::on_device(&small, WORKER_DISK, &root.join("small.image"))
            .map_err(|why| skip("loop-device", format!("no disk is throttled: {why}")))
            .or_else(|_| SmallDisk::mount(&small, WORKER_DISK))
            .map_err(|why| skip("tmpfs", format!("no worker has a small disk: {why}")))
            .ok();
        let switch = network.as_ref().map_or(Namespaces::Host, Network::switch);
        let address = |port| match switch {
            Namespaces::Host => free_address(),
            _ => SocketAddr::new(SWITCH, port),
        };
        let s3 = S3::start_in(servers.s3, root, address(9000), &switch);
        let models = Hub::start_in(servers.hub, root, address(9100), &switch);
        let mut disks = Vec::new();
        let mut setup = |folder: &Path, port| {
            let mut setup = Setup {
                storage: Some(s3.url()),
                namespaces: switch.clone(),
                address: address(port),
                environment: models.environment(),
                worker_tokens: database.is_none(),
                ..tolerant(Setup::new(folder))
            };
            match database {
                // Workers that joined need no storage keys, because they access storage through the coordinator.
                Some(_) => setup.coordinator_environment = s3.environment(),
                None => {
                    setup.environment.extend(s3.environment());
                    setup.coordinator_environment.push(direct_storage());
                }
            }
            match data_disk(folder, &switch) {
                Ok((disk, data_disk)) => {
                    disks.push(disk);
                    setup.data_disk = Some(data_disk);
                }
                Err(why) => skip("tmpfs", format!("no coordinator has a small disk: {why}")),
            }
            setup
        };
        let coordinators = match &database {
            Some(database) => coordinators::start(
                &database.url(),
                vec![setup(root, 7420), setup(&root.join("second"), 7421)],
            ),
            None => vec![TestCluster::start_with(setup(root, 7420))],
        };
        let mut cluster = Self::new(root, workloads, s3, coordinators);
        (cluster.network, cluster.database) = (network, database);
        (cluster.hub, cluster.coordinator_disks) = (Some(models), disks);
        cluster.add_machine("left", Some(1), None);
        cluster.add_machine("right", Some(2), None);
        cluster.add_machine("small", Some(3), disk);
        cluster
    }

    fn new(root: &Path, workloads: Vec<Workload>, s3: S3, coordinators: Vec<TestCluster>) -> Self {
        let logs = coordinators
            .iter()
            .map(|test_cluster| test_cluster.coordinator.log_from_start())
            .collect();
        Self {
            coordinators,
            down: BTreeSet::new(),
            logs,
            leader: 0,
            machines: Vec::new(),
            s3,
            workloads,
            database: None,
            network: None,
            hub: None,
            coordinator_disks: Vec::new(),
            full_disks: BTreeSet::new(),
            root: root.to_path_buf(),
            acknowledged: BTreeSet::new(),
            unexpected_exits: Vec::new(),
        }
    }

    fn add_machine(&mut self, name: &str, link: Option<u8>, disk: Option<SmallDisk>) {
        let link = link.filter(|_| self.network.is_some());
        let network = match (&self.network, link) {
            (Some(network), Some(link)) => network.worker_end(link),
            _ => Namespaces::Host,
        };
        let namespaces = disk
            .as_ref()
            .map_or(network.clone(), |disk| disk.namespaces_with(&network));
        if self.test_cluster().setup().endpoint.is_some() {
            coordinators::join(self.test_cluster(), name, &namespaces);
        } else {
            let admitted = Admission::of(self.test_cluster(), name, &namespaces).admit().join();
            assert!(admitted.unwrap_or(false), "{name} could not get a token");
        }
        let folder = disk.as_ref().map(SmallDisk::seen_from_here);
        self.machines.push(Machine {
            name: name.to_owned(),
            process: Some(self.test_cluster().worker_in(name, &namespaces)),
            folder: folder.unwrap_or_else(|| self.test_cluster().worker_dir(name)),
            disk,
            namespaces,
            link,
            is_revoked: false,
            was_revoked: false,
            restart_at: None,
        });
    }

    /// The coordinator through which commands run, with its workers.
    #[must_use]
    pub fn test_cluster(&self) -> &TestCluster {
        &self.coordinators[0]
    }

    /// The parts of the cluster that can have faults.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        let disks = || self.machines.iter().filter_map(|machine| machine.disk.as_ref());
        let database = self.database.as_ref();
        Capabilities {
            links: self.network.is_some(),
            standby: database.is_some(),
            slow_database: database.and_then(Postgres::disk).is_some(),
            small_disk: disks().count() > 0,
            coordinator_disks: !self.coordinator_disks.is_empty(),
            hub: self.hub.is_some(),
            slow_disk: disks().any(SmallDisk::is_device),
        }
    }

    /// The index of the leader, from the coordinators' logs.
    fn leader(&mut self) -> usize {
        for (at, log) in self.logs.iter_mut().enumerate() {
            if log.lines().iter().any(|line| coordinators::leads(line)) {
                self.leader = at;
            }
        }
        self.leader
    }

    /// Restarts processes that exited on their own, as a service manager does.
    fn supervise(&mut self) {
        for (at, test_cluster) in self.coordinators.iter_mut().enumerate() {
            if !self.down.contains(&at) && test_cluster.coordinator.has_ended() {
                self.unexpected_exits
                    .push(format!("coordinator {at}:\n{}", test_cluster.coordinator.tail()));
                test_cluster.spawn_coordinator();
            }
        }
        for at in 0..self.machines.len() {
            let machine = &mut self.machines[at];
            machine.was_revoked |= machine.is_revoked;
            if machine.restart_at.is_some_and(|time| time <= Instant::now()) {
                machine.restart_at = None;
                self.start_worker(at);
                continue;
            }
            let code = machine.process.as_mut().and_then(Process::exit_code);
            if machine.was_revoked && code == Some(EXIT_REFUSED) {
                machine.process = None;
                machine.restart_at = Some(Instant::now() + RESTART_DELAY);
            } else if machine.process.as_mut().is_some_and(Process::has_ended) {
                let tail = machine.process.as_ref().map(Process::tail).unwrap_or_default();
                self.unexpected_exits.push(format!("worker {}:\n{tail}", machine.name));
                machine.process = Some(self.coordinators[0].worker_in(&machine.name, &machine.namespaces));
            }
        }
        if let Some(database) = self.database.as_mut().filter(|database| !database.is_stopped()) {
            database.start_again();
        }
    }

    /// Starts the worker of a machine, unless it runs.
    fn start_worker(&mut self, at: usize) {
        let machine = &self.machines[at];
        if machine.process.is_some() {
            return;
        }
        let process = self.test_cluster().worker_in(&machine.name, &machine.namespaces);
        self.machines[at].process = Some(process);
    }

    /// Prepares a round: removes the workers' cached models, ends the quarantine of devices, and forgets earlier revocations.
    fn begin_round(&mut self) {
        for machine in &mut self.machines {
            machine.was_revoked = machine.is_revoked;
            let models = std::fs::read_dir(machine.folder.join("cache/hub"));
            for model in models.into_iter().flatten().flatten() {
                let _ = std::fs::remove_dir_all(model.path());
            }
        }
        for machine in &self.machines {
            let _ = self.test_cluster().aitk(["worker", "undrain", &machine.name]);
        }
    }

    /// Ends all faults and restarts what is down.
    pub fn recover(&mut self) {
        self.s3.set_fault(ServerFault::None);
        if let Some(hub) = &mut self.hub {
            hub.set_fault(ServerFault::None);
            hub.start_again();
        }
        if let Some(database) = &mut self.database {
            if let Some(disk) = database.disk() {
                disk.throttle(None);
            }
            database.start_again();
        }
        for at in std::mem::take(&mut self.down) {
            self.coordinators[at].spawn_coordinator();
        }
        for test_cluster in &self.coordinators {
            test_cluster.coordinator.signal(nix::sys::signal::Signal::SIGCONT);
        }
        for at in 0..self.machines.len() {
            if let (Some(network), Some(link)) = (&self.network, self.machines[at].link) {
                network.set_link(link, Direction::Up, true);
                network.set_link(link, Direction::Down, true);
            }
            if let Some(disk) = &self.machines[at].disk {
                disk.throttle(None);
            }
            match &self.machines[at].process {
                Some(process) => process.signal(nix::sys::signal::Signal::SIGCONT),
                None => self.start_worker(at),
            }
        }
    }

    /// The tails of all logs, for a message.
    #[must_use]
    pub fn tails(&self) -> String {
        let mut tails: Vec<String> = self
            .coordinators
            .iter()
            .map(|test_cluster| test_cluster.coordinator.tail())
            .collect();
        for machine in self.machines.iter().filter_map(|machine| machine.process.as_ref()) {
            tails.push(machine.tail());
        }
        tails.extend(self.database.as_ref().map(Postgres::tail));
        tails.join("\n")
    }
}

/// Many retries and short time-outs: a round may interrupt the same steps many times.
fn tolerant(setup: Setup) -> Setup {
    Setup {
        lease: LEASE,
        retries: 50,
        progress_timeout: Some(PROGRESS_TIMEOUT),
        ..setup
    }
}

/// Lets workers with tokens access the bucket directly.
fn direct_storage() -> (String, String) {
    ("AITK_DIRECT_STORAGE".to_owned(), "true".to_owned())
}

/// Mounts a small disk for the data folder of the coordinator in `folder`, which runs in these namespaces.
///
/// # Errors
/// Why this machine does not permit it.
fn data_disk(folder: &Path, namespaces: &Namespaces) -> Result<(SmallDisk, DataDisk), String> {
    let data = folder.join("coordinator");
    std::fs::create_dir_all(&data).map_err(|error| error.to_string())?;
    let disk = SmallDisk::mount(&data, COORDINATOR_DISK)?;
    let data_disk = DataDisk {
        namespaces: disk.namespaces_with(namespaces),
        seen_from_here: disk.seen_from_here(),
        reserve_mib: RESERVE_MIB,
    };
    Ok((disk, data_disk))
}
