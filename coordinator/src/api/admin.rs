//! What the one who runs the coordinator may do.

use super::{Shared, storage_failed, store_failed};
use crate::garbage::CollectError;
use crate::runner::full;
use aitk_proto::v1;
use aitk_proto::v1::admin_server::Admin;
use tonic::{Request, Response, Status};

#[derive(Debug)]
pub(super) struct AdminApi(pub(super) Shared);

#[tonic::async_trait]
impl Admin for AdminApi {
    async fn collect_garbage(
        &self,
        request: Request<v1::CollectGarbageRequest>,
    ) -> Result<Response<v1::CollectGarbageReply>, Status> {
        let collector = self.0.collector.clone();
        let dry_run = request.into_inner().dry_run;
        // On its own task: a caller that goes away does not stop it halfway.
        let collected = tokio::spawn(async move { collector.collect(dry_run).await })
            .await
            .map_err(|error| Status::internal(error.to_string()))?
            .map_err(|error| match error {
                CollectError::Busy => Status::aborted(error.to_string()),
                CollectError::Broken { .. } => Status::failed_precondition(full(&error)),
                CollectError::Storage(error) => storage_failed(&error),
                CollectError::Store(error) => store_failed(&error),
                CollectError::Gone(gone) => gone.into(),
            })?;
        Ok(Response::new(v1::CollectGarbageReply {
            blobs: collected.blobs,
            needed: collected.needed,
            removed: collected.removed,
            removed_bytes: collected.removed_bytes,
            jobs_forgotten: collected.jobs_forgotten,
        }))
    }
}
