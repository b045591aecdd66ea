//! Jobs whose messages are too large for a worker, and jobs that cannot be read from the database. They are refused, or fail
//! once with a message. The worker's session goes on.

use super::{TestServer, view};
use crate::support::{FakeWorker, eventually, held_attempt, input, job_json, submission, within};
use aitk_common::attempt::Outcome;
use aitk_common::control_plane::{JobState, Verdict};
use aitk_proto::v1;
use tonic::Code;

#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_assignment_would_exceed_the_message_limit_is_refused() {
    let server = TestServer::start().await;
    let eve = server.submitter("eve").await;
    let hash = input().id().to_hex();
    let request = |inputs: usize| v1::SubmitRequest {
        config_text: "x".repeat(4 << 20),
        job_json: job_json("wide", "").replacen("{}", &format!(r#"{{"filler":"{}"}}"#, "y".repeat((4 << 20) - 300)), 1),
        inputs: (0..inputs)
            .map(|number| (format!("./{}/{number}", "d".repeat(800)), hash.clone()))
            .collect(),
        ..v1::SubmitRequest::from(submission("wide"))
    };
    // Just below the limit of a request; the assignment adds fields of its own.
    let oversized = request(9_400);
    let bytes = aitk_proto::encoded_len(&oversized);
    assert!(bytes < 16 << 20 && bytes > (16 << 20) - (1 << 20), "{bytes}");
    let error = within(eve.jobs.clone().submit(oversized)).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    assert!(
        error.message().contains("at most 12582912") && error.message().contains("fewer inputs"),
        "{error}"
    );

    // The largest accepted job reaches its worker.
    let job = within(eve.jobs.clone().submit(request(4_500)))
        .await
        .unwrap()
        .into_inner()
        .job_id;
    let admin = server.daemon.clients().await;
    let mut worker = FakeWorker::register(&admin, FakeWorker::registration("w", None, Vec::new())).await;
    let work = worker.next_assignment().await;
    assert_eq!((work.job.as_str(), work.inputs.len()), (job.as_str(), 4_500));
    assert_eq!(work.config_text.len(), 4 << 20);
    assert_eq!(view(&eve, &job).await.config_text.map(|text| text.len()), Some(4 << 20));
    assert_eq!(
        worker.finish(&held_attempt(&work), Outcome::Completed).await,
        Verdict::Accepted
    );
    drop(worker);
    server.assert_works().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_cannot_be_read_or_sent_fails_once_and_the_session_goes_on() {
    let mut server = TestServer::start().await;
    let mut jobs = Vec::new();
    for name in ["large", "unreadable"] {
        let clients = server.daemon.clients().await;
        let reply = within(clients.jobs.clone().submit(v1::SubmitRequest::from(submission(name)))).await;
        jobs.push(reply.unwrap().into_inner().job_id);
    }
    // Rows as an earlier version might have left them.
    server.daemon.kill();
    let file = server.folder.path().join("aitk.db");
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
    server.daemon.kill_and_restart().await;

    let clients = server.daemon.clients().await;
    let mut worker = FakeWorker::register(&clients, FakeWorker::registration("w", None, Vec::new())).await;
    for (job, expected) in jobs
        .iter()
        .zip(["at most 16777216", "could not be read from the coordinator's database"])
    {
        let failed = eventually(&format!("{job} to fail"), || async {
            Some(view(&clients, job).await).filter(|view| view.state == JobState::Failed)
        })
        .await;
        assert!(failed.reason.contains(expected), "{}", failed.reason);
        assert_eq!(failed.attempts.len(), 1, "{failed:?}");
    }
    // The same session goes on with other work.
    let reply = within(clients.jobs.clone().submit(v1::SubmitRequest::from(submission("next")))).await;
    let next = reply.unwrap().into_inner().job_id;
    let work = worker.next_assignment().await;
    assert_eq!(work.job.as_str(), next);
    assert_eq!(
        worker.finish(&held_attempt(&work), Outcome::Completed).await,
        Verdict::Accepted
    );
    drop(worker);
    server.assert_works().await;
}
