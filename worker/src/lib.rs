//! The aitk worker: probes a machine, runs attempts in child processes, stages their inputs and syncs their results.
//!
//! [`start`] runs a worker inside this process (the daemon, or the command line's `run` and `up`); [`run_attempt`] is
//! the main function of the child processes that it starts.

mod attempt;
pub mod bench;
mod child;
mod config_place;
mod confine;
mod context;
mod folders;
mod host;
mod identity;
mod join;
mod join_error;
mod kept;
mod outbox;
mod outcome;
mod path_redactor;
mod pins;
pub mod probe;
mod resend;
pub mod runner;
pub mod sandbox;
mod session;
mod spec_file;
mod stage;
mod storage;
mod trace;
mod unsent;
mod upload;
mod usage;

use aitk_common::attempt::Outcome;
use aitk_common::capability::Device;
use aitk_common::confinement::Confinement;
use aitk_common::control::Assignment;
use aitk_common::telemetry::traces::Traces;
pub use child::run_attempt;
pub use folders::FoldersError;
pub use host::host_name;
pub use identity::Membership;
pub use join::{JoinOptions, join};
pub use join_error::JoinError;
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
    /// The file that the token is from: read again before each connection, so that a new token needs no restart.
    pub token_file: Option<PathBuf>,
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
    /// How its attempts are confined, as [`sandbox::measure`] found; none: it was not measured.
    pub confinement: Option<Confinement>,
    /// Start, and run attempts, only where files and network are confined.
    pub require_sandbox: bool,
    /// Makes a control group for each attempt; none: attempts share the daemon's.
    pub groups: Option<runner::Groups>,
    /// The largest file that an attempt may write.
    pub largest_file: u64,
    /// Bytes that inputs may take in the cache.
    pub cache_quota: u64,
    /// How long ago the contents of a cached input may have been hashed when it is used.
    pub verify_cache_after: Duration,
    /// Bytes that files may take which attempts compute from their inputs and keep.
    pub derived_quota: u64,
    /// How long a child may take to save and stop.
    pub grace: Duration,
    /// How long a child may show no progress before it is ended and tried again, where its job does not say
    /// (`cluster.progress_timeout`); longer where its own steps take long.
    pub progress_timeout: Duration,
    /// How long all attempts together may take to save, upload and report when the worker leaves.
    pub shutdown_patience: Duration,
    /// How much longer leaving may take, at most, for checkpoints that are still being sent: a second for each MiB.
    pub upload_patience: Duration,
    /// How long object storage may be in trouble, while there is a connection, before an attempt fails that fetches from it.
    pub storage_patience: Duration,
    /// How long the end of a job waits for its results to be stored.
    pub end_patience: Duration,
    /// Where the spans of attempts go.
    pub traces: Traces,
    /// Repositories on Hugging Face, `ORG/NAME` or `ORG/*`, for which jobs of others may use this worker's `HF_TOKEN`. Jobs
    /// that run in place always may.
    pub hub_allow: Vec<String>,
    /// A folder with tokens of Hugging Face of the pool's users, in files `USER/NAME` that nobody else can read: jobs of that user
    /// may name them (`cluster.hub_token`). None: no job may.
    pub hub_secrets: Option<PathBuf>,
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
            token_file: None,
            membership: None,
            ca_file: None,
            name: host_name(),
            data_dir: data_dir.into(),
            devices: Vec::new(),
            labels: BTreeMap::new(),
            attempt_command: vec![program],
            confinement: None,
            require_sandbox: false,
            groups: None,
            // Several times the largest model that is trained whole.
            largest_file: 512 << 30,
            cache_quota: 100 << 30,
            verify_cache_after: Duration::from_secs(7 * 24 * 60 * 60),
            derived_quota: 20 << 30,
            grace: Duration::from_secs(60),
            progress_timeout: Duration::from_secs(600),
            shutdown_patience: Duration::from_secs(80),
            upload_patience: Duration::from_secs(15 * 60),
            storage_patience: Duration::from_secs(15 * 60),
            end_patience: Duration::from_secs(24 * 3600),
            traces: Traces::default(),
            hub_allow: Vec::new(),
            hub_secrets: None,
        }
    }
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
    /// It demands a sandbox that this machine does not give.
    #[error("--require-sandbox: attempts cannot be confined here ({0}); docs/security.md says what is needed")]
    NotConfined(String),
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
    if config.require_sandbox && !config.confinement.as_ref().is_some_and(Confinement::holds) {
        let found = config.confinement.as_ref().map(ToString::to_string);
        return Err(StartError::NotConfined(
            found.unwrap_or_else(|| "it was not measured".to_owned()),
        ));
    }
    let allow = stage::hub::AllowList::parse(&config.hub_allow).map_err(StartError::HubAllow)?;
    let (data_dir, upload_patience) = (config.data_dir.clone(), config.upload_patience);
    let (folders, kept) = tokio::task::spawn_blocking(move || folders::open_all(&data_dir))
        .await
        .map_err(std::io::Error::other)??;
    let files_are_confined = config.confinement.as_ref().is_some_and(|found| found.files.in_force);
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
        confinement: config.confinement,
    };
    let context = Arc::new(context::Context {
        cache: stage::cache::Cache::new(
            folders.blobs(),
            folders.trees(),
            config.cache_quota,
            config.verify_cache_after,
        ),
        derived: stage::derived::DerivedCaches::new(folders.derived(), config.derived_quota),
        hub: stage::hub::Hub::from_environment(folders.hub(), allow),
        hub_secrets: stage::hub::Secrets::of(config.hub_secrets),
        kept,
        refused: watch::Sender::new(None),
        folders,
        spawner: runner::Spawner::start(tokio::runtime::Handle::current())?,
        storage: storage::StorageAccess::new(),
        attempt_command: config.attempt_command,
        files_are_confined,
        require_sandbox: config.require_sandbox,
        groups: config.groups,
        largest_file: config.largest_file,
        grace: config.grace,
        progress_timeout: config.progress_timeout,
        storage_patience: config.storage_patience,
        end_patience: config.end_patience,
        spans,
    });
    let found = Arc::clone(&context);
    // Half-written files of attempts that ended with the daemon before.
    tokio::task::spawn_blocking(move || found.derived.tidy())
        .await
        .map_err(std::io::Error::other)?;
    let (status, watched) = watch::channel(Status::Connecting(None));
    let leave = CancellationToken::new();
    let keeper = config.membership.map(|joined| {
        let (folder, server) = (config.data_dir.clone(), config.server.clone());
        Arc::new(identity::Keeper::new(folder, server, config.ca_file.clone(), joined))
    });
    let target = session::Target {
        server: config.server,
        token: config.token,
        token_file: config.token_file,
        ca_file: config.ca_file,
        keeper: keeper.clone(),
    };
    let session = session::Session::new(context, identity, status);
    let session = tokio::spawn(session.run(target, leave.clone(), config.shutdown_patience, upload_patience));
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

    /// Waits until the session is over, which only happens by itself when the coordinator refuses us and nothing would be lost:
    /// a refused worker that runs attempts or keeps their checkpoints goes on and waits to be let in again.
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
