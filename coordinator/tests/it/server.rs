//! A coordinator over gRPC on loopback, with workers that the tests drive.

use crate::support::{self, FakeWorker, TestCoordinator, eventually, held_attempt, logs, submission, within};
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::control_plane::{
    Artifact, AttemptRef, EventBody, JobState, Progress, Report, Submission, ToCoordinator, ToWorker, UnixMillis,
    Verdict,
};
use aitk_common::hash::ContentHash;
use aitk_common::id::{AttemptId, Epoch};
use aitk_common::storage::{BlobStore, StorageError};
use aitk_proto::v1;
use std::time::Duration;
use tonic::Code;

/// Longer than any of these tests takes, so no lease expires.
const LONG_LEASE: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn a_job_runs_from_submission_to_artifact() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let job = coordinator.submit("shapes").await.job;
    let waiting = coordinator.job(job.as_str()).await;
    assert_eq!(waiting.state, JobState::Queued);
    assert!(waiting.reason.contains("no worker is connected"), "{}", waiting.reason);
    assert_eq!(waiting.config_text.as_deref(), Some("name: shapes\n"));

    let mut worker = FakeWorker::new(&coordinator, "w1").await;
    let work = worker.next_assignment().await;
    assert_eq!((&work.job, work.epoch, work.resume), (&job, Epoch(1), None));
    assert_eq!(work.inputs["./data"], support::input().id());
    assert!(work.job_json.contains("shapes") && work.config_text.contains("shapes"));
    worker.heartbeat(&[held_attempt(&work)]).await;

    let follower = {
        let clients = coordinator.clients.clone();
        let request = v1::EventsRequest {
            job_id: job.to_string(),
            cursor: 0,
            follow: true,
        };
        tokio::spawn(async move {
            let mut stream = clients.jobs.clone().events(request).await.unwrap().into_inner();
            let mut events: Vec<aitk_common::control_plane::JobEvent> = Vec::new();
            while let Some(event) = stream.message().await.unwrap() {
                events.push(event.try_into().unwrap());
            }
            events
        })
    };
    worker.log(&work, 1, "one").await;
    let progress = Progress {
        done: 1,
        total: 2,
        seconds_per_step: Some(0.5),
    };
    let report = Report::Progress(progress);
    worker
        .send(ToCoordinator::Event {
            held: held_attempt(&work),
            seq: 2,
            time: UnixMillis(1),
            report,
        })
        .await;
    worker.log(&work, 3, "two").await;

    let (text, file) = support::checkpoint(1);
    let manifest = ContentHash::of(text.as_bytes());
    assert_eq!(
        worker.commit(&held_attempt(&work), manifest, 1).await,
        Verdict::Refused,
        "the manifest is not in storage yet"
    );
    within(coordinator.blobs().put_bytes(manifest, text.into()))
        .await
        .unwrap();
    assert_eq!(
        worker.commit(&held_attempt(&work), manifest, 1).await,
        Verdict::Refused,
        "a file that the manifest lists is not in storage yet"
    );
    within(coordinator.blobs().put_bytes(ContentHash::of(&file), file.into()))
        .await
        .unwrap();
    let junk = coordinator.put(b"not a manifest").await;
    assert_eq!(worker.commit(&held_attempt(&work), junk, 1).await, Verdict::Refused);
    assert_eq!(
        worker.commit(&held_attempt(&work), manifest, 1).await,
        Verdict::Accepted
    );
    let view = coordinator.job(job.as_str()).await;
    assert_eq!((view.checkpoint_step, view.progress), (Some(1), Some(progress)));

    let artifact = Artifact {
        name: "shapes/shapes.safetensors".into(),
        kind: "lora".into(),
        hash: Some(coordinator.put(b"lora").await),
        bytes: 4,
        step: Some(2),
        index: None,
        local_path: None,
    };
    let (ready, held_by) = (artifact.clone(), held_attempt(&work));
    let verdict = worker
        .request(|request| ToCoordinator::ArtifactReady {
            request,
            held: held_by,
            artifact: ready,
        })
        .await
        .0;
    assert_eq!(verdict, Verdict::Accepted);
    assert_eq!(
        worker.finish(&held_attempt(&work), Outcome::Completed).await,
        Verdict::Accepted
    );

    let events = within(follower).await.unwrap();
    assert_eq!(logs(&events), ["one", "two"]);
    assert!(matches!(
        events.last().unwrap().body,
        EventBody::State {
            state: JobState::Completed,
            ..
        }
    ));
    let log_cursors: Vec<u64> = events
        .iter()
        .filter(|event| !matches!(event.body, EventBody::Progress(_)))
        .map(|event| event.cursor)
        .collect();
    assert_eq!(
        log_cursors,
        (1..=log_cursors.len() as u64).collect::<Vec<_>>(),
        "no gap, no repetition"
    );
    // Read again from a cursor in the middle, and from the end.
    let later = coordinator.events(job.as_str(), log_cursors[3], false).await;
    assert_eq!(later.first().unwrap().cursor, log_cursors[4]);
    let rest = coordinator
        .events(job.as_str(), *log_cursors.last().unwrap(), true)
        .await;
    assert!(
        rest.iter().all(|event| matches!(event.body, EventBody::Progress(_))),
        "{rest:?}"
    );

    let request = v1::ArtifactsRequest {
        job_id: job.as_str()[..5].into(),
        ..Default::default()
    };
    let reply = within(coordinator.clients.jobs.clone().artifacts(request))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(reply.artifacts, [v1::Artifact::from(artifact)]);
    let lora = coordinator
        .blobs()
        .get_bytes(ContentHash::of(b"lora"), 10)
        .await
        .unwrap();
    assert_eq!(&lora[..], b"lora");
    let workers = within(
        coordinator
            .clients
            .jobs
            .clone()
            .list_workers(v1::ListWorkersRequest::default()),
    )
    .await
    .unwrap()
    .into_inner();
    assert_eq!(
        (workers.workers[0].name.as_str(), workers.workers[0].connected),
        ("w1", true)
    );
    within(coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_attempt_survives_a_restart_of_the_coordinator() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let job = coordinator.submit("long").await.job;
    let waiting = coordinator.submit("next").await.job;
    let mut worker = FakeWorker::new(&coordinator, "w1").await;
    let work = worker.next_assignment().await;
    worker.heartbeat(&[held_attempt(&work)]).await;
    worker.log(&work, 1, "before").await;
    let manifest = coordinator.checkpoint(5).await;
    assert_eq!(
        worker.commit(&held_attempt(&work), manifest, 5).await,
        Verdict::Accepted
    );
    let id = worker.id.clone();
    let token = coordinator.running.token.clone();

    let coordinator = coordinator.restart().await;
    assert!(matches!(
        worker.wait_for_message(Some).await,
        ToWorker::HeartbeatReply { .. } | ToWorker::GoingAway { .. }
    ));
    assert_eq!(coordinator.running.token, token, "the token is created once");
    let view = coordinator.job(job.as_str()).await;
    assert_eq!((view.state, view.checkpoint_step), (JobState::Running, Some(5)));
    assert!(view.reason.contains("not connected"), "{}", view.reason);

    let stale = AttemptRef {
        attempt: AttemptId::new("jgone-3"),
        epoch: Epoch(3),
    };
    let registration = FakeWorker::registration("w1", Some(id.clone()), vec![held_attempt(&work), stale]);
    let mut worker = FakeWorker::register(&coordinator.clients, registration).await;
    assert_eq!(
        (&worker.id, &worker.keep),
        (&id, &vec![work.attempt.clone()]),
        "the known attempt goes on, the unknown one is dropped"
    );
    worker.log(&work, 1, "before").await;
    worker.log(&work, 2, "after").await;
    let manifest = coordinator.checkpoint(9).await;
    assert_eq!(
        worker.commit(&held_attempt(&work), manifest, 9).await,
        Verdict::Accepted
    );
    assert_eq!(
        worker.finish(&held_attempt(&work), Outcome::Completed).await,
        Verdict::Accepted
    );
    assert_eq!(
        worker.finish(&held_attempt(&work), Outcome::Completed).await,
        Verdict::Accepted,
        "a repeated report is accepted"
    );
    assert_eq!(coordinator.job(job.as_str()).await.state, JobState::Completed);
    assert_eq!(
        logs(&coordinator.events(job.as_str(), 0, false).await),
        ["before", "after"],
        "once each"
    );

    // The queue survives, too. A worker without its attempt is assigned work again.
    let second = FakeWorker::registration("w1", Some(id.clone()), Vec::new());
    let mut worker = FakeWorker::register(&coordinator.clients, second).await;
    let next = worker.next_assignment().await;
    assert_eq!((next.job, next.resume), (waiting, None));
    within(coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_without_heartbeats_is_fenced_and_its_job_goes_on_elsewhere() {
    let coordinator = TestCoordinator::start(Duration::from_millis(2500)).await;
    let job = coordinator.submit("shapes").await.job;
    let mut one = FakeWorker::new(&coordinator, "one").await;
    let first = one.next_assignment().await;
    one.heartbeat(&[held_attempt(&first)]).await;
    let saved = coordinator.checkpoint(10).await;
    assert_eq!(one.commit(&held_attempt(&first), saved, 10).await, Verdict::Accepted);

    let mut two = FakeWorker::new(&coordinator, "two").await;
    let second = loop {
        two.heartbeat(&[]).await;
        let next = tokio::time::timeout(Duration::from_millis(100), two.next()).await;
        match next {
            Ok(Some(ToWorker::Assign(work))) => break *work,
            Ok(None) => panic!("the session of the worker that sends heartbeats ended"),
            _ => {}
        }
    };
    assert_eq!(
        (&second.job, second.epoch, second.resume),
        (&job, Epoch(2), Some(saved))
    );
    two.heartbeat(&[held_attempt(&second)]).await;

    // The first worker's session has ended. A new session tells it that it may keep nothing.
    while one.next().await.is_some() {}
    two.heartbeat(&[held_attempt(&second)]).await;
    let registration = FakeWorker::registration("one", Some(one.id.clone()), vec![held_attempt(&first)]);
    let mut one = FakeWorker::register(&coordinator.clients, registration).await;
    assert!(one.keep.is_empty());
    let stale = coordinator.checkpoint(30).await;
    assert_eq!(one.commit(&held_attempt(&first), stale, 30).await, Verdict::Fenced);
    assert_eq!(
        one.finish(&held_attempt(&first), Outcome::Completed).await,
        Verdict::Fenced
    );
    assert_eq!(
        one.finish(&held_attempt(&second), Outcome::Completed).await,
        Verdict::Fenced,
        "the attempt of another worker"
    );
    one.heartbeat(&[held_attempt(&first)]).await;
    let fenced = one
        .wait_for_message(|m| {
            if let ToWorker::Fence { held, reason } = m {
                Some((held, reason))
            } else {
                None
            }
        })
        .await;
    assert_eq!(fenced.0, held_attempt(&first));
    two.heartbeat(&[held_attempt(&second)]).await;
    assert!(fenced.1.contains("followed by epoch 2"), "{}", fenced.1);
    assert_eq!(
        two.finish(&held_attempt(&second), Outcome::Completed).await,
        Verdict::Accepted
    );
    let view = coordinator.job(job.as_str()).await;
    assert_eq!(
        (view.state, view.checkpoint_step, view.attempts.len()),
        (JobState::Completed, Some(10), 2)
    );
    within(coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_saves_and_resume_continues_from_the_checkpoint() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let job = coordinator.submit("shapes").await.job.to_string();
    let mut worker = FakeWorker::new(&coordinator, "w1").await;
    let work = worker.next_assignment().await;
    worker.heartbeat(&[held_attempt(&work)]).await;
    let stop = v1::StopJobRequest {
        job_id: job[..4].into(),
        now: false,
    };
    let view = within(coordinator.clients.jobs.clone().stop(stop))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(view.state(), v1::JobState::Stopping);
    let save = worker
        .wait_for_message(|m| {
            if let ToWorker::Stop { save, .. } = m {
                Some(save)
            } else {
                None
            }
        })
        .await;
    assert!(save);
    let saved = coordinator.checkpoint(7).await;
    assert_eq!(worker.commit(&held_attempt(&work), saved, 7).await, Verdict::Accepted);
    assert_eq!(
        worker.finish(&held_attempt(&work), Outcome::stopped()).await,
        Verdict::Accepted
    );
    coordinator.in_state(&job, JobState::Stopped).await;
    let resume = v1::ResumeJobRequest { job_id: job.clone() };
    within(coordinator.clients.jobs.clone().resume(resume.clone()))
        .await
        .unwrap();
    let resumed = worker.next_assignment().await;
    assert_eq!((resumed.epoch, resumed.resume), (Epoch(2), Some(saved)));
    assert_eq!(resumed.seed, work.seed, "all attempts of a job have the same seed");
    let refused = within(coordinator.clients.jobs.clone().resume(resume))
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::Aborted);
    let failed = Outcome::Failed {
        cause: FailureCause::BadInput,
        message: "cat.png has 0 bytes".into(),
    };
    worker.finish(&held_attempt(&resumed), failed).await;
    assert_eq!(
        coordinator.in_state(&job, JobState::Failed).await.reason,
        "cat.png has 0 bytes"
    );
    within(coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn submissions_are_idempotent_validated_and_found_by_id_prefix() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let mut jobs = coordinator.clients.jobs.clone();
    let keyed = Submission {
        idempotency_key: Some("k1".into()),
        ..submission("a")
    };
    let first = within(jobs.submit(v1::SubmitRequest::from(keyed.clone())))
        .await
        .unwrap()
        .into_inner();
    let repeated = within(jobs.submit(v1::SubmitRequest::from(keyed.clone())))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        (repeated.job_id.as_str(), repeated.existed, first.existed),
        (first.job_id.as_str(), true, false)
    );
    let coordinator = coordinator.restart().await;
    let mut jobs = coordinator.clients.jobs.clone();
    let later = within(jobs.submit(v1::SubmitRequest::from(keyed)))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        (later.job_id, later.existed),
        (first.job_id.clone(), true),
        "also after a restart"
    );

    let unknown = within(jobs.get(v1::GetJobRequest {
        job_id: "jzzzzzzzz".into(),
    }))
    .await
    .unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
    coordinator.submit("b").await;
    let ambiguous = within(jobs.get(v1::GetJobRequest { job_id: "j".into() }))
        .await
        .unwrap_err();
    assert_eq!(ambiguous.code(), Code::InvalidArgument);
    assert!(ambiguous.message().contains(&first.job_id), "{}", ambiguous.message());

    for (field, bad) in [
        (
            "config_format",
            v1::SubmitRequest {
                config_format: "toml".into(),
                ..submission("x").into()
            },
        ),
        (
            "job_json",
            v1::SubmitRequest {
                job_json: "{".into(),
                ..submission("x").into()
            },
        ),
        (
            "inputs",
            v1::SubmitRequest {
                inputs: [("d".to_owned(), "beef".to_owned())].into(),
                ..submission("x").into()
            },
        ),
        (
            "config_text",
            v1::SubmitRequest {
                config_text: "#".repeat(5 << 20),
                ..submission("x").into()
            },
        ),
    ] {
        let error = within(jobs.submit(bad)).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{field}: {error}");
        assert!(error.message().starts_with(field), "{field}: {error}");
    }
    let list = within(jobs.list(v1::ListJobsRequest::default()))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(list.jobs.len(), 2, "refused submissions leave no job");
    within(coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn blobs_are_verified_on_upload_and_download() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let blobs = coordinator.blobs();
    let big: Vec<u8> = (0..3_500_000_u32).map(|n| n.to_le_bytes()[n as usize % 3]).collect();
    let hash = ContentHash::of(&big);
    let path = coordinator.dir.path().join("big");
    std::fs::write(&path, &big).unwrap();
    assert_eq!(blobs.has(&[hash]).await.unwrap(), [false]);
    within(blobs.put_file(hash, &path)).await.unwrap();
    within(blobs.put_file(hash, &path)).await.unwrap();
    assert_eq!(blobs.has(&[hash, ContentHash::of(b"no")]).await.unwrap(), [true, false]);
    let back = coordinator.dir.path().join("back");
    assert_eq!(within(blobs.get_to_file(hash, &back)).await.unwrap(), big.len() as u64);
    assert_eq!(std::fs::read(&back).unwrap(), big);
    assert!(matches!(
        within(blobs.get_bytes(hash, 10)).await,
        Err(StorageError::TooLarge { .. })
    ));
    let missing = within(blobs.get_to_file(ContentHash::of(b"no"), &back)).await;
    assert!(matches!(missing, Err(StorageError::NotFound { .. })), "{missing:?}");
    let empty = ContentHash::of(b"");
    within(blobs.put_bytes(empty, "".into())).await.unwrap();
    assert_eq!(within(blobs.get_bytes(empty, 0)).await.unwrap().len(), 0);
    assert!(
        matches!(within(blobs.put_file(empty, &path)).await, Ok(())),
        "the blob is in storage, so the file is not read"
    );
    let wrong = within(blobs.put_file(ContentHash::of(b"x"), &path)).await;
    assert!(matches!(wrong, Err(StorageError::Corrupt { .. })), "{wrong:?}");

    // Wrong content, more bytes than announced, fewer bytes than announced, no header, two headers, nothing at all.
    use v1::put_blob_request::Part;
    let header = |bytes| {
        Part::Header(v1::BlobHeader {
            sha256: ContentHash::of(b"abc").to_hex(),
            bytes,
            ..Default::default()
        })
    };
    let cases = [
        (vec![header(3), Part::Data(b"xyz".to_vec())], Code::DataLoss),
        (vec![header(2), Part::Data(b"abc".to_vec())], Code::InvalidArgument),
        (vec![header(3), Part::Data(b"ab".to_vec())], Code::InvalidArgument),
        (vec![Part::Data(b"abc".to_vec())], Code::InvalidArgument),
        (vec![header(3), header(3)], Code::InvalidArgument),
        (vec![], Code::InvalidArgument),
    ];
    for (index, (parts, code)) in cases.into_iter().enumerate() {
        let parts: Vec<_> = parts
            .into_iter()
            .map(|part| v1::PutBlobRequest { part: Some(part) })
            .collect();
        let error = within(coordinator.clients.blobs.clone().put(tokio_stream::iter(parts)))
            .await
            .unwrap_err();
        assert_eq!(error.code(), code, "case {index}: {error}");
    }
    assert_eq!(
        blobs.has(&[ContentHash::of(b"abc")]).await.unwrap(),
        [false],
        "failed uploads store nothing"
    );
    eventually("the partial uploads to be removed", || async {
        let left = std::fs::read_dir(coordinator.dir.path().join("transit"))
            .unwrap()
            .count();
        (left == 0).then_some(())
    })
    .await;
    within(coordinator.running.shutdown()).await;
}
