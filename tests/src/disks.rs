//! Small disks: a file system in memory of a given size, seen only by those who run among the disks of its holder.
//!
//! Needs a mount namespace (`unshare`), so Linux; without being root also a user namespace. Where the system does not
//! grant it, [`SmallDisk::mount`] says why.

use crate::place::Place;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A small disk, mounted on a folder. Gone when dropped.
pub struct SmallDisk {
    holder: Child,
    folder: PathBuf,
}

impl SmallDisk {
    /// Mounts a disk of `bytes` on `folder`, which must exist.
    ///
    /// # Errors
    /// Why this machine does not let us.
    pub fn mount(folder: &Path, bytes: u64) -> Result<Self, String> {
        let script = r#"mount -t tmpfs -o size="$1" none "$0" && echo ready && exec sleep 3600"#;
        let mut command = Command::new("unshare");
        command.arg("--mount");
        if !nix::unistd::Uid::effective().is_root() {
            command.arg("--map-root-user");
        }
        command.args(["sh", "-c", script]).arg(folder).arg(bytes.to_string());
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut holder = command.spawn().map_err(|error| format!("unshare: {error}"))?;
        let mut ready = [0_u8; 6];
        let said = holder.stdout.as_mut().map(|pipe| pipe.read_exact(&mut ready));
        if matches!(said, Some(Ok(()))) {
            return Ok(Self {
                holder,
                folder: folder.to_path_buf(),
            });
        }
        let mut why = String::new();
        if let Some(pipe) = holder.stderr.as_mut() {
            let _ = pipe.read_to_string(&mut why);
        }
        let _ = holder.wait();
        Err(format!("no mount namespace here: {}", why.trim()))
    }

    /// Where those run who see the disk.
    #[must_use]
    pub fn place(&self) -> Place {
        Place::Disks(self.holder.id())
    }

    /// The folder as this process can reach it.
    #[must_use]
    pub fn seen_from_here(&self) -> PathBuf {
        let below = self.folder.strip_prefix("/").unwrap_or(&self.folder);
        Path::new("/proc")
            .join(self.holder.id().to_string())
            .join("root")
            .join(below)
    }

    /// Makes the disk larger.
    ///
    /// # Panics
    /// When the system refuses.
    pub fn grow(&self, bytes: u64) {
        let status = enter(self.holder.id())
            .args(["mount", "-o", &format!("remount,size={bytes}")])
            .arg(&self.folder)
            .status();
        assert!(status.is_ok_and(|status| status.success()), "the disk does not grow");
    }

    /// Bytes in use.
    #[must_use]
    pub fn used(&self) -> u64 {
        fn below(folder: &Path) -> u64 {
            let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
            entries
                .map(|entry| match entry.metadata() {
                    Ok(data) if data.is_dir() => below(&entry.path()),
                    Ok(data) => data.len(),
                    Err(_) => 0,
                })
                .sum()
        }
        below(&self.seen_from_here())
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        if let Ok(id) = i32::try_from(self.holder.id()) {
            let _ = kill(Pid::from_raw(id), Signal::SIGKILL);
        }
        let _ = self.holder.wait();
    }
}

/// The beginning of a command that runs among the disks of this process.
#[must_use]
pub fn enter(owner: u32) -> Command {
    let mut command = Command::new("nsenter");
    command.args(["--target", &owner.to_string()]);
    if !nix::unistd::Uid::effective().is_root() {
        command.args(["--user", "--preserve-credentials"]);
    }
    command.args(["--mount", "--"]);
    command
}
