//! One submitter sends an array as large as a request can be, while another user's job runs.
#![allow(clippy::print_stdout, reason = "figures for whoever asks for them")]

use super::{Besieged, view};
use crate::access;
use crate::support::{FakeWorker, held, input, job_json, submission, within};
use aitk_common::attempt::Outcome;
use aitk_common::control::{HeldAttempt, JobState, ToWorker, Verdict};
use aitk_proto::v1;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tonic::Code;

const MEMBERS: usize = 1000;
/// Bytes that one member has of its own.
const OWN: usize = 3_300;
/// Memory that the coordinator may take for all of it: a few copies of the request. It took more than 7 GB.
const MEMORY: u64 = 512 << 20;
/// What the database may grow by: what came in, once. It grew by gigabytes.
const DATABASE: u64 = 80 << 20;

/// An array whose members share a list of so many inputs, with paths of so many bytes.
fn array(inputs: usize, path: usize) -> v1::SubmitArrayRequest {
    let hash = input().id().to_hex();
    let shared = v1::SubmitRequest {
        inputs: (0..inputs)
            .map(|number| (format!("./{}/{number}", "d".repeat(path)), hash.clone()))
            .collect(),
        ..v1::SubmitRequest::from(submission("shared"))
    };
    let filler = "x".repeat(OWN - 300);
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

/// Beats five times a second, answered or not, until told to stop; the longest time that an answer took, and the worker.
async fn beat(mut worker: FakeWorker, work: HeldAttempt, mut stop: oneshot::Receiver<()>) -> (Duration, FakeWorker) {
    let (mut longest, mut sent) = (Duration::ZERO, VecDeque::new());
    let mut beats = tokio::time::interval(Duration::from_millis(200));
    loop {
        // A beat's answer is never cut in half by the other branches: it is read whole or not at all.
        tokio::select! {
            _ = &mut stop => return (longest, worker),
            _ = beats.tick() => {
                worker.beat(std::slice::from_ref(&work)).await;
                sent.push_back(Instant::now());
            }
            message = worker.next() => match message {
                Some(ToWorker::BeatReply { .. }) => {
                    let begin = sent.pop_front().expect("an answer to a beat");
                    longest = longest.max(begin.elapsed());
                }
                Some(ToWorker::Fence { reason, .. }) => panic!("the job was declared lost: {reason}"),
                Some(_) => {}
                None => panic!("the session ended"),
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_array_of_fifteen_megabytes_disturbs_nobody() {
    // The beats' answers are what a worker sees of the core; a lease of two seconds would not survive the stall of before.
    let besieged = Besieged::start_with(&["--lease-seconds", "2"]).await;
    let admin = besieged.daemon.clients().await;
    let (ada, eve) = (besieged.submitter("ada").await, besieged.submitter("eve").await);
    let job = within(ada.jobs.clone().submit(v1::SubmitRequest::from(submission("calm"))))
        .await
        .unwrap()
        .into_inner()
        .job_id;
    let mut worker = FakeWorker::register(&admin, FakeWorker::registration("busy", None, Vec::new())).await;
    let work = worker.assigned().await;
    assert_eq!(work.job.as_str(), job);
    let (stop, stopped) = oneshot::channel();
    let beating = tokio::spawn(beat(worker, held(&work), stopped));

    // What all members share would not fit into the messages of one of them: refused before anything is made of it.
    let error = within(eve.jobs.clone().submit_array(array(10_000, 1_230)))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    let request = array(10_000, 1_000);
    let sent = aitk_proto::encoded_len(&request);
    assert!(sent > 14_000_000 && sent < 16 << 20, "{sent}");
    let database = database_bytes(&besieged);
    let begin = Instant::now();
    let array_id = within(eve.jobs.clone().submit_array(request))
        .await
        .unwrap()
        .into_inner()
        .job_id;
    println!("{sent} bytes were taken in after {:?}", begin.elapsed());

    stop.send(()).unwrap();
    let (longest, mut worker) = within(beating).await.unwrap();
    println!("the longest answer to a beat took {longest:?}");
    let calm = view(&admin, &job).await;
    assert_eq!((calm.state, calm.attempts.len()), (JobState::Running, 1), "{calm:?}");
    if let Some(peak) = besieged.peak_memory() {
        println!("at most {} MiB of memory were in use", peak >> 20);
        assert!(peak < MEMORY, "{peak} bytes of memory");
    }
    let grown = database_bytes(&besieged) - database;
    println!("the database grew by {} MiB", grown >> 20);
    assert!(grown < DATABASE, "{grown} bytes of database");

    // The member is given to a worker with all that it shares with the others.
    assert_eq!(worker.finish(&held(&work), Outcome::Completed).await, Verdict::Accepted);
    let member = worker.assigned().await;
    assert_eq!(member.job.as_str(), format!("{array_id}-0"));
    assert_eq!(member.inputs.len(), 10_000);
    assert!(member.job_json.contains("\"m0\"") && member.config_text == submission("shared").config_text);
    let line = access::line(&admin, "the array in the audit log", |line| line.object == array_id).await;
    assert_eq!(
        (line.action.as_str(), line.who.as_str(), line.done),
        ("job.submit", "eve", true)
    );
    assert!(!besieged.daemon.log().contains("panicked"));
}

fn database_bytes(besieged: &Besieged) -> u64 {
    ["aitk.db", "aitk.db-wal"]
        .iter()
        .filter_map(|name| std::fs::metadata(besieged._folder.path().join(name)).ok())
        .map(|file| file.len())
        .sum()
}
