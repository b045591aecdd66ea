//! Jobs, their logs and their files belong to the user who submitted them.

use super::{LONG_LEASE, audit_log, client_with_role, get, list, stop, submit, wait_for_audit_line};
use crate::support::{self, FakeWorker, TestCoordinator, eventually, held_attempt, job_json, submission, within};
use aitk_common::control_plane::{Artifact, Submission, ToCoordinator, Verdict};
use aitk_common::id::UserName;
use aitk_common::storage::BlobStore;
use aitk_proto::client::Clients;
use aitk_proto::remote_blobs::RemoteBlobs;
use aitk_proto::v1;
use std::time::Duration;
use tonic::{Code, Status};

/// Two users: anna's job runs, ben's job waits.
struct Fixture {
    coordinator: TestCoordinator,
    anna: Clients,
    ben: Clients,
    hers: String,
    his: String,
    worker: FakeWorker,
    work: aitk_common::control_plane::AttemptRef,
}

impl Fixture {
    async fn start() -> Self {
        let coordinator = TestCoordinator::start(LONG_LEASE).await;
        let anna = client_with_role(&coordinator, "anna", "submitter").await;
        let ben = client_with_role(&coordinator, "ben", "submitter").await;
        let hers = submit(&anna, "hers").await.unwrap();
        let his = submit(&ben, "his").await.unwrap();
        let mut worker = FakeWorker::new(&coordinator, "w").await;
        let work = worker.next_assignment().await;
        assert_eq!(work.job.as_str(), hers);
        let work = held_attempt(&work);
        Self {
            coordinator,
            anna,
            ben,
            hers,
            his,
            worker,
            work,
        }
    }

    /// The ways to name anna's job: its id, and a prefix of it.
    fn names(&self) -> [String; 2] {
        [self.hers.clone(), self.hers[..8].to_owned()]
    }
}

/// The results of all calls that name a job.
async fn call_everything(clients: &Clients, job: &str) -> Vec<Result<(), Status>> {
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
        within(jobs.save(v1::SaveJobRequest { job_id: job_id() }))
            .await
            .map(drop),
        within(jobs.sample(v1::SampleJobRequest { job_id: job_id() }))
            .await
            .map(drop),
        within(jobs.resume(v1::ResumeJobRequest { job_id: job_id() }))
            .await
            .map(drop),
        stop(clients, job).await.map(drop),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_cannot_access_another_users_job_or_log() {
    let fixture = Fixture::start().await;
    assert_eq!(list(&fixture.anna).await, std::slice::from_ref(&fixture.hers));
    assert_eq!(list(&fixture.ben).await, std::slice::from_ref(&fixture.his));
    for name in fixture.names() {
        for (number, result) in call_everything(&fixture.ben, &name).await.into_iter().enumerate() {
            let error = result.unwrap_err();
            assert_eq!(error.code(), Code::NotFound, "{number}: {error}");
            // The same message as for a job that does not exist.
            assert!(error.message().contains("there is no job"), "{error}");
        }
    }
    for action in [
        "job.read",
        "job.stop",
        "job.pause",
        "job.save",
        "job.sample",
        "job.resume",
        "job.priority",
    ] {
        let refused = wait_for_audit_line(&fixture.coordinator.clients, action, |line| line.action == action).await;
        assert!(
            !refused.done && refused.who == "ben" && refused.object == fixture.hers,
            "{refused:?}"
        );
    }
    assert_eq!(
        get(&fixture.anna, &fixture.hers).await.unwrap().state(),
        v1::JobState::Running
    );
    // Its owner can access it by the same names.
    for name in fixture.names() {
        assert_eq!(get(&fixture.anna, &name).await.unwrap().owner, "anna");
    }
    stop(&fixture.anna, &fixture.hers).await.unwrap();
    let stopped = wait_for_audit_line(&fixture.coordinator.clients, "her stop", |line| {
        line.action == "job.stop" && line.who == "anna"
    })
    .await;
    assert!(stopped.done && stopped.object == fixture.hers, "{stopped:?}");
    within(fixture.coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_array_and_its_members_belong_to_the_submitter() {
    let fixture = Fixture::start().await;
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
    let refused = within(fixture.ben.jobs.clone().submit_array(forged)).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    let reply = within(fixture.anna.jobs.clone().submit_array(request)).await.unwrap();
    let array = reply.into_inner().job_id;
    for name in [array.clone(), array[..8].to_owned(), format!("{array}-1")] {
        for refused in call_everything(&fixture.ben, &name).await {
            assert_eq!(refused.unwrap_err().code(), Code::NotFound, "{name}");
        }
        assert_eq!(get(&fixture.anna, &name).await.unwrap().owner, "anna");
    }
    let theirs = v1::ListJobsRequest {
        array_id: array.clone(),
        ..Default::default()
    };
    let refused = within(fixture.ben.jobs.clone().list(theirs)).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound);
    let submitted = wait_for_audit_line(&fixture.coordinator.clients, "her array", |line| {
        line.action == "job.submit" && line.object == array
    })
    .await;
    assert!(
        submitted.done && submitted.who == "anna" && submitted.detail.contains("2 members"),
        "{submitted:?}"
    );
    stop(&fixture.anna, &array).await.unwrap();
    within(fixture.coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_cannot_fetch_another_users_files() {
    let mut fixture = Fixture::start().await;
    let lora = fixture.coordinator.put(b"her lora").await;
    let artifact = Artifact {
        name: "hers.safetensors".into(),
        kind: "lora".into(),
        hash: Some(lora),
        bytes: 8,
        step: None,
        index: None,
        local_path: None,
    };
    let held = fixture.work.clone();
    let ready = fixture.worker.request(|request| ToCoordinator::ArtifactReady {
        request,
        held,
        artifact,
    });
    assert_eq!(ready.await.0, Verdict::Accepted);
    let blobs = |clients: &Clients| RemoteBlobs::with_budget(clients, Duration::from_secs(5));
    for blob in [lora, support::input().id()] {
        let request = v1::GetBlobRequest {
            sha256: blob.to_hex(),
            offset: 0,
        };
        let error = within(fixture.ben.blobs.clone().get(request)).await.unwrap_err();
        assert_eq!(error.code(), Code::NotFound, "{error}");
        let refused = wait_for_audit_line(&fixture.coordinator.clients, "the file", |line| {
            line.action == "blob.get" && line.object == blob.to_hex()
        })
        .await;
        assert!(!refused.done && refused.who == "ben", "{refused:?}");
    }
    let vera = client_with_role(&fixture.coordinator, "vera", "viewer").await;
    for clients in [&fixture.anna, &vera, &fixture.coordinator.clients] {
        assert_eq!(&blobs(clients).get_bytes(lora, 100).await.unwrap()[..], b"her lora");
    }
    within(fixture.coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn users_see_only_the_owners_of_other_users_jobs() {
    let fixture = Fixture::start().await;
    let workers = |clients: &Clients| {
        let mut jobs = clients.jobs.clone();
        async move {
            within(jobs.list_workers(v1::ListWorkersRequest::default()))
                .await
                .unwrap()
        }
    };
    let fit = within(fixture.ben.jobs.clone().fit(v1::SubmitRequest::from(submission("fit"))))
        .await
        .unwrap();
    let explained = within(fixture.ben.jobs.clone().explain(v1::ExplainRequest {
        job_id: fixture.his.clone(),
    }))
    .await
    .unwrap();
    let waits = get(&fixture.ben, &fixture.his).await.unwrap().reason;
    let answers = format!("{:?} {fit:?} {explained:?} {waits}", workers(&fixture.ben).await);
    assert!(
        !answers.contains(&fixture.hers) && answers.contains("busy with a job of anna"),
        "{answers}"
    );
    assert!(format!("{:?}", workers(&fixture.anna).await).contains(&fixture.hers));
    within(fixture.coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_cannot_depend_on_another_users_job() {
    let fixture = Fixture::start().await;
    let [whole, beginning] = fixture.names();
    for text in [whole, beginning, "hers".to_owned()] {
        let mut after = v1::SubmitRequest::from(submission("after"));
        after.job_json = job_json("after", &format!(r#""after":["{text}"]"#));
        let error = within(fixture.ben.jobs.clone().submit(after)).await.unwrap_err();
        assert!(error.message().contains("there is no job"), "{error}");
    }
    let refused = wait_for_audit_line(&fixture.coordinator.clients, "the dependency", |line| {
        line.action == "job.submit" && !line.done
    })
    .await;
    assert!(
        refused.who == "ben" && refused.detail.contains("there is no job"),
        "{refused:?}"
    );
    within(fixture.coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_submitter_cannot_submit_for_another_user() {
    let fixture = Fixture::start().await;
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
        let error = within(fixture.ben.jobs.clone().submit(request)).await.unwrap_err();
        assert_eq!(error.code(), Code::PermissionDenied, "{error}");
    }
    let lines = eventually("both refusals", || async {
        let lines = audit_log(&fixture.coordinator.clients).await;
        let refused = lines
            .into_iter()
            .filter(|line| line.action == "job.submit" && !line.done);
        let refused: Vec<_> = refused.collect();
        (refused.len() == 2).then_some(refused)
    })
    .await;
    assert!(lines.iter().all(|line| line.who == "ben"), "{lines:?}");

    // An operator may, and then the job belongs to that user.
    let olga = client_with_role(&fixture.coordinator, "olga", "operator").await;
    let reply = within(olga.jobs.clone().submit(v1::SubmitRequest::from(forged)))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(get(&fixture.anna, &reply.job_id).await.unwrap().owner, "anna");

    // Idempotency keys are separate for each user.
    let keyed = Submission {
        idempotency_key: Some("key".into()),
        ..submission("keyed")
    };
    let send = |clients: &Clients| {
        let (mut jobs, request) = (clients.jobs.clone(), v1::SubmitRequest::from(keyed.clone()));
        async move { within(jobs.submit(request)).await.unwrap().into_inner() }
    };
    let (first, second, repeated) = (
        send(&fixture.anna).await,
        send(&fixture.ben).await,
        send(&fixture.anna).await,
    );
    assert!(!second.existed && first.job_id != second.job_id);
    assert!(repeated.existed && first.job_id == repeated.job_id);
    within(fixture.coordinator.running.shutdown()).await;
}
