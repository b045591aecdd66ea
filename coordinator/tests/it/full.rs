//! The coordinator's disk is full: what is there can be read, what comes is refused as an error of its own kind, nothing new
//! starts and says why, and with room again everything goes on.

use crate::support::{FakeWorker, PATIENCE, config, eventually, held, input, put_checkpoint, submission, within};
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::control::{JobState, JobView, Verdict};
use aitk_common::hash::ContentHash;
use aitk_common::storage::{BlobStore, StorageError};
use aitk_coordinator::{Config, Running, start};
use aitk_proto::client::{Clients, connect};
use aitk_proto::remote_blobs::RemoteBlobs;
use aitk_proto::v1;
use std::path::Path;
use std::time::Duration;

/// A coordinator that keeps so many bytes of its disk for the database.
async fn with_reserve(dir: &Path, reserve: u64) -> (Running, Clients) {
    let config = Config {
        disk_reserve: Some(reserve),
        ..config(dir, Duration::from_secs(60))
    };
    let running = start(config).await.unwrap();
    let clients = connect(&running.url(), &running.token, None).await.unwrap();
    (running, clients)
}

async fn view(clients: &Clients, job: &str) -> JobView {
    let request = v1::GetJobRequest { job_id: job.into() };
    let reply = within(clients.jobs.clone().get(request)).await.unwrap();
    reply.into_inner().try_into().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_pauses_the_queue_and_costs_no_job_its_tries() {
    let dir = tempfile::tempdir().unwrap();
    let (running, clients) = with_reserve(dir.path(), 0).await;
    let blobs = RemoteBlobs::with_budget(&clients, PATIENCE);
    within(blobs.put_bytes(input().id(), input().to_bytes().into()))
        .await
        .unwrap();
    let checkpoint = put_checkpoint(&blobs, 5).await;
    let submitted = within(clients.jobs.clone().submit(v1::SubmitRequest::from(submission("a")))).await;
    let job = submitted.unwrap().into_inner().job_id;
    // More failures of the coordinator's own storage in a row than a job has tries.
    let mut worker = FakeWorker::register(&clients, FakeWorker::registration("w", None, Vec::new())).await;
    let work = worker.assigned().await;
    let failed = Outcome::Failed {
        cause: FailureCause::Storage,
        message: "no room".into(),
    };
    assert_eq!(worker.finish(&held(&work), failed).await, Verdict::Accepted);
    let after = view(&clients, &job).await;
    assert_eq!((after.state, after.failures), (JobState::Queued, 0), "{after:?}");
    drop(worker);
    within(running.shutdown()).await;

    // As if the disk were full: more is kept for the database than it has.
    let (running, clients) = with_reserve(dir.path(), 1 << 60).await;
    let _worker = FakeWorker::register(&clients, FakeWorker::registration("x", None, Vec::new())).await;
    let waits = eventually("the reason", || async {
        Some(view(&clients, &job).await).filter(|view| view.reason.contains("disk is full"))
    })
    .await;
    assert_eq!(waits.state, JobState::Queued);
    assert!(
        waits.reason.starts_with("waits: the coordinator's disk is full (") && waits.reason.contains("GiB reserved)"),
        "{}",
        waits.reason
    );
    let blobs = RemoteBlobs::with_budget(&clients, PATIENCE);
    let error = within(blobs.put_bytes(ContentHash::of(b"new"), b"new".as_slice().into()))
        .await
        .unwrap_err();
    assert!(
        matches!(&error, StorageError::Full { message, .. } if message.contains("kept for the database")),
        "{error:?}"
    );
    // Reading needs no room, and the database goes on.
    assert!(!within(blobs.get_bytes(checkpoint, 1 << 20)).await.unwrap().is_empty());
    let second = within(clients.jobs.clone().submit(v1::SubmitRequest::from(submission("b")))).await;
    assert!(
        view(&clients, &second.unwrap().into_inner().job_id)
            .await
            .reason
            .contains("disk is full")
    );
    within(running.shutdown()).await;

    let (running, clients) = with_reserve(dir.path(), 0).await;
    let mut worker = FakeWorker::register(&clients, FakeWorker::registration("y", None, Vec::new())).await;
    let work = worker.assigned().await;
    assert_eq!(worker.finish(&held(&work), Outcome::Completed).await, Verdict::Accepted);
    within(running.shutdown()).await;
}
