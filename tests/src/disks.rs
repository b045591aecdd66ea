//! Small disks of a given size, in memory or on a loop device, each in a mount namespace of its own. A disk on a device can be
//! throttled, too.
//!
//! They need Linux mount namespaces (`unshare`), and user namespaces when not run as root. A disk on a device needs root, a loop
//! device, ext4, and the `blkio` controller of cgroups v1 for the throttling: its root group also limits write-back by the
//! kernel. Without the permissions, [`SmallDisk::mount`] and [`SmallDisk::on_device`] return the reason.

use crate::namespaces::{Namespaces, enter};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, Uid};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Limits the bytes per second that all processes together may write to a device.
const THROTTLE: &str = "/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device";

/// A small disk that is mounted on a folder. It is removed when dropped, or when the test process ends.
pub struct SmallDisk {
    /// The process that keeps the mount namespace. It waits on a pipe from the test process.
    holder: Child,
    folder: PathBuf,
    /// The device number, such as `7:0`; `None` for a disk in memory.
    device: Option<String>,
}

impl SmallDisk {
    /// Mounts a disk of `bytes` in memory on `folder`, which must exist.
    ///
    /// # Errors
    /// Why this machine does not permit it.
    pub fn mount(folder: &Path, bytes: u64) -> Result<Self, String> {
        let script = r#"mount -t tmpfs -o size="$1" none "$0" && echo memory && exec cat"#;
        Self::hold(script, folder, &[bytes.to_string()])
    }

    /// Mounts a disk of `bytes` on `folder`, which must exist. Its content is in the file `image`. It can be
    /// [throttled](Self::throttle).
    ///
    /// # Errors
    /// Why this machine does not permit it.
    pub fn on_device(folder: &Path, bytes: u64, image: &Path) -> Result<Self, String> {
        if !Uid::effective().is_root() {
            return Err("a disk on a device needs root".to_owned());
        }
        if !Path::new(THROTTLE).exists() {
            return Err(format!(
                "a disk that can be throttled needs {THROTTLE}, which does not exist"
            ));
        }
        // The loop device is released with the mount.
        let script = r#"truncate -s "$1" "$2" && mkfs.ext4 -q -F "$2" && mount -o loop "$2" "$0" &&
            echo "$(basename "$(findmnt -no SOURCE "$0")")" && exec cat"#;
        let image = image.display().to_string();
        let disk = Self::hold(script, folder, &[bytes.to_string(), image])?;
        // An earlier user of the device may have left a limit.
        disk.set_limit(0)?;
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
        let mut answer = String::new();
        if let Some(pipe) = holder.stdout.as_mut() {
            let _ = BufReader::new(pipe).read_line(&mut answer);
        }
        if answer.ends_with('\n') {
            let device = std::fs::read_to_string(format!("/sys/block/{}/dev", answer.trim())).ok();
            return Ok(Self {
                holder,
                folder: folder.to_path_buf(),
                device: device.map(|number| number.trim().to_owned()),
            });
        }
        let mut error = String::new();
        if let Some(pipe) = holder.stderr.as_mut() {
            let _ = pipe.read_to_string(&mut error);
        }
        let _ = holder.wait();
        Err(format!("no disk in a mount namespace here: {}", error.trim()))
    }

    /// The namespaces in which the disk is visible.
    #[must_use]
    pub fn namespaces(&self) -> Namespaces {
        Namespaces::Mount(self.holder.id())
    }

    /// The namespaces in which the disk is visible, together with this network namespace.
    #[must_use]
    pub fn namespaces_with(&self, network: &Namespaces) -> Namespaces {
        match network {
            Namespaces::Network(name) => Namespaces::Both(name.clone(), self.holder.id()),
            _ => self.namespaces(),
        }
    }

    /// The path of the folder for this process.
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

    /// Fills the disk. Removing the returned file frees the space again.
    ///
    /// # Panics
    /// When not even an empty file can be created.
    #[must_use]
    pub fn fill(&self) -> PathBuf {
        let path = self.seen_from_here().join("filler");
        let mut file = File::create(&path).expect("there is space for an empty file");
        let mut piece = vec![1_u8; 1 << 16];
        while !piece.is_empty() {
            if file.write_all(&piece).is_err() {
                piece.truncate(piece.len() / 2);
            }
        }
        path
    }

    /// Fills the disk except for `left` bytes. Removing the returned file frees the space again.
    ///
    /// # Panics
    /// When the file cannot be written.
    #[must_use]
    #[allow(clippy::useless_conversion, reason = "macOS counts blocks in 32 bits")]
    pub fn fill_except(&self, left: u64) -> PathBuf {
        let folder = self.seen_from_here();
        let statistics = nix::sys::statvfs::statvfs(&folder).expect("the file system has statistics");
        let free = u64::from(statistics.blocks_available()) * statistics.fragment_size();
        let path = folder.join("filler");
        let mut file = File::create(&path).expect("there is space for an empty file");
        let bytes = std::io::copy(&mut std::io::repeat(1).take(free.saturating_sub(left)), &mut file);
        bytes.expect("the free space can be written");
        path
    }

    /// Whether it can be [throttled](Self::throttle).
    #[must_use]
    pub fn is_device(&self) -> bool {
        self.device.is_some()
    }

    /// Limits writes to this many bytes per second; `None` removes the limit.
    ///
    /// # Panics
    /// When the system refuses.
    pub fn throttle(&self, bytes_per_second: Option<u64>) {
        self.set_limit(bytes_per_second.unwrap_or(0))
            .expect("the disk can be throttled");
    }

    fn set_limit(&self, bytes_per_second: u64) -> Result<(), String> {
        let Some(device) = &self.device else {
            return Ok(());
        };
        std::fs::write(THROTTLE, format!("{device} {bytes_per_second}\n"))
            .map_err(|error| format!("{THROTTLE}: {error}"))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = self.set_limit(0);
        if let Ok(id) = i32::try_from(self.holder.id()) {
            let _ = kill(Pid::from_raw(id), Signal::SIGKILL);
        }
        let _ = self.holder.wait();
    }
}
