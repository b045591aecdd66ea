//! State that the services share.

use super::unfinished_uploads::UnfinishedUploads;
use crate::access::Access;
use crate::assign::Assigner;
use crate::blob_access::BlobAccess;
use crate::clock::Clock;
use crate::disk_reserve::DiskSpace;
use crate::garbage::{Collector, Pins};
use crate::pki::Signer;
use crate::scheduler_task::SchedulerHandle;
use crate::storage_monitor::StorageMonitor;
use crate::store::Store;
use crate::transfer_limit::{TransferLimiter, UploadRate};
use aitk_common::control_plane::UnixMillis;
use aitk_common::storage::BlobStore;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, watch};
use tonic::Status;

/// State that the services share.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    pub(crate) scheduler: SchedulerHandle,
    pub(crate) clock: Clock,
    pub(crate) store: Arc<dyn Store>,
    /// Authentication and audit log.
    pub(crate) access: Access,
    pub(crate) blobs: Arc<dyn BlobStore>,
    /// Which caller may see which blobs.
    pub(crate) blob_access: BlobAccess,
    /// Blobs that garbage collection must keep.
    pub(crate) pins: Arc<Pins>,
    pub(crate) collector: Collector,
    /// Scheme of the storage URL.
    pub(crate) storage: String,
    /// Whether the object storage refuses the coordinator.
    pub(crate) storage_monitor: StorageMonitor,
    pub(crate) started: UnixMillis,
    pub(crate) lease: Duration,
    /// Default number of retries of a job.
    pub(crate) retries: u32,
    /// Signs certificates, if there is a certificate authority.
    pub(crate) signer: Option<Arc<Signer>>,
    /// Folder for blobs that are being uploaded.
    pub(crate) upload_folder: PathBuf,
    /// Uploads whose call broke.
    pub(crate) unfinished_uploads: UnfinishedUploads,
    /// Limits the large submissions that are parsed at once.
    pub(crate) parsing: Arc<Semaphore>,
    /// Creates the assignment messages for workers.
    pub(crate) assigner: Assigner,
    /// Limits concurrent uploads.
    pub(crate) uploads: TransferLimiter,
    /// Limits the upload rate of each user.
    pub(crate) upload_rate: UploadRate,
    /// Limits concurrent downloads.
    pub(crate) downloads: TransferLimiter,
    /// Free disk space.
    pub(crate) space: DiskSpace,
    /// True when the coordinator shuts down: streams then end.
    pub(crate) stopping: watch::Receiver<bool>,
}

/// Does work on a task of its own, so that it also ends when the client disconnects: a change that the database has would else be
/// missing in memory.
///
/// # Errors
///
/// The work's own, and `internal` if it panics.
pub(super) async fn run_to_end<T: Send + 'static>(
    work: impl Future<Output = Result<T, Status>> + Send + 'static,
) -> Result<T, Status> {
    tokio::spawn(work)
        .await
        .unwrap_or_else(|error| Err(Status::internal(error.to_string())))
}

/// Waits until the coordinator shuts down.
pub(super) async fn wait_for_shutdown(stopping: &mut watch::Receiver<bool>) {
    // The sender lives as long as the server; a dropped sender is a shutdown too.
    let _ = stopping.wait_for(|stop| *stop).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot;

    #[tokio::test]
    async fn work_ends_although_its_caller_is_gone() {
        let (go_on, may_go_on) = oneshot::channel::<()>();
        let (done, is_done) = oneshot::channel();
        let (started, has_started) = oneshot::channel();
        let call = tokio::spawn(run_to_end(async move {
            let _ = started.send(());
            let _ = may_go_on.await;
            let _ = done.send("written");
            Ok(())
        }));
        has_started.await.unwrap();
        call.abort();
        assert!(call.await.unwrap_err().is_cancelled());
        go_on.send(()).unwrap();
        assert_eq!(is_done.await, Ok("written"));
    }
}
