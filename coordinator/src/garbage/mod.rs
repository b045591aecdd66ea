//! Retention and garbage collection: removes old ended jobs and their checkpoints, then deletes blobs from object
//! storage that nothing refers to.
//!
//! A collection lists the blobs first and determines the needed ones afterwards. It never deletes a blob whose sender
//! is still uploading (an upload sends file contents before anything refers to them), and respects [`pins`]. When in
//! doubt it keeps a blob: a live job whose inputs cannot be read stops the collection, with the reason in the log.

mod check;
mod pins;

pub(crate) use check::{UnusableReference, pin_and_check};
pub(crate) use pins::{PinGuard, Pins};

use crate::blob_access::Uploads;
use crate::clock::Clock;
use crate::scheduler_task::SchedulerHandle;
use crate::store::{EVENTS_KEPT, JobRoots, Store, StoreError};
use aitk_common::control_plane::UnixMillis;
use aitk_common::error_chain::error_chain;
use aitk_common::hash::ContentHash;
use aitk_common::storage::{BlobInfo, BlobStore, StorageError, gc};
use aitk_scheduler::{Event, MAX_EXPIRED_PER_CALL, State};
use futures::stream::{self, StreamExt, TryStreamExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Concurrent deletions.
const CONCURRENT_DELETES: usize = 8;
/// Age after which parts of an unfinished upload are removed.
const ABANDONED_UPLOAD_AGE: Duration = Duration::from_secs(24 * 3600);

/// How long a collection waits for the database before it continues with the stored state.
const EXPIRE_TIMEOUT: Duration = Duration::from_secs(60);

/// Retention times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retention {
    /// Interval of garbage collection; `None`: only on request.
    pub every: Option<Duration>,
    /// Younger blobs are not removed while their sender is still uploading, or when the sender is unknown. Must be
    /// longer than any upload takes.
    pub grace: Duration,
    /// Other unreferenced blobs are removed after this time, at most [`Self::grace`].
    pub unreferenced: Duration,
    /// Ended jobs that no other job depends on are removed after this time, with their logs and files; `None`:
    /// never.
    pub jobs: Option<Duration>,
    /// The last checkpoint of a completed or failed job is kept for this time; `None`: as long as the job. A stopped
    /// job always keeps it.
    pub checkpoints: Option<Duration>,
    /// Audit lines about refused actions are kept for this time; lines about completed actions are kept forever.
    pub refusals: Duration,
    /// Approximate number of log lines and metrics kept per job, the newest; all other events of its log stay.
    pub events: u64,
}

impl Default for Retention {
    fn default() -> Self {
        Self {
            every: Some(Duration::from_secs(3600)),
            grace: Duration::from_secs(24 * 3600),
            unreferenced: Duration::from_secs(3600),
            jobs: None,
            checkpoints: Some(Duration::from_secs(30 * 24 * 3600)),
            refusals: Duration::from_secs(90 * 24 * 3600),
            events: EVENTS_KEPT,
        }
    }
}

impl Retention {
    /// How long an unreferenced blob stays after its sender stopped uploading.
    pub(crate) fn unreferenced_retention(&self) -> Duration {
        self.unreferenced.min(self.grace)
    }
}

/// Result of a collection or a dry run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CollectionReport {
    /// Blobs in the storage at the beginning.
    pub(crate) blobs: u64,
    /// Blobs that jobs need.
    pub(crate) needed: u64,
    /// Blobs removed.
    pub(crate) removed: u64,
    /// Their bytes.
    pub(crate) removed_bytes: u64,
    /// Jobs forgotten.
    pub(crate) jobs_forgotten: u64,
}

/// Why a collection stopped early. Blobs removed until then were not needed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CollectError {
    #[error("a collection is running already; try again when it has ended")]
    Busy,
    #[error(
        "nothing was removed: {hash}, which a job that has not ended needs, cannot be read, so what belongs to it is unknown; \
         stop that job, or put the blob back"
    )]
    Broken {
        hash: ContentHash,
        #[source]
        source: StorageError,
    },
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Stopped(#[from] crate::scheduler_task::SchedulerStopped),
}

/// The garbage collector.
#[derive(Clone, Debug)]
pub(crate) struct Collector {
    pub(crate) scheduler: SchedulerHandle,
    pub(crate) clock: Clock,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) blobs: Arc<dyn BlobStore>,
    pub(crate) pins: Arc<Pins>,
    pub(crate) uploads: Arc<Uploads>,
    pub(crate) retention: Retention,
    /// Number of the audit line up to which old refusals are removed.
    pub(crate) refusals_seen: Arc<AtomicU64>,
}

impl Collector {
    /// Collects periodically until the coordinator stops.
    pub(crate) async fn run(self) {
        let Some(every) = self.retention.every else { return };
        loop {
            tokio::time::sleep(every).await;
            match self.collect(false).await {
                Ok(_) | Err(CollectError::Busy) => {}
                Err(CollectError::Stopped(_)) => return,
                Err(error) => tracing::warn!(error = %error_chain(&error), "garbage collection failed; old blobs stay"),
            }
        }
    }

    /// Runs one collection. With `dry_run`, only counts.
    pub(crate) async fn collect(&self, dry_run: bool) -> Result<CollectionReport, CollectError> {
        let Some(_collection) = self.pins.begin_collection() else {
            return Err(CollectError::Busy);
        };
        let mut done = CollectionReport::default();
        if !dry_run {
            done.jobs_forgotten = self.expire().await?;
            // A failure to clean the audit log does not stop the collection.
            if let Err(error) = self.forget_refusals().await {
                tracing::warn!(error = %error_chain(&error), "old refusals stay in the audit log");
            }
            let unfinished = self.blobs.remove_abandoned_uploads(ABANDONED_UPLOAD_AGE).await?;
            if unfinished > 0 {
                tracing::info!(unfinished, "removed parts of unfinished uploads");
            }
        }
        let listed = self.blobs.list().await?;
        done.blobs = listed.len() as u64;
        let needed = self.needed_blobs().await?;
        done.needed = needed.len() as u64;
        if !dry_run {
            self.uploads.record_sizes_of_old_uploads(&listed).await?;
        }
        let garbage = gc::unneeded(
            listed,
            &needed,
            self.retention.unreferenced_retention(),
            jiff::Timestamp::now(),
        );
        drop(needed);
        let removed = stream::iter(garbage)
            .map(|blob| async move {
                let gone = if dry_run {
                    self.is_expired(blob.hash, blob.stored).await?
                } else {
                    self.remove(&blob).await?
                };
                Ok::<_, CollectError>(if gone { (1, blob.bytes) } else { (0, 0) })
            })
            .buffer_unordered(CONCURRENT_DELETES)
            .try_fold((0, 0), |sum, one| async move { Ok((sum.0 + one.0, sum.1 + one.1)) })
            .await?;
        (done.removed, done.removed_bytes) = removed;
        tracing::info!(
            dry = dry_run,
            blobs = done.blobs,
            needed = done.needed,
            removed = done.removed,
            removed_bytes = done.removed_bytes,
            jobs_forgotten = done.jobs_forgotten,
            "garbage collection finished"
        );
        Ok(done)
    }

    /// Makes the scheduler remove old jobs. Returns how many.
    async fn expire(&self) -> Result<u64, CollectError> {
        let jobs_before = self.retention.jobs.map(|kept| begin_of(kept, &self.clock));
        let checkpoints_before = self.retention.checkpoints.map(|kept| begin_of(kept, &self.clock));
        let count = move |state: &State, _| state.count_expirable(jobs_before, checkpoints_before);
        let (jobs, checkpoints) = self.scheduler.query(count).await?;
        // In small steps, between which other requests are handled. Jobs that become old meanwhile wait for the next
        // collection.
        for _ in 0..jobs.max(checkpoints).div_ceil(MAX_EXPIRED_PER_CALL) {
            let expire = Event::Expire {
                jobs_before,
                checkpoints_before,
            };
            self.scheduler.event(expire).await?;
            // A full database stores it when there is room, which the collection may create.
            let Ok(stored) = tokio::time::timeout(EXPIRE_TIMEOUT, self.scheduler.wait_until_stored()).await else {
                tracing::warn!("the removal of old jobs is not stored yet; their blobs stay until it is");
                break;
            };
            stored?;
        }
        Ok(jobs as u64)
    }

    /// Removes old refusals from the audit log: unauthenticated clients can cause many.
    async fn forget_refusals(&self) -> Result<(), CollectError> {
        let before = begin_of(self.retention.refusals, &self.clock);
        let (mut after, mut lines) = (self.refusals_seen.load(Ordering::Relaxed), 0);
        loop {
            let forgotten = self.store.forget_refusals(after, before).await?;
            after = forgotten.after;
            lines += forgotten.lines;
            if !forgotten.more {
                break;
            }
        }
        self.refusals_seen.store(after, Ordering::Relaxed);
        if lines > 0 {
            tracing::info!(lines, "removed old refusals from the audit log");
        }
        Ok(())
    }

    async fn needed_blobs(&self) -> Result<std::collections::HashSet<ContentHash>, CollectError> {
        let (mut live, mut ended) = (gc::Roots::default(), gc::Roots::default());
        for job in self.store.roots().await? {
            let JobRoots {
                ended: has_ended,
                snapshots,
                checkpoints,
                artifacts,
            } = job;
            let roots = if has_ended { &mut ended } else { &mut live };
            roots.snapshots.extend(snapshots);
            roots.checkpoints.extend(checkpoints);
            roots.blobs.extend(artifacts);
        }
        let reached = gc::reachable(self.blobs.as_ref(), &live).await?;
        if let Some((hash, source)) = reached.broken.into_iter().next() {
            return Err(CollectError::Broken { hash, source });
        }
        let mut needed = reached.needed;
        ended.snapshots.retain(|hash| !live.snapshots.contains(hash));
        let reached = gc::reachable(self.blobs.as_ref(), &ended).await?;
        for (hash, error) in &reached.broken {
            tracing::warn!(%hash, error = %error_chain(error), "a blob of an ended job cannot be read; the job cannot be resumed");
        }
        needed.extend(reached.needed);
        Ok(needed)
    }

    /// Whether an unreferenced blob is so old that no caller will refer to it.
    async fn is_expired(&self, hash: ContentHash, stored: jiff::Timestamp) -> Result<bool, StoreError> {
        let (now, long) = (jiff::Timestamp::now(), self.retention.grace);
        if gc::is_older(stored, long, now) {
            return Ok(true);
        }
        let kept = self
            .uploads
            .retention_of(hash, self.retention.unreferenced_retention(), long)
            .await?;
        Ok(gc::is_older(stored, kept, now))
    }

    /// Deletes one blob, unless it is needed again. Returns whether it was deleted.
    async fn remove(&self, blob: &BlobInfo) -> Result<bool, CollectError> {
        let Some(_delete_guard) = self.pins.begin_delete(blob.hash) else {
            return Ok(false);
        };
        // A worker with direct storage access may have uploaded it again since the listing.
        let Some(stored) = self.blobs.stored(blob.hash).await? else {
            return Ok(false);
        };
        if !self.is_expired(blob.hash, stored).await? {
            return Ok(false);
        }
        self.blobs.delete(blob.hash).await?;
        // A remaining entry does no harm: visibility also requires that the blob exists.
        if let Err(error) = self.uploads.forget(blob.hash).await {
            tracing::warn!(error = %error_chain(&error), "cannot remove the upload entry of a deleted blob");
        }
        Ok(true)
    }
}

/// The time before which records are old that are kept for `kept`. By the wall clock, like the times of the records.
fn begin_of(kept: Duration, clock: &Clock) -> UnixMillis {
    let kept = u64::try_from(kept.as_millis()).unwrap_or(u64::MAX);
    UnixMillis(clock.wall_time().0.saturating_sub(kept))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_for_which_the_machine_was_suspended_counts() {
        let (kept, slept) = (Duration::from_secs(3600), Duration::from_secs(7200));
        let clock = Clock::after_sleep(slept);
        let start = clock.now();
        // A record of the time before the machine was suspended is older than `kept`.
        assert!(begin_of(kept, &clock) > start);
        assert_eq!(begin_of(Duration::MAX, &clock), UnixMillis(0));
    }
}
