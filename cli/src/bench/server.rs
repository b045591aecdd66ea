//! The coordinator under test: this program as `aitk up --no-worker`, in a process of its own, with TLS.

use crate::download::disk_failure;
use crate::failure::Failure;
use aitk_common::fsutil;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use sysinfo::{Pid, ProcessRefreshKind, ProcessesToUpdate, System};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, ChildStdout, Command};

/// How long a coordinator may take to say where it listens.
const START: Duration = Duration::from_secs(120);

/// A coordinator in a process of its own. Dropping it kills it.
pub(super) struct Server {
    child: Child,
    /// Kept open: a pipe that nobody reads would stop it.
    _output: BufReader<ChildStdout>,
    folder: PathBuf,
    database: Option<String>,
    pid: Pid,
    system: System,
    /// Where it listens.
    pub(super) address: String,
    /// From the start of the process to the line that says where it listens.
    pub(super) ready_after: Duration,
}

/// What it has used since it started.
#[derive(Clone, Copy, Debug)]
pub(super) struct Usage {
    /// CPU time, user and system.
    pub(super) cpu: Duration,
    /// Bytes in memory now.
    pub(super) resident: u64,
}

impl Server {
    /// Makes a certificate in `folder` and starts a coordinator whose data lie there, or in a PostgreSQL database.
    ///
    /// # Errors
    /// When that does not work.
    pub(super) async fn start(folder: &Path, database: Option<&str>) -> Result<Self, Failure> {
        let certificate = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned(), "localhost".to_owned()])
            .map_err(|error| Failure::failed(format!("no certificate could be made: {error}")))?;
        let write = |name: &str, text: String| {
            fsutil::write_private(&folder.join(name), text.as_bytes()).map_err(|error| disk_failure(&error))
        };
        write("cert.pem", certificate.cert.pem())?;
        write("key.pem", certificate.signing_key.serialize_pem())?;
        Self::spawn(folder, database).await
    }

    /// Starts a coordinator on what an earlier one left in `folder`.
    async fn spawn(folder: &Path, database: Option<&str>) -> Result<Self, Failure> {
        let log = folder.join("log");
        let errors = std::fs::File::create(&log).map_err(|error| Failure::file("write", &log, &error))?;
        let program = std::env::current_exe().map_err(|error| Failure::failed(error.to_string()))?;
        let began = Instant::now();
        let mut child = Command::new(program)
            .args(["up", "--no-worker", "--bind", "127.0.0.1:0"])
            .arg("--data-dir")
            .arg(folder.join("data"))
            .arg("--tls-cert")
            .arg(folder.join("cert.pem"))
            .arg("--tls-key")
            .arg(folder.join("key.pem"))
            .args(database.into_iter().flat_map(|url| ["--database", url]))
            // It must not take the place of an `aitk up` that this user has.
            .env("XDG_STATE_HOME", folder.join("state"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(errors)
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| Failure::failed(format!("the coordinator did not start: {error}")))?;
        let silent = || {
            let said = std::fs::read_to_string(&log).unwrap_or_default();
            let said = said.trim();
            let why = if said.is_empty() { "it said nothing" } else { said };
            Failure::failed(format!("the coordinator did not start: {why}"))
        };
        let mut output = BufReader::new(child.stdout.take().ok_or_else(silent)?);
        let mut line = String::new();
        tokio::time::timeout(START, output.read_line(&mut line))
            .await
            .map_err(|_| silent())?
            .map_err(|error| Failure::failed(error.to_string()))?;
        let ready_after = began.elapsed();
        let address = line.split_whitespace().nth(1).ok_or_else(silent)?.to_owned();
        let pid = Pid::from_u32(child.id().ok_or_else(silent)?);
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

    /// Kills it (SIGKILL) and starts another on the same data.
    ///
    /// # Errors
    /// When that one does not start.
    pub(super) async fn restart(mut self) -> Result<Self, Failure> {
        self.child
            .kill()
            .await
            .map_err(|error| Failure::failed(format!("the coordinator could not be ended: {error}")))?;
        Self::spawn(&self.folder, self.database.as_deref()).await
    }

    /// The certificate to trust.
    pub(super) fn ca_file(&self) -> PathBuf {
        self.folder.join("cert.pem")
    }

    /// The token that it made.
    ///
    /// # Errors
    /// When it made none.
    pub(super) fn token(&self) -> Result<String, Failure> {
        let path = self.folder.join("data/coordinator/token");
        std::fs::read_to_string(&path).map_err(|error| Failure::file("read", &path, &error))
    }

    /// What it has used until now.
    ///
    /// # Errors
    /// When it is gone.
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
