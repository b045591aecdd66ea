//! Jobs whose messages no worker would take, and jobs that cannot be read: refused, or failed once, in words. The session
//! of the worker that should have had them goes on.

use super::{Besieged, view};
use crate::support::{FakeWorker, eventually, held, input, job_json, submission, within};
use aitk_common::attempt::Outcome;
use aitk_common::control::{JobState, Verdict};
use aitk_proto::v1;
use tonic::Code;

#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_assignment_no_worker_would_take_is_refused() {
    let besieged = Besieged::start().await;
    let eve = besieged.submitter("eve").await;
    let hash = input().id().to_hex();
    let request = |inputs: usize| v1::SubmitRequest {
        config_text: "x".repeat(4 << 20),
        job_json: job_json("wide", "").replacen("{}", &format!(r#"{{"filler":"{}"}}"#, "y".repeat((4 << 20) - 300)), 1),
        inputs: (0..inputs)
            .map(|number| (format!("./{}/{number}", "d".repeat(800)), hash.clone()))
            .collect(),
        ..v1::SubmitRequest::from(submission("wide"))
    };
    // Just what a request can carry; the assignment adds its own to that.
    let wide = request(9_400);
    let bytes = aitk_proto::encoded_len(&wide);
    assert!(bytes < 16 << 20 && bytes > (16 << 20) - (1 << 20), "{bytes}");
    let error = within(eve.jobs.clone().submit(wide)).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    assert!(
        error.message().contains("at most 12582912") && error.message().contains("fewer inputs"),
        "{error}"
    );

    // The largest that is taken reaches its worker.
    let job = within(eve.jobs.clone().submit(request(4_500)))
        .await
        .unwrap()
        .into_inner()
        .job_id;
    let admin = besieged.daemon.clients().await;
    let mut worker = FakeWorker::register(&admin, FakeWorker::registration("w", None, Vec::new())).await;
    let work = worker.assigned().await;
    assert_eq!((work.job.as_str(), work.inputs.len()), (job.as_str(), 4_500));
    assert_eq!(work.config_text.len(), 4 << 20);
    assert_eq!(view(&eve, &job).await.config_text.map(|text| text.len()), Some(4 << 20));
    assert_eq!(worker.finish(&held(&work), Outcome::Completed).await, Verdict::Accepted);
    drop(worker);
    besieged.works().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_cannot_be_read_or_sent_fails_once_and_its_worker_goes_on() {
    let mut besieged = Besieged::start().await;
    let mut jobs = Vec::new();
    for name in ["large", "unreadable"] {
        let clients = besieged.daemon.clients().await;
        let reply = within(clients.jobs.clone().submit(v1::SubmitRequest::from(submission(name)))).await;
        jobs.push(reply.unwrap().into_inner().job_id);
    }
    // As an earlier version might have left them.
    besieged.daemon.kill();
    let file = besieged._folder.path().join("aitk.db");
    let database = sqlx::SqlitePool::connect_with(sqlx::sqlite::SqliteConnectOptions::new().filename(file))
        .await
        .unwrap();
    for statement in [
        "UPDATE jobs SET config_text = hex(zeroblob(9000000)) WHERE id = $1",
        "UPDATE jobs SET inputs = 'nonsense' WHERE id = $1",
    ]
    .into_iter()
    .zip(&jobs)
    {
        sqlx::query(statement.0)
            .bind(statement.1)
            .execute(&database)
            .await
            .unwrap();
    }
    database.close().await;
    besieged.daemon.kill_and_restart().await;

    let clients = besieged.daemon.clients().await;
    let mut worker = FakeWorker::register(&clients, FakeWorker::registration("w", None, Vec::new())).await;
    for (job, words) in jobs
        .iter()
        .zip(["at most 16777216", "could not be read from the coordinator's database"])
    {
        let failed = eventually(&format!("{job} to fail"), || async {
            Some(view(&clients, job).await).filter(|view| view.state == JobState::Failed)
        })
        .await;
        assert!(failed.reason.contains(words), "{}", failed.reason);
        assert_eq!(failed.attempts.len(), 1, "{failed:?}");
    }
    // The same session goes on with other work.
    let reply = within(clients.jobs.clone().submit(v1::SubmitRequest::from(submission("next")))).await;
    let next = reply.unwrap().into_inner().job_id;
    let work = worker.assigned().await;
    assert_eq!(work.job.as_str(), next);
    assert_eq!(worker.finish(&held(&work), Outcome::Completed).await, Verdict::Accepted);
    drop(worker);
    besieged.works().await;
}
