//! Tokens that expire or are revoked, also while streams are open.

use super::{LONG_LEASE, create_token, get, put_input, submit, wait_for_audit_line};
use crate::support::{FakeWorker, TestCoordinator, eventually, within};
use aitk_common::control_plane::{JobState, ToCoordinator};
use aitk_common::hash::ContentHash;
use aitk_proto::client::{Clients, connect};
use aitk_proto::v1;
use aitk_proto::v1::put_blob_request::Part;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

/// Reads a stream to its end. Returns the error that ends it.
async fn wait_for_error<T>(stream: &mut Streaming<T>) -> Status {
    within(async {
        loop {
            match stream.message().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("the stream ended without an error"),
                Err(status) => return status,
            }
        }
    })
    .await
}

async fn revoke(admin: &Clients, id: &str) {
    let request = v1::RevokeTokenRequest { id: id.into() };
    within(admin.admin.clone().revoke_token(request)).await.unwrap();
}

fn follow(job: &str) -> v1::EventsRequest {
    v1::EventsRequest {
        job_id: job.into(),
        cursor: 0,
        follow: true,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expiring_token_ends_its_open_streams() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let job = coordinator.submit("a").await.job.to_string();
    // Doubled until a stream can be opened before the token expires, however busy the machine is.
    let mut lifetime = Duration::from_millis(500);
    let (viewer, mut log) = loop {
        let (secret, _) = create_token(
            &coordinator.clients,
            "vera",
            "viewer",
            Some(lifetime.as_millis() as u64),
        )
        .await;
        let viewer = connect(&coordinator.running.url(), &secret, None).await.unwrap();
        if let Ok(log) = within(viewer.jobs.clone().events(follow(&job))).await {
            break (viewer, log.into_inner());
        }
        lifetime *= 2;
    };
    let error = wait_for_error(&mut log).await;
    assert_eq!(error.code(), Code::Unauthenticated, "{error}");
    assert_eq!(get(&viewer, &job).await.unwrap_err().code(), Code::Unauthenticated);
    let refused = wait_for_audit_line(&coordinator.clients, "the expired token", |line| line.action == "login").await;
    assert!(!refused.done && refused.who == "vera" && refused.detail == "the token has expired");
    within(coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_token_is_refused_and_its_streams_end() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let url = coordinator.running.url();
    let (secret, anna_id) = create_token(&coordinator.clients, "anna", "submitter", None).await;
    let anna = connect(&url, &secret, None).await.unwrap();
    put_input(&anna).await;
    let job = submit(&anna, "a").await.unwrap();
    let mut log = within(anna.jobs.clone().events(follow(&job)))
        .await
        .unwrap()
        .into_inner();
    // An upload that lacks its last byte.
    let data = b"half of it";
    let (parts, receiver) = mpsc::channel(4);
    let header = v1::BlobHeader {
        sha256: ContentHash::of(b"something").to_hex(),
        bytes: data.len() as u64 + 1,
        ..Default::default()
    };
    for part in [Part::Header(header), Part::Data(data.to_vec())] {
        parts.send(v1::PutBlobRequest { part: Some(part) }).await.unwrap();
    }
    let mut uploader = anna.blobs.clone();
    let upload = tokio::spawn(async move { uploader.put(ReceiverStream::new(receiver)).await });
    eventually("the upload to begin", || async {
        let parts = std::fs::read_dir(coordinator.dir.path().join("transit")).unwrap();
        (parts.count() == 1).then_some(())
    })
    .await;

    let (secret, id) = create_token(&coordinator.clients, "box", "worker", None).await;
    let clients = connect(&url, &secret, None).await.unwrap();
    let mut worker = FakeWorker::register(&clients, FakeWorker::registration("w", None, Vec::new())).await;
    worker.next_assignment().await;

    revoke(&coordinator.clients, &anna_id).await;
    let error = wait_for_error(&mut log).await;
    assert_eq!(error.code(), Code::Unauthenticated, "{error}");
    let error = within(upload).await.unwrap().unwrap_err();
    assert_eq!(error.code(), Code::Unauthenticated, "{error}");
    assert_eq!(submit(&anna, "b").await.unwrap_err().code(), Code::Unauthenticated);
    eventually("the partial upload to be removed", || async {
        let parts = std::fs::read_dir(coordinator.dir.path().join("transit")).unwrap();
        (parts.count() == 0).then_some(())
    })
    .await;
    drop(parts);

    revoke(&coordinator.clients, &id).await;
    while worker.next().await.is_some() {}
    let first = ToCoordinator::Register(Box::new(FakeWorker::registration("w", None, Vec::new())));
    let error = FakeWorker::open(&clients, Some(first)).await.unwrap_err();
    assert_eq!(error.code(), Code::Unauthenticated);
    let revoked = wait_for_audit_line(&coordinator.clients, "the revocation", |line| {
        line.action == "token.revoke" && line.object == id
    })
    .await;
    assert!(
        revoked.done && revoked.who == "admin" && revoked.detail == "worker of box",
        "{revoked:?}"
    );

    // A revoked token stays revoked after a restart, and the administrator's token still works.
    let coordinator = coordinator.restart().await;
    let clients = connect(&coordinator.running.url(), &secret, None).await.unwrap();
    assert_eq!(get(&clients, &job).await.unwrap_err().code(), Code::Unauthenticated);
    let refused = wait_for_audit_line(&coordinator.clients, "the revoked token", |line| {
        line.action == "login" && line.by == id
    })
    .await;
    assert!(
        !refused.done && refused.detail == "the token was revoked",
        "{refused:?}"
    );
    assert_eq!(coordinator.job(&job).await.state, JobState::Running);
    let tokens = within(
        coordinator
            .clients
            .admin
            .clone()
            .list_tokens(v1::ListTokensRequest::default()),
    )
    .await
    .unwrap();
    assert_eq!(tokens.into_inner().tokens.len(), 2);
    within(coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_download_ends_when_its_token_is_revoked() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    // Far more than all buffers between the coordinator and a client that does not read.
    let bytes: &'static [u8] = vec![7; 16 << 20].leak();
    let blob = coordinator.put(bytes).await;
    let (secret, id) = create_token(&coordinator.clients, "olga", "operator", None).await;
    let olga = connect(&coordinator.running.url(), &secret, None).await.unwrap();
    let request = v1::GetBlobRequest {
        sha256: blob.to_hex(),
        offset: 0,
    };
    let mut download = within(olga.blobs.clone().get(request)).await.unwrap().into_inner();
    within(download.message()).await.unwrap().unwrap();
    revoke(&coordinator.clients, &id).await;
    let error = wait_for_error(&mut download).await;
    assert_eq!(error.code(), Code::Unauthenticated, "{error}");
    within(coordinator.running.shutdown()).await;
}
