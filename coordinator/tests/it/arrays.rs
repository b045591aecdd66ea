//! Arrays of jobs through the protocol, and jobs that are split into parts.

use crate::support::{FakeWorker, TestCoordinator, held_attempt, job_json, submission, within};
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::control_plane::{
    Artifact, Assignment, JobState, JobView, NewMember, Submission, ToCoordinator, Verdict,
};
use aitk_common::hash::ContentHash;
use aitk_proto::v1;
use serde_json::Value;
use std::time::Duration;
use tonic::{Code, Status};

const LONG_LEASE: Duration = Duration::from_secs(60);

fn request(names: &[&str], key: &str) -> v1::SubmitArrayRequest {
    let members = names.iter().zip(0..).map(|(name, seed_group)| NewMember {
        job_json: submission(name).job_json,
        seed_group: seed_group / 2,
    });
    let shared = Submission {
        idempotency_key: Some(key.into()),
        ..submission("shared")
    };
    v1::SubmitArrayRequest {
        shared: Some(shared.into()),
        name: "sweep".into(),
        members: members.map(Into::into).collect(),
        at_most: 0,
    }
}

async fn submit(coordinator: &TestCoordinator, request: v1::SubmitArrayRequest) -> Result<String, Status> {
    let reply = within(coordinator.clients.jobs.clone().submit_array(request)).await?;
    Ok(reply.into_inner().job_id)
}

async fn members(coordinator: &TestCoordinator, array: &str) -> Vec<JobView> {
    let request = v1::ListJobsRequest {
        array_id: array.into(),
        ..Default::default()
    };
    let reply = within(coordinator.clients.jobs.clone().list(request)).await.unwrap();
    reply
        .into_inner()
        .jobs
        .into_iter()
        .map(|job| job.try_into().unwrap())
        .collect()
}

async fn artifacts(coordinator: &TestCoordinator, id: &str) -> Vec<String> {
    let request = v1::ArtifactsRequest {
        job_id: id.into(),
        ..Default::default()
    };
    let reply = within(coordinator.clients.jobs.clone().artifacts(request))
        .await
        .unwrap();
    reply
        .into_inner()
        .artifacts
        .into_iter()
        .map(|artifact| artifact.name)
        .collect()
}

async fn report_artifact(
    worker: &mut FakeWorker,
    work: &Assignment,
    name: &str,
    blob: ContentHash,
    index: Option<u64>,
) {
    let artifact = Artifact {
        name: name.into(),
        kind: "image".into(),
        hash: Some(blob),
        bytes: 4,
        step: None,
        index,
        local_path: None,
    };
    let held = held_attempt(work);
    let ready = worker.request(|request| ToCoordinator::ArtifactReady {
        request,
        held,
        artifact,
    });
    assert_eq!(ready.await.0, Verdict::Accepted);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_array_is_one_job_for_its_user_and_several_for_the_workers() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let array = submit(&coordinator, request(&["a", "b", "c"], "monday")).await.unwrap();
    assert_eq!(
        submit(&coordinator, request(&["a", "b", "c"], "monday")).await.unwrap(),
        array
    );
    let all = members(&coordinator, &array).await;
    let names: Vec<&str> = all.iter().map(|job| job.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "c"]);
    let view = coordinator.job(&array[..5]).await;
    assert_eq!((view.id.as_str(), view.state), (array.as_str(), JobState::Queued));
    assert_eq!(view.array.as_ref().unwrap().counts.waiting, 3);
    assert!(view.config_text.unwrap().contains("shared"));
    let list = within(coordinator.clients.jobs.clone().list(v1::ListJobsRequest::default()))
        .await
        .unwrap();
    assert_eq!(list.into_inner().jobs.len(), 1);

    let blob = coordinator.put(b"file").await;
    let mut worker = FakeWorker::new(&coordinator, "w1").await;
    let mut seeds = Vec::new();
    for name in ["a", "b"] {
        let work = worker.next_assignment().await;
        seeds.push(work.seed);
        assert!(work.job_json.contains(&format!(r#""name":"{name}""#)));
        assert!(work.inputs.contains_key("./data") && work.generated.is_empty());
        report_artifact(
            &mut worker,
            &work,
            if name == "a" { "a/a.safetensors" } else { "1_0.png" },
            blob,
            None,
        )
        .await;
        worker.finish(&held_attempt(&work), Outcome::Completed).await;
    }
    let last = worker.next_assignment().await;
    assert!(
        seeds[0] == seeds[1] && seeds[0] != last.seed,
        "twins share a seed: {seeds:?}"
    );
    assert_eq!(artifacts(&coordinator, &array).await, ["a/a.safetensors", "b/1_0.png"]);
    assert_eq!(artifacts(&coordinator, &format!("{array}-1")).await, ["1_0.png"]);

    let coordinator = coordinator.restart().await;
    let view = coordinator.job(&array).await;
    let counts = view.array.unwrap().counts;
    assert_eq!(
        (view.state, counts.completed, counts.running),
        (JobState::Running, 2, 1)
    );
    let stop = v1::StopJobRequest {
        job_id: array.clone(),
        now: true,
    };
    within(coordinator.clients.jobs.clone().stop(stop)).await.unwrap();
    assert_eq!(coordinator.job(&array).await.state, JobState::Stopping);
    let events = v1::EventsRequest {
        job_id: array.clone(),
        cursor: 0,
        follow: false,
    };
    let refused = within(coordinator.clients.jobs.clone().events(events))
        .await
        .unwrap_err();
    assert!(
        refused.code() == Code::InvalidArgument && refused.message().contains("-0"),
        "{refused}"
    );
    within(coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_array_is_refused_as_a_whole() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let invalid = |change: fn(&mut v1::SubmitArrayRequest)| {
        let mut request = request(&["a", "b"], "key");
        change(&mut request);
        request
    };
    for (request, expected) in [
        (invalid(|request| request.members.truncate(1)), "2 to 1000"),
        (
            invalid(|request| request.members[1].job_json = "{".into()),
            "members[1]: job_json",
        ),
        (
            invalid(|request| request.members[1] = request.members[0].clone()),
            "same name",
        ),
        (invalid(|request| request.shared = None), "shared: missing"),
        (
            invalid(|request| request.shared.as_mut().unwrap().local = true),
            "shared.local",
        ),
        (invalid(|request| request.name.clear()), "name:"),
        (
            invalid(|request| {
                let shared = request.shared.as_mut().unwrap();
                shared.inputs.insert("x".into(), ContentHash::of(b"nowhere").to_hex());
            }),
            "is not in storage",
        ),
    ] {
        let refused = submit(&coordinator, request).await.unwrap_err();
        assert!(refused.message().contains(expected), "{refused}");
    }
    let list = v1::ListJobsRequest {
        all: true,
        members: true,
        ..Default::default()
    };
    assert!(
        within(coordinator.clients.jobs.clone().list(list))
            .await
            .unwrap()
            .into_inner()
            .jobs
            .is_empty()
    );
    within(coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_split_into_parts_and_a_failed_part_continues_after_its_last_image() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let whole = Submission {
        job_json: job_json("cats", r#""split":{"parts":4},"retries":3"#),
        images: Some(10),
        ..submission("cats")
    };
    let without_count = Submission {
        images: None,
        ..whole.clone()
    };
    let refused = within(
        coordinator
            .clients
            .jobs
            .clone()
            .submit(v1::SubmitRequest::from(without_count)),
    )
    .await
    .unwrap_err();
    assert!(
        refused.message().starts_with("cluster.split: only a job with one"),
        "{refused}"
    );
    let reply = within(coordinator.clients.jobs.clone().submit(v1::SubmitRequest::from(whole)))
        .await
        .unwrap();
    let array = reply.into_inner().job_id;
    let view = coordinator.job(&array).await;
    assert!(
        view.name == "cats" && view.array.as_ref().is_some_and(|array| array.split),
        "{view:?}"
    );
    assert_eq!(members(&coordinator, &array).await.len(), 4);

    let blob = coordinator.put(b"file").await;
    let mut worker = FakeWorker::new(&coordinator, "w1").await;
    let mut ended = std::collections::BTreeMap::new();
    let mut failed = false;
    while ended.len() < 4 {
        let work = worker.next_assignment().await;
        let job: Value = serde_json::from_str(&work.job_json).unwrap();
        let bound = |key: &str| job["part"][key].as_u64().unwrap();
        let (from, to) = (bound("from"), bound("to"));
        assert_eq!(job["name"], "cats");
        if from == 2 && !failed {
            // This part fails after its first image; the next attempt generates the others.
            failed = true;
            report_artifact(&mut worker, &work, "1_2.png", blob, Some(2)).await;
            let outcome = Outcome::Failed {
                cause: FailureCause::DiskFull,
                message: "full".into(),
            };
            worker.finish(&held_attempt(&work), outcome).await;
            continue;
        }
        assert_eq!(work.generated, if from == 2 { vec![2] } else { Vec::new() });
        for index in (from..to).filter(|index| !work.generated.contains(index)) {
            report_artifact(&mut worker, &work, &format!("2_{index}.png"), blob, Some(index)).await;
        }
        worker.finish(&held_attempt(&work), Outcome::Completed).await;
        ended.insert((from, to), work.seed);
    }
    coordinator.in_state(&array, JobState::Completed).await;
    let ranges: Vec<(u64, u64)> = ended.keys().copied().collect();
    assert_eq!(ranges, [(0, 2), (2, 5), (5, 7), (7, 10)]);
    assert!(
        ended.values().all(|seed| Some(seed) == ended.values().next()),
        "all parts have the same seed"
    );
    let names = artifacts(&coordinator, &array).await;
    let expected = (0..10).map(|index| format!("{}_{index}.png", if index == 2 { 1 } else { 2 }));
    assert_eq!(names, expected.collect::<Vec<_>>());
    within(coordinator.running.shutdown()).await;
}
