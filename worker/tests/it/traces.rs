//! Spans of attempts, with a real coordinator, real workers and a collector; one of the workers dies.

use crate::program::{program, text};
use crate::support::{TestCluster, emit, emit_checkpoint, emit_finished, script};
use aitk_common::control_plane::JobState;
use aitk_common::telemetry::context::TraceContext;
use aitk_common::telemetry::traces::Traces;
use aitk_tests::trace_collector::{ReceivedSpan, TraceCollector};
use serde_json::json;
use std::collections::HashMap;
use std::time::Duration;

fn client() -> TraceContext {
    "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        .parse()
        .unwrap()
}

/// Returns all recorded spans.
async fn collect_spans(collector: &TraceCollector, traces: Traces) -> Vec<ReceivedSpan> {
    tokio::task::spawn_blocking(move || traces.finish(Duration::from_secs(20)))
        .await
        .unwrap();
    collector.received()
}

fn spans_named<'a>(spans: &'a [ReceivedSpan], name: &str) -> Vec<&'a ReceivedSpan> {
    let mut spans_named: Vec<&ReceivedSpan> = spans.iter().filter(|span| span.name == name).collect();
    spans_named.sort_by_key(|span| span.start);
    spans_named
}

#[tokio::test(flavor = "multi_thread")]
async fn both_attempts_of_a_job_whose_worker_died_are_in_the_clients_trace() {
    let collector = TraceCollector::start().await.unwrap();
    let traces = Traces::to(&collector.traces_endpoint());
    let cluster = TestCluster::start_with_traces(traces.clone()).await;
    let phase = |name: &str| emit(json!({"event": "phase", "name": name}));
    let checkpoint = cluster.checkpoint(5);
    let hangs = script(&[
        &phase("loading model"),
        &phase("training"),
        &emit_checkpoint(&checkpoint, 5),
        "sleep 1000\n",
    ]);
    let ends = script(&[&phase("training"), &phase("saving"), &emit_finished("completed")]);

    let first = cluster.worker("first", &hangs).await;
    let job = cluster.submit_in_trace(Some(client()), HashMap::new(), false).await;
    cluster
        .wait_until(&job, "saved", |job| job.checkpoint_step == Some(5))
        .await;
    drop(first);
    let second = cluster.worker("second", &ends).await;
    let view = cluster.wait_for_state(&job, JobState::Completed).await;
    assert_eq!(view.attempts.len(), 2);
    second.shutdown().await;

    let spans = collect_spans(&collector, traces).await;
    let trace = client().trace.to_string();
    assert!(spans.iter().all(|span| span.trace == trace), "{spans:#?}");
    let of = |name| spans_named(&spans, name);
    let [whole] = of("job")[..] else { panic!("{spans:#?}") };
    assert_eq!(whole.parent, client().span.to_string());
    let (assigned, attempts, staging) = (of("assigned"), of("attempt"), of("staging"));
    assert_eq!((assigned.len(), attempts.len(), staging.len()), (2, 2, 2), "{spans:#?}");
    for number in 0..2 {
        let (assigned_span, attempt) = (assigned[number], attempts[number]);
        assert_eq!(
            (&assigned_span.parent, &attempt.parent),
            (&whole.span, &assigned_span.span)
        );
        assert_eq!(
            (&*assigned_span.service, &*attempt.service),
            ("aitk-coordinator", "aitk-worker")
        );
        assert_eq!(attempt.attributes["aitk.job.id"], job);
        assert_eq!(attempt.attributes["aitk.attempt.number"], (number + 1).to_string());
        assert_eq!(attempt.attributes["aitk.worker.name"], ["first", "second"][number]);
        assert_eq!(attempt.attributes["aitk.device"], "cpu:0");
        assert_eq!(attempt.attributes["aitk.outcome"], ["cut off", "completed"][number]);
        assert_eq!(staging[number].parent, attempt.span);
    }
    assert_eq!((attempts[0].error.is_some(), attempts[1].error.is_none()), (true, true));
    let phases: Vec<(&str, &str, &str)> = spans
        .iter()
        .filter(|span| span.service == "aitk-attempt")
        .map(|span| {
            (
                span.name.as_str(),
                span.parent.as_str(),
                span.attributes["aitk.attempt.id"].as_str(),
            )
        })
        .collect();
    let expected = |name, number: usize| {
        let attempt: &ReceivedSpan = attempts[number];
        (
            name,
            attempt.span.as_str(),
            attempt.attributes["aitk.attempt.id"].as_str(),
        )
    };
    for phase in [
        expected("loading model", 0),
        expected("training", 0),
        expected("training", 1),
        expected("saving", 1),
    ] {
        assert_eq!(
            phases.iter().filter(|spans| **spans == phase).count(),
            1,
            "{phase:?} in {phases:?}"
        );
    }
    assert_eq!(phases.len(), 4, "{phases:?}");
    let [checkpoint_span] = of("checkpoint")[..] else {
        panic!("{spans:#?}")
    };
    assert_eq!(
        (&checkpoint_span.parent, &*checkpoint_span.attributes["aitk.step"]),
        (&attempts[0].span, "5")
    );
    for part in ["upload", "commit"] {
        let [part] = of(part)[..] else { panic!("{spans:#?}") };
        assert_eq!((&part.parent, &part.error), (&checkpoint_span.span, &None));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_without_a_trace_gets_one_from_its_id() {
    let collector = TraceCollector::start().await.unwrap();
    let traces = Traces::to(&collector.traces_endpoint());
    let mut cluster = TestCluster::start().await;
    // The coordinator has no collector; its worker has.
    cluster.traces.clone_from(&traces);
    let worker = cluster.worker("w", &emit_finished("completed")).await;
    let job = cluster.submit(HashMap::new(), false).await;
    cluster.wait_for_state(&job, JobState::Completed).await;
    worker.shutdown().await;
    let spans = collect_spans(&collector, traces).await;
    let [attempt] = spans_named(&spans, "attempt")[..] else {
        panic!("{spans:#?}")
    };
    let id = aitk_common::id::JobId::new(job);
    let trace = aitk_common::telemetry::context::TraceId::of_job(&id);
    assert_eq!(
        (attempt.trace.clone(), attempt.parent.as_str()),
        (trace.to_string(), "")
    );
}

/// The daemon as a process, with the standard OpenTelemetry variables, and a child that refuses its job.
#[tokio::test(flavor = "multi_thread")]
async fn the_program_sends_its_spans_and_logs_the_trace_id() {
    let collector = TraceCollector::start().await.unwrap();
    let cluster = TestCluster::start().await;
    let daemon = program()
        .env("AITK_TOKEN", &cluster.token)
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint())
        .args([
            "--json-log",
            "--server",
            &cluster.url(),
            "--devices",
            "cpu",
            "--name",
            "basement",
            "--data-dir",
        ])
        .arg(cluster.path("w"))
        .spawn()
        .unwrap();
    let job = cluster.submit_in_trace(Some(client()), HashMap::new(), false).await;
    cluster.wait_for_state(&job, JobState::Failed).await;
    // Pending spans are sent at shutdown.
    let pid = nix::unistd::Pid::from_raw(i32::try_from(daemon.id()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    let output = tokio::task::spawn_blocking(move || daemon.wait_with_output().unwrap())
        .await
        .unwrap();
    let log = text(&output.stderr);
    assert!(output.status.success(), "{log}");

    let spans = collector.received();
    let [attempt] = spans_named(&spans, "attempt")[..] else {
        panic!("{spans:#?}\n{log}")
    };
    assert_eq!(
        (&*attempt.service, &*attempt.attributes["aitk.outcome"]),
        ("aitk-worker", "failed")
    );
    assert_eq!(
        (&attempt.trace, &attempt.parent),
        (&client().trace.to_string(), &client().span.to_string())
    );
    let lines: Vec<serde_json::Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let ended = lines.iter().find(|line| line["message"] == "attempt ended");
    let about = &ended.unwrap_or_else(|| panic!("{log}"))["span"];
    assert_eq!(
        (&about["job"], &about["attempt"]),
        (&json!(job), &json!(format!("{job}-1")))
    );
    assert_eq!(about["trace_id"], client().trace.to_string());
}
