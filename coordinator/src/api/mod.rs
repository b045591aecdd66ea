//! The gRPC services: they convert between protobuf and domain types and call the rest of the crate.

mod admin;
mod arrays;
mod auth;
mod blobs;
mod change_rate_limit;
mod concurrent_call_limit;
mod enrol;
mod follow;
mod jobs;
mod new_job;
mod outputs;
mod shared;
mod status;
mod submission;
mod unfinished_uploads;
mod workers;

pub(crate) use auth::{Authenticator, peer_address};

pub(crate) use shared::Shared;
pub(crate) use unfinished_uploads::UnfinishedUploads;

use aitk_proto::MAX_MESSAGE_BYTES;
use aitk_proto::v1::admin_server::AdminServer;
use aitk_proto::v1::blobs_server::BlobsServer;
use aitk_proto::v1::jobs_server::JobsServer;
use aitk_proto::v1::workers_server::WorkersServer;
use tonic::service::Routes;

/// Returns all services, each behind the authenticator.
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
    Routes::new(authenticator.wrap(workers))
        .add_service(authenticator.wrap(admin))
        .add_service(authenticator.wrap(jobs))
        .add_service(authenticator.wrap(blobs))
}
