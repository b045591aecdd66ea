//! A PostgreSQL server for one test: its own folder, a Unix socket, no network. It can be stopped in two ways and started
//! again, and its disk can be slow.

use crate::disks::SmallDisk;
use crate::eventually;
use crate::place::Place;
use crate::processes::Process;
use nix::sys::signal::Signal;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Must never be seen in a log or an error.
pub const PASSWORD: &str = "geheimes-passwort";
/// PostgreSQL refuses to run as root; a test that does becomes this user, who owns nothing else.
const NOBODY: u32 = 65534;
/// More than it ever needs here; the file behind it is as large as what is written.
const DISK: u64 = 1 << 30;
const LIMIT: Duration = Duration::from_secs(60);

/// How it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Every connection is ended, everything is written: `pg_ctl stop -m fast`.
    Fast,
    /// Without a goodbye, to be repaired at the next start: `pg_ctl stop -m immediate`.
    Immediate,
}

/// A running server. Gone when dropped.
pub struct Postgres {
    programs: PathBuf,
    as_nobody: bool,
    server: Option<Process>,
    disk: Option<SmallDisk>,
    folder: tempfile::TempDir,
}

impl Postgres {
    /// Starts a server, on a disk of its own if it is to have one and the machine grants it.
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
        let folder = tempfile::tempdir().expect("there is room for a database");
        // Our own folder belongs to root only when we are root.
        let as_nobody = std::fs::metadata(folder.path()).expect("the folder is there").uid() == 0;
        let mut server = Self {
            programs,
            as_nobody,
            server: None,
            disk: None,
            folder,
        };
        let room = server.folder.path().join("disk");
        std::fs::create_dir(&room).expect("the folder can be made");
        if with_disk {
            server.disk = SmallDisk::on_device(&room, DISK, &server.folder.path().join("image")).ok();
        }
        let password = server.folder.path().join("password");
        std::fs::write(&password, PASSWORD).expect("the password can be written");
        server.own(&[server.folder.path(), &password, &server.room()]);
        server.init(&password);
        server.serve();
        let ready = server.room().join("data/postmaster.pid");
        eventually("PostgreSQL to start", LIMIT, &[], || {
            // It writes "ready" into its pid file when it answers.
            std::fs::read_to_string(&ready)
                .is_ok_and(|text| text.contains("ready"))
                .then_some(())
        });
        Ok(server)
    }

    /// Its disk as this process sees it.
    fn room(&self) -> PathBuf {
        match &self.disk {
            Some(disk) => disk.seen_from_here(),
            None => self.folder.path().join("disk"),
        }
    }

    fn own(&self, paths: &[&Path]) {
        if self.as_nobody {
            for path in paths {
                chown(path, Some(NOBODY), Some(NOBODY)).expect("root may give files away");
            }
        }
    }

    fn init(&self, password: &Path) {
        let made = self
            .command("initdb")
            .arg("-D")
            .arg(self.folder.path().join("disk/data"))
            .args(["-U", "aitk", "-A", "scram-sha-256", "-E", "UTF8", "--locale=C"])
            .arg("--no-sync")
            .arg(format!("--pwfile={}", password.display()))
            .output()
            .expect("initdb starts");
        let said = String::from_utf8_lossy(&made.stderr);
        assert!(made.status.success(), "initdb: {said}");
    }

    fn command(&self, name: &str) -> Command {
        let place = self.disk.as_ref().map_or(Place::Here, SmallDisk::place);
        let program = self.programs.join(name);
        if !self.as_nobody {
            return place.command(program, Path::new("/"));
        }
        let mut command = place.command("setpriv", Path::new("/"));
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

    /// The address of its database, with the password in it.
    #[must_use]
    pub fn url(&self) -> String {
        let folder = self.folder.path().display();
        format!("postgres://aitk:{PASSWORD}@localhost/postgres?host={folder}")
    }

    /// Its disk, when it has one of its own.
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
            // To the first process, which ends the others.
            server.signal(match how {
                Stop::Fast => Signal::SIGINT,
                Stop::Immediate => Signal::SIGQUIT,
            });
            let _ = server.wait(LIMIT);
        }
    }

    /// Starts it again where it was stopped, or ended; does not wait for it to answer.
    pub fn start_again(&mut self) {
        if self.server.as_mut().is_none_or(Process::ended) {
            self.serve();
        }
    }

    /// What it said.
    #[must_use]
    pub fn tail(&self) -> String {
        self.server.as_ref().map(Process::tail).unwrap_or_default()
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        if let Some(disk) = &self.disk {
            disk.slow(None);
        }
        // Not by SIGKILL, which would leave the others and their shared memory.
        if !std::thread::panicking() {
            self.stop(Stop::Immediate);
        } else if let Some(server) = &self.server {
            server.signal(Signal::SIGQUIT);
            std::thread::sleep(Duration::from_millis(500));
        }
    }
}

/// Where the programs lie: the newest version that Debian installed, else on the `PATH`.
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
