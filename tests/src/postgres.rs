//! A PostgreSQL server for one test, with a folder of its own and a Unix socket instead of TCP. It can be stopped in two modes
//! and started again, and its disk can be throttled.

use crate::disks::SmallDisk;
use crate::eventually;
use crate::namespaces::Namespaces;
use crate::processes::Process;
use nix::sys::signal::Signal;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The database password. It must not appear in any log or error.
pub const PASSWORD: &str = "geheimes-passwort";
/// The user `nobody`. PostgreSQL refuses to run as root, so tests that run as root start it as this user.
const NOBODY: u32 = 65534;
/// The size of its disk, more than the tests need. The image file is sparse.
const DISK: u64 = 1 << 30;
const LIMIT: Duration = Duration::from_secs(60);

/// A shutdown mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Closes all connections and writes everything: `pg_ctl stop -m fast`.
    Fast,
    /// Without a clean shutdown, so that the next start recovers: `pg_ctl stop -m immediate`.
    Immediate,
}

/// A server. It is stopped when dropped.
pub struct Postgres {
    programs: PathBuf,
    as_nobody: bool,
    server: Option<Process>,
    disk: Option<SmallDisk>,
    folder: tempfile::TempDir,
}

impl Postgres {
    /// Starts a server. With `with_disk` it gets a disk of its own, if the machine permits it.
    ///
    /// # Errors
    /// Where PostgreSQL is not installed.
    ///
    /// # Panics
    /// When it does not start.
    pub fn start(with_disk: bool) -> Result<Self, String> {
        let Some(programs) = programs() else {
            return Err("PostgreSQL is not installed (Debian: `apt-get install postgresql`)".to_owned());
        };
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        // A folder that we create belongs to root only when we are root.
        let as_nobody = std::fs::metadata(folder.path()).expect("the folder is there").uid() == 0;
        let mut server = Self {
            programs,
            as_nobody,
            server: None,
            disk: None,
            folder,
        };
        let disk_folder = server.folder.path().join("disk");
        std::fs::create_dir(&disk_folder).expect("the folder can be made");
        if with_disk {
            server.disk = SmallDisk::on_device(&disk_folder, DISK, &server.folder.path().join("image")).ok();
        }
        let password = server.folder.path().join("password");
        std::fs::write(&password, PASSWORD).expect("the password can be written");
        server.change_owner(&[server.folder.path(), &password, &server.data_disk()]);
        server.init(&password);
        server.serve();
        let ready = server.data_disk().join("data/postmaster.pid");
        eventually("PostgreSQL to start", LIMIT, &[], || {
            // The server writes "ready" into its pid file when it accepts connections.
            std::fs::read_to_string(&ready)
                .is_ok_and(|text| text.contains("ready"))
                .then_some(())
        });
        Ok(server)
    }

    /// The path of its disk for this process.
    fn data_disk(&self) -> PathBuf {
        match &self.disk {
            Some(disk) => disk.seen_from_here(),
            None => self.folder.path().join("disk"),
        }
    }

    fn change_owner(&self, paths: &[&Path]) {
        if self.as_nobody {
            for path in paths {
                chown(path, Some(NOBODY), Some(NOBODY)).expect("root may give files away");
            }
        }
    }

    fn init(&self, password: &Path) {
        let initdb = self
            .command("initdb")
            .arg("-D")
            .arg(self.folder.path().join("disk/data"))
            .args(["-U", "aitk", "-A", "scram-sha-256", "-E", "UTF8", "--locale=C"])
            .arg("--no-sync")
            .arg(format!("--pwfile={}", password.display()))
            .output()
            .expect("initdb starts");
        let stderr = String::from_utf8_lossy(&initdb.stderr);
        assert!(initdb.status.success(), "initdb: {stderr}");
    }

    fn command(&self, name: &str) -> Command {
        let namespaces = self.disk.as_ref().map_or(Namespaces::Host, SmallDisk::namespaces);
        let program = self.programs.join(name);
        if !self.as_nobody {
            return namespaces.command(program, Path::new("/"));
        }
        let mut command = namespaces.command("setpriv", Path::new("/"));
        command.args([format!("--reuid={NOBODY}"), format!("--regid={NOBODY}")]);
        command.arg("--clear-groups").arg(program);
        command
    }

    fn serve(&mut self) {
        let folder = self.folder.path();
        let mut command = self.command("postgres");
        command.arg("-D").arg(folder.join("disk/data")).arg("-k").arg(folder);
        command.args(["-c", "listen_addresses=", "-c", "max_wal_size=128MB"]);
        self.server = Some(Process::start("postgres", folder, &mut command));
    }

    /// The URL of its database, including the password.
    #[must_use]
    pub fn url(&self) -> String {
        let folder = self.folder.path().display();
        format!("postgres://aitk:{PASSWORD}@localhost/postgres?host={folder}")
    }

    /// Its own disk, if it has one.
    #[must_use]
    pub fn disk(&self) -> Option<&SmallDisk> {
        self.disk.as_ref()
    }

    /// Whether it was stopped.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.server.is_none()
    }

    /// Stops it.
    ///
    /// # Panics
    /// When it does not end.
    pub fn stop(&mut self, how: Stop) {
        if let Some(mut server) = self.server.take() {
            // Sent to the first process, which ends the others.
            server.signal(match how {
                Stop::Fast => Signal::SIGINT,
                Stop::Immediate => Signal::SIGQUIT,
            });
            let _ = server.wait(LIMIT);
        }
    }

    /// Starts it again if it does not run. Does not wait until it answers.
    pub fn start_again(&mut self) {
        if self.server.as_mut().is_none_or(Process::has_ended) {
            self.serve();
        }
    }

    /// The tail of its log.
    #[must_use]
    pub fn tail(&self) -> String {
        self.server.as_ref().map(Process::tail).unwrap_or_default()
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        if let Some(disk) = &self.disk {
            disk.throttle(None);
        }
        // SIGKILL would leave the other processes and their shared memory.
        if !std::thread::panicking() {
            self.stop(Stop::Immediate);
        } else if let Some(server) = &self.server {
            server.signal(Signal::SIGQUIT);
            std::thread::sleep(Duration::from_millis(500));
        }
    }
}

/// The folder with the programs: of the newest version that Debian installed, else one on the `PATH`.
fn programs() -> Option<PathBuf> {
    let complete = |bin: &PathBuf| bin.join("postgres").is_file() && bin.join("initdb").is_file();
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let numbered = versions.filter_map(|entry| {
        let number: u32 = entry.file_name().to_str()?.parse().ok()?;
        Some((number, entry.path().join("bin")))
    });
    let newest = numbered.filter(|(_, bin)| complete(bin)).max();
    let path = std::env::var_os("PATH").unwrap_or_default();
    newest
        .map(|(_, bin)| bin)
        .or_else(|| std::env::split_paths(&path).find(complete))
}
