//! The gRPC services: convert, call, convert.

mod admin;
mod auth;
mod blobs;
mod jobs;
mod workers;

pub(crate) use auth::Gate;

use crate::core::Refusal;
use crate::garbage::{Collector, Pins};
use crate::runner::{Clock, Core, Gone, full};
use crate::store::{Store, StoreError};
use aitk_common::control::UnixMillis;
use aitk_common::storage::{BlobStore, StorageError};
use aitk_proto::MAX_MESSAGE_BYTES;
use aitk_proto::v1::admin_server::AdminServer;
use aitk_proto::v1::blobs_server::BlobsServer;
use aitk_proto::v1::jobs_server::JobsServer;
use aitk_proto::v1::workers_server::WorkersServer;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, watch};
use tonic::Status;
use tonic::service::Routes;
use tonic::service::interceptor::InterceptedService;

/// What the services share.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    pub(crate) core: Core,
    pub(crate) clock: Clock,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) blobs: Arc<dyn BlobStore>,
    /// What the collection of garbage must leave alone.
    pub(crate) pins: Arc<Pins>,
    pub(crate) collector: Collector,
    /// Scheme of the storage address.
    pub(crate) storage: String,
    pub(crate) started: UnixMillis,
    pub(crate) lease: Duration,
    /// Failed tries that a job is granted which says nothing about them.
    pub(crate) retries: u32,
    /// Where blobs on their way through lie.
    pub(crate) transit: PathBuf,
    /// Blobs on their way through, all clients together.
    pub(crate) transfers: Arc<Semaphore>,
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
    Routes::new(InterceptedService::new(workers, gate.clone()))
        .add_service(InterceptedService::new(admin, gate.clone()))
        .add_service(InterceptedService::new(jobs, gate.clone()))
        .add_service(InterceptedService::new(blobs, gate.clone()))
}

impl From<Gone> for Status {
    fn from(gone: Gone) -> Self {
        Self::unavailable(gone.to_string())
    }
}

/// The one place where refusals get their code.
fn refused(refusal: &Refusal) -> Status {
    match refusal {
        Refusal::NotFound(_) | Refusal::NoWorker(_) => Status::not_found(refusal.to_string()),
        Refusal::Ambiguous { .. } => Status::invalid_argument(refusal.to_string()),
        Refusal::Conflict(_) => Status::aborted(refusal.to_string()),
    }
}

/// The caller hears that it is our trouble; the log hears which.
fn store_failed(error: &StoreError) -> Status {
    tracing::error!(error = %full(error), "the store failed");
    Status::unavailable("the coordinator's database does not answer; its log says why")
}

/// The one place where storage errors get their code.
fn storage_failed(error: &StorageError) -> Status {
    let text = full(error);
    match error {
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
