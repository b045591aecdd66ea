//! A pool: one coordinator, its workers, and the folder they all live in.

use crate::place::Place;
use crate::processes::{Process, free_address, wait_for_port};
use crate::programs::program;
use std::ffi::OsStr;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

/// How a pool is set up.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Everything lies below it.
    pub folder: PathBuf,
    /// As in `--storage`; none: a folder of the coordinator.
    pub storage: Option<String>,
    /// Goes to every process of the pool.
    pub environment: Vec<(String, String)>,
    /// Goes to the coordinator only.
    pub own_environment: Vec<(String, String)>,
    /// How long an attempt lives without a beat.
    pub lease: Duration,
    /// Failed tries in a row that are followed by another.
    pub retries: u32,
    /// Where the coordinator listens.
    pub address: SocketAddr,
    /// Certificate and key of the coordinator, when it has TLS.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// Where the coordinator and `aitk` run.
    pub place: Place,
    /// A disk of its own for the coordinator's data folder.
    pub data_disk: Option<DataDisk>,
    /// How long a job may show no progress before its worker ends it; none: as long as workers let it by themselves.
    pub progress_timeout: Option<Duration>,
    /// Each worker has a token of its own, in a file that can be written anew; without, all have the coordinator's.
    pub worker_tokens: bool,
    /// Of several coordinators: what workers and clients have instead of this one's address and token.
    pub endpoint: Option<Endpoint>,
}

/// A disk for the data folder of a coordinator. Its holder keeps it for as long as the coordinator needs it.
#[derive(Clone, Debug)]
pub struct DataDisk {
    /// Where those run who see it.
    pub place: Place,
    /// The folder as everybody else reaches it.
    pub seen_from_here: PathBuf,
    /// MiB of it that the coordinator keeps for its database.
    pub reserve_mib: u64,
}

/// How workers and clients reach several coordinators that have an authority.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// All their addresses.
    pub servers: String,
    /// The file with the token, which names the authority.
    pub token: PathBuf,
}

impl Setup {
    /// On loopback, without anything special; a lease of 6 seconds.
    #[must_use]
    pub fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_path_buf(),
            storage: None,
            environment: Vec::new(),
            own_environment: Vec::new(),
            lease: Duration::from_secs(6),
            retries: 3,
            address: free_address(),
            tls: None,
            place: Place::Here,
            data_disk: None,
            progress_timeout: None,
            worker_tokens: false,
            endpoint: None,
        }
    }

    /// The coordinator's data folder, as this process sees it.
    #[must_use]
    pub fn data_dir(&self) -> PathBuf {
        match &self.data_disk {
            Some(disk) => disk.seen_from_here.clone(),
            None => self.folder.join("coordinator"),
        }
    }

    /// With this storage, for whoever has this environment.
    #[must_use]
    pub fn storage(mut self, url: String, environment: Vec<(String, String)>) -> Self {
        self.storage = Some(url);
        self.environment.extend(environment);
        self
    }
}

/// A running pool.
pub struct Pool {
    setup: Setup,
    /// The coordinator.
    pub coordinator: Process,
}

impl Pool {
    /// Starts a coordinator in `folder`. `storage` as in `--storage`; `environment` goes to every process of the pool.
    #[must_use]
    pub fn start(folder: &Path, storage: Option<String>, environment: Vec<(String, String)>) -> Self {
        Self::start_with(Setup {
            storage,
            environment,
            ..Setup::new(folder)
        })
    }

    /// Starts a coordinator.
    #[must_use]
    pub fn start_with(setup: Setup) -> Self {
        let coordinator = start_coordinator(&setup);
        Self { setup, coordinator }
    }

    /// Workers and clients go through this endpoint from now on.
    pub fn set_endpoint(&mut self, endpoint: Endpoint) {
        self.setup.endpoint = Some(endpoint);
    }

    /// Starts the coordinator again, on the same address and data, after it was killed.
    pub fn restart_coordinator(&mut self) {
        self.coordinator.kill();
        self.coordinator = start_coordinator(&self.setup);
    }

    /// The same, without waiting until it answers.
    pub fn spawn_coordinator(&mut self) {
        self.coordinator.kill();
        self.coordinator = spawn_coordinator(&self.setup);
    }

    /// Starts a worker with its own data folder.
    #[must_use]
    pub fn worker(&self, name: &str) -> Process {
        self.worker_in(name, &Place::Here)
    }

    /// Starts a worker somewhere.
    #[must_use]
    pub fn worker_in(&self, name: &str, place: &Place) -> Process {
        let mut command = self.command_in("aitk-worker", place);
        if self.setup.endpoint.is_some() {
            // It has joined: address, name and certificate lie in its folder.
            command.env_remove("AITK_SERVER").env_remove("AITK_TOKEN_FILE");
        } else {
            command.arg("--name").arg(name);
        }
        if self.setup.worker_tokens {
            command.env("AITK_TOKEN_FILE", self.worker_token(name));
        }
        if let Some(timeout) = self.setup.progress_timeout {
            let timeout = format!("{}s", timeout.as_secs());
            command.args(["--progress-timeout", &timeout]);
        }
        command.arg("--devices").arg("cpu");
        command.arg("--data-dir").arg(self.worker_dir(name));
        Process::start(name, &self.setup.folder, &mut command)
    }

    /// The data folder of a worker.
    #[must_use]
    pub fn worker_dir(&self, name: &str) -> PathBuf {
        self.setup.folder.join(name)
    }

    /// The file with a worker's own token.
    #[must_use]
    pub fn worker_token(&self, name: &str) -> PathBuf {
        self.setup.folder.join(format!("{name}.token"))
    }

    /// The coordinator's data folder.
    #[must_use]
    pub fn data_dir(&self) -> PathBuf {
        self.setup.data_dir()
    }

    /// How it is set up.
    #[must_use]
    pub fn setup(&self) -> &Setup {
        &self.setup
    }

    /// Runs `aitk` against this pool to its end.
    ///
    /// # Panics
    /// When it does not start.
    #[must_use]
    pub fn aitk<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Output {
        self.command("aitk").args(arguments).output().expect("aitk starts")
    }

    /// Runs `aitk` and gives its standard output.
    ///
    /// # Panics
    /// When it fails.
    pub fn aitk_ok<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> String {
        let output = self.aitk(arguments);
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "aitk failed with {}\n{err}\n{}",
            output.status,
            self.coordinator.tail()
        );
        String::from_utf8(output.stdout).expect("aitk writes UTF-8")
    }

    /// Runs `aitk … --json` and reads what it says.
    ///
    /// # Panics
    /// When it fails, or says no JSON.
    pub fn aitk_json<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> serde_json::Value {
        let text = self.aitk_ok(arguments);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// One of our programs with the pool's address, token and environment.
    #[must_use]
    pub fn command(&self, name: &str) -> Command {
        self.command_in(name, &self.setup.place)
    }

    /// The same somewhere else.
    #[must_use]
    pub fn command_in(&self, name: &str, place: &Place) -> Command {
        let setup = &self.setup;
        let folder = &setup.folder;
        let mut command = place.command(program(name), folder);
        let scheme = if setup.tls.is_some() { "https" } else { "http" };
        let (servers, token) = match &setup.endpoint {
            Some(endpoint) => (endpoint.servers.clone(), endpoint.token.clone()),
            None => (format!("{scheme}://{}", setup.address), self.data_dir().join("token")),
        };
        command
            .env("AITK_SERVER", servers)
            .env("AITK_TOKEN_FILE", token)
            .env("HOME", folder)
            .env("XDG_STATE_HOME", folder.join("state"))
            .env("XDG_CONFIG_HOME", folder.join("config"))
            .env("XDG_CACHE_HOME", folder.join("cache"))
            .env("XDG_DATA_HOME", folder.join("data"))
            .envs(setup.environment.iter().map(|(key, value)| (key, value)));
        if let Some((certificate, _)) = &setup.tls {
            command.env("AITK_CA_FILE", certificate);
        }
        command
    }
}

fn start_coordinator(setup: &Setup) -> Process {
    let process = spawn_coordinator(setup);
    if setup.place == Place::Here {
        wait_for_port(setup.address, &process);
    } else {
        // Of several, one stands by.
        wait_for_words(&["the coordinator answers", "this coordinator stands by"], &process);
    }
    process
}

fn spawn_coordinator(setup: &Setup) -> Process {
    let place = setup.data_disk.as_ref().map_or(&setup.place, |disk| &disk.place);
    let mut command = place.command(program("aitk-coordinator"), &setup.folder);
    if let Some(disk) = &setup.data_disk {
        command.args(["--disk-reserve-mib", &disk.reserve_mib.to_string()]);
    }
    command.arg("--bind").arg(setup.address.to_string());
    command.arg("--data-dir").arg(setup.folder.join("coordinator"));
    command.args(["--lease-seconds", &setup.lease.as_secs_f64().to_string()]);
    command.args(["--retries", &setup.retries.to_string()]);
    if let Some(storage) = &setup.storage {
        command.arg("--storage").arg(storage);
    }
    if let Some((certificate, key)) = &setup.tls {
        command.arg("--tls-cert").arg(certificate).arg("--tls-key").arg(key);
    }
    let environment = setup.environment.iter().chain(&setup.own_environment);
    command.envs(environment.map(|(key, value)| (key, value)));
    Process::start("coordinator", &setup.folder, &mut command)
}

/// Waits until a process says one of these in its log.
fn wait_for_words(words: &[&str], process: &Process) {
    let mut log = process.log_from_start();
    let said = |line: &String| words.iter().any(|words| line.contains(words));
    crate::eventually(words[0], Duration::from_secs(30), &[process], || {
        log.lines().iter().any(said).then_some(())
    });
}
