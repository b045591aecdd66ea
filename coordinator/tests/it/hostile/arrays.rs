//! One user submits an array as large as a request can be, while another user's job runs.
#![allow(clippy::print_stdout, reason = "prints measurements")]

use super::{TestServer, view};
use crate::access;
use crate::support::{FakeWorker, held_attempt, input, job_json, submission, within};
use aitk_common::attempt::Outcome;
use aitk_common::control_plane::{AttemptRef, JobState, ToWorker, Verdict};
use aitk_proto::v1;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tonic::Code;

const MEMBERS: usize = 1000;
/// Bytes of each member's own config.
const MEMBER_BYTES: usize = 3_300;
/// Limit of the coordinator's memory: a few copies of the request. It once took more than 7 GB.
const MAX_MEMORY: u64 = 512 << 20;
/// Limit of the database's growth: the request, stored once. It once grew by gigabytes.
const MAX_DATABASE_GROWTH: u64 = 80 << 20;

/// An array whose members share `inputs` inputs, each with a path of about `path_bytes` bytes.
fn array(inputs: usize, path_bytes: usize) -> v1::SubmitArrayRequest {
    let hash = input().id().to_hex();
    let shared = v1::SubmitRequest {
        inputs: (0..inputs)
            .map(|number| (format!("./{}/{number}", "d".repeat(path_bytes)), hash.clone()))
            .collect(),
        ..v1::SubmitRequest::from(submission("shared"))
    };
    let filler = "x".repeat(MEMBER_BYTES - 300);
    let members = (0..MEMBERS).map(|number| v1::ArrayMember {
        job_json: job_json(&format!("m{number}"), "").replacen("{}", &format!(r#"{{"filler":"{filler}"}}"#), 1),
        twin: 0,
    });
    v1::SubmitArrayRequest {
        shared: Some(shared),
        name: "flood".into(),
        members: members.collect(),
        at_most: 0,
    }
}

/// Sends five heartbeats a second until `stop`. Returns the longest time until an answer, and the worker.
///
/// # Panics
/// When the coordinator fences the attempt or ends the session.
async fn send_heartbeats(
    mut worker: FakeWorker,
    work: AttemptRef,
    mut stop: oneshot::Receiver<()>,
) -> (Duration, FakeWorker) {
    let (mut longest, mut sent) = (Duration::ZERO, VecDeque::new());
    let mut ticks = tokio::time::interval(Duration::from_millis(200));
    loop {
        // Reading a message is cancel safe.
        tokio::select! {
            _ = &mut stop => return (longest, worker),
            _ = ticks.tick() => {
                worker.heartbeat(std::slice::from_ref(&work)).await;
                sent.push_back(Instant::now());
            }
            message = worker.next() => match message {
                Some(ToWorker::HeartbeatReply { .. }) => {
                    let sent_at = sent.pop_front().expect("the answer belongs to a heartbeat");
                    longest = longest.max(sent_at.elapsed());
                }
                Some(ToWorker::Fence { reason, .. }) => panic!("the job was declared lost: {reason}"),
                Some(_) => {}
                None => panic!("the session ended"),
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_array_of_fifteen_megabytes_does_not_delay_heartbeats() {
    // A stalled scheduler would not answer heartbeats: a job with a lease of two seconds would be lost.
    let server = TestServer::start_with(&["--lease-seconds", "2"]).await;
    let admin = server.daemon.clients().await;
    let (ada, eve) = (server.submitter("ada").await, server.submitter("eve").await);
    let job = within(ada.jobs.clone().submit(v1::SubmitRequest::from(submission("running"))))
        .await
        .unwrap()
        .into_inner()
        .job_id;
    let mut worker = FakeWorker::register(&admin, FakeWorker::registration("busy", None, Vec::new())).await;
    let work = worker.next_assignment().await;
    assert_eq!(work.job.as_str(), job);
    let (stop, stopped) = oneshot::channel();
    let heartbeats = tokio::spawn(send_heartbeats(worker, held_attempt(&work), stopped));

    // The shared part would not fit into the assignment of one member: refused at once.
    let error = within(eve.jobs.clone().submit_array(array(10_000, 1_230)))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    let request = array(10_000, 1_000);
    let sent = aitk_proto::encoded_len(&request);
    assert!(sent > 14_000_000 && sent < 16 << 20, "{sent}");
    let database = database_bytes(&server);
    let begin = Instant::now();
    let array_id = within(eve.jobs.clone().submit_array(request))
        .await
        .unwrap()
        .into_inner()
        .job_id;
    println!("{sent} bytes were accepted after {:?}", begin.elapsed());

    stop.send(()).unwrap();
    let (longest, mut worker) = within(heartbeats).await.unwrap();
    println!("the longest answer to a heartbeat took {longest:?}");
    let running = view(&admin, &job).await;
    assert_eq!(
        (running.state, running.attempts.len()),
        (JobState::Running, 1),
        "{running:?}"
    );
    if let Some(peak) = server.peak_memory() {
        println!("peak memory: {} MiB", peak >> 20);
        assert!(peak < MAX_MEMORY, "{peak} bytes of memory");
    }
    let grown = database_bytes(&server) - database;
    println!("the database grew by {} MiB", grown >> 20);
    assert!(grown < MAX_DATABASE_GROWTH, "{grown} bytes of database");

    // A member's assignment contains the shared part.
    assert_eq!(
        worker.finish(&held_attempt(&work), Outcome::Completed).await,
        Verdict::Accepted
    );
    let member = worker.next_assignment().await;
    assert_eq!(member.job.as_str(), format!("{array_id}-0"));
    assert_eq!(member.inputs.len(), 10_000);
    assert!(member.job_json.contains("\"m0\"") && member.config_text == submission("shared").config_text);
    let line = access::wait_for_audit_line(&admin, "the array in the audit log", |line| line.object == array_id).await;
    assert_eq!(
        (line.action.as_str(), line.who.as_str(), line.done),
        ("job.submit", "eve", true)
    );
    assert!(!server.daemon.log().contains("panicked"));
}

fn database_bytes(server: &TestServer) -> u64 {
    ["aitk.db", "aitk.db-wal"]
        .iter()
        .filter_map(|name| std::fs::metadata(server.folder.path().join(name)).ok())
        .map(|file| file.len())
        .sum()
}
