//! FreeSpace on the disks of this machine. A part of it is kept for the database: blobs are refused before they take it, so that
//! what was acknowledged can always be stored.

use crate::error_chain::error_chain;
use crate::runner::SchedulerHandle;
use aitk_scheduler::Event;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::watch;

/// How often the disks are looked at.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// The least that is kept for the database when nobody says how much.
const MIN_RESERVE: u64 = 1 << 30;
/// The part of a disk that is kept for it, in percent.
const RESERVE_PERCENT: u64 = 5;

/// What is free on a disk, and how much of that is kept for the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FreeSpace {
    pub(crate) free: u64,
    pub(crate) reserve: u64,
}

/// The disks that blobs pass through. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct DiskSpace {
    folders: Arc<[PathBuf]>,
    /// None: [`RESERVE_PERCENT`], and at least [`MIN_RESERVE`].
    reserve: Option<u64>,
    /// Bytes that uploads announced and have not sent yet.
    pending: Arc<AtomicU64>,
}

/// FreeSpace that an upload was promised; given back when this goes.
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

    /// The disk with the least room for blobs. A disk that does not say is taken to have room: writing shows.
    fn room(&self) -> Option<FreeSpace> {
        let rooms = self
            .folders
            .iter()
            .filter_map(|folder| free_space(folder, self.reserve).ok());
        rooms.min_by_key(|room| room.free.saturating_sub(room.reserve))
    }

    /// Promises room for an upload.
    ///
    /// # Errors
    /// What there is, when that is not enough.
    pub(crate) fn reserve_upload(&self, bytes: u64) -> Result<SpaceReservation, FreeSpace> {
        // A blob lies in the folder for uploads and, for a moment, in the storage.
        let pending = self.pending.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        let reservation = SpaceReservation {
            pending: self.pending.clone(),
            bytes,
        };
        match self.room() {
            Some(room) if room.free < room.reserve.saturating_add(pending) => Err(room),
            _ => Ok(reservation),
        }
    }

    /// Tells the scheduler when the disks run full and when there is room again, until the coordinator stops.
    pub(crate) async fn watch(self, scheduler: SchedulerHandle, mut stopping: watch::Receiver<bool>) {
        tokio::select! {
            () = self.report(scheduler) => {}
            // Whoever could say so is gone: that is a stop, too.
            _ = stopping.wait_for(|stop| *stop) => {}
        }
    }

    async fn report(self, scheduler: SchedulerHandle) {
        let mut reported = false;
        loop {
            let space = self.clone();
            let room = tokio::task::spawn_blocking(move || space.room()).await;
            let room = room.unwrap_or_else(|error| {
                tracing::warn!(error = %error_chain(&error), "the disks could not be looked at");
                None
            });
            // FreeSpace again only with a margin, so that it does not go to and fro.
            let is_full = room.is_some_and(|room| {
                let margin = if reported { room.reserve / 10 } else { 0 };
                room.reserve > 0 && room.free < room.reserve.saturating_add(margin)
            });
            if is_full || reported {
                let full = room.filter(|_| is_full).map(|room| (room.free, room.reserve));
                if is_full != reported {
                    tracing::warn!(?room, is_full, "room on the coordinator's disk");
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
    fn a_promise_is_room_that_nobody_else_gets() {
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
        let kept = DiskSpace::new(vec![folder.path().to_owned()], Some(u64::MAX));
        assert_eq!(kept.reserve_upload(1).unwrap_err().reserve, u64::MAX);
        assert_eq!(kept.pending.load(Ordering::Relaxed), 0);
    }
}
