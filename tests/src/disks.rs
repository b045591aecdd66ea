//! Small disks of a given size, in memory or on a device, seen only by those who run among the disks of its holder. One on a
//! device can be made slow as well.
//!
//! Needs a mount namespace (`unshare`), so Linux; without being root also a user namespace. One on a device needs root, a
//! loop device, ext4, and the first version of cgroups' `blkio` for the slowness: its rule for everybody holds for the
//! kernel's own writing, too. Where the system does not grant it, [`SmallDisk::mount`] and [`SmallDisk::on_device`] say why.

use crate::place::Place;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, Uid};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Bytes that everybody together may write to a device in a second.
const THROTTLE: &str = "/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device";

/// A small disk, mounted on a folder. Gone when dropped, or when whoever made it dies.
pub struct SmallDisk {
    /// Waits at the end of a pipe from here.
    holder: Child,
    folder: PathBuf,
    /// Its number, as `7:0`.
    device: Option<String>,
}

impl SmallDisk {
    /// Mounts a disk of `bytes` in memory on `folder`, which must exist.
    ///
    /// # Errors
    /// Why this machine does not let us.
    pub fn mount(folder: &Path, bytes: u64) -> Result<Self, String> {
        let script = r#"mount -t tmpfs -o size="$1" none "$0" && echo memory && exec cat"#;
        Self::hold(script, folder, &[bytes.to_string()])
    }

    /// Mounts a disk of `bytes` on `folder`, which must exist; what is on it lies in the file `image`. It can be [slow](Self::slow).
    ///
    /// # Errors
    /// Why this machine does not let us.
    pub fn on_device(folder: &Path, bytes: u64, image: &Path) -> Result<Self, String> {
        if !Uid::effective().is_root() {
            return Err("a disk on a device needs root".to_owned());
        }
        if !Path::new(THROTTLE).exists() {
            return Err(format!("a slow disk needs {THROTTLE}, which is not there"));
        }
        // The loop device goes with the mount.
        let script = r#"truncate -s "$1" "$2" && mkfs.ext4 -q -F "$2" && mount -o loop "$2" "$0" &&
            echo "$(basename "$(findmnt -no SOURCE "$0")")" && exec cat"#;
        let image = image.display().to_string();
        let disk = Self::hold(script, folder, &[bytes.to_string(), image])?;
        // A rule that an earlier user of the device left would hold for us.
        disk.throttle(0)?;
        Ok(disk)
    }

    fn hold(script: &str, folder: &Path, arguments: &[String]) -> Result<Self, String> {
        let mut command = Command::new("unshare");
        command.arg("--mount");
        if !Uid::effective().is_root() {
            command.arg("--map-root-user");
        }
        command.args(["sh", "-c", script]).arg(folder).args(arguments);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut holder = command.spawn().map_err(|error| format!("unshare: {error}"))?;
        let mut said = String::new();
        if let Some(pipe) = holder.stdout.as_mut() {
            let _ = BufReader::new(pipe).read_line(&mut said);
        }
        if said.ends_with('\n') {
            let device = std::fs::read_to_string(format!("/sys/block/{}/dev", said.trim())).ok();
            return Ok(Self {
                holder,
                folder: folder.to_path_buf(),
                device: device.map(|number| number.trim().to_owned()),
            });
        }
        let mut why = String::new();
        if let Some(pipe) = holder.stderr.as_mut() {
            let _ = pipe.read_to_string(&mut why);
        }
        let _ = holder.wait();
        Err(format!("no disk in a mount namespace here: {}", why.trim()))
    }

    /// Where those run who see the disk.
    #[must_use]
    pub fn place(&self) -> Place {
        Place::Disks(self.holder.id())
    }

    /// Where those run who see the disk, in a network of their own.
    #[must_use]
    pub fn place_in(&self, network: &Place) -> Place {
        match network {
            Place::Network(name) => Place::Both(name.clone(), self.holder.id()),
            _ => self.place(),
        }
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

    /// Makes a disk in memory larger.
    ///
    /// # Panics
    /// When the system refuses.
    pub fn grow(&self, bytes: u64) {
        let status = enter(self.holder.id())
            .args(["--", "mount", "-o", &format!("remount,size={bytes}")])
            .arg(&self.folder)
            .status();
        assert!(status.is_ok_and(|status| status.success()), "the disk does not grow");
    }

    /// Takes all the room that is left; it comes back when the file is removed.
    ///
    /// # Panics
    /// When not even an empty file can be made.
    #[must_use]
    pub fn fill(&self) -> PathBuf {
        let path = self.seen_from_here().join("filler");
        let mut file = File::create(&path).expect("there is room for a name");
        let mut piece = vec![1_u8; 1 << 16];
        while !piece.is_empty() {
            if file.write_all(&piece).is_err() {
                piece.truncate(piece.len() / 2);
            }
        }
        path
    }

    /// Takes all the room but so many bytes; it comes back when the file is removed.
    ///
    /// # Panics
    /// When the file cannot be written.
    #[must_use]
    #[allow(clippy::useless_conversion, reason = "macOS counts blocks in 32 bits")]
    pub fn fill_but(&self, left: u64) -> PathBuf {
        let folder = self.seen_from_here();
        let room = nix::sys::statvfs::statvfs(&folder).expect("a disk says how much room it has");
        let free = u64::from(room.blocks_available()) * room.fragment_size();
        let path = folder.join("filler");
        let mut file = File::create(&path).expect("there is room for a name");
        let bytes = std::io::copy(&mut std::io::repeat(1).take(free.saturating_sub(left)), &mut file);
        bytes.expect("there is as much room as the disk says");
        path
    }

    /// Whether it can be [slow](Self::slow).
    #[must_use]
    pub fn is_device(&self) -> bool {
        self.device.is_some()
    }

    /// From now on it takes so many bytes a second, or as many as it can.
    ///
    /// # Panics
    /// When the system refuses.
    pub fn slow(&self, bytes_per_second: Option<u64>) {
        self.throttle(bytes_per_second.unwrap_or(0))
            .expect("the disk can be slowed down");
    }

    fn throttle(&self, bytes_per_second: u64) -> Result<(), String> {
        let Some(device) = &self.device else {
            return Ok(());
        };
        std::fs::write(THROTTLE, format!("{device} {bytes_per_second}\n"))
            .map_err(|error| format!("{THROTTLE}: {error}"))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = self.throttle(0);
        if let Ok(id) = i32::try_from(self.holder.id()) {
            let _ = kill(Pid::from_raw(id), Signal::SIGKILL);
        }
        let _ = self.holder.wait();
    }
}

/// The beginning of a command that runs among the disks of this process; `--` and a program follow.
#[must_use]
pub fn enter(owner: u32) -> Command {
    let mut command = Command::new("nsenter");
    command.args(["--target", &owner.to_string()]);
    if !Uid::effective().is_root() {
        command.args(["--user", "--preserve-credentials"]);
    }
    command.arg("--mount");
    command
}
