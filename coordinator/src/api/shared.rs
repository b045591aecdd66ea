//! What the services share.

use crate::access::Access;
use crate::assign::Assigner;
use crate::clock::Clock;
use crate::garbage::{Collector, Pins};
use crate::pki::Signer;
use crate::runner::Core;
use crate::scope::Scope;
use crate::space::Space;
use crate::store::Store;
use crate::transfers::{Transfers, UploadRate};
use aitk_common::control::UnixMillis;
use aitk_common::storage::BlobStore;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, watch};

/// What the services share.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    pub(crate) core: Core,
    pub(crate) clock: Clock,
    pub(crate) store: Arc<dyn Store>,
    /// Tokens, and what their owners may do.
    pub(crate) access: Access,
    pub(crate) blobs: Arc<dyn BlobStore>,
    /// Who may see which of them.
    pub(crate) scope: Scope,
    /// What the collection of garbage must leave alone.
    pub(crate) pins: Arc<Pins>,
    pub(crate) collector: Collector,
    /// Scheme of the storage address.
    pub(crate) storage: String,
    pub(crate) started: UnixMillis,
    pub(crate) lease: Duration,
    /// Failed tries that a job is granted which says nothing about them.
    pub(crate) retries: u32,
    /// Who signs certificates, if there is an authority.
    pub(crate) signer: Option<Arc<Signer>>,
    /// Where blobs on their way through lie.
    pub(crate) transit: PathBuf,
    /// Large submissions that are looked at, all users together.
    pub(crate) parsing: Arc<Semaphore>,
    /// Makes messages of what the core places.
    pub(crate) assigner: Assigner,
    /// Blobs on their way in.
    pub(crate) uploads: Transfers,
    /// How fast a user may send them.
    pub(crate) upload_rate: UploadRate,
    /// Blobs on their way out.
    pub(crate) downloads: Transfers,
    /// Room for blobs.
    pub(crate) space: Space,
    /// Turns true when the coordinator shuts down: streams end.
    pub(crate) stopping: watch::Receiver<bool>,
}

/// Waits until the coordinator shuts down.
pub(super) async fn stopped(stopping: &mut watch::Receiver<bool>) {
    // The sender lives as long as the server; should it be gone, that is a shutdown too.
    let _ = stopping.wait_for(|stop| *stop).await;
}
