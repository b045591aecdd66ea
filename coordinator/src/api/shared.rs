//! State that the services share.

use crate::access::Access;
use crate::assign::Assigner;
use crate::blob_access::BlobAccess;
use crate::clock::Clock;
use crate::disk_reserve::DiskSpace;
use crate::garbage::{Collector, Pins};
use crate::pki::Signer;
use crate::scheduler_task::SchedulerHandle;
use crate::store::Store;
use crate::transfer_limit::{TransferLimiter, UploadRate};
use aitk_common::control_plane::UnixMillis;
use aitk_common::storage::BlobStore;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, watch};

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
    pub(crate) started: UnixMillis,
    pub(crate) lease: Duration,
    /// Default number of retries of a job.
    pub(crate) retries: u32,
    /// Signs certificates, if there is a certificate authority.
    pub(crate) signer: Option<Arc<Signer>>,
    /// Folder for blobs that are being uploaded.
    pub(crate) upload_folder: PathBuf,
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

/// Waits until the coordinator shuts down.
pub(super) async fn wait_for_shutdown(stopping: &mut watch::Receiver<bool>) {
    // The sender lives as long as the server; a dropped sender is a shutdown too.
    let _ = stopping.wait_for(|stop| *stop).await;
}
