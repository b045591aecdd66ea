//! A test cluster: one coordinator, its workers, and the folder with all their files.

use crate::namespaces::Namespaces;
use crate::processes::{Process, free_address, wait_for_port};
use crate::programs::program;
use std::ffi::OsStr;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

/// How a cluster is set up.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The folder with all files of the cluster.
    pub folder: PathBuf,
    /// The value of `--storage`; `None` for a folder of the coordinator.
    pub storage: Option<String>,
    /// Environment variables of every process of the cluster.
    pub environment: Vec<(String, String)>,
    /// Environment variables of the coordinator only.
    pub coordinator_environment: Vec<(String, String)>,
    /// How long an attempt is kept without heartbeats.
    pub lease: Duration,
    /// How many failed attempts in a row are repeated.
    pub retries: u32,
    /// The address of the coordinator.
    pub address: SocketAddr,
    /// Certificate and key of the coordinator, if it has TLS.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// The namespaces of the coordinator and `aitk`.
    pub namespaces: Namespaces,
    /// A disk of its own for the coordinator's data folder.
    pub data_disk: Option<DataDisk>,
    /// How long a job may make no progress before its worker ends it; `None` for the worker's default.
    pub progress_timeout: Option<Duration>,
    /// Whether each worker has a token of its own, in a file that can be replaced. Otherwise all use the coordinator's.
    pub worker_tokens: bool,
    /// With several coordinators: the addresses and the token that workers and clients use.
    pub endpoint: Option<Endpoint>,
}

/// A disk for the data folder of a coordinator. The owner of the `SmallDisk` keeps it mounted.
#[derive(Clone, Debug)]
pub struct DataDisk {
    /// The namespaces in which the disk is visible.
    pub namespaces: Namespaces,
    /// The path of the folder from outside these namespaces.
    pub seen_from_here: PathBuf,
    /// MiB of it that the coordinator reserves for its database.
    pub reserve_mib: u64,
}

/// How workers and clients reach several coordinators with a certificate authority.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// All their addresses, separated by commas.
    pub servers: String,
    /// The file with the token, which contains the authority's hash.
    pub token: PathBuf,
}

impl Setup {
    /// Defaults: on loopback, with a lease of 6 seconds.
    #[must_use]
    pub fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_path_buf(),
            storage: None,
            environment: Vec::new(),
            coordinator_environment: Vec::new(),
            lease: Duration::from_secs(6),
            retries: 3,
            address: free_address(),
            tls: None,
            namespaces: Namespaces::Host,
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

    /// Sets the storage and the environment variables that give access to it.
    #[must_use]
    pub fn storage(mut self, url: String, environment: Vec<(String, String)>) -> Self {
        self.storage = Some(url);
        self.environment.extend(environment);
        self
    }
}

/// A running cluster.
pub struct TestCluster {
    setup: Setup,
    /// The coordinator.
    pub coordinator: Process,
}

impl TestCluster {
    /// Starts a coordinator in `folder`. `storage` is the value of `--storage`; all processes get `environment`.
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

    /// Lets workers and clients use this endpoint from now on.
    pub fn set_endpoint(&mut self, endpoint: Endpoint) {
        self.setup.endpoint = Some(endpoint);
    }

    /// Kills the coordinator and starts it again, on the same address and data.
    pub fn restart_coordinator(&mut self) {
        self.coordinator.kill();
        self.coordinator = start_coordinator(&self.setup);
    }

    /// Like [`Self::restart_coordinator`], without waiting until it answers.
    pub fn spawn_coordinator(&mut self) {
        self.coordinator.kill();
        self.coordinator = spawn_coordinator(&self.setup);
    }

    /// Starts a worker with its own data folder.
    #[must_use]
    pub fn worker(&self, name: &str) -> Process {
        self.worker_in(name, &Namespaces::Host)
    }

    /// Starts a worker in these namespaces.
    #[must_use]
    pub fn worker_in(&self, name: &str, namespaces: &Namespaces) -> Process {
        let mut command = self.command_in("aitk-worker", namespaces);
        if self.setup.endpoint.is_some() {
            // It has joined: its folder contains the addresses, its name and its certificate.
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

    /// The settings of the cluster.
    #[must_use]
    pub fn setup(&self) -> &Setup {
        &self.setup
    }

    /// Runs `aitk` against this cluster and waits for its end.
    ///
    /// # Panics
    /// When it does not start.
    #[must_use]
    pub fn aitk<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Output {
        self.command("aitk").args(arguments).output().expect("aitk starts")
    }

    /// Runs `aitk` and returns its standard output.
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

    /// Runs `aitk … --json` and parses its output.
    ///
    /// # Panics
    /// When it fails, or does not print JSON.
    pub fn aitk_json<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> serde_json::Value {
        let text = self.aitk_ok(arguments);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// One of our programs with the cluster's address, token and environment.
    #[must_use]
    pub fn command(&self, name: &str) -> Command {
        self.command_in(name, &self.setup.namespaces)
    }

    /// Like [`Self::command`], in these namespaces.
    #[must_use]
    pub fn command_in(&self, name: &str, namespaces: &Namespaces) -> Command {
        let setup = &self.setup;
        let folder = &setup.folder;
        let mut command = namespaces.command(program(name), folder);
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
    if setup.namespaces == Namespaces::Host {
        wait_for_port(setup.address, &process);
    } else {
        // With several coordinators, one is a standby.
        wait_for_log(&["the coordinator answers", "this coordinator stands by"], &process);
    }
    process
}

fn spawn_coordinator(setup: &Setup) -> Process {
    let namespaces = setup
        .data_disk
        .as_ref()
        .map_or(&setup.namespaces, |disk| &disk.namespaces);
    let mut command = namespaces.command(program("aitk-coordinator"), &setup.folder);
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
    let environment = setup.environment.iter().chain(&setup.coordinator_environment);
    command.envs(environment.map(|(key, value)| (key, value)));
    Process::start("coordinator", &setup.folder, &mut command)
}

/// Waits until the log of a process contains one of these texts.
fn wait_for_log(texts: &[&str], process: &Process) {
    let mut log = process.log_from_start();
    let matches = |line: &String| texts.iter().any(|text| line.contains(text));
    crate::eventually(texts[0], Duration::from_secs(30), &[process], || {
        log.lines().iter().any(matches).then_some(())
    });
}
