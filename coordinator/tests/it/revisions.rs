//! Model commits: when a job names no commit, all its attempts use the commit that its first attempt used.

use crate::support::{FakeWorker, TestCoordinator, held_attempt, submission, within};
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::control_plane::{Assignment, Report, ToCoordinator, UnixMillis, Verdict};
use aitk_proto::v1;
use serde_json::Value;
use std::time::Duration;

async fn report_commit(worker: &FakeWorker, work: &Assignment, seq: u64, commit: &str) {
    let report = Report::Pinned {
        repository: "org/model".into(),
        commit: commit.into(),
        message: format!("org/model is used at commit {commit}"),
    };
    let (held, time) = (held_attempt(work), UnixMillis(1));
    worker
        .send(ToCoordinator::Event {
            held,
            seq,
            time,
            report,
        })
        .await;
}

fn revisions(work: &Assignment) -> Value {
    let job: Value = serde_json::from_str(&work.job_json).unwrap();
    job["revisions"].clone()
}

async fn fail(worker: &mut FakeWorker, work: &Assignment) {
    let outcome = Outcome::Failed {
        cause: FailureCause::Machine,
        message: "tripped".into(),
    };
    assert_eq!(worker.finish(&held_attempt(work), outcome).await, Verdict::Accepted);
}

#[tokio::test(flavor = "multi_thread")]
async fn later_attempts_use_the_commit_of_the_first_attempt() {
    let coordinator = TestCoordinator::start(Duration::from_secs(60)).await;
    let mut worker = FakeWorker::new(&coordinator, "w").await;
    let job = coordinator.submit("free").await.job.to_string();
    let work = worker.next_assignment().await;
    assert_eq!(revisions(&work), Value::Null);
    let (first, second) = ("0a".repeat(20), "0b".repeat(20));
    report_commit(&worker, &work, 1, &first).await;
    // A later report of another commit is ignored.
    report_commit(&worker, &work, 2, &second).await;
    fail(&mut worker, &work).await;
    let events = coordinator.events(&job, 0, false).await;
    assert!(
        crate::support::logs(&events).iter().any(|line| line.contains(&first)),
        "{events:?}"
    );
    drop(worker);

    // The commit is stored with the job.
    let coordinator = coordinator.restart().await;
    let mut worker = FakeWorker::new(&coordinator, "w").await;
    let work = worker.next_assignment().await;
    assert_eq!(work.job.as_str(), job);
    assert_eq!(revisions(&work), serde_json::json!({ "org/model": first }));
    assert_eq!(
        worker.finish(&held_attempt(&work), Outcome::Completed).await,
        Verdict::Accepted
    );

    // A job that names a commit keeps it.
    let named = v1::SubmitRequest {
        job_json: crate::support::job_json("named", "").replacen(
            r#""config""#,
            &format!(r#""revisions":{{"org/model":"{second}"}},"config""#),
            1,
        ),
        ..v1::SubmitRequest::from(submission("named"))
    };
    within(coordinator.clients.jobs.clone().submit(named)).await.unwrap();
    let work = worker.next_assignment().await;
    report_commit(&worker, &work, 1, &first).await;
    fail(&mut worker, &work).await;
    let work = worker.next_assignment().await;
    assert_eq!(revisions(&work), serde_json::json!({ "org/model": second }));
    assert_eq!(
        worker.finish(&held_attempt(&work), Outcome::Completed).await,
        Verdict::Accepted
    );
    drop(worker);
    within(coordinator.running.shutdown()).await;
}
