//! Free disk space of this machine. A part is reserved for the database: blobs are refused before they use it, so that
//! acknowledged changes can always be stored.

use crate::scheduler_task::SchedulerHandle;
use aitk_common::error_chain::error_chain;
use aitk_scheduler::Event;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::watch;

/// How often the disks are checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// Minimum reserve when none is configured.
const MIN_RESERVE: u64 = 1 << 30;
/// Default reserve in percent of the disk.
const RESERVE_PERCENT: u64 = 5;

/// Free bytes of a disk, and how many of them are reserved for the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FreeSpace {
    pub(crate) free: u64,
    pub(crate) reserve: u64,
}

/// The disks that store blobs. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct DiskSpace {
    folders: Arc<[PathBuf]>,
    /// `None`: [`RESERVE_PERCENT`], and at least [`MIN_RESERVE`].
    reserve: Option<u64>,
    /// Bytes of running uploads.
    pending: Arc<AtomicU64>,
}

/// Space reserved for an upload; released when dropped.
#[derive(Debug)]
pub(crate) struct SpaceReservation {
    pending: Arc<AtomicU64>,
    bytes: u64,
}

impl Drop for SpaceReservation {
    fn drop(&mut self) {
        self.pending.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[allow(clippy::useless_conversion, reason = "macOS counts blocks in 32 bits")]
fn free_space(folder: &Path, reserve: Option<u64>) -> io::Result<FreeSpace> {
    let disk = nix::sys::statvfs::statvfs(folder)?;
    let block = disk.fragment_size();
    Ok(FreeSpace {
        free: block.saturating_mul(disk.blocks_available().into()),
        reserve: reserve
            .unwrap_or_else(|| (block.saturating_mul(disk.blocks().into()) / 100 * RESERVE_PERCENT).max(MIN_RESERVE)),
    })
}

impl DiskSpace {
    pub(crate) fn new(folders: Vec<PathBuf>, reserve: Option<u64>) -> Self {
        Self {
            folders: folders.into(),
            reserve,
            pending: Arc::default(),
        }
    }

    /// Returns the disk with the least space for blobs. A disk that cannot be queried counts as having space; writing
    /// to it will fail if it does not.
    fn least_free_space(&self) -> Option<FreeSpace> {
        let disks = self
            .folders
            .iter()
            .filter_map(|folder| free_space(folder, self.reserve).ok());
        disks.min_by_key(|space| space.free.saturating_sub(space.reserve))
    }

    /// Reserves space for an upload.
    ///
    /// # Errors
    /// The free space, when it is not enough.
    pub(crate) fn reserve_upload(&self, bytes: u64) -> Result<SpaceReservation, FreeSpace> {
        // A blob is in the upload folder and, for a moment, in the storage as well.
        let space = self.least_free_space();
        let add = |pending: u64| {
            let sum = pending.checked_add(bytes)?;
            let fits = space.is_none_or(|space| space.free >= space.reserve.saturating_add(sum));
            fits.then_some(sum)
        };
        // Only what fits is counted: a sender may announce any size, and others must not be refused meanwhile.
        match self.pending.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add) {
            Ok(_) => Ok(SpaceReservation {
                pending: self.pending.clone(),
                bytes,
            }),
            Err(pending) => Err(space.unwrap_or(FreeSpace {
                free: u64::MAX - pending,
                reserve: 0,
            })),
        }
    }

    /// Reports to the scheduler when a disk becomes full and when there is space again, until the coordinator stops.
    pub(crate) async fn watch(self, scheduler: SchedulerHandle, mut stopping: watch::Receiver<bool>) {
        tokio::select! {
            () = self.report(scheduler) => {}
            // A dropped sender is a shutdown too.
            _ = stopping.wait_for(|stop| *stop) => {}
        }
    }

    async fn report(self, scheduler: SchedulerHandle) {
        let mut reported = false;
        loop {
            let disks = self.clone();
            let space = tokio::task::spawn_blocking(move || disks.least_free_space()).await;
            let space = space.unwrap_or_else(|error| {
                tracing::warn!(error = %error_chain(&error), "cannot check the free disk space");
                None
            });
            // The end of the full state needs a margin, so that the state does not flap.
            let is_full = space.is_some_and(|space| {
                let margin = if reported { space.reserve / 10 } else { 0 };
                space.reserve > 0 && space.free < space.reserve.saturating_add(margin)
            });
            if is_full || reported {
                let full = space.filter(|_| is_full).map(|space| (space.free, space.reserve));
                if is_full != reported {
                    tracing::warn!(room = ?space, is_full, "free space of the coordinator's disk");
                }
                if scheduler.event(Event::StorageSpace { full }).await.is_err() {
                    return;
                }
                reported = is_full;
            }
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_space_is_not_given_to_another_upload() {
        let folder = tempfile::tempdir().unwrap();
        let free = free_space(folder.path(), None).unwrap().free;
        let half = free / 2 + (free / 20);
        let space = DiskSpace::new(vec![folder.path().to_owned()], Some(0));
        let first = space.reserve_upload(half).unwrap();
        assert!(space.reserve_upload(half).is_err(), "together they do not fit");
        drop(first);
        let second = space.reserve_upload(half);
        assert!(second.is_ok() && space.pending.load(Ordering::Relaxed) == half);
        drop(second);
        let small = space.reserve_upload(1).unwrap();
        assert!(space.reserve_upload(u64::MAX).is_err());
        assert_eq!(space.pending.load(Ordering::Relaxed), 1);
        drop(small);
        let kept = DiskSpace::new(vec![folder.path().to_owned()], Some(u64::MAX));
        assert_eq!(kept.reserve_upload(1).unwrap_err().reserve, u64::MAX);
        assert_eq!(kept.pending.load(Ordering::Relaxed), 0);
    }
}
