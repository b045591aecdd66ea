//! The coordinator under test: this program as `aitk up --no-worker` in a child process, with TLS.

use crate::download::disk_failure;
use crate::failure::Failure;
use aitk_common::fsutil;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use sysinfo::{Pid, ProcessRefreshKind, ProcessesToUpdate, System};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, ChildStdout, Command};

/// How long a coordinator may take to print its address.
const START: Duration = Duration::from_secs(120);

/// A coordinator in a child process, which is killed on drop.
pub(super) struct Server {
    child: Child,
    /// Kept open, because writing to a closed pipe would end the process.
    _output: BufReader<ChildStdout>,
    folder: PathBuf,
    database: Option<String>,
    pid: Pid,
    system: System,
    /// Where it listens.
    pub(super) address: String,
    /// Time from the start of the process to the line with its address.
    pub(super) ready_after: Duration,
}

/// Resources that the process has used since its start.
#[derive(Clone, Copy, Debug)]
pub(super) struct Usage {
    /// User and system CPU time.
    pub(super) cpu: Duration,
    /// Resident memory now, in bytes.
    pub(super) resident: u64,
}

impl Server {
    /// Creates a certificate in `folder`, and starts a coordinator with its data there or in a PostgreSQL database.
    ///
    /// # Errors
    /// When the certificate cannot be created or the coordinator does not start.
    pub(super) async fn start(folder: &Path, database: Option<&str>) -> Result<Self, Failure> {
        let certificate = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned(), "localhost".to_owned()])
            .map_err(|error| Failure::failed(format!("cannot create a certificate: {error}")))?;
        let write = |name: &str, text: String| {
            fsutil::write_private(&folder.join(name), text.as_bytes()).map_err(|error| disk_failure(&error))
        };
        write("cert.pem", certificate.cert.pem())?;
        write("key.pem", certificate.signing_key.serialize_pem())?;
        Self::spawn(folder, database).await
    }

    /// Starts a coordinator with the certificate and data in `folder`.
    async fn spawn(folder: &Path, database: Option<&str>) -> Result<Self, Failure> {
        let log = folder.join("log");
        let errors = std::fs::File::create(&log).map_err(|error| Failure::file("write", &log, &error))?;
        let program = std::env::current_exe().map_err(|error| Failure::failed(error.to_string()))?;
        let start = Instant::now();
        let mut child = Command::new(program)
            .args(["up", "--no-worker", "--bind", "127.0.0.1:0"])
            .arg("--data-dir")
            .arg(folder.join("data"))
            .arg("--tls-cert")
            .arg(folder.join("cert.pem"))
            .arg("--tls-key")
            .arg(folder.join("key.pem"))
            .args(database.into_iter().flat_map(|url| ["--database", url]))
            // It must not overwrite the state file of the user's own `aitk up`.
            .env("XDG_STATE_HOME", folder.join("state"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(errors)
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| Failure::failed(format!("the coordinator did not start: {error}")))?;
        let not_started = || {
            let output = std::fs::read_to_string(&log).unwrap_or_default();
            let output = output.trim();
            let why = if output.is_empty() {
                "it printed nothing"
            } else {
                output
            };
            Failure::failed(format!("the coordinator did not start: {why}"))
        };
        let mut output = BufReader::new(child.stdout.take().ok_or_else(not_started)?);
        let mut line = String::new();
        tokio::time::timeout(START, output.read_line(&mut line))
            .await
            .map_err(|_| not_started())?
            .map_err(|error| Failure::failed(error.to_string()))?;
        let ready_after = start.elapsed();
        let address = line.split_whitespace().nth(1).ok_or_else(not_started)?.to_owned();
        let pid = Pid::from_u32(child.id().ok_or_else(not_started)?);
        Ok(Self {
            child,
            _output: output,
            folder: folder.to_owned(),
            database: database.map(str::to_owned),
            pid,
            system: System::new().map_err(|error| Failure::failed(error.to_string()))?,
            address,
            ready_after,
        })
    }

    /// Kills the coordinator with SIGKILL, and starts another with the same data.
    ///
    /// # Errors
    /// When it does not start.
    pub(super) async fn restart(mut self) -> Result<Self, Failure> {
        self.child
            .kill()
            .await
            .map_err(|error| Failure::failed(format!("the coordinator could not be killed: {error}")))?;
        Self::spawn(&self.folder, self.database.as_deref()).await
    }

    /// Returns the certificate to trust.
    pub(super) fn ca_file(&self) -> PathBuf {
        self.folder.join("cert.pem")
    }

    /// Reads the token that the coordinator created.
    ///
    /// # Errors
    /// When the token cannot be read.
    pub(super) fn token(&self) -> Result<String, Failure> {
        let path = self.folder.join("data/coordinator/token");
        std::fs::read_to_string(&path).map_err(|error| Failure::file("read", &path, &error))
    }

    /// Returns the resources used until now.
    ///
    /// # Errors
    /// When the process has ended.
    pub(super) fn usage(&mut self) -> Result<Usage, Failure> {
        let what = ProcessRefreshKind::nothing().with_cpu().with_memory();
        self.system
            .refresh_processes_specifics(ProcessesToUpdate::Some(&[self.pid]), true, what);
        let process = self.system.process(self.pid);
        let process = process.ok_or_else(|| Failure::failed("the coordinator ended while it was measured"))?;
        Ok(Usage {
            cpu: Duration::from_millis(process.accumulated_cpu_time()),
            resident: process.memory(),
        })
    }
}
