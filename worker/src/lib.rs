//! The aitk worker: probes a machine, runs attempts in child processes, stages their inputs and syncs their results.
//!
//! [`start`] runs a worker inside this process (the daemon, or the command line's `run` and `up`); [`run_attempt`] is
//! the main function of the child processes that it starts.

mod as_written;
mod attempt;
pub mod bench;
mod child;
mod config_place;
mod confine;
mod context;
mod folders;
mod identity;
mod join;
mod outbox;
pub mod probe;
pub mod runner;
mod session;
mod stage;
mod storage;
mod sync;
mod trace;
mod usage;

use aitk_common::attempt::Outcome;
use aitk_common::capability::Device;
use aitk_common::control::Assignment;
use aitk_common::telemetry::traces::Traces;
pub use child::run_attempt;
pub use folders::FoldersError;
pub use identity::Membership;
pub use join::{JoinError, JoinOptions, join};
pub use session::{Refusal, Status};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// How a worker is set up.
#[derive(Clone, Debug)]
pub struct Config {
    /// The coordinator: `https://host[:port]`, or `http://127.0.0.1[:port]`.
    pub server: String,
    /// The token that it wants; empty with a [`Self::membership`].
    pub token: String,
    /// What `join` got: shown instead of a token.
    pub membership: Option<Membership>,
    /// A certificate authority to trust besides those of the system.
    pub ca_file: Option<PathBuf>,
    /// What people call this worker.
    pub name: String,
    /// Its own folder: cache, attempts, identity. Only one worker uses it at a time.
    pub data_dir: PathBuf,
    /// What it offers; see [`probe::devices`] and [`probe::choose`].
    pub devices: Vec<Device>,
    /// Labels that jobs may ask for.
    pub labels: BTreeMap<String, String>,
    /// The program that runs attempts, and its first arguments; `attempt --spec FILE` is added.
    pub attempt_command: Vec<OsString>,
    /// Bytes that inputs may take in the cache.
    pub cache_quota: u64,
    /// How long a child may take to save and stop.
    pub grace: Duration,
    /// How long a child may show no progress before it is ended and tried again, where its job does not say
    /// (`cluster.progress_timeout`); longer where its own steps take long.
    pub progress_timeout: Duration,
    /// How long all attempts together may take to save, upload and report when the worker leaves.
    pub shutdown_patience: Duration,
    /// How long object storage may be in trouble, while there is a connection, before an attempt fails for it.
    pub storage_patience: Duration,
    /// Where the spans of attempts go.
    pub traces: Traces,
    /// Repositories on Hugging Face, `ORG/NAME` or `ORG/*`, for which jobs of others may use this worker's `HF_TOKEN`. Jobs
    /// that run in place always may.
    pub hub_allow: Vec<String>,
}

impl Config {
    /// A worker with the usual settings: this program runs its attempts, 100 GiB of cache, a minute to save,
    /// 80 seconds to leave (systemd waits 90), a quarter of an hour of patience with storage.
    #[must_use]
    pub fn new(server: impl Into<String>, token: impl Into<String>, data_dir: impl Into<PathBuf>) -> Self {
        let program = std::env::current_exe().map_or_else(|_| "aitk-worker".into(), PathBuf::into_os_string);
        Self {
            server: server.into(),
            token: token.into(),
            membership: None,
            ca_file: None,
            name: host_name(),
            data_dir: data_dir.into(),
            devices: Vec::new(),
            labels: BTreeMap::new(),
            attempt_command: vec![program],
            cache_quota: 100 << 30,
            grace: Duration::from_secs(60),
            progress_timeout: Duration::from_secs(600),
            shutdown_patience: Duration::from_secs(80),
            storage_patience: Duration::from_secs(15 * 60),
            traces: Traces::default(),
            hub_allow: Vec::new(),
        }
    }
}

/// The name of this machine.
#[must_use]
pub fn host_name() -> String {
    sysinfo::System::host_name()
        .ok()
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| "worker".to_owned())
}

/// Whether a worker would run the job of an assignment, as far as the job alone says: what it checks before it fetches
/// or starts anything.
///
/// # Errors
/// How the attempt would end.
pub fn check_assignment(assignment: &Assignment) -> Result<(), Outcome> {
    stage::job_of(assignment).map(|_| ())
}

/// A worker that could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Its data folder.
    #[error(transparent)]
    Folders(#[from] FoldersError),
    /// The list of repositories.
    #[error("--hub-allow: `{0}` is no repository; expected ORG/NAME, or ORG/* for all of an organisation")]
    HubAllow(String),
    /// It has nothing to offer.
    #[error("the worker has no device to offer; choose one with --devices")]
    NoDevice,
    /// The system gave us no thread.
    #[error("the worker could not start: {0}")]
    System(#[from] std::io::Error),
}

/// A worker that runs in the background. Dropping it ends its children at once; [`Self::shutdown`] lets them save.
#[derive(Debug)]
pub struct Running {
    leave: CancellationToken,
    /// Keeps the certificate fresh.
    renewing: Option<JoinHandle<()>>,
    session: JoinHandle<Result<(), Refusal>>,
    status: watch::Receiver<Status>,
}

/// Starts a worker: takes its data folder, then keeps a session with the coordinator, however long that takes.
///
/// # Errors
/// [`StartError`]. Whether the coordinator can be reached, and whether it accepts us, shows in [`Running::status`]
/// and [`Running::ended`].
pub async fn start(config: Config) -> Result<Running, StartError> {
    if config.devices.is_empty() {
        return Err(StartError::NoDevice);
    }
    let allow = stage::hub::AllowList::parse(&config.hub_allow).map_err(StartError::HubAllow)?;
    let data_dir = config.data_dir.clone();
    let folders = tokio::task::spawn_blocking(move || folders::Folders::open(&data_dir)).await;
    let folders = folders.map_err(std::io::Error::other)??;
    let spans = trace::Spans::to(&config.traces, &config.name);
    let identity = session::Identity {
        worker: config
            .membership
            .as_ref()
            .map_or_else(|| folders.worker_id(), |joined| Some(joined.worker.clone())),
        name: config.name,
        host: host_name(),
        devices: config.devices,
        labels: config.labels,
    };
    let context = Arc::new(context::Context {
        cache: stage::cache::Cache::new(folders.blobs(), folders.trees(), config.cache_quota),
        hub: stage::hub::Hub::from_environment(folders.hub(), allow),
        folders,
        spawner: runner::Spawner::start(tokio::runtime::Handle::current())?,
        storage: storage::StorageAccess::new(),
        attempt_command: config.attempt_command,
        grace: config.grace,
        progress_timeout: config.progress_timeout,
        storage_patience: config.storage_patience,
        spans,
    });
    let (status, watched) = watch::channel(Status::Connecting(None));
    let leave = CancellationToken::new();
    let keeper = config.membership.map(|joined| {
        let (folder, server) = (config.data_dir.clone(), config.server.clone());
        Arc::new(identity::Keeper::new(folder, server, config.ca_file.clone(), joined))
    });
    let target = session::Target {
        server: config.server,
        token: config.token,
        ca_file: config.ca_file,
        keeper: keeper.clone(),
    };
    let session = session::Session::new(context, identity, status);
    let session = tokio::spawn(session.run(target, leave.clone(), config.shutdown_patience));
    Ok(Running {
        leave,
        renewing: keeper.map(|keeper| tokio::spawn(keeper.run())),
        session,
        status: watched,
    })
}

impl Running {
    /// How the session stands, now and as it changes.
    #[must_use]
    pub fn status(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    /// Waits until the session is over, which only happens by itself when the coordinator refuses us.
    ///
    /// # Errors
    /// Why it refused.
    pub async fn ended(&mut self) -> Result<(), Refusal> {
        match (&mut self.session).await {
            Ok(ended) => ended,
            Err(error) => Err(Refusal::Config(format!(
                "the worker failed: {error}; please report this"
            ))),
        }
    }

    /// Leaves: children save and stop, results are stored and reported, all within the patience of the config.
    pub async fn shutdown(mut self) {
        self.leave.cancel();
        if !self.session.is_finished() {
            // A refusal does not matter any more.
            let _ = self.ended().await;
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.session.abort();
        if let Some(renewing) = &self.renewing {
            renewing.abort();
        }
    }
}
