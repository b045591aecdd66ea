//! The administration service.

use super::auth::caller;
use super::enrol;
use super::jobs::paginate;
use super::shared::{Shared, run_to_end};
use super::status::{access_status, storage_status, store_status};
use crate::access::TokenRecord;
use crate::garbage::CollectError;
use crate::store::AuditLine;
use aitk_common::error_chain::error_chain;
use aitk_common::id::UserName;
use aitk_common::security::role::Role;
use aitk_proto::v1;
use aitk_proto::v1::admin_server::Admin;
use std::time::Duration;
use tonic::{Request, Response, Status};

/// Maximum number of audit lines in one answer.
const MAX_LINES: u32 = 1000;

#[derive(Debug)]
pub(super) struct AdminApi(pub(super) Shared);

impl From<TokenRecord> for v1::TokenInfo {
    fn from(record: TokenRecord) -> Self {
        Self {
            id: record.id,
            name: record.name.to_string(),
            role: record.role.name().to_owned(),
            created_ms: record.created.0,
            created_by: record.created_by,
            expires_ms: record.expires.map(|time| time.0),
            revoked_ms: record.revoked.map(|time| time.0),
        }
    }
}

fn wire_line((seq, line): (u64, AuditLine)) -> v1::AuditLine {
    v1::AuditLine {
        seq,
        time_ms: line.time.0,
        who: line.who,
        by: line.by,
        from: line.from,
        action: line.action,
        object: line.object,
        done: line.done,
        detail: line.detail,
    }
}

fn collect_status(error: CollectError) -> Status {
    match error {
        CollectError::Busy => Status::aborted(error.to_string()),
        CollectError::Broken { .. } => Status::failed_precondition(error_chain(&error)),
        CollectError::Storage(error) => storage_status(&error),
        CollectError::Store(error) => store_status(&error),
        CollectError::Stopped(stopped) => stopped.into(),
    }
}

async fn create_token(
    shared: &Shared,
    request: Request<v1::CreateTokenRequest>,
) -> Result<Response<v1::CreateTokenReply>, Status> {
    let by = caller(&request)?;
    let wire = request.into_inner();
    let name = UserName::parse(&wire.name).map_err(|_| {
        Status::invalid_argument(
            "name: expected 1 to 64 letters, digits, '-' or '_'; it becomes the owner of this user's jobs",
        )
    })?;
    let role: Role = wire
        .role
        .parse()
        .map_err(|error| Status::invalid_argument(format!("role: {error}")))?;
    if wire.expires_in_ms == Some(0) {
        return Err(Status::invalid_argument(
            "expires_in_ms: 0 expires at once; leave it out for a token that does not expire",
        ));
    }
    let life = wire.expires_in_ms.map(Duration::from_millis);
    let made = shared.access.create(&by, name, role, life).await;
    let (secret, record) = made.map_err(|error| access_status(&error))?;
    Ok(Response::new(v1::CreateTokenReply {
        secret: secret.secret().to_owned(),
        token: Some(record.into()),
        ca_sha256: shared
            .signer
            .as_ref()
            .map(|signer| signer.hash().to_hex())
            .unwrap_or_default(),
    }))
}

async fn revoke_token(
    shared: &Shared,
    request: Request<v1::RevokeTokenRequest>,
) -> Result<Response<v1::TokenInfo>, Status> {
    let by = caller(&request)?;
    let revoked = shared.access.revoke(&by, &request.into_inner().id).await;
    Ok(Response::new(revoked.map_err(|error| access_status(&error))?.into()))
}

#[tonic::async_trait]
impl Admin for AdminApi {
    async fn create_token(
        &self,
        request: Request<v1::CreateTokenRequest>,
    ) -> Result<Response<v1::CreateTokenReply>, Status> {
        let shared = self.0.clone();
        run_to_end(async move { create_token(&shared, request).await }).await
    }

    async fn create_join_token(
        &self,
        request: Request<v1::CreateJoinTokenRequest>,
    ) -> Result<Response<v1::CreateJoinTokenReply>, Status> {
        let shared = self.0.clone();
        run_to_end(async move { enrol::create_join_token(&shared, request).await }).await
    }

    async fn list_certificates(
        &self,
        request: Request<v1::ListCertificatesRequest>,
    ) -> Result<Response<v1::ListCertificatesReply>, Status> {
        let v1::ListCertificatesRequest { page_token, page_size } = request.into_inner();
        let (certificates, next_page_token) = paginate(enrol::certificates(&self.0), &page_token, page_size)?;
        Ok(Response::new(v1::ListCertificatesReply {
            certificates,
            next_page_token,
        }))
    }

    async fn revoke_worker(
        &self,
        request: Request<v1::RevokeWorkerRequest>,
    ) -> Result<Response<v1::RevokeWorkerReply>, Status> {
        let shared = self.0.clone();
        run_to_end(async move { enrol::revoke_worker(&shared, request).await }).await
    }

    async fn list_tokens(
        &self,
        request: Request<v1::ListTokensRequest>,
    ) -> Result<Response<v1::ListTokensReply>, Status> {
        let v1::ListTokensRequest { page_token, page_size } = request.into_inner();
        let (tokens, next_page_token) = paginate(self.0.access.tokens(), &page_token, page_size)?;
        Ok(Response::new(v1::ListTokensReply {
            tokens,
            next_page_token,
        }))
    }

    async fn revoke_token(&self, request: Request<v1::RevokeTokenRequest>) -> Result<Response<v1::TokenInfo>, Status> {
        let shared = self.0.clone();
        run_to_end(async move { revoke_token(&shared, request).await }).await
    }

    async fn read_audit(&self, request: Request<v1::ReadAuditRequest>) -> Result<Response<v1::ReadAuditReply>, Status> {
        let v1::ReadAuditRequest { after, limit } = request.into_inner();
        let limit = if limit == 0 { MAX_LINES } else { limit.min(MAX_LINES) };
        let lines = self.0.store.audit(after, limit).await;
        let lines = lines.map_err(|error| store_status(&error))?;
        Ok(Response::new(v1::ReadAuditReply {
            lines: lines.into_iter().map(wire_line).collect(),
        }))
    }

    async fn collect_garbage(
        &self,
        request: Request<v1::CollectGarbageRequest>,
    ) -> Result<Response<v1::CollectGarbageReply>, Status> {
        let who = caller(&request)?;
        let shared = self.0.clone();
        let dry_run = request.into_inner().dry_run;
        let collected = run_to_end(async move {
            let collected = shared.collector.collect(dry_run).await.map_err(collect_status)?;
            if !dry_run {
                let mut line = who.audit_line(shared.clock.wall_time(), "storage.gc", "");
                line.detail = format!(
                    "{} blobs removed, {} jobs forgotten",
                    collected.removed, collected.jobs_forgotten
                );
                let written = shared.store.administer(&[], &[line]).await;
                written.map_err(|error| store_status(&error))?;
            }
            Ok(collected)
        })
        .await?;
        Ok(Response::new(v1::CollectGarbageReply {
            blobs: collected.blobs,
            needed: collected.needed,
            removed: collected.removed,
            removed_bytes: collected.removed_bytes,
            jobs_forgotten: collected.jobs_forgotten,
        }))
    }
}
