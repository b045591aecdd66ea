//! Uploads over connections that break.

use crate::access::create_token;
use crate::support::{TIMEOUT, TestCoordinator, eventually, within};
use aitk_common::hash::ContentHash;
use aitk_common::storage::BlobStore;
use aitk_proto::BLOB_CHUNK_BYTES;
use aitk_proto::client::{Clients, connect};
use aitk_proto::remote_blobs::RemoteBlobs;
use aitk_proto::v1;
use aitk_proto::v1::put_blob_request::Part;
use aitk_tests::breaking_proxy::BreakingProxy;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

const LEASE: Duration = Duration::from_secs(60);

/// No two megabytes are alike, so that wrong offsets change the content.
fn content(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8).collect()
}

fn header(content: &[u8], offset: usize, upload: &str) -> v1::BlobHeader {
    v1::BlobHeader {
        sha256: ContentHash::of(content).to_hex(),
        bytes: content.len() as u64,
        offset: offset as u64,
        upload: upload.to_owned(),
    }
}

/// Sends a header and data, and ends the stream.
async fn put(clients: &Clients, header: v1::BlobHeader, data: &[u8]) -> Result<bool, Status> {
    let data = data.chunks(BLOB_CHUNK_BYTES).map(|data| Part::Data(data.to_vec()));
    let parts: Vec<_> = std::iter::once(Part::Header(header))
        .chain(data)
        .map(|part| v1::PutBlobRequest { part: Some(part) })
        .collect();
    let reply = within(clients.blobs.clone().put(tokio_stream::iter(parts))).await?;
    Ok(reply.into_inner().existed)
}

/// Sends a header and data, and gives the call up when the coordinator has received them. Returns the sender of its stream: while it exists,
/// the stream does not end, as with a connection that nothing passes any more.
async fn break_off(
    coordinator: &TestCoordinator,
    clients: &Clients,
    header: v1::BlobHeader,
    data: &[u8],
) -> mpsc::Sender<v1::PutBlobRequest> {
    let (parts, receiver) = mpsc::channel(4);
    let mut blobs = clients.blobs.clone();
    let call = tokio::spawn(async move { blobs.put(ReceiverStream::new(receiver)).await });
    let data_parts = data.chunks(BLOB_CHUNK_BYTES).map(|data| Part::Data(data.to_vec()));
    for part in std::iter::once(Part::Header(header.clone())).chain(data_parts) {
        within(parts.send(v1::PutBlobRequest { part: Some(part) }))
            .await
            .unwrap();
    }
    eventually("the data to arrive", || async {
        let arrived = files(coordinator).into_iter().any(|bytes| bytes == data.len() as u64);
        arrived.then_some(())
    })
    .await;
    call.abort();
    parts
}

/// The sizes of the files of unfinished uploads.
fn files(coordinator: &TestCoordinator) -> Vec<u64> {
    let folder = std::fs::read_dir(coordinator.dir.path().join("transit")).unwrap();
    let sizes = folder.flatten().filter_map(|file| Some(file.metadata().ok()?.len()));
    sizes.collect()
}

async fn received(clients: &Clients, content: &[u8], upload: &str) -> u64 {
    let request = v1::HasRequest {
        sha256: vec![ContentHash::of(content).to_hex()],
        upload: upload.to_owned(),
    };
    let reply = within(clients.blobs.clone().has(request)).await.unwrap();
    reply.into_inner().received
}

/// A connection carries less than the blob, so that an upload that starts over never ends.
#[tokio::test(flavor = "multi_thread")]
async fn an_upload_over_connections_that_break_continues_where_it_stopped() {
    let coordinator = TestCoordinator::start(LEASE).await;
    let line = BreakingProxy::to(coordinator.running.addr, 12 << 20).await.unwrap();
    let clients = connect(&line.url, &coordinator.running.token, None).await.unwrap();
    let blobs = RemoteBlobs::with_budget(&clients, TIMEOUT);
    let content = content(32 << 20);
    let (folder, hash) = (tempfile::tempdir().unwrap(), ContentHash::of(&content));
    let source = folder.path().join("source");
    std::fs::write(&source, &content).unwrap();
    within(blobs.put_file(hash, &source)).await.unwrap();
    assert!(line.broken() >= 2, "{} connections broke", line.broken());
    let stored = within(coordinator.blobs().get_bytes(hash, 64 << 20)).await.unwrap();
    assert!(stored == content, "wrong content");
    eventually("the temporary files to be removed", || async {
        files(&coordinator).is_empty().then_some(())
    })
    .await;
    within(coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_bytes_of_a_broken_upload_belong_to_its_sender() {
    let coordinator = TestCoordinator::start(LEASE).await;
    let admin = &coordinator.clients;
    let content = content(1 << 20);
    let half = content.len() / 2;
    let _stream = break_off(&coordinator, admin, header(&content, 0, "u1"), &content[..half]).await;
    assert_eq!(received(admin, &content, "u1").await, half as u64);
    // Neither another user nor another upload can continue it, nor a sender that claims to have sent more.
    let (token, _) = create_token(admin, "eve", "submitter", None).await;
    let eve = connect(&coordinator.running.url(), &token, None).await.unwrap();
    assert_eq!(received(&eve, &content, "u1").await, 0);
    assert_eq!(received(admin, &content, "u2").await, 0);
    for (clients, upload) in [(&eve, "u1"), (admin, "u2"), (admin, "")] {
        let refused = put(clients, header(&content, half, upload), &content[half..]).await;
        assert_eq!(refused.unwrap_err().code(), Code::OutOfRange, "{upload}");
    }
    // From a smaller offset than what arrived.
    let offset = half - 1000;
    assert!(
        !put(admin, header(&content, offset, "u1"), &content[offset..])
            .await
            .unwrap()
    );
    let hash = ContentHash::of(&content);
    let stored = within(coordinator.blobs().get_bytes(hash, 64 << 20)).await.unwrap();
    assert!(stored == content, "wrong content");
    assert_eq!(received(admin, &content, "u1").await, 0);
    within(coordinator.running.shutdown()).await;
}

/// Another content than announced is refused after a break as well, and nothing of it is kept.
#[tokio::test(flavor = "multi_thread")]
async fn a_continued_upload_with_wrong_bytes_is_refused_and_discarded() {
    let coordinator = TestCoordinator::start(LEASE).await;
    let clients = &coordinator.clients;
    let content = content(1 << 20);
    let half = content.len() / 2;
    let _stream = break_off(&coordinator, clients, header(&content, 0, "u1"), &content[..half]).await;
    let refused = put(clients, header(&content, half, "u1"), &vec![7; half]).await;
    assert_eq!(refused.unwrap_err().code(), Code::DataLoss);
    assert_eq!(received(clients, &content, "u1").await, 0);
    let missing = put(clients, header(&content, half, "u1"), &content[half..]).await;
    assert_eq!(missing.unwrap_err().code(), Code::OutOfRange);
    assert!(files(&coordinator).is_empty());
    within(coordinator.running.shutdown()).await;
}

/// How many uploads of one user the coordinator receives at once.
const MAX_UPLOADS_OF_USER: usize = 12;

/// Before, the call that waited did not give the upload up, and the sender had to send the whole blob again.
#[tokio::test(flavor = "multi_thread")]
async fn an_upload_is_taken_over_from_a_call_that_waits_until_others_end() {
    let coordinator = TestCoordinator::start(LEASE).await;
    let clients = &coordinator.clients;
    let content = content(1 << 20);
    let half = content.len() / 2;
    let _stream = break_off(&coordinator, clients, header(&content, 0, "u1"), &content[..half]).await;
    let open = |header: v1::BlobHeader, data: Vec<u8>| {
        let (parts, receiver) = mpsc::channel(4);
        let mut blobs = clients.blobs.clone();
        let call = tokio::spawn(async move {
            for part in [Part::Header(header), Part::Data(data)] {
                parts.send(v1::PutBlobRequest { part: Some(part) }).await.unwrap();
            }
            parts
        });
        let answer = tokio::spawn(async move { blobs.put(ReceiverStream::new(receiver)).await });
        (call, answer)
    };
    let mut others = Vec::new();
    for number in 0..MAX_UPLOADS_OF_USER {
        let (sent, _) = open(header(&[number as u8; 2000], 0, ""), vec![number as u8; 1000]);
        others.push(within(sent).await.unwrap());
    }
    eventually("the other uploads to begin", || async {
        (files(&coordinator).len() == MAX_UPLOADS_OF_USER + 1).then_some(())
    })
    .await;
    let (_waiting_stream, waiting) = open(header(&content, half, "u1"), content[half..].to_vec());
    let continued = async {
        loop {
            match put(clients, header(&content, half, "u1"), &content[half..]).await {
                // The other call came later than this one.
                Err(status) if status.code() == Code::Aborted => {}
                other => return other,
            }
        }
    };
    let given_up = async {
        let answer = within(waiting).await.unwrap();
        others.pop();
        answer.unwrap_err().code()
    };
    let (continued, given_up) = tokio::join!(continued, given_up);
    assert!(!continued.unwrap());
    assert_eq!(given_up, Code::Aborted);
    let stored = within(coordinator.blobs().get_bytes(ContentHash::of(&content), 64 << 20)).await;
    assert!(stored.unwrap() == content, "wrong content");
    drop(others);
    within(coordinator.running.shutdown()).await;
}

/// Clients of older versions do not name their uploads, and send the whole blob again.
#[tokio::test(flavor = "multi_thread")]
async fn an_upload_without_a_name_starts_over() {
    let coordinator = TestCoordinator::start(LEASE).await;
    let clients = &coordinator.clients;
    let content = content(1 << 20);
    drop(break_off(&coordinator, clients, header(&content, 0, ""), &content[..1 << 19]).await);
    eventually("the temporary file to be removed", || async {
        files(&coordinator).is_empty().then_some(())
    })
    .await;
    assert_eq!(received(clients, &content, "").await, 0);
    assert!(!put(clients, header(&content, 0, ""), &content).await.unwrap());
    let hash = ContentHash::of(&content);
    assert_eq!(within(coordinator.blobs().has(&[hash])).await.unwrap(), [true]);
    within(coordinator.running.shutdown()).await;
}

/// Before, the message was that of the system alone, and a worker took it for an outage of the connection.
#[tokio::test(flavor = "multi_thread")]
async fn a_folder_that_cannot_be_written_is_named_and_the_upload_succeeds_when_it_is_mended() {
    let coordinator = TestCoordinator::start(LEASE).await;
    let clients = &coordinator.clients;
    let content = content(1000);
    let transit = coordinator.dir.path().join("transit");
    std::fs::remove_dir_all(&transit).unwrap();
    let failed = put(clients, header(&content, 0, "u1"), &content).await.unwrap_err();
    assert_eq!(failed.code(), Code::Unavailable);
    assert!(aitk_proto::is_storage_refused(&failed), "{failed:?}");
    let folder = transit.display().to_string();
    for part in [
        "could not open a file for an upload in",
        folder.as_str(),
        "No such file",
        "check that folder",
    ] {
        assert!(failed.message().contains(part), "{part}: {}", failed.message());
    }
    std::fs::create_dir(&transit).unwrap();
    assert!(!put(clients, header(&content, 0, "u1"), &content).await.unwrap());
    within(coordinator.running.shutdown()).await;
}
