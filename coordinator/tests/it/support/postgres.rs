//! A PostgreSQL server for one test, with a folder of its own and a Unix socket instead of TCP.

use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The database password. It must not appear in any log or error.
pub(crate) const PASSWORD: &str = "geheimes-passwort";
/// The user `nobody`. PostgreSQL refuses to run as root, so tests that run as root start it as this user.
const NOBODY: u32 = 65534;

pub(crate) struct Postgres {
    folder: tempfile::TempDir,
    programs: PathBuf,
    as_nobody: bool,
    server: Child,
}

impl Postgres {
    /// Starts a server. Returns `None` and skips the test where PostgreSQL is not installed.
    pub(crate) fn start() -> Option<Self> {
        let Some(programs) = programs() else {
            crate::skip::skip(
                "postgresql",
                "PostgreSQL is not installed (Debian: `apt-get install postgresql`)",
            );
            return None;
        };
        let folder = tempfile::tempdir().unwrap();
        // A folder that we create belongs to root only when we are root.
        let as_nobody = std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(folder.path()).unwrap()) == 0;
        let password = folder.path().join("password");
        std::fs::write(&password, PASSWORD).unwrap();
        if as_nobody {
            for path in [folder.path(), &password] {
                chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
            }
        }
        let initdb = command(&programs, "initdb", as_nobody)
            .arg("-D")
            .arg(folder.path().join("data"))
            .args([
                "-U",
                "aitk",
                "-A",
                "scram-sha-256",
                "-E",
                "UTF8",
                "--locale=C",
                "--no-sync",
            ])
            .arg(format!("--pwfile={}", password.display()))
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert!(
            initdb.status.success(),
            "initdb: {}",
            String::from_utf8_lossy(&initdb.stderr)
        );
        let server = serve(&programs, folder.path(), as_nobody);
        Some(Self {
            folder,
            programs,
            as_nobody,
            server,
        })
    }

    /// The URL of its database, including the password.
    pub(crate) fn url(&self) -> String {
        let folder = self.folder.path().display();
        format!("postgres://aitk:{PASSWORD}@localhost/postgres?host={folder}")
    }

    /// Stops the server without a clean shutdown and starts it again.
    pub(crate) fn restart(&mut self) {
        self.stop("immediate");
        self.server = serve(&self.programs, self.folder.path(), self.as_nobody);
    }

    fn stop(&mut self, mode: &str) {
        let _ = command(&self.programs, "pg_ctl", self.as_nobody)
            .args(["stop", "-m", mode, "-t", "20", "-s", "-D"])
            .arg(self.folder.path().join("data"))
            .status();
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // Killing only the first process would leave the others, which keep the shared memory.
        self.stop("immediate");
    }
}

/// The folder with the programs: of the newest version that Debian installed, else one on the `PATH`.
fn programs() -> Option<PathBuf> {
    let complete = |bin: &PathBuf| {
        ["postgres", "initdb", "pg_ctl"]
            .iter()
            .all(|name| bin.join(name).is_file())
    };
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let newest = versions
        .filter_map(|entry| {
            Some((
                entry.file_name().to_str()?.parse::<u32>().ok()?,
                entry.path().join("bin"),
            ))
        })
        .filter(|(_, bin)| complete(bin))
        .max();
    let path = std::env::var_os("PATH").unwrap_or_default();
    newest
        .map(|(_, bin)| bin)
        .or_else(|| std::env::split_paths(&path).find(complete))
}

fn command(programs: &Path, name: &str, as_nobody: bool) -> Command {
    let mut command = Command::new(programs.join(name));
    command.current_dir("/");
    if as_nobody {
        command.uid(NOBODY).gid(NOBODY);
    }
    command
}

fn serve(programs: &Path, folder: &Path, as_nobody: bool) -> Child {
    let child = command(programs, "postgres", as_nobody)
        .arg("-D")
        .arg(folder.join("data"))
        .arg("-k")
        .arg(folder)
        .args(["-c", "listen_addresses="])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // The server writes "ready" into its pid file when it accepts connections.
    let begin = Instant::now();
    let pid_file = folder.join("data/postmaster.pid");
    while !std::fs::read_to_string(&pid_file).is_ok_and(|text| text.contains("ready")) {
        assert!(
            begin.elapsed() < Duration::from_secs(30),
            "PostgreSQL is not ready after 30 s"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    child
}
