//! The gRPC services: convert, call, convert.

mod admin;
mod arrays;
mod auth;
mod blobs;
mod calls;
mod changes;
mod enrol;
mod follow;
mod jobs;
mod submission;
mod workers;

pub(crate) use auth::{Gate, peer};

use crate::access::{Access, AccessError};
use crate::assign::Assigner;
use crate::clock::Clock;
use crate::error_chain::error_chain;
use crate::garbage::{Collector, Pins};
use crate::pki::Signer;
use crate::runner::{Core, Gone};
use crate::scope::{Scope, ScopeError};
use crate::space::Space;
use crate::store::{Store, StoreError};
use crate::transfers::{Transfers, UploadRate};
use aitk_common::control::UnixMillis;
use aitk_common::storage::{BlobStore, StorageError};
use aitk_proto::v1::admin_server::AdminServer;
use aitk_proto::v1::blobs_server::BlobsServer;
use aitk_proto::v1::jobs_server::JobsServer;
use aitk_proto::v1::workers_server::WorkersServer;
use aitk_proto::{MAX_MESSAGE_BYTES, STORAGE_HEADER};
use aitk_scheduler::Refusal;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, watch};
use tonic::Status;
use tonic::metadata::MetadataValue;
use tonic::service::Routes;

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

/// Every service behind the gate.
pub(crate) fn routes(shared: &Shared, gate: &Gate) -> Routes {
    let workers = WorkersServer::new(workers::WorkersApi(shared.clone()))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let jobs = JobsServer::new(jobs::JobsApi(shared.clone()))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let blobs = BlobsServer::new(blobs::BlobsApi(shared.clone()))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let admin = AdminServer::new(admin::AdminApi(shared.clone()))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    Routes::new(gate.guard(workers))
        .add_service(gate.guard(admin))
        .add_service(gate.guard(jobs))
        .add_service(gate.guard(blobs))
}

impl From<Gone> for Status {
    fn from(gone: Gone) -> Self {
        Self::unavailable(gone.to_string())
    }
}

impl From<ScopeError> for Status {
    fn from(error: ScopeError) -> Self {
        match error {
            ScopeError::Gone(gone) => gone.into(),
            ScopeError::Store(error) => store_failed(&error),
            ScopeError::Storage(error) => storage_failed(&error),
        }
    }
}

/// The one place where refusals get their code.
fn refused(refusal: &Refusal) -> Status {
    match refusal {
        Refusal::NotFound(_) | Refusal::NoWorker(_) => Status::not_found(refusal.to_string()),
        Refusal::Ambiguous { .. } | Refusal::SameName { .. } => Status::invalid_argument(refusal.to_string()),
        Refusal::Conflict(_) => Status::aborted(refusal.to_string()),
        Refusal::TooMuch(_) => Status::resource_exhausted(refusal.to_string()),
        Refusal::NoRoom(_) => storage_full(refusal.to_string()),
    }
}

/// What whoever has a stream open is told when their token is revoked or expires.
fn token_ended() -> Status {
    Status::unauthenticated(
        "your token or certificate was revoked, or has expired; ask an administrator for another one",
    )
}

pub(crate) fn access_failed(error: &AccessError) -> Status {
    match error {
        AccessError::NoToken(_) | AccessError::NoWorker(_) => Status::not_found(error.to_string()),
        AccessError::NotYours(_) | AccessError::TooManyWorkers { .. } => Status::permission_denied(error.to_string()),
        AccessError::Record(_) => Status::internal(error.to_string()),
        AccessError::Store(error) => store_failed(error),
    }
}

/// The caller hears that it is our trouble; the log hears which.
fn store_failed(error: &StoreError) -> Status {
    tracing::error!(error = %error_chain(error), "the store failed");
    if error.is_full() {
        let text = "the disk of the coordinator's database is full, so nothing can be changed now; try again when there is room";
        return storage_full(text.into());
    }
    Status::unavailable("the coordinator's database does not answer; its log says why")
}

/// No room for a blob: an error of its own kind, which whoever has something to store waits out.
fn storage_full(text: String) -> Status {
    let mut status = Status::resource_exhausted(text);
    status
        .metadata_mut()
        .insert(STORAGE_HEADER, MetadataValue::from_static("full"));
    status
}

/// The one place where storage errors get their code.
fn storage_failed(error: &StorageError) -> Status {
    let text = error_chain(error);
    match error {
        StorageError::Full { .. } => storage_full(text),
        StorageError::Local(error) if error.is_disk_full() => storage_full(text),
        StorageError::NotFound { .. } => Status::not_found(text),
        StorageError::Corrupt { .. } => Status::data_loss(text),
        StorageError::TooLarge { .. } => Status::invalid_argument(text),
        StorageError::Unavailable { .. } => Status::unavailable(text),
        StorageError::Denied { .. } => Status::permission_denied(text),
        StorageError::Local(_) => Status::resource_exhausted(text),
        StorageError::Unsupported { .. } => Status::unimplemented(text),
        _ => Status::internal(text),
    }
}

/// Waits until the coordinator shuts down.
async fn stopped(stopping: &mut watch::Receiver<bool>) {
    // The sender lives as long as the server; should it be gone, that is a shutdown too.
    let _ = stopping.wait_for(|stop| *stop).await;
}
