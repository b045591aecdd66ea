//! How much a download may take: the bytes of a model, and the space of the disk.

use super::client::HubError;
use std::path::Path;

/// The default limit of a model: larger than the models that are fine-tuned.
pub(crate) const DEFAULT_LARGEST_MODEL: u64 = 200 << 30;
/// The most space that a download leaves free, in bytes: attempts on the same disk write logs and results.
const MAX_RESERVE: u64 = 1 << 30;
/// What it leaves free of a small disk, in percent.
const RESERVE_PERCENT: u64 = 5;

/// The space of a disk, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DiskSpace {
    pub(super) free: u64,
    /// How much of it a download leaves free.
    pub(super) reserve: u64,
}

impl DiskSpace {
    /// Returns the space of the disk on which a folder is; `None` if the system reports none, or a size of 0, as some network file systems
    /// do. Writing fails then if there is too little.
    #[allow(clippy::useless_conversion, reason = "macOS counts blocks in 32 bits")]
    pub(super) fn of_folder(folder: &Path) -> Option<Self> {
        let disk = nix::sys::statvfs::statvfs(folder).ok()?;
        let block = disk.fragment_size();
        let size = block.saturating_mul(disk.blocks().into());
        (size > 0).then(|| Self {
            free: block.saturating_mul(disk.blocks_available().into()),
            reserve: (size / 100 * RESERVE_PERCENT).min(MAX_RESERVE),
        })
    }

    /// Refuses a download of `missing` bytes into `folder` that would use the reserve.
    pub(super) fn check(self, repo: &str, missing: u64, folder: &Path) -> Result<(), HubError> {
        if missing == 0 || missing.saturating_add(self.reserve) <= self.free {
            return Ok(());
        }
        Err(HubError::DiskFull {
            repo: repo.to_owned(),
            problem: format!(
                "{} are missing, and {} has {} of free space, of which {} must stay free",
                gib(missing),
                folder.display(),
                gib(self.free),
                gib(self.reserve)
            ),
        })
    }
}

/// Refuses a model that has more bytes than this worker downloads.
pub(super) fn check_size(repo: &str, bytes: u64, largest_model: Option<u64>) -> Result<(), HubError> {
    match largest_model {
        Some(limit) if bytes > limit => Err(HubError::TooLarge {
            repo: repo.to_owned(),
            problem: format!("its files have {}; expected at most {}", gib(bytes), gib(limit)),
        }),
        _ => Ok(()),
    }
}

fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_download_leaves_the_reserve_free() {
        let disk = DiskSpace { free: 100, reserve: 10 };
        let folder = Path::new("/models");
        for (missing, fits) in [(0, true), (90, true), (91, false), (u64::MAX, false)] {
            assert_eq!(disk.check("org/tiny", missing, folder).is_ok(), fits, "{missing}");
        }
        let full = DiskSpace { free: 0, reserve: 10 };
        full.check("org/tiny", 0, folder).unwrap();
        let disk = DiskSpace {
            free: 3 << 30,
            reserve: 1 << 30,
        };
        let message = disk.check("org/tiny", 5 << 29, folder).unwrap_err().to_string();
        assert!(
            message
                .starts_with("disk full: org/tiny was not downloaded: 2.50 GiB are missing, and /models has 3.00 GiB"),
            "{message}"
        );
    }

    #[test]
    fn the_reserve_of_a_disk_is_small() {
        let folder = tempfile::tempdir().unwrap();
        let space = DiskSpace::of_folder(folder.path()).unwrap();
        assert!(space.reserve <= MAX_RESERVE, "{space:?}");
        assert_eq!(DiskSpace::of_folder(Path::new("/nowhere/at/all")), None);
        // A file system without a size.
        #[cfg(target_os = "linux")]
        assert_eq!(DiskSpace::of_folder(Path::new("/proc")), None);
    }
}
