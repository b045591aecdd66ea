//! Authorization: each test makes a forbidden call, is refused, and finds the refusal in the audit log.

mod audit;
mod calls;
mod commands;
mod machine_tokens;
mod ownership;
mod roles;
mod scope;
mod token_expiry;
mod token_guessing;

use crate::support::{TIMEOUT, TestCoordinator, data_sets, eventually, input, submission, within};
use aitk_proto::client::{Clients, connect};
use aitk_proto::remote_blobs::RemoteBlobs;
use aitk_proto::v1;
use std::time::Duration;
use tonic::Status;

/// Longer than any of these tests takes, so no lease expires.
const LONG_LEASE: Duration = Duration::from_secs(60);

/// Creates a token with this role. Returns its secret and its id.
pub(crate) async fn create_token(
    admin: &Clients,
    name: &str,
    role: &str,
    expires_in_ms: Option<u64>,
) -> (String, String) {
    let request = v1::CreateTokenRequest {
        name: name.into(),
        role: role.into(),
        expires_in_ms,
    };
    let made = within(admin.admin.clone().create_token(request))
        .await
        .unwrap()
        .into_inner();
    (made.secret, made.token.unwrap().id)
}

/// Creates a token with this role and connects with it. A submitter also uploads the input of the test jobs.
pub(super) async fn client_with_role(coordinator: &TestCoordinator, name: &str, role: &str) -> Clients {
    let (secret, _) = create_token(&coordinator.clients, name, role, None).await;
    let clients = connect(&coordinator.running.url(), &secret, None).await.unwrap();
    if role == "submitter" {
        put_input(&clients).await;
    }
    clients
}

/// Uploads the input of the test jobs. A user may only submit jobs whose inputs they uploaded.
pub(super) async fn put_input(clients: &Clients) {
    data_sets::put(&RemoteBlobs::with_budget(clients, TIMEOUT), &input().to_bytes()).await;
}

pub(crate) async fn audit_log(admin: &Clients) -> Vec<v1::AuditLine> {
    let request = v1::ReadAuditRequest { after: 0, limit: 0 };
    within(admin.admin.clone().read_audit(request))
        .await
        .unwrap()
        .into_inner()
        .lines
}

/// Waits for a matching line of the audit log. A refusal is written shortly after the client gets it.
pub(crate) async fn wait_for_audit_line(
    admin: &Clients,
    what: &str,
    matches: impl Fn(&v1::AuditLine) -> bool,
) -> v1::AuditLine {
    eventually(what, || async {
        audit_log(admin).await.into_iter().find(|line| matches(line))
    })
    .await
}

pub(super) async fn submit(clients: &Clients, name: &str) -> Result<String, Status> {
    let request = v1::SubmitRequest::from(submission(name));
    Ok(within(clients.jobs.clone().submit(request)).await?.into_inner().job_id)
}

pub(super) async fn get(clients: &Clients, job_id: &str) -> Result<v1::Job, Status> {
    let request = v1::GetJobRequest { job_id: job_id.into() };
    Ok(within(clients.jobs.clone().get(request)).await?.into_inner())
}

pub(super) async fn stop(clients: &Clients, job_id: &str) -> Result<v1::Job, Status> {
    let request = v1::StopJobRequest {
        job_id: job_id.into(),
        now: false,
    };
    Ok(within(clients.jobs.clone().stop(request)).await?.into_inner())
}

pub(super) async fn drain(clients: &Clients) -> Result<(), Status> {
    let request = v1::DrainWorkerRequest {
        worker: "w".into(),
        drain: true,
        now: true,
    };
    within(clients.jobs.clone().drain_worker(request)).await.map(drop)
}

pub(crate) async fn list(clients: &Clients) -> Vec<String> {
    let request = v1::ListJobsRequest {
        all: true,
        ..Default::default()
    };
    let jobs = within(clients.jobs.clone().list(request))
        .await
        .unwrap()
        .into_inner()
        .jobs;
    jobs.into_iter().map(|job| job.id).collect()
}
