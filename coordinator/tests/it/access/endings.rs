//! Tokens that expire or are revoked, also while something is open.

use super::{CALM, get, line, put_input, submit, token};
use crate::support::{FakeWorker, Pool, eventually, within};
use aitk_common::control::{JobState, ToCoordinator};
use aitk_common::hash::ContentHash;
use aitk_proto::client::{Clients, connect};
use aitk_proto::v1;
use aitk_proto::v1::put_blob_request::Part;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

/// What a stream ends with.
async fn end<T>(stream: &mut Streaming<T>) -> Status {
    within(async {
        loop {
            match stream.message().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("it ended as if all were well"),
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
async fn a_token_that_expires_cuts_what_it_opened() {
    let pool = Pool::start(CALM).await;
    let job = pool.submit("a").await.job.to_string();
    // Long enough to open something with it, on however busy a machine.
    let mut life = Duration::from_millis(500);
    let (viewer, mut log) = loop {
        let (secret, _) = token(&pool.clients, "vera", "viewer", Some(life.as_millis() as u64)).await;
        let viewer = connect(&pool.running.url(), &secret, None).await.unwrap();
        if let Ok(log) = within(viewer.jobs.clone().events(follow(&job))).await {
            break (viewer, log.into_inner());
        }
        life *= 2;
    };
    let cut = end(&mut log).await;
    assert_eq!(cut.code(), Code::Unauthenticated, "{cut}");
    assert_eq!(get(&viewer, &job).await.unwrap_err().code(), Code::Unauthenticated);
    let refused = line(&pool.clients, "the expired token", |line| line.action == "login").await;
    assert!(!refused.done && refused.who == "vera" && refused.detail == "the token has expired");
    within(pool.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_token_opens_nothing_and_its_streams_end() {
    let pool = Pool::start(CALM).await;
    let url = pool.running.url();
    let (secret, anna_id) = token(&pool.clients, "anna", "submitter", None).await;
    let anna = connect(&url, &secret, None).await.unwrap();
    put_input(&anna).await;
    let job = submit(&anna, "a").await.unwrap();
    let mut log = within(anna.jobs.clone().events(follow(&job)))
        .await
        .unwrap()
        .into_inner();
    // An upload of which one byte is missing.
    let data = b"half of it";
    let (parts, waiting) = mpsc::channel(4);
    let header = v1::BlobHeader {
        sha256: ContentHash::of(b"something").to_hex(),
        bytes: data.len() as u64 + 1,
        offset: 0,
    };
    for part in [Part::Header(header), Part::Data(data.to_vec())] {
        parts.send(v1::PutBlobRequest { part: Some(part) }).await.unwrap();
    }
    let mut uploader = anna.blobs.clone();
    let upload = tokio::spawn(async move { uploader.put(ReceiverStream::new(waiting)).await });
    eventually("the upload to begin", || async {
        let parts = std::fs::read_dir(pool.dir.path().join("transit")).unwrap();
        (parts.count() == 1).then_some(())
    })
    .await;

    let (secret, id) = token(&pool.clients, "box", "worker", None).await;
    let clients = connect(&url, &secret, None).await.unwrap();
    let mut worker = FakeWorker::register(&clients, FakeWorker::registration("w", None, Vec::new())).await;
    worker.assigned().await;

    revoke(&pool.clients, &anna_id).await;
    let cut = end(&mut log).await;
    assert_eq!(cut.code(), Code::Unauthenticated, "{cut}");
    let cut = within(upload).await.unwrap().unwrap_err();
    assert_eq!(cut.code(), Code::Unauthenticated, "{cut}");
    assert_eq!(submit(&anna, "b").await.unwrap_err().code(), Code::Unauthenticated);
    eventually("what was uploaded to be gone", || async {
        let parts = std::fs::read_dir(pool.dir.path().join("transit")).unwrap();
        (parts.count() == 0).then_some(())
    })
    .await;
    drop(parts);

    revoke(&pool.clients, &id).await;
    while worker.next().await.is_some() {}
    let first = ToCoordinator::Register(Box::new(FakeWorker::registration("w", None, Vec::new())));
    let error = FakeWorker::open(&clients, Some(first)).await.unwrap_err();
    assert_eq!(error.code(), Code::Unauthenticated);
    let revoked = line(&pool.clients, "the revocation", |line| {
        line.action == "token.revoke" && line.object == id
    })
    .await;
    assert!(
        revoked.done && revoked.who == "admin" && revoked.detail == "worker of box",
        "{revoked:?}"
    );

    // What ended stays ended after a restart, and the first token still opens.
    let pool = pool.restart().await;
    let clients = connect(&pool.running.url(), &secret, None).await.unwrap();
    assert_eq!(get(&clients, &job).await.unwrap_err().code(), Code::Unauthenticated);
    let refused = line(&pool.clients, "the revoked token", |line| {
        line.action == "login" && line.by == id
    })
    .await;
    assert!(
        !refused.done && refused.detail == "the token was revoked",
        "{refused:?}"
    );
    assert_eq!(pool.job(&job).await.state, JobState::Running);
    let tokens = within(pool.clients.admin.clone().list_tokens(v1::ListTokensRequest::default()))
        .await
        .unwrap();
    assert_eq!(tokens.into_inner().tokens.len(), 2);
    within(pool.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_download_ends_with_its_token() {
    let pool = Pool::start(CALM).await;
    // Far more than lies between the coordinator and a receiver that reads nothing.
    let bytes: &'static [u8] = vec![7; 16 << 20].leak();
    let blob = pool.put(bytes).await;
    let (secret, id) = token(&pool.clients, "olga", "operator", None).await;
    let olga = connect(&pool.running.url(), &secret, None).await.unwrap();
    let request = v1::GetBlobRequest {
        sha256: blob.to_hex(),
        offset: 0,
    };
    let mut download = within(olga.blobs.clone().get(request)).await.unwrap().into_inner();
    within(download.message()).await.unwrap().unwrap();
    revoke(&pool.clients, &id).await;
    let cut = end(&mut download).await;
    assert_eq!(cut.code(), Code::Unauthenticated, "{cut}");
    within(pool.running.shutdown()).await;
}
