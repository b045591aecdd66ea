//! Calls that issue, renew, list and revoke certificates of workers.

use super::auth::caller;
use super::shared::Shared;
use super::status::access_status;
use crate::access::{EnrolError, Enrolment, Identity, IssuedCertificate};
use crate::pki::{Signer, wall_clock};
use aitk_common::control_plane::Registration;
use aitk_common::id::{UserName, WorkerId};
use aitk_common::security::ca::CaError;
use aitk_common::security::join::JoinToken;
use aitk_proto::v1;
use std::time::Duration;
use tonic::{Request, Response, Status};

/// Maximum lifetime of a join token: it is stored in clear text until it is used.
const MAX_JOIN_LIFETIME: Duration = Duration::from_secs(30 * 24 * 3600);

fn signer(shared: &Shared) -> Result<&Signer, Status> {
    shared.signer.as_deref().ok_or_else(|| {
        Status::failed_precondition(
            "this coordinator has no certificate authority; run `aitk-coordinator init` in its data folder and start it again",
        )
    })
}

fn enrol_status(error: &EnrolError) -> Status {
    match error {
        EnrolError::Token(_) => Status::unauthenticated(error.to_string()),
        EnrolError::NameTaken(_) => Status::already_exists(error.to_string()),
        EnrolError::NoCertificate => Status::failed_precondition(error.to_string()),
        EnrolError::BadName(_) | EnrolError::Certificate(CaError::Request(_)) => {
            Status::invalid_argument(error.to_string())
        }
        EnrolError::Certificate(CaError::NameMismatch { .. }) => Status::permission_denied(error.to_string()),
        EnrolError::Certificate(_) => Status::internal(error.to_string()),
        EnrolError::Access(error) => access_status(error),
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn wire_certificate(signer: &Signer, certified: &IssuedCertificate) -> v1::WorkerCertificate {
    v1::WorkerCertificate {
        certificate: certified.pem.clone(),
        renew_in_ms: millis(signer.renew_after()),
        ends_in_ms: millis(certified.enrolment.expires.since(wall_clock())),
    }
}

fn wire_info(enrolment: Enrolment) -> v1::WorkerCertificateInfo {
    v1::WorkerCertificateInfo {
        id: enrolment.id,
        name: enrolment.name.to_string(),
        worker_id: enrolment.worker.to_string(),
        joined_ms: enrolment.joined.0,
        issued_ms: enrolment.issued.0,
        serial: enrolment.serial,
        expires_ms: enrolment.expires.0,
        revoked_ms: enrolment.revoked.map(|time| time.0),
    }
}

pub(super) async fn join(
    shared: &Shared,
    request: Request<v1::JoinRequest>,
) -> Result<Response<v1::JoinReply>, Status> {
    let who = caller(&request)?;
    let signer = signer(shared)?;
    let wire = request.into_inner();
    let worker = match wire.worker_id.as_str() {
        "" => None,
        text => Some(WorkerId::parse(text).map_err(|error| Status::invalid_argument(format!("worker_id: {error}")))?),
    };
    let request = wire.request.unwrap_or_default().into();
    let joined = shared.access.enrol(&who, signer, request, &wire.host, worker).await;
    let joined = joined.map_err(|error| enrol_status(&error))?;
    tracing::info!(name = %joined.enrolment.name, worker = %joined.enrolment.worker, "a worker joined");
    Ok(Response::new(v1::JoinReply {
        name: joined.enrolment.name.to_string(),
        worker_id: joined.enrolment.worker.to_string(),
        certificate: Some(wire_certificate(signer, &joined)),
        ca_sha256: signer.hash().to_hex(),
    }))
}

pub(super) async fn renew(
    shared: &Shared,
    request: Request<v1::RenewRequest>,
) -> Result<Response<v1::RenewReply>, Status> {
    let who = caller(&request)?;
    let signer = signer(shared)?;
    let request = request.into_inner().request.unwrap_or_default().into();
    let renewed = shared.access.renew(&who, signer, request).await;
    let renewed = renewed.map_err(|error| enrol_status(&error))?;
    tracing::info!(name = %renewed.enrolment.name, "a worker's certificate was renewed");
    Ok(Response::new(v1::RenewReply {
        certificate: Some(wire_certificate(signer, &renewed)),
    }))
}

/// Sets name and worker id of a registration from the caller's certificate.
pub(super) fn apply_certificate_identity(
    shared: &Shared,
    who: &Identity,
    registration: &mut Registration,
) -> Result<(), Status> {
    let Some(enrolment) = shared.access.enrolment_of(who) else {
        return Ok(());
    };
    if let Some(other) = registration.worker.as_ref().filter(|other| **other != enrolment.worker) {
        return Err(access_status(&shared.access.audit_foreign_worker_id(who, other)));
    }
    registration.worker = Some(enrolment.worker);
    registration.name = enrolment.name.to_string();
    Ok(())
}

pub(super) async fn create_join_token(
    shared: &Shared,
    request: Request<v1::CreateJoinTokenRequest>,
) -> Result<Response<v1::CreateJoinTokenReply>, Status> {
    let by = caller(&request)?;
    let signer = signer(shared)?;
    let wire = request.into_inner();
    let name =
        match wire.name.as_str() {
            "" => None,
            text => Some(UserName::parse(text).map_err(|_| {
                Status::invalid_argument("name: expected 1 to 64 letters, digits, '-' or '_', or nothing")
            })?),
        };
    let life = Duration::from_millis(wire.expires_in_ms);
    if life.is_zero() || life > MAX_JOIN_LIFETIME {
        return Err(Status::invalid_argument(
            "expires_in_ms: expected more than 0 and at most 30 days for a join token",
        ));
    }
    let made = shared.access.create_join_token(&by, name, life).await;
    let (secret, record) = made.map_err(|error| access_status(&error))?;
    let invitation = JoinToken {
        secret,
        ca: signer.hash(),
    };
    Ok(Response::new(v1::CreateJoinTokenReply {
        text: invitation.text(),
        id: record.id,
        expires_ms: record.expires.0,
    }))
}

pub(super) fn certificates(shared: &Shared) -> Vec<v1::WorkerCertificateInfo> {
    shared.access.enrolments().into_iter().map(wire_info).collect()
}

pub(super) async fn revoke_worker(
    shared: &Shared,
    request: Request<v1::RevokeWorkerRequest>,
) -> Result<Response<v1::RevokeWorkerReply>, Status> {
    let by = caller(&request)?;
    let revoked = shared.access.revoke_worker(&by, &request.into_inner().name).await;
    let (ended, join_tokens) = revoked.map_err(|error| access_status(&error))?;
    Ok(Response::new(v1::RevokeWorkerReply {
        certificates: ended.into_iter().map(wire_info).collect(),
        join_tokens,
    }))
}
