//! Trace spans of jobs as an OTLP collector receives them, and the behaviour without a collector.

use crate::support::daemon::Daemon;
use crate::support::{FakeWorker, eventually, held_attempt, submission, within};
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::control_plane::{JobState, JobView, NewMember, Submission, SubmissionReceipt, Verdict};
use aitk_common::telemetry::context::TraceContext;
use aitk_proto::client::Clients;
use aitk_proto::{trace, v1};
use aitk_tests::processes::free_address;
use aitk_tests::trace_collector::{ReceivedSpan, TraceCollector};
use std::collections::BTreeMap;

const CLIENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

fn client() -> TraceContext {
    CLIENT.parse().unwrap()
}

fn job(name: &str) -> Submission {
    Submission {
        inputs: BTreeMap::new(),
        ..submission(name)
    }
}

async fn submit(clients: &Clients, name: &str, from: Option<TraceContext>) -> SubmissionReceipt {
    let mut request = tonic::Request::new(v1::SubmitRequest::from(job(name)));
    trace::insert(request.metadata_mut(), from);
    let reply = within(clients.jobs.clone().submit(request)).await.unwrap();
    reply.into_inner().try_into().unwrap()
}

async fn register_worker(clients: &Clients, name: &str) -> FakeWorker {
    FakeWorker::register(clients, FakeWorker::registration(name, None, Vec::new())).await
}

/// Waits for `count` spans with this name. Returns them by start time.
async fn wait_for_spans(collector: &TraceCollector, name: &str, count: usize) -> Vec<ReceivedSpan> {
    eventually(&format!("{count} spans {name}"), || async {
        let mut seen = collector.received();
        seen.retain(|span| span.name == name);
        seen.sort_by_key(|span| span.start);
        (seen.len() >= count).then_some(seen)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_one_trace_although_its_worker_and_coordinator_were_killed() {
    let dir = tempfile::tempdir().unwrap();
    let collector = TraceCollector::start().await.unwrap();
    let endpoint = collector.endpoint();
    let environment = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
        ("OTEL_BSP_SCHEDULE_DELAY", "50"),
    ];
    let mut daemon = Daemon::start(dir.path(), &["--lease-seconds", "3"], &environment).await;

    let clients = daemon.clients().await;
    let mut first = register_worker(&clients, "first").await;
    let id = submit(&clients, "traced", Some(client())).await.job;
    let first_try = first.next_assignment().await;
    wait_for_spans(&collector, "queued", 1).await;
    drop(first);
    daemon.kill_and_restart().await;

    let clients = daemon.clients().await;
    // The first worker does not come back, so its lease runs out.
    eventually("the loss of the first attempt", || async {
        let request = v1::GetJobRequest { job_id: id.to_string() };
        let job: JobView = clients
            .jobs
            .clone()
            .get(request)
            .await
            .ok()?
            .into_inner()
            .try_into()
            .unwrap();
        (job.state == JobState::Queued).then_some(())
    })
    .await;
    let mut second = register_worker(&clients, "second").await;
    let second_try = second.next_assignment().await;
    assert_eq!(second_try.job, id);
    assert_eq!(
        second.finish(&held_attempt(&second_try), Outcome::Completed).await,
        Verdict::Accepted
    );

    let [job] = &wait_for_spans(&collector, "job", 1).await[..] else {
        panic!("{:#?}", collector.received());
    };
    assert_eq!(job.service, "aitk-coordinator");
    assert_eq!(
        (job.trace.clone(), job.parent.clone()),
        (client().trace.to_string(), client().span.to_string())
    );
    assert_eq!(
        (&*job.attributes["aitk.job.id"], &*job.attributes["aitk.outcome"]),
        (id.as_str(), "completed")
    );
    let assigned = wait_for_spans(&collector, "assigned", 2).await;
    let queued = wait_for_spans(&collector, "queued", 2).await;
    for span in assigned.iter().chain(&queued) {
        assert_eq!((&span.trace, &span.parent), (&job.trace, &job.span), "{span:#?}");
        assert!(
            job.start <= span.start && span.end <= job.end,
            "{span:#?} within {job:#?}"
        );
    }
    for (span, work) in assigned.iter().zip([&first_try, &second_try]) {
        let context = work.trace.unwrap();
        assert_eq!(
            (context.trace.to_string(), context.span.to_string()),
            (span.trace.clone(), span.span.clone())
        );
        assert!(context.sampled);
        assert_eq!(span.attributes["aitk.attempt.id"], work.attempt.to_string());
    }
    let outcomes: Vec<_> = assigned.iter().map(|span| &*span.attributes["aitk.outcome"]).collect();
    assert_eq!(outcomes, ["lost", "completed"]);
    assert!(
        assigned[0]
            .error
            .as_ref()
            .is_some_and(|why| why.contains("no heartbeat")),
        "{:?}",
        assigned[0]
    );
    assert!(assigned[1].error.is_none() && job.error.is_none());
    assert_eq!(collector.received().len(), 5, "{:#?}", collector.received());
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_without_a_trace_get_one_and_each_array_member_gets_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let collector = TraceCollector::start().await.unwrap();
    let endpoint = collector.traces_endpoint();
    let environment = [
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", endpoint.as_str()),
        ("OTEL_BSP_SCHEDULE_DELAY", "50"),
        ("OTEL_SERVICE_NAME", "the lab's"),
    ];
    let daemon = Daemon::start(dir.path(), &[], &environment).await;
    let clients = daemon.clients().await;
    let mut worker = register_worker(&clients, "w").await;

    submit(&clients, "alone", None).await;
    let work = worker.next_assignment().await;
    let failed = Outcome::Failed {
        cause: FailureCause::BadInput,
        message: "no such model".into(),
    };
    worker.finish(&held_attempt(&work), failed).await;
    let alone = wait_for_spans(&collector, "job", 1).await.remove(0);
    assert_eq!((alone.service.as_str(), alone.parent.as_str()), ("the lab's", ""));
    assert_eq!(alone.error.as_deref(), Some("no such model"));

    // The client does not sample this trace, so no span is exported.
    let unsampled = TraceContext {
        sampled: false,
        ..client()
    };
    submit(&clients, "unsampled", Some(unsampled)).await;
    let work = worker.next_assignment().await;
    assert_eq!(
        work.trace.map(|trace| (trace.trace, trace.sampled)),
        Some((client().trace, false))
    );
    worker.finish(&held_attempt(&work), Outcome::Completed).await;

    let member = |name: &str| NewMember {
        job_json: job(name).job_json,
        seed_group: 0,
    };
    let mut request = tonic::Request::new(v1::SubmitArrayRequest {
        shared: Some(job("sweep").into()),
        name: "sweep".into(),
        members: ["a", "b"].map(|name| member(name).into()).to_vec(),
        at_most: 0,
    });
    trace::insert(request.metadata_mut(), Some(client()));
    within(clients.jobs.clone().submit_array(request)).await.unwrap();
    for _ in 0..2 {
        let work = worker.next_assignment().await;
        worker.finish(&held_attempt(&work), Outcome::Completed).await;
    }
    let jobs = wait_for_spans(&collector, "job", 3).await;
    let members = &jobs[1..];
    assert_ne!(members[0].trace, members[1].trace);
    for member in members {
        assert_ne!(member.trace, client().trace.to_string());
        assert_eq!(
            (member.parent.as_str(), &member.links),
            ("", &vec![client().trace.to_string()])
        );
    }
    assert!(
        collector
            .received()
            .iter()
            .all(|span| span.trace != client().trace.to_string()),
        "{:#?}",
        collector.received()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_collector_is_logged_once_and_jobs_still_run() {
    let dir = tempfile::tempdir().unwrap();
    let closed_port = free_address();
    let endpoint = format!("http://anna:s3cret@{closed_port}");
    let environment = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
        ("OTEL_BSP_SCHEDULE_DELAY", "20"),
    ];
    let daemon = Daemon::start(dir.path(), &[], &environment).await;
    let clients = daemon.clients().await;
    let mut worker = register_worker(&clients, "w").await;
    for name in ["one", "two", "three"] {
        submit(&clients, name, None).await;
        let work = worker.next_assignment().await;
        assert_eq!(
            worker.finish(&held_attempt(&work), Outcome::Completed).await,
            Verdict::Accepted
        );
        let warnings = || daemon.log().matches("traces do not reach").count();
        eventually("the warning", || async { (warnings() > 0).then_some(()) }).await;
        assert_eq!(warnings(), 1, "{}", daemon.log());
    }
    assert!(!daemon.log().contains("s3cret"), "{}", daemon.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_collector_the_clients_trace_is_passed_to_the_worker() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::start(dir.path(), &["--lease-seconds", "1"], &[]).await;
    let clients = daemon.clients().await;
    submit(&clients, "traced", Some(client())).await;
    daemon.kill_and_restart().await;
    let mut worker = register_worker(&daemon.clients().await, "w").await;
    assert_eq!(worker.next_assignment().await.trace, Some(client()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_resumed_job_sends_its_span_again_and_stopped_time_is_not_queued_time() {
    let dir = tempfile::tempdir().unwrap();
    let collector = TraceCollector::start().await.unwrap();
    let endpoint = collector.endpoint();
    let environment = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
        ("OTEL_BSP_SCHEDULE_DELAY", "50"),
    ];
    let daemon = Daemon::start(dir.path(), &[], &environment).await;
    let clients = daemon.clients().await;
    let mut worker = register_worker(&clients, "w").await;
    let job_id = submit(&clients, "resumed", None).await.job.to_string();
    let work = worker.next_assignment().await;
    let stop = v1::StopJobRequest {
        job_id: job_id.clone(),
        now: false,
    };
    within(clients.jobs.clone().stop(stop)).await.unwrap();
    worker.finish(&held_attempt(&work), Outcome::stopped()).await;
    let stopped = wait_for_spans(&collector, "job", 1).await.remove(0);
    assert_eq!(stopped.attributes["aitk.outcome"], "stopped");

    let resume = v1::ResumeJobRequest { job_id };
    within(clients.jobs.clone().resume(resume)).await.unwrap();
    let work = worker.next_assignment().await;
    worker.finish(&held_attempt(&work), Outcome::Completed).await;
    let mut both = wait_for_spans(&collector, "job", 2).await;
    both.sort_by_key(|span| span.end);
    let [first, second] = &both[..] else {
        panic!("{both:#?}");
    };
    assert_eq!((&first.span, first.start), (&second.span, second.start));
    assert_eq!(second.attributes["aitk.outcome"], "completed");
    let queued = wait_for_spans(&collector, "queued", 2).await;
    assert!(queued[1].start >= first.end, "{queued:#?}");
}
