//! Jobs, their logs and their files belong to somebody.

use super::{CALM, audit, get, line, list, somebody, stop, submit};
use crate::support::{self, FakeWorker, Pool, eventually, held, job_json, submission, within};
use aitk_common::control::{Artifact, Submission, ToCoordinator, Verdict};
use aitk_common::id::UserName;
use aitk_common::storage::BlobStore;
use aitk_proto::client::Clients;
use aitk_proto::remote_blobs::RemoteBlobs;
use aitk_proto::v1;
use std::time::Duration;
use tonic::{Code, Status};

/// Two users; the first one's job runs, the second one's waits.
struct Lab {
    pool: Pool,
    anna: Clients,
    ben: Clients,
    hers: String,
    his: String,
    worker: FakeWorker,
    work: aitk_common::control::HeldAttempt,
}

impl Lab {
    async fn start() -> Self {
        let pool = Pool::start(CALM).await;
        let anna = somebody(&pool, "anna", "submitter").await;
        let ben = somebody(&pool, "ben", "submitter").await;
        let hers = submit(&anna, "hers").await.unwrap();
        let his = submit(&ben, "his").await.unwrap();
        let mut worker = FakeWorker::new(&pool, "w").await;
        let work = worker.assigned().await;
        assert_eq!(work.job.as_str(), hers);
        let work = held(&work);
        Self {
            pool,
            anna,
            ben,
            hers,
            his,
            worker,
            work,
        }
    }

    /// What she may call her job: its id, and the beginning of it.
    fn names(&self) -> [String; 2] {
        [self.hers.clone(), self.hers[..8].to_owned()]
    }
}

/// Everything that can be done with one job.
async fn attempts(clients: &Clients, job: &str) -> Vec<Result<(), Status>> {
    let job_id = || job.to_owned();
    let mut jobs = clients.jobs.clone();
    let events = |follow| v1::EventsRequest {
        job_id: job_id(),
        cursor: 0,
        follow,
    };
    let priority = v1::SetPriorityRequest {
        job_id: job_id(),
        priority: -9,
    };
    vec![
        get(clients, job).await.map(drop),
        within(jobs.explain(v1::ExplainRequest { job_id: job_id() }))
            .await
            .map(drop),
        within(jobs.events(events(false))).await.map(drop),
        within(jobs.events(events(true))).await.map(drop),
        within(jobs.artifacts(v1::ArtifactsRequest {
            job_id: job_id(),
            ..Default::default()
        }))
        .await
        .map(drop),
        within(jobs.set_priority(priority)).await.map(drop),
        within(jobs.pause(v1::PauseJobRequest { job_id: job_id() }))
            .await
            .map(drop),
        within(jobs.resume(v1::ResumeJobRequest { job_id: job_id() }))
            .await
            .map(drop),
        stop(clients, job).await.map(drop),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_reaches_another_users_job_or_log() {
    let lab = Lab::start().await;
    assert_eq!(list(&lab.anna).await, std::slice::from_ref(&lab.hers));
    assert_eq!(list(&lab.ben).await, std::slice::from_ref(&lab.his));
    for name in lab.names() {
        for (number, attempt) in attempts(&lab.ben, &name).await.into_iter().enumerate() {
            let error = attempt.unwrap_err();
            assert_eq!(error.code(), Code::NotFound, "{number}: {error}");
            // As for a job that is not there.
            assert!(error.message().contains("there is no job"), "{error}");
        }
    }
    for action in ["job.read", "job.stop", "job.pause", "job.resume", "job.priority"] {
        let refused = line(&lab.pool.clients, action, |line| line.action == action).await;
        assert!(
            !refused.done && refused.who == "ben" && refused.object == lab.hers,
            "{refused:?}"
        );
    }
    assert_eq!(get(&lab.anna, &lab.hers).await.unwrap().state(), v1::JobState::Running);
    // She reaches it, by the same names.
    for name in lab.names() {
        assert_eq!(get(&lab.anna, &name).await.unwrap().owner, "anna");
    }
    stop(&lab.anna, &lab.hers).await.unwrap();
    let stopped = line(&lab.pool.clients, "her stop", |line| {
        line.action == "job.stop" && line.who == "anna"
    })
    .await;
    assert!(stopped.done && stopped.object == lab.hers, "{stopped:?}");
    within(lab.pool.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_array_belongs_to_somebody_like_its_members() {
    let lab = Lab::start().await;
    let members = ["one", "two"].map(|name| v1::ArrayMember {
        job_json: submission(name).job_json,
        twin: 0,
    });
    let request = v1::SubmitArrayRequest {
        shared: Some(submission("both").into()),
        name: "both".into(),
        members: members.to_vec(),
        at_most: 0,
    };
    let forged = v1::SubmitArrayRequest {
        shared: Some(v1::SubmitRequest {
            owner: "anna".into(),
            ..submission("both").into()
        }),
        ..request.clone()
    };
    let refused = within(lab.ben.jobs.clone().submit_array(forged)).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    let reply = within(lab.anna.jobs.clone().submit_array(request)).await.unwrap();
    let array = reply.into_inner().job_id;
    for name in [array.clone(), array[..8].to_owned(), format!("{array}-1")] {
        for refused in attempts(&lab.ben, &name).await {
            assert_eq!(refused.unwrap_err().code(), Code::NotFound, "{name}");
        }
        assert_eq!(get(&lab.anna, &name).await.unwrap().owner, "anna");
    }
    let theirs = v1::ListJobsRequest {
        array_id: array.clone(),
        ..Default::default()
    };
    let refused = within(lab.ben.jobs.clone().list(theirs)).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound);
    let submitted = line(&lab.pool.clients, "her array", |line| {
        line.action == "job.submit" && line.object == array
    })
    .await;
    assert!(
        submitted.done && submitted.who == "anna" && submitted.detail.contains("2 members"),
        "{submitted:?}"
    );
    stop(&lab.anna, &array).await.unwrap();
    within(lab.pool.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_fetches_another_users_files() {
    let mut lab = Lab::start().await;
    let lora = lab.pool.put(b"her lora").await;
    let artifact = Artifact {
        name: "hers.safetensors".into(),
        kind: "lora".into(),
        hash: Some(lora),
        bytes: 8,
        step: None,
        index: None,
        local_path: None,
    };
    let held = lab.work.clone();
    let ready = lab.worker.ask(|request| ToCoordinator::ArtifactReady {
        request,
        held,
        artifact,
    });
    assert_eq!(ready.await.0, Verdict::Accepted);
    let file = |clients: &Clients| RemoteBlobs::with_budget(clients, Duration::from_secs(5));
    for blob in [lora, support::input().id()] {
        let request = v1::GetBlobRequest {
            sha256: blob.to_hex(),
            offset: 0,
        };
        let error = within(lab.ben.blobs.clone().get(request)).await.unwrap_err();
        assert_eq!(error.code(), Code::NotFound, "{error}");
        let refused = line(&lab.pool.clients, "the file", |line| {
            line.action == "blob.get" && line.object == blob.to_hex()
        })
        .await;
        assert!(!refused.done && refused.who == "ben", "{refused:?}");
    }
    let vera = somebody(&lab.pool, "vera", "viewer").await;
    for clients in [&lab.anna, &vera, &lab.pool.clients] {
        assert_eq!(&file(clients).get_bytes(lora, 100).await.unwrap()[..], b"her lora");
    }
    within(lab.pool.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_other_peoples_jobs_only_their_owners_are_told() {
    let lab = Lab::start().await;
    let workers = |clients: &Clients| {
        let mut jobs = clients.jobs.clone();
        async move {
            within(jobs.list_workers(v1::ListWorkersRequest::default()))
                .await
                .unwrap()
        }
    };
    let fit = within(lab.ben.jobs.clone().fit(v1::SubmitRequest::from(submission("fit"))))
        .await
        .unwrap();
    let explained = within(lab.ben.jobs.clone().explain(v1::ExplainRequest {
        job_id: lab.his.clone(),
    }))
    .await
    .unwrap();
    let waits = get(&lab.ben, &lab.his).await.unwrap().reason;
    let told = format!("{:?} {fit:?} {explained:?} {waits}", workers(&lab.ben).await);
    assert!(
        !told.contains(&lab.hers) && told.contains("busy with a job of anna"),
        "{told}"
    );
    assert!(format!("{:?}", workers(&lab.anna).await).contains(&lab.hers));
    within(lab.pool.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_waits_for_another_users_job() {
    let lab = Lab::start().await;
    let [whole, beginning] = lab.names();
    for text in [whole, beginning, "hers".to_owned()] {
        let mut after = v1::SubmitRequest::from(submission("after"));
        after.job_json = job_json("after", &format!(r#""after":["{text}"]"#));
        let error = within(lab.ben.jobs.clone().submit(after)).await.unwrap_err();
        assert!(error.message().contains("there is no job"), "{error}");
    }
    let refused = line(&lab.pool.clients, "the dependency", |line| {
        line.action == "job.submit" && !line.done
    })
    .await;
    assert!(
        refused.who == "ben" && refused.detail.contains("there is no job"),
        "{refused:?}"
    );
    within(lab.pool.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_submits_in_another_users_name() {
    let lab = Lab::start().await;
    let forged = Submission {
        owner: Some(UserName::new("anna")),
        ..submission("forged")
    };
    let local = Submission {
        local: true,
        ..submission("local")
    };
    for submission in [forged.clone(), local] {
        let request = v1::SubmitRequest::from(submission);
        let error = within(lab.ben.jobs.clone().submit(request)).await.unwrap_err();
        assert_eq!(error.code(), Code::PermissionDenied, "{error}");
    }
    let lines = eventually("both refusals", || async {
        let lines = audit(&lab.pool.clients).await;
        let refused = lines
            .into_iter()
            .filter(|line| line.action == "job.submit" && !line.done);
        let refused: Vec<_> = refused.collect();
        (refused.len() == 2).then_some(refused)
    })
    .await;
    assert!(lines.iter().all(|line| line.who == "ben"), "{lines:?}");

    // An operator may, and the job is hers.
    let olga = somebody(&lab.pool, "olga", "operator").await;
    let made = within(olga.jobs.clone().submit(v1::SubmitRequest::from(forged)))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(get(&lab.anna, &made.job_id).await.unwrap().owner, "anna");

    // The same key of two users is two keys.
    let keyed = Submission {
        idempotency_key: Some("key".into()),
        ..submission("keyed")
    };
    let send = |clients: &Clients| {
        let (mut jobs, request) = (clients.jobs.clone(), v1::SubmitRequest::from(keyed.clone()));
        async move { within(jobs.submit(request)).await.unwrap().into_inner() }
    };
    let (first, second, again) = (send(&lab.anna).await, send(&lab.ben).await, send(&lab.anna).await);
    assert!(!second.existed && first.job_id != second.job_id);
    assert!(again.existed && first.job_id == again.job_id);
    within(lab.pool.running.shutdown()).await;
}
