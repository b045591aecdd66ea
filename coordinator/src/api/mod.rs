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
mod new_job;
mod shared;
mod status;
mod submission;
mod workers;

pub(crate) use auth::{Authenticator, peer};

pub(crate) use shared::Shared;

use aitk_proto::MAX_MESSAGE_BYTES;
use aitk_proto::v1::admin_server::AdminServer;
use aitk_proto::v1::blobs_server::BlobsServer;
use aitk_proto::v1::jobs_server::JobsServer;
use aitk_proto::v1::workers_server::WorkersServer;
use tonic::service::Routes;

/// Every service behind the authenticator.
pub(crate) fn routes(shared: &Shared, authenticator: &Authenticator) -> Routes {
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
    Routes::new(authenticator.guard(workers))
        .add_service(authenticator.guard(admin))
        .add_service(authenticator.guard(jobs))
        .add_service(authenticator.guard(blobs))
}
