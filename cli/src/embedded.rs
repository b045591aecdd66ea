//! A coordinator and a worker inside this program, for `run`, `up`, `demo` and `bench`.

use crate::api::Api;
use crate::download::disk_failure;
use crate::exit::Exit;
use crate::failure::Failure;
use crate::output::Ui;
use crate::own_address::host_of;
use crate::trace::traces;
use aitk_common::capability::Device;
use aitk_common::confinement::Confinement;
use aitk_common::fsutil;
use aitk_worker::probe::{DeviceSelection, choose, devices};
use nix::libc;
use std::fs::{DirEntry, File, TryLockError};
use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// How long the worker may take to register with the coordinator.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(30);

/// After this time a private folder that its program has not locked is removed. Locking takes a moment.
const UNLOCKED_AGE: Duration = Duration::from_secs(3600);

/// A folder with mode 0700 below the state folder, removed when this value is dropped.
#[derive(Debug)]
pub struct PrivateFolder {
    path: PathBuf,
    /// The system releases the lock however this program ends; the next one then removes the folder.
    _lock: File,
}

impl PrivateFolder {
    /// Creates a folder in `parent`, and removes those that killed programs left there.
    ///
    /// # Errors
    /// When the folder cannot be created.
    pub fn new(parent: &Path) -> Result<Self, Failure> {
        fsutil::create_dir_all(parent).map_err(|error| disk_failure(&error))?;
        remove_stale_folders(parent);
        Self::create(parent, File::try_lock)
    }

    fn create(parent: &Path, try_lock: impl Fn(&File) -> Result<(), TryLockError>) -> Result<Self, Failure> {
        let cannot = |error: std::io::Error| Failure::file("create a folder in", parent, &error);
        let mut last = String::new();
        for _ in 0..5 {
            // Mode 0700. Until the folder is kept, it is removed at an error.
            let folder = tempfile::Builder::new()
                .prefix("run-")
                .tempdir_in(parent)
                .map_err(cannot)?;
            let lock = File::create(folder.path().join("lock")).map_err(cannot)?;
            match try_lock(&lock) {
                Ok(()) => {
                    return Ok(Self {
                        path: folder.keep(),
                        _lock: lock,
                    });
                }
                // Another program that started at the same time is removing the folder as stale, or the file system has no locks.
                Err(error) => last = format!("cannot lock a file in {}: {error}", parent.display()),
            }
        }
        Err(Failure::failed(last)
            .hint("set XDG_STATE_HOME to a folder of a file system with locks, such as a local disk"))
    }

    /// Returns its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for PrivateFolder {
    fn drop(&mut self) {
        if let Err(error) = fsutil::remove(&self.path) {
            tracing::warn!(%error, "the private folder of this run could not be removed");
        }
    }
}

/// Whether a folder was changed last more than [`UNLOCKED_AGE`] ago. After the clock was set back, it may seem to be of the future.
fn is_old(entry: &DirEntry) -> bool {
    let changed = entry.metadata().and_then(|data| data.modified());
    changed.is_ok_and(|changed| changed.elapsed().is_ok_and(|age| age >= UNLOCKED_AGE))
}

/// Whether a folder is empty except for its lock.
fn has_only_a_lock(entry: &DirEntry) -> bool {
    std::fs::read_dir(entry.path())
        .is_ok_and(|mut inside| inside.all(|one| one.is_ok_and(|one| one.file_name() == "lock")))
}

/// Removes folders whose program has ended.
fn remove_stale_folders(parent: &Path) {
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        if !entry.file_name().to_string_lossy().starts_with("run-") {
            continue;
        }
        // Held while the folder is removed, so that a program which has just created it does not use it.
        let lock = File::open(entry.path().join("lock"));
        let is_stale = match lock.as_ref().map(File::try_lock) {
            Ok(Ok(())) => true,
            Ok(Err(TryLockError::WouldBlock)) => false,
            // A program failed to lock it, or was killed before. Any other folder may be in use.
            Ok(Err(TryLockError::Error(_))) | Err(_) => is_old(&entry) && has_only_a_lock(&entry),
        };
        if is_stale {
            tracing::info!(folder = %entry.path().display(), "removing the folder of a killed program");
            let _ = fsutil::remove(&entry.path());
        }
    }
    // Removes files of a program that was killed while it removed a folder.
    let _ = fsutil::remove_abandoned(parent, Duration::ZERO);
}

/// Finds the requested devices: `cuda:1`, `cpu`; `None`: the best devices of this machine.
///
/// # Errors
/// When the text is not a device (code 2), or this machine does not have it (code 7).
pub async fn find_devices(wanted: Option<&str>) -> Result<Vec<Device>, Failure> {
    let choice: DeviceSelection = wanted
        .unwrap_or("auto")
        .parse()
        .map_err(|error| Failure::usage(format!("{error}")))?;
    let found = tokio::task::spawn_blocking(devices)
        .await
        .map_err(|error| Failure::new(Exit::Internal, format!("looking for devices failed: {error}")))?;
    choose(found, &choice).map_err(|error| {
        Failure::new(Exit::NothingFits, error.to_string()).hint("`aitk doctor` lists the devices of this machine")
    })
}

/// Measures how attempts of this program are confined; `None` if that fails.
pub async fn measure_confinement() -> Option<Confinement> {
    let command = vec![std::env::current_exe().ok()?.into_os_string()];
    let measured = tokio::task::spawn_blocking(move || aitk_worker::sandbox::measure(&command)).await;
    measured.ok()
}

/// A coordinator and a worker that run in this program.
pub struct EmbeddedCluster {
    coordinator: aitk_coordinator::CoordinatorHandle,
    worker: Option<aitk_worker::WorkerHandle>,
    api: Api,
    /// Why one of them ended by itself.
    failure: Option<Failure>,
}

/// What a worker offers to jobs.
#[derive(Clone, Debug)]
pub struct WorkerResources {
    /// The devices to compute on.
    pub devices: Vec<Device>,
    /// Programs that jobs may run as extensions: `NAME=/PATH/OF/PROGRAM`.
    pub allow_extensions: Vec<String>,
}

/// Options of a worker that also runs other users' jobs.
#[derive(Clone, Debug)]
pub struct SharedWorkerOptions {
    /// Refuse jobs if attempts cannot be confined.
    pub require_sandbox: bool,
    /// Repositories for which jobs may use this machine's Hugging Face token.
    pub hub_allow: Vec<String>,
    /// The largest model that is downloaded from Hugging Face, in bytes.
    pub largest_model: u64,
    /// The folder with the users' own Hugging Face tokens.
    pub hub_secrets: Option<PathBuf>,
}

impl EmbeddedCluster {
    /// Starts both, and connects to the coordinator.
    ///
    /// # Errors
    /// When the coordinator (code 1) or the worker (code 125) cannot start, an option of the worker is wrong (code 2), or the certificate is
    /// not valid for this machine (code 1).
    pub async fn start(
        mut coordinator: aitk_coordinator::Config,
        worker_dir: Option<&Path>,
        hub_folder: Option<PathBuf>,
        name: Option<&str>,
        resources: WorkerResources,
        ca_file: Option<&Path>,
        shared_worker: Option<SharedWorkerOptions>,
    ) -> Result<Self, Failure> {
        let certificate = coordinator.tls.as_ref().map(|files| files.cert.as_path());
        let scheme = if certificate.is_some() { "https" } else { "http" };
        let host = host_of(coordinator.bind.ip(), certificate).await?;
        coordinator.traces.clone_from(traces());
        let running = aitk_coordinator::start(coordinator).await;
        let coordinator = running.map_err(|error| start_failure(&error))?;
        let server = format!("{scheme}://{host}:{}", coordinator.addr.port());
        let api = Api::connect(&server, &coordinator.token, ca_file).await?;
        let worker = match worker_dir {
            None => None,
            Some(dir) => {
                let mut config = aitk_worker::Config::new(&server, &coordinator.token, dir);
                config.ca_file = ca_file.map(Path::to_path_buf);
                config.devices = resources.devices;
                config.allow_extensions = resources.allow_extensions;
                config.hub_folder = hub_folder;
                config.traces.clone_from(traces());
                config.confinement = measure_confinement().await;
                // Only a server runs other users' jobs.
                if let Some(shared_worker) = shared_worker {
                    config.require_sandbox = shared_worker.require_sandbox;
                    config.largest_model = shared_worker.largest_model;
                    (config.hub_allow, config.hub_secrets) = (shared_worker.hub_allow, shared_worker.hub_secrets);
                    let (limits, control_groups) = aitk_worker::runner::detect_control_groups();
                    config.control_groups = control_groups;
                    if let Some(confinement) = &mut config.confinement {
                        confinement.limits = limits;
                    }
                }
                if let Some(name) = name {
                    name.clone_into(&mut config.name);
                }
                let worker = aitk_worker::start(config).await;
                Some(worker.map_err(|error| worker_failure(&error))?)
            }
        };
        Ok(Self {
            coordinator,
            worker,
            api,
            failure: None,
        })
    }

    /// Waits until the worker has registered, or a signal stops the program. Returns the exit code of the signal.
    ///
    /// # Errors
    /// When the coordinator refuses the worker, or it does not register within half a minute.
    pub async fn wait_until_registered(&mut self, signals: &mut StopSignals) -> Result<Option<Exit>, Failure> {
        unless_stopped(signals, self.registered()).await
    }

    async fn registered(&mut self) -> Result<(), Failure> {
        let Some(worker) = &mut self.worker else { return Ok(()) };
        let (mut status, last_status) = (worker.status(), worker.status());
        let refused = |why: &str| {
            Failure::new(
                Exit::Internal,
                format!("the worker could not register with the coordinator: {why}"),
            )
        };
        let connected = async {
            status
                .wait_for(|status| matches!(status, aitk_worker::Status::Connected { .. }))
                .await
                .map(|_| ())
        };
        tokio::select! {
            registered = tokio::time::timeout(REGISTRATION_TIMEOUT, connected) => match registered {
                Ok(Ok(())) => Ok(()),
                Ok(Err(_)) => Err(refused("the worker ended")),
                Err(_) => Err(refused(&timeout_message(&last_status.borrow()))),
            },
            ended = worker.ended() => Err(refused(&ended.map_or_else(|error| crate::failure::chain(&error), |()| "the worker ended".to_owned()))),
        }
    }

    /// Returns the connection to the coordinator.
    #[must_use]
    pub fn api(&self) -> &Api {
        &self.api
    }

    /// Shuts the worker down. Running jobs save first.
    pub async fn shutdown_worker(&mut self) {
        if let Some(worker) = self.worker.take() {
            worker.shutdown().await;
        }
    }

    /// Shuts both down. Running jobs save first.
    pub async fn shutdown(mut self) {
        self.shutdown_worker().await;
        drop(self.api);
        self.coordinator.shutdown().await;
    }

    /// Shuts both down immediately: child processes are killed, nothing is saved.
    pub async fn kill(self) {
        drop(self.worker);
        drop(self.api);
        self.coordinator.shutdown().await;
    }

    /// Waits until the coordinator fails for good, such as when its database does not work, or the worker ends by itself, which happens when the
    /// coordinator refuses it. Returns why.
    pub async fn failed(&mut self) -> Failure {
        // A task that has ended must not be awaited again.
        if let Some(failure) = &self.failure {
            return failure.clone();
        }
        let Self {
            coordinator, worker, ..
        } = self;
        let worker_ended = async move {
            match worker {
                Some(worker) => worker.ended().await,
                None => std::future::pending().await,
            }
        };
        let failure = first_failure(coordinator.wait_for_failure(), worker_ended).await;
        self.failure = Some(failure.clone());
        failure
    }

    /// Whether [`Self::failed`] has returned: nothing can run here any more.
    pub fn has_failed(&self) -> bool {
        self.failure.is_some()
    }
}

/// Why a worker is not registered after [`REGISTRATION_TIMEOUT`]: what it found last.
fn timeout_message(status: &aitk_worker::Status) -> String {
    let seconds = REGISTRATION_TIMEOUT.as_secs();
    match status {
        aitk_worker::Status::Connecting(Some(problem)) | aitk_worker::Status::Refused(problem) => {
            format!("not within {seconds} seconds; the last problem: {problem}")
        }
        _ => format!("no answer within {seconds} seconds"),
    }
}

/// The failure of a coordinator that does not start. Its own message about TLS is for the options of `aitk-coordinator`.
fn start_failure(error: &aitk_coordinator::StartError) -> Failure {
    match error {
        aitk_coordinator::StartError::Plaintext { bind } => Failure::failed(format!(
            "refusing to listen on {bind} without TLS: everyone on the network could read the token and the data"
        ))
        .hint("give --tls-cert and --tls-key, or --bind 127.0.0.1:7420"),
        error => Failure::failed(crate::failure::chain(error)),
    }
}

/// The failure of a worker that does not start.
fn worker_failure(error: &aitk_worker::StartError) -> Failure {
    let exit = match error {
        aitk_worker::StartError::HubAllow(_) | aitk_worker::StartError::Extension(_) => Exit::Usage,
        _ => Exit::Internal,
    };
    Failure::new(exit, crate::failure::chain(error))
}

/// Waits for the first end of a coordinator and a worker.
async fn first_failure(
    coordinator: impl Future<Output = aitk_coordinator::RunError>,
    worker: impl Future<Output = Result<(), aitk_worker::Refusal>>,
) -> Failure {
    tokio::select! {
        error = coordinator => Failure::failed(crate::failure::chain(&error)),
        ended = worker => Failure::new(Exit::Internal, match ended {
            Ok(()) => "the worker ended".to_owned(),
            Err(refusal) => crate::failure::chain(&refusal),
        }),
    }
}

/// The signals that stop the program: Ctrl-C, SIGTERM, and SIGHUP when the terminal is closed.
pub struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
    /// SIGHUP; `None` if hangups are ignored.
    hangup: Option<Signal>,
    /// A signal was received.
    has_received: bool,
}

impl StopSignals {
    /// Installs the handlers, so that none of the signals ends the program by itself. A SIGHUP that `nohup` ignores
    /// stays ignored.
    ///
    /// # Errors
    /// When a handler cannot be installed.
    pub fn listen() -> Result<Self, Failure> {
        let cannot = |error: std::io::Error| Failure::failed(format!("cannot listen for Ctrl-C: {error}"));
        let hangup = (!hangups_are_ignored()).then(|| signal(SignalKind::hangup()));
        Ok(Self {
            terminate: signal(SignalKind::terminate()).map_err(cannot)?,
            interrupt: signal(SignalKind::interrupt()).map_err(cannot)?,
            hangup: hangup.transpose().map_err(cannot)?,
            has_received: false,
        })
    }

    /// Waits for the next signal and returns its exit code. A hangup counts only as the first signal: shell and kernel
    /// both send one when a terminal closes, and the second must not count as a second Ctrl-C.
    pub async fn next(&mut self) -> Exit {
        let Self {
            terminate,
            interrupt,
            hangup,
            has_received,
        } = self;
        let closed = async {
            match hangup.as_mut().filter(|_| !*has_received) {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        let exit = tokio::select! {
            _ = interrupt.recv() => Exit::Interrupted,
            _ = terminate.recv() => Exit::Terminated,
            _ = closed => Exit::Terminated,
        };
        self.has_received = true;
        exit
    }

    /// Waits for a Ctrl-C or SIGTERM during shutdown. Hangups do not count.
    pub async fn wait_for_second(&mut self) {
        self.has_received = true;
        self.next().await;
    }
}

/// Waits for `work`, or for a signal, whose exit code is returned.
async fn unless_stopped(
    signals: &mut StopSignals,
    work: impl Future<Output = Result<(), Failure>>,
) -> Result<Option<Exit>, Failure> {
    tokio::select! {
        worked = work => worked.map(|()| None),
        exit = signals.next() => Ok(Some(exit)),
    }
}

/// Whether SIGHUP was set to be ignored when this program started, as `nohup` does.
#[expect(unsafe_code, reason = "the standard library cannot read the action of a signal")]
fn hangups_are_ignored() -> bool {
    let mut now = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: `now` is valid for writes, the null pointer sets no new action, and `now` is read only after the call has
    // initialised it.
    let now = unsafe {
        if libc::sigaction(libc::SIGHUP, std::ptr::null(), now.as_mut_ptr()) != 0 {
            return false;
        }
        now.assume_init()
    };
    now.sa_sigaction == libc::SIG_IGN
}

/// Prints the devices that are used.
pub fn print_devices(ui: &Ui, devices: &[Device]) {
    for found in devices {
        let budget = crate::output::format::gib(found.memory_budget);
        let name = crate::output::format::printable(&found.name);
        let device = crate::views::device(found.id);
        ui.notice(&format!(
            "device {device}: {name}, memory budget {budget}, {}",
            found.profile.name()
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use nix::sys::signal::raise;

    #[test]
    fn private_folders_are_removed_at_the_end_and_stale_ones_at_the_start() {
        let state = tempfile::tempdir().unwrap();
        let left = state.path().join("run-dead");
        std::fs::create_dir(&left).unwrap();
        std::fs::write(left.join("lock"), "").unwrap();
        let mine = PrivateFolder::new(state.path()).unwrap();
        let path = mine.path().to_owned();
        assert!(path.is_dir() && !left.exists());
        let other = PrivateFolder::new(state.path()).unwrap();
        assert!(path.is_dir(), "the folder of a running program is kept");
        drop(other);
        drop(mine);
        assert_eq!(std::fs::read_dir(state.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_without_a_lock_is_removed() {
        let state = tempfile::tempdir().unwrap();
        let without_locks = |_: &File| Err(TryLockError::Error(std::io::ErrorKind::Unsupported.into()));
        let failure = PrivateFolder::create(state.path(), without_locks).unwrap_err();
        assert!(
            failure.render(false).contains("XDG_STATE_HOME"),
            "{}",
            failure.render(false)
        );
        assert_eq!(std::fs::read_dir(state.path()).unwrap().count(), 0);

        // A program was killed before it created the lock.
        let [old, new, used] = ["run-old", "run-new", "run-used"].map(|name| state.path().join(name));
        for folder in [&old, &new, &used] {
            std::fs::create_dir(folder).unwrap();
        }
        std::fs::write(used.join("coordinator"), "").unwrap();
        let changed = std::time::SystemTime::now() - UNLOCKED_AGE;
        for folder in [&old, &used] {
            File::open(folder).unwrap().set_modified(changed).unwrap();
        }
        let mine = PrivateFolder::new(state.path()).unwrap();
        assert!(mine.path().is_dir() && !old.exists() && new.is_dir() && used.is_dir());
    }

    #[tokio::test]
    async fn a_hangup_counts_only_as_the_first_signal() {
        use nix::sys::signal::Signal::{SIGHUP, SIGUSR1};
        // Other signals instead of SIGINT and SIGTERM, so that those still end the tests.
        let listen = || StopSignals {
            terminate: signal(SignalKind::user_defined2()).unwrap(),
            interrupt: signal(SignalKind::user_defined1()).unwrap(),
            hangup: Some(signal(SignalKind::hangup()).unwrap()),
            has_received: false,
        };
        let mut seen = signal(SignalKind::hangup()).unwrap();
        let (mut running, mut ending) = (listen(), listen());
        raise(SIGHUP).unwrap();
        assert_eq!(running.next().await, Exit::Terminated);
        seen.recv().await;
        // During shutdown the first hangup does not count either.
        assert_eq!(ending.wait_for_second().now_or_never(), None);
        raise(SIGHUP).unwrap();
        seen.recv().await;
        assert_eq!(running.next().now_or_never(), None);
        assert_eq!(ending.wait_for_second().now_or_never(), None);
        raise(SIGUSR1).unwrap();
        assert_eq!(running.next().await, Exit::Interrupted);
        ending.wait_for_second().await;
    }

    /// Before, a signal was seen only after the worker had registered or failed to, which takes up to half a minute.
    #[tokio::test]
    async fn a_signal_ends_the_wait_for_the_worker() {
        use nix::sys::signal::Signal::SIGWINCH;
        // Signals that no other test raises, and that end nothing by themselves.
        let mut signals = StopSignals {
            terminate: signal(SignalKind::io()).unwrap(),
            interrupt: signal(SignalKind::window_change()).unwrap(),
            hangup: None,
            has_received: false,
        };
        let registered = unless_stopped(&mut signals, std::future::ready(Ok(()))).await;
        assert_eq!(registered.unwrap(), None);
        raise(SIGWINCH).unwrap();
        let stopped = unless_stopped(&mut signals, std::future::pending()).await;
        assert_eq!(stopped.unwrap(), Some(Exit::Interrupted));
    }

    #[test]
    fn an_address_without_tls_is_refused_with_the_options_of_this_program() {
        let bind = std::net::SocketAddr::from(([0, 0, 0, 0], 7420));
        let failure = start_failure(&aitk_coordinator::StartError::Plaintext { bind }).render(false);
        assert!(
            failure.contains("0.0.0.0:7420") && failure.contains("--tls-cert"),
            "{failure}"
        );
        assert!(!failure.contains("aitk-coordinator"), "{failure}");
    }

    #[test]
    fn a_wrong_option_of_the_worker_is_an_error_of_the_command_line() {
        let failure = worker_failure(&aitk_worker::StartError::HubAllow("lab".to_owned()));
        assert_eq!(failure.exit, Exit::Usage);
        assert!(failure.message.contains("--hub-allow: `lab`"), "{}", failure.message);
        assert_eq!(worker_failure(&aitk_worker::StartError::NoDevice).exit, Exit::Internal);
    }

    /// The certificate has names only, as one of a public authority does.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_certificate_with_names_only_is_enough() {
        let folder = tempfile::tempdir().unwrap();
        let (cert, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        std::fs::write(&cert, made.cert.pem()).unwrap();
        std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
        let mut coordinator = aitk_coordinator::Config::new(folder.path().join("coordinator"));
        coordinator.bind = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
        coordinator.tls = Some(aitk_coordinator::TlsFiles {
            cert: cert.clone(),
            key,
        });
        let resources = WorkerResources {
            devices: Vec::new(),
            allow_extensions: Vec::new(),
        };
        let local = EmbeddedCluster::start(coordinator, None, None, None, resources, Some(&cert), None).await;
        let local = local.unwrap_or_else(|failure| panic!("{}", failure.render(false)));
        assert!(local.api().server().starts_with("https://localhost:"));
        local.shutdown().await;
    }

    #[test]
    fn a_worker_that_does_not_register_in_time_says_what_it_found_last() {
        let message = timeout_message(&aitk_worker::Status::Connecting(Some("connection reset".to_owned())));
        assert_eq!(message, "not within 30 seconds; the last problem: connection reset");
        let message = timeout_message(&aitk_worker::Status::Refused("wrong token".to_owned()));
        assert!(message.ends_with("wrong token"), "{message}");
        let message = timeout_message(&aitk_worker::Status::Connecting(None));
        assert_eq!(message, "no answer within 30 seconds");
    }

    #[tokio::test]
    async fn the_end_of_the_coordinator_or_of_the_worker_is_a_failure() {
        use std::future::{pending, ready};
        let error = aitk_coordinator::RunError::Serve("no more sockets".to_owned());
        let failure = first_failure(ready(error), pending()).await;
        assert_eq!(failure.exit, Exit::Failed);
        assert!(failure.message.contains("no more sockets"), "{}", failure.message);
        let failure = first_failure(pending(), ready(Ok(()))).await;
        assert_eq!(failure.message, "the worker ended");
    }

    #[tokio::test]
    async fn missing_devices_and_wrong_names_are_errors() {
        assert_eq!(find_devices(Some("quantum")).await.unwrap_err().exit, Exit::Usage);
        let failure = find_devices(Some("cuda:99")).await.unwrap_err();
        assert_eq!(failure.exit, Exit::NothingFits);
        assert_eq!(find_devices(Some("cpu")).await.unwrap().len(), 1);
    }
}
