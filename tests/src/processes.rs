//! Child processes with an owner: started here, stopped by id, their output kept in a file.

use crate::eventually;
use crate::programs::program;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::ffi::OsStr;
use std::fs::File;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

/// A process of the system under test. Dropping it kills it.
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `command`, both outputs going to `folder/<name>.log`.
    ///
    /// # Panics
    /// When it does not start.
    #[must_use]
    pub fn start(name: &str, folder: &Path, command: &mut Command) -> Self {
        let log = folder.join(format!("{name}.log"));
        let out = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .expect("the log file opens");
        let err = out.try_clone().expect("the log file has a second handle");
        let child = command.stdin(Stdio::null()).stdout(out).stderr(err).spawn();
        let child = child.unwrap_or_else(|error| panic!("{name} does not start: {error}"));
        Self {
            name: name.to_owned(),
            child,
            log,
        }
    }

    /// The process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id()).expect("a process id fits"))
    }

    /// SIGKILL, then waits for the end.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// SIGTERM, then waits for the end.
    ///
    /// # Panics
    /// When it does not end in time.
    pub fn terminate(&mut self, limit: Duration) -> Option<i32> {
        let _ = kill(self.pid(), Signal::SIGTERM);
        let log = self.tail();
        let start = std::time::Instant::now();
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return status.code();
            }
            assert!(
                start.elapsed() < limit,
                "{} did not end {limit:?} after SIGTERM\n{log}",
                self.name
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The ids of the processes that this one started and that still live.
    #[must_use]
    pub fn children(&self) -> Vec<u32> {
        let path = format!("/proc/{0}/task/{0}/children", self.child.id());
        // Threads other than the first may be the parents: ask them all.
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id()));
        let Ok(tasks) = tasks else {
            return read_ids(Path::new(&path));
        };
        tasks
            .flatten()
            .flat_map(|task| read_ids(&task.path().join("children")))
            .collect()
    }

    /// Its log so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The last lines of its log, for messages.
    #[must_use]
    pub fn tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        let start = lines.len().saturating_sub(40);
        format!("--- {} ---\n{}", self.name, lines[start..].join("\n"))
    }
}

fn read_ids(path: &Path) -> Vec<u32> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Whether a process with this id still runs (a zombie does not).
#[must_use]
pub fn alive(id: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next());
    state.is_some_and(|state| state != "Z" && state != "X")
}

/// A loopback address that nobody listens on.
///
/// # Panics
/// When the machine has no free port.
#[must_use]
pub fn free_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    listener.local_addr().expect("a listener has an address")
}

/// Waits until somebody listens on the address.
pub fn wait_for_port(address: SocketAddr, owner: &Process) {
    eventually(
        &format!("somebody to listen on {address}"),
        Duration::from_secs(30),
        &[owner],
        || TcpStream::connect_timeout(&address, Duration::from_millis(200)).ok(),
    );
}

/// A pool: one coordinator, its workers, and the folder they all live in.
pub struct Pool {
    folder: PathBuf,
    address: SocketAddr,
    storage: Option<String>,
    environment: Vec<(String, String)>,
    /// The coordinator.
    pub coordinator: Process,
}

impl Pool {
    /// Starts a coordinator in `folder`. `storage` as in `--storage`; `environment` goes to every process of the pool.
    #[must_use]
    pub fn start(folder: &Path, storage: Option<String>, environment: Vec<(String, String)>) -> Self {
        let address = free_address();
        let coordinator = start_coordinator(folder, address, storage.as_deref(), &environment);
        Self {
            folder: folder.to_path_buf(),
            address,
            storage,
            environment,
            coordinator,
        }
    }

    /// Starts the coordinator again, on the same address and data, after it was killed.
    pub fn restart_coordinator(&mut self) {
        self.coordinator.kill();
        self.coordinator = start_coordinator(&self.folder, self.address, self.storage.as_deref(), &self.environment);
    }

    /// Starts a worker with its own data folder.
    #[must_use]
    pub fn worker(&self, name: &str) -> Process {
        let mut command = self.command("aitk-worker");
        command.arg("--name").arg(name).arg("--devices").arg("cpu");
        command.arg("--data-dir").arg(self.folder.join(name));
        Process::start(name, &self.folder, &mut command)
    }

    /// The coordinator's data folder.
    #[must_use]
    pub fn data_dir(&self) -> PathBuf {
        self.folder.join("coordinator")
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

    /// One of our programs with the pool's address, token and environment.
    #[must_use]
    pub fn command(&self, name: &str) -> Command {
        let mut command = Command::new(program(name));
        command
            .env("AITK_SERVER", format!("http://{}", self.address))
            .env("AITK_TOKEN_FILE", self.data_dir().join("token"))
            .env("HOME", &self.folder)
            .env("XDG_STATE_HOME", self.folder.join("state"))
            .env("XDG_CONFIG_HOME", self.folder.join("config"))
            .env("XDG_CACHE_HOME", self.folder.join("cache"))
            .env("XDG_DATA_HOME", self.folder.join("data"))
            .envs(self.environment.iter().map(|(key, value)| (key, value)))
            .current_dir(&self.folder);
        command
    }
}

fn start_coordinator(folder: &Path, address: SocketAddr, storage: Option<&str>, env: &[(String, String)]) -> Process {
    let mut command = Command::new(program("aitk-coordinator"));
    command
        .arg("--bind")
        .arg(address.to_string())
        .arg("--data-dir")
        .arg(folder.join("coordinator"));
    command.args(["--lease-seconds", "6"]);
    if let Some(storage) = storage {
        command.arg("--storage").arg(storage);
    }
    command.envs(env.iter().map(|(key, value)| (key, value)));
    let process = Process::start("coordinator", folder, &mut command);
    wait_for_port(address, &process);
    process
}

/// A real S3 server with one bucket, `aitk`.
pub struct S3 {
    fail_file: PathBuf,
    address: SocketAddr,
    /// The server.
    pub process: Process,
    /// Where it keeps its objects.
    pub root: PathBuf,
}

impl S3 {
    /// Starts the server program at `program` (`env!("CARGO_BIN_EXE_s3-server")` in a test) below `folder`.
    ///
    /// # Panics
    /// When its folders cannot be made.
    #[must_use]
    pub fn start(program: &str, folder: &Path) -> Self {
        let root = folder.join("s3");
        std::fs::create_dir_all(root.join("aitk")).expect("the bucket's folder can be made");
        let fail_file = folder.join("s3-fails");
        let address = free_address();
        let mut command = Command::new(program);
        command
            .args(["--host", "127.0.0.1", "--port", &address.port().to_string()])
            .arg("--fail-file")
            .arg(&fail_file);
        command
            .args(["--access-key", "test-key", "--secret-key", "test-secret"])
            .arg(&root);
        let process = Process::start("s3", folder, &mut command);
        wait_for_port(address, &process);
        Self {
            fail_file,
            address,
            process,
            root,
        }
    }

    /// What `--storage` wants.
    #[must_use]
    pub fn url(&self) -> String {
        "s3://aitk".to_owned()
    }

    /// What coordinator and workers find in their environment.
    #[must_use]
    pub fn environment(&self) -> Vec<(String, String)> {
        [
            ("AWS_ENDPOINT_URL", format!("http://{}", self.address)),
            ("AWS_ACCESS_KEY_ID", "test-key".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "test-secret".to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
        ]
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value))
        .collect()
    }

    /// From now on every request is answered with 500, or no longer.
    ///
    /// # Panics
    /// When the switch cannot be written.
    pub fn fail(&self, failing: bool) {
        if failing {
            std::fs::write(&self.fail_file, b"").expect("the switch can be written");
        } else {
            let _ = std::fs::remove_file(&self.fail_file);
        }
    }
}
