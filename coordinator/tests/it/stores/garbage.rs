//! Garbage collection removes blobs that nothing references, and keeps the others.

use crate::support::data_sets::{collect, data_set, put, submission_with};
use crate::support::{FakeWorker, TestCoordinator, config, held_attempt, put_checkpoint, within};
use aitk_common::attempt::Outcome;
use aitk_common::control_plane::{Artifact, ToCoordinator, Verdict};
use aitk_common::hash::ContentHash;
use aitk_common::storage::BlobStore;
use aitk_common::storage::snapshot::Snapshot;
use aitk_coordinator::{Config, Retention, start};
use aitk_proto::client::connect;
use aitk_proto::remote_blobs::RemoteBlobs;
use aitk_proto::v1::{self, CollectGarbageRequest};
use std::time::Duration;
use tonic::Code;

const LONG_LEASE: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn a_submission_may_only_reference_stored_inputs() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let mut jobs = coordinator.clients.jobs.clone();
    let (snapshot, contents) = data_set("a");
    let error = within(jobs.submit(submission_with("a", &snapshot))).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(
        error.message().contains("./data") && error.message().contains("upload it first"),
        "{error}"
    );

    put(&coordinator.blobs(), &snapshot.to_bytes()).await;
    put(&coordinator.blobs(), &contents[0]).await;
    let error = within(jobs.submit(submission_with("a", &snapshot))).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    let missing = ContentHash::of(&contents[1]).to_hex();
    assert!(
        error.message().contains(&missing) && error.message().contains("submit again"),
        "{error}"
    );

    let (_, junk) = (
        put(&coordinator.blobs(), b"no list").await,
        Snapshot::new(Vec::new(), false).unwrap(),
    );
    let mut request = submission_with("a", &junk);
    request
        .inputs
        .insert("./data".into(), ContentHash::of(b"no list").to_hex());
    let error = within(jobs.submit(request)).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.message().contains("is not a snapshot"), "{error}");

    put(&coordinator.blobs(), &contents[1]).await;
    within(jobs.submit(submission_with("a", &snapshot))).await.unwrap();
    within(coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_jobs_blobs_are_kept_until_the_job_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let retention = |jobs, checkpoints| Retention {
        every: None,
        grace: Duration::ZERO,
        jobs,
        checkpoints,
        ..Retention::default()
    };
    let settings = |retention| Config {
        retention,
        ..config(dir.path(), LONG_LEASE)
    };
    let running = start(settings(retention(None, None))).await.unwrap();
    let clients = connect(&running.url(), &running.token, None).await.unwrap();
    let blobs = RemoteBlobs::new(&clients);
    let orphan = put(&blobs, b"orphan").await;
    let (snapshot, contents) = data_set("kept");
    for content in contents
        .iter()
        .map(Vec::as_slice)
        .chain([snapshot.to_bytes().as_slice()])
    {
        put(&blobs, content).await;
    }
    let job = within(clients.jobs.clone().submit(submission_with("kept", &snapshot)))
        .await
        .unwrap();
    let job = job.into_inner().job_id;
    let mut worker = FakeWorker::register(&clients, FakeWorker::registration("w", None, Vec::new())).await;
    let work = worker.next_assignment().await;
    let mut saved = Vec::new();
    for step in 1..=3 {
        saved.push(put_checkpoint(&blobs, step).await);
        assert_eq!(
            worker
                .commit(&held_attempt(&work), saved[step as usize - 1], step)
                .await,
            Verdict::Accepted
        );
    }
    let lora = put(&blobs, b"lora").await;
    let artifact = Artifact {
        name: "kept/kept.safetensors".into(),
        kind: "lora".into(),
        hash: Some(lora),
        bytes: 4,
        step: Some(3),
        index: None,
        local_path: None,
    };
    let held = held_attempt(&work);
    let ready = worker.request(|request| ToCoordinator::ArtifactReady {
        request,
        held,
        artifact,
    });
    assert_eq!(ready.await.0, Verdict::Accepted);

    // A dry run removes nothing.
    let counted = collect(&clients, true).await;
    assert_eq!((counted.blobs, counted.removed), (3 + 1 + 6 + 1, 3), "{counted:?}");
    assert_eq!(blobs.has(&[orphan, saved[0]]).await.unwrap(), [true, true]);
    let done = collect(&clients, false).await;
    assert_eq!(
        done.removed, 3,
        "the orphan, the first checkpoint's manifest and its file: {done:?}"
    );
    let all = [
        orphan,
        saved[0],
        saved[1],
        saved[2],
        lora,
        snapshot.id(),
        ContentHash::of(&contents[0]),
    ];
    let after = blobs.has(&all).await.unwrap();
    assert_eq!(after, [false, false, true, true, true, true, true]);

    // An ended job keeps only its last checkpoint.
    let outcome = Outcome::Failed {
        cause: aitk_common::attempt::FailureCause::BadInput,
        message: "no".into(),
    };
    assert_eq!(worker.finish(&held_attempt(&work), outcome).await, Verdict::Accepted);
    assert_eq!(collect(&clients, false).await.removed, 2);
    assert_eq!(
        blobs.has(&all).await.unwrap(),
        [false, false, false, true, true, true, true]
    );
    drop(worker);
    within(running.shutdown()).await;

    // The checkpoint expires.
    let running = start(settings(retention(None, Some(Duration::ZERO)))).await.unwrap();
    let clients = connect(&running.url(), &running.token, None).await.unwrap();
    let blobs = RemoteBlobs::new(&clients);
    assert_eq!(collect(&clients, false).await.removed, 2);
    assert_eq!(
        blobs.has(&all).await.unwrap(),
        [false, false, false, false, true, true, true]
    );
    let request = v1::GetJobRequest { job_id: job.clone() };
    let view = within(clients.jobs.clone().get(request.clone()))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(view.checkpoint_step, None);
    within(running.shutdown()).await;

    // Then the whole job is removed, with the blobs that only it referenced.
    let running = start(settings(retention(Some(Duration::ZERO), None))).await.unwrap();
    let clients = connect(&running.url(), &running.token, None).await.unwrap();
    let done = collect(&clients, false).await;
    assert_eq!((done.jobs_forgotten, done.removed, done.needed), (1, 4, 0), "{done:?}");
    let gone = within(clients.jobs.clone().get(request)).await.unwrap_err();
    assert_eq!(gone.code(), Code::NotFound);
    within(running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn young_blobs_are_kept_and_an_unreadable_input_stops_the_collection() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let orphan = coordinator.put(b"orphan").await;
    let done = collect(&coordinator.clients, false).await;
    assert_eq!(
        (done.blobs, done.removed),
        (2, 0),
        "the grace period of a day has not passed"
    );
    assert_eq!(coordinator.blobs().has(&[orphan]).await.unwrap(), [true]);

    coordinator.submit("waits").await;
    let file = coordinator.dir.path().join("storage/blobs");
    let id = crate::support::input().id().to_hex();
    std::fs::remove_file(file.join(&id[..2]).join(&id)).unwrap();
    let request = CollectGarbageRequest { dry_run: false };
    let error = within(coordinator.clients.admin.clone().collect_garbage(request))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(
        error.message().contains("nothing was removed") && error.message().contains(&id),
        "{error}"
    );
    within(coordinator.running.shutdown()).await;
}
