//! The aitk worker: probes a machine, runs attempts in child processes, stages their inputs and uploads their
//! results.
//!
//! [`start`] runs a worker inside this process (the daemon, or the command line's `run` and `up`); [`run_attempt`] is
//! the main function of the child processes that it starts.

mod announcement;
mod attempt;
pub mod bench;
mod child;
mod config_location;
mod context;
mod data_folder;
mod extensions;
mod host;
mod identity;
mod join;
mod join_calls;
mod memory_usage;
mod outbox;
mod outcome;
mod path_redactor;
mod pins;
mod privileges;
pub mod probe;
mod resend;
pub mod runner;
pub mod sandbox;
mod session;
#[cfg(test)]
#[allow(unreachable_pub, reason = "other tests share this file")]
#[path = "../../tests/src/skip.rs"]
mod skip;
mod spec_file;
mod stage;
mod storage;
mod trace;
mod uncommitted;
mod upload;

use aitk_common::attempt::Outcome;
use aitk_common::capability::Device;
use aitk_common::confinement::Confinement;
use aitk_common::control_plane::Assignment;
use aitk_common::telemetry::traces::Traces;
pub use child::run_attempt;
pub use data_folder::DataFolderError;
use extensions::AllowedExtensions;
pub use extensions::check_allowed_programs;
use futures::future::BoxFuture;
pub use host::host_name;
pub use identity::WorkerIdentity;
pub use join::{JoinOptions, join};
pub use join_calls::JoinError;
pub use session::{Refusal, Status};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// How long all attempts together may take at shutdown, if [`Config::shutdown_timeout`] is not set: systemd waits 90 seconds.
pub const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(80);

/// The settings of a worker.
#[derive(Clone, Debug)]
pub struct Config {
    /// The coordinator: `https://host[:port]`, or `http://127.0.0.1[:port]`.
    pub server: String,
    /// The token for the coordinator; empty with a [`Self::identity`].
    pub token: String,
    /// The file that holds the token. It is read again before each connection, so that a new token needs no restart.
    pub token_file: Option<PathBuf>,
    /// The certificate that `join` obtained; used instead of a token.
    pub identity: Option<WorkerIdentity>,
    /// A file with a certificate authority to trust in addition to those of the system.
    pub ca_file: Option<PathBuf>,
    /// The worker's display name.
    pub name: String,
    /// The data folder: cache, attempts, identity. Only one worker uses it at a time.
    pub data_dir: PathBuf,
    /// The folder for models from Hugging Face, which several workers of one user may share. `None`: one in `data_dir`.
    pub hub_folder: Option<PathBuf>,
    /// The devices that it offers; see [`probe::devices`] and [`probe::choose`].
    pub devices: Vec<Device>,
    /// Labels that jobs may ask for.
    pub labels: BTreeMap<String, String>,
    /// The program that runs attempts, and its first arguments; `attempt --spec FILE` is added.
    pub attempt_command: Vec<OsString>,
    /// How attempts are confined, as measured by [`sandbox::measure`]. `None`: not measured.
    pub confinement: Option<Confinement>,
    /// Start, and run attempts, only if files and network can be confined.
    pub require_sandbox: bool,
    /// Creates a control group for each attempt. `None`: attempts share the daemon's group.
    pub control_groups: Option<runner::ControlGroups>,
    /// The largest file that an attempt may write, in bytes.
    pub largest_file: u64,
    /// Size limit of the input cache, in bytes.
    pub cache_quota: u64,
    /// A cached input that was hashed longer ago than this is hashed again when it is used.
    pub verify_cache_after: Duration,
    /// Size limit of the files that attempts compute from their inputs and keep, in bytes.
    pub derived_quota: u64,
    /// How long a child may take to save and stop.
    pub grace: Duration,
    /// How long a child may show no progress before it is stopped and the attempt retried. A job's
    /// `cluster.progress_timeout` overrides it; phases with slow steps get a longer limit.
    pub progress_timeout: Duration,
    /// How long all attempts together may take to save, upload and report when the worker shuts down.
    pub shutdown_timeout: Duration,
    /// The most extra time at shutdown for checkpoints that are still being uploaded: one second per MiB.
    pub upload_timeout: Duration,
    /// How long object storage may fail, while there is a connection, before an attempt that fetches from it fails.
    pub storage_timeout: Duration,
    /// How long a finished job waits for its results to be stored.
    pub end_timeout: Duration,
    /// The exporter for the spans of attempts.
    pub traces: Traces,
    /// Repositories on Hugging Face, `ORG/NAME` or `ORG/*`, for which jobs of other users may use this worker's
    /// token (`HF_TOKEN`, or that of `hf auth login`). Jobs that run in place may always use it.
    pub hub_allow: Vec<String>,
    /// The largest model that is downloaded from Hugging Face for a job of another user, in bytes. Jobs that run in place have no limit.
    pub largest_model: u64,
    /// A folder with Hugging Face tokens of the cluster's users, in files `USER/NAME` that only the owner can read. A
    /// job may name a token of its own user (`cluster.hub_token`). `None`: no job may.
    pub hub_secrets: Option<PathBuf>,
    /// Programs that jobs may run as extensions: `NAME=/PATH/OF/PROGRAM`. Default: none.
    pub allow_extensions: Vec<String>,
}

impl Config {
    /// A worker with default settings: this program runs its attempts; 100 GiB of cache; 60 seconds to save; 80
    /// seconds to shut down (systemd waits 90); 15 minutes of failing storage.
    #[must_use]
    pub fn new(server: impl Into<String>, token: impl Into<String>, data_dir: impl Into<PathBuf>) -> Self {
        let program = std::env::current_exe().map_or_else(|_| "aitk-worker".into(), PathBuf::into_os_string);
        Self {
            server: server.into(),
            token: token.into(),
            token_file: None,
            identity: None,
            ca_file: None,
            name: host_name(),
            data_dir: data_dir.into(),
            hub_folder: None,
            devices: Vec::new(),
            labels: BTreeMap::new(),
            attempt_command: vec![program],
            confinement: None,
            require_sandbox: false,
            control_groups: None,
            // Several times the size of the largest model that is fully fine-tuned.
            largest_file: 512 << 30,
            cache_quota: 100 << 30,
            verify_cache_after: Duration::from_secs(7 * 24 * 60 * 60),
            derived_quota: 20 << 30,
            grace: Duration::from_secs(60),
            progress_timeout: Duration::from_secs(600),
            shutdown_timeout: SHUTDOWN_TIMEOUT,
            upload_timeout: Duration::from_secs(15 * 60),
            storage_timeout: Duration::from_secs(15 * 60),
            end_timeout: Duration::from_secs(24 * 3600),
            traces: Traces::default(),
            hub_allow: Vec::new(),
            largest_model: stage::hub::DEFAULT_LARGEST_MODEL,
            hub_secrets: None,
            allow_extensions: Vec::new(),
        }
    }
}

/// Checks whether a worker would run the job of an assignment. These are the checks that the worker makes before it
/// fetches or starts anything.
///
/// # Errors
/// The outcome with which the attempt would fail.
pub fn check_assignment(assignment: &Assignment) -> Result<(), Outcome> {
    stage::parse_job(assignment).map(|_| ())
}

/// Why a worker could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The data folder cannot be used.
    #[error(transparent)]
    DataFolder(#[from] DataFolderError),
    /// An entry of `--hub-allow` is not a repository.
    #[error("--hub-allow: `{0}` is not a repository; expected ORG/NAME, or ORG/* for all of an organisation")]
    HubAllow(String),
    /// A value of `--allow-extension` is wrong.
    #[error("--allow-extension: {0}")]
    Extension(String),
    /// No device was selected.
    #[error("the worker has no device to offer; choose one with --devices")]
    NoDevice,
    /// A sandbox is required, but this machine cannot confine attempts.
    #[error("--require-sandbox: attempts cannot be confined here ({0}); docs/security.md says what is needed")]
    NotConfined(String),
    /// A thread or a task could not be started.
    #[error("the worker could not start: {0}")]
    System(#[from] std::io::Error),
}

/// A worker that runs in the background. Dropping it kills its children at once; [`Self::shutdown`] lets them save.
#[derive(Debug)]
pub struct WorkerHandle {
    shutdown_token: CancellationToken,
    /// The task that renews the certificate.
    renewal: Option<JoinHandle<()>>,
    session: JoinHandle<Result<(), Refusal>>,
    status: watch::Receiver<Status>,
}

/// Starts a worker: locks its data folder, then keeps a session with the coordinator open.
///
/// # Errors
/// [`StartError`]. Connection errors and refusals appear in [`WorkerHandle::status`] and [`WorkerHandle::ended`].
pub fn start(config: Config) -> BoxFuture<'static, Result<WorkerHandle, StartError>> {
    // Boxed: compiled once, in this crate; an `async fn` is compiled by each crate that awaits it.
    Box::pin(start_session(config))
}

async fn start_session(config: Config) -> Result<WorkerHandle, StartError> {
    if config.devices.is_empty() {
        return Err(StartError::NoDevice);
    }
    if config.require_sandbox && !config.confinement.as_ref().is_some_and(Confinement::holds) {
        let measured = config.confinement.as_ref().map(ToString::to_string);
        return Err(StartError::NotConfined(
            measured.unwrap_or_else(|| "it was not measured".to_owned()),
        ));
    }
    let allow_list = stage::hub::AllowList::parse(&config.hub_allow).map_err(StartError::HubAllow)?;
    let extensions =
        AllowedExtensions::parse(&config.allow_extensions, Path::new("/")).map_err(StartError::Extension)?;
    let (data_dir, upload_timeout) = (config.data_dir.clone(), config.upload_timeout);
    let (data_folder, uncommitted) = tokio::task::spawn_blocking(move || data_folder::open_all(&data_dir))
        .await
        .map_err(std::io::Error::other)??;
    extensions
        .check_data_dir(&std::fs::canonicalize(&config.data_dir)?)
        .map_err(StartError::Extension)?;
    let files_are_confined = config
        .confinement
        .as_ref()
        .is_some_and(|measured| measured.files.in_force);
    let spans = trace::SpanRecorder::new(&config.traces, &config.name);
    let identity = session::RegistrationInfo {
        worker: config
            .identity
            .as_ref()
            .map_or_else(|| data_folder.worker_id(), |joined| Some(joined.worker.clone())),
        name: config.name,
        host: host_name(),
        devices: config.devices,
        labels: config.labels.into_iter().chain(extensions.labels()).collect(),
        confinement: config.confinement,
    };
    let context = Arc::new(context::Context {
        cache: stage::cache::InputCache::new(
            data_folder.blobs(),
            data_folder.trees(),
            config.cache_quota,
            config.verify_cache_after,
        ),
        derived: stage::derived::DerivedCaches::new(data_folder.derived(), config.derived_quota),
        hub: stage::hub::Hub::from_environment(
            config.hub_folder.unwrap_or_else(|| data_folder.hub()),
            allow_list,
            config.largest_model,
        ),
        hub_tokens: stage::hub::UserTokens::new(config.hub_secrets),
        uncommitted,
        refusal: watch::Sender::new(None),
        data_folder,
        devices: identity.devices.clone(),
        spawner: runner::Spawner::start(tokio::runtime::Handle::current())?,
        storage: storage::StorageAccess::new(),
        attempt_command: config.attempt_command,
        extensions,
        files_are_confined,
        require_sandbox: config.require_sandbox,
        control_groups: config.control_groups,
        largest_file: config.largest_file,
        grace: config.grace,
        progress_timeout: config.progress_timeout,
        storage_timeout: config.storage_timeout,
        end_timeout: config.end_timeout,
        spans,
    });
    let cleaned = Arc::clone(&context);
    // Remove partial files of attempts that were killed with an earlier daemon, and downloads that nobody resumed.
    tokio::task::spawn_blocking(move || {
        cleaned.derived.clean_up();
        cleaned.hub.clean_up();
    })
    .await
    .map_err(std::io::Error::other)?;
    let (status, status_receiver) = watch::channel(Status::Connecting(None));
    let shutdown_token = CancellationToken::new();
    let renewer = config.identity.map(|joined| {
        let (folder, server) = (config.data_dir.clone(), config.server.clone());
        Arc::new(identity::CertificateRenewer::new(
            folder,
            server,
            config.ca_file.clone(),
            joined,
        ))
    });
    let connection_target = session::ConnectionTarget {
        server: config.server,
        token: config.token,
        token_file: config.token_file,
        ca_file: config.ca_file,
        renewer: renewer.clone(),
    };
    let session = session::Session::new(context, identity, status);
    let session = tokio::spawn(session.run(
        connection_target,
        shutdown_token.clone(),
        config.shutdown_timeout,
        upload_timeout,
    ));
    Ok(WorkerHandle {
        shutdown_token,
        renewal: renewer.map(|renewer| tokio::spawn(renewer.run())),
        session,
        status: status_receiver,
    })
}

impl WorkerHandle {
    /// The state of the session; a watch channel that reports changes.
    #[must_use]
    pub fn status(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    /// Waits until the session is over. It ends by itself only when the coordinator refuses the worker and nothing
    /// would be lost: a refused worker that runs attempts or holds their checkpoints keeps trying to connect.
    ///
    /// # Errors
    /// Why the coordinator refused the worker.
    pub async fn ended(&mut self) -> Result<(), Refusal> {
        match (&mut self.session).await {
            Ok(ended) => ended,
            Err(error) => Err(Refusal::Config(format!(
                "the worker failed: {error}; please report this"
            ))),
        }
    }

    /// Shuts down: children save and stop, results are stored and reported, all within the time limits of the config.
    pub async fn shutdown(mut self) {
        self.shutdown_token.cancel();
        if !self.session.is_finished() {
            // A refusal no longer matters.
            let _ = self.ended().await;
        }
    }
}

impl Drop for WorkerHandle {
    fn drop(&mut self) {
        self.session.abort();
        if let Some(renewal) = &self.renewal {
            renewal.abort();
        }
    }
}
