//! Spans of attempts: a real coordinator, real workers and a collector, one of the workers dies.

use crate::program::{program, text};
use crate::support::{Lab, finished, saved, say, script};
use aitk_common::control::JobState;
use aitk_common::telemetry::context::TraceContext;
use aitk_common::telemetry::test_collector::{ReceivedSpan, TestCollector};
use aitk_common::telemetry::traces::Traces;
use serde_json::json;
use std::collections::HashMap;
use std::time::Duration;

fn client() -> TraceContext {
    "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        .parse()
        .unwrap()
}

/// Everything that was written down.
async fn all(collector: &TestCollector, traces: Traces) -> Vec<ReceivedSpan> {
    tokio::task::spawn_blocking(move || traces.finish(Duration::from_secs(20)))
        .await
        .unwrap();
    collector.received()
}

fn named<'a>(seen: &'a [ReceivedSpan], name: &str) -> Vec<&'a ReceivedSpan> {
    let mut named: Vec<&ReceivedSpan> = seen.iter().filter(|span| span.name == name).collect();
    named.sort_by_key(|span| span.start);
    named
}

#[tokio::test(flavor = "multi_thread")]
async fn both_attempts_of_a_job_whose_first_worker_died_are_in_the_clients_trace() {
    let collector = TestCollector::start().await.unwrap();
    let traces = Traces::to(&collector.traces_endpoint());
    let lab = Lab::traced(traces.clone()).await;
    let phase = |name: &str| say(json!({"event": "phase", "name": name}));
    let checkpoint = lab.checkpoint(5);
    let hangs = script(&[
        &phase("loading model"),
        &phase("training"),
        &saved(&checkpoint, 5),
        "sleep 1000\n",
    ]);
    let ends = script(&[&phase("training"), &phase("saving"), &finished("completed")]);

    let first = lab.worker("first", &hangs).await;
    let job = lab.submit_in(Some(client()), HashMap::new(), false).await;
    lab.until(&job, "saved", |job| job.checkpoint_step == Some(5)).await;
    drop(first);
    let second = lab.worker("second", &ends).await;
    let view = lab.until_state(&job, JobState::Completed).await;
    assert_eq!(view.attempts.len(), 2);
    second.shutdown().await;

    let seen = all(&collector, traces).await;
    let trace = client().trace.to_string();
    assert!(seen.iter().all(|span| span.trace == trace), "{seen:#?}");
    let of = |name| named(&seen, name);
    let [whole] = of("job")[..] else { panic!("{seen:#?}") };
    assert_eq!(whole.parent, client().span.to_string());
    let (assigned, attempts, staging) = (of("assigned"), of("attempt"), of("staging"));
    assert_eq!((assigned.len(), attempts.len(), staging.len()), (2, 2, 2), "{seen:#?}");
    for number in 0..2 {
        let (given, attempt) = (assigned[number], attempts[number]);
        assert_eq!((&given.parent, &attempt.parent), (&whole.span, &given.span));
        assert_eq!(
            (&*given.service, &*attempt.service),
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
    let phases: Vec<(&str, &str, &str)> = seen
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
            phases.iter().filter(|seen| **seen == phase).count(),
            1,
            "{phase:?} in {phases:?}"
        );
    }
    assert_eq!(phases.len(), 4, "{phases:?}");
    let [kept] = of("checkpoint")[..] else {
        panic!("{seen:#?}")
    };
    assert_eq!((&kept.parent, &*kept.attributes["aitk.step"]), (&attempts[0].span, "5"));
    for part in ["upload", "commit"] {
        let [part] = of(part)[..] else { panic!("{seen:#?}") };
        assert_eq!((&part.parent, &part.error), (&kept.span, &None));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_nobody_traces_has_the_trace_of_its_id() {
    let collector = TestCollector::start().await.unwrap();
    let traces = Traces::to(&collector.traces_endpoint());
    let mut lab = Lab::start().await;
    // The coordinator has no collector; its worker has.
    lab.traces.clone_from(&traces);
    let worker = lab.worker("w", &finished("completed")).await;
    let job = lab.submit(HashMap::new(), false).await;
    lab.until_state(&job, JobState::Completed).await;
    worker.shutdown().await;
    let seen = all(&collector, traces).await;
    let [attempt] = named(&seen, "attempt")[..] else {
        panic!("{seen:#?}")
    };
    let id = aitk_common::id::JobId::new(job);
    let trace = aitk_common::telemetry::context::TraceId::of_job(&id);
    assert_eq!(
        (attempt.trace.clone(), attempt.parent.as_str()),
        (trace.to_string(), "")
    );
}

/// The daemon as a process, with the variables that everybody sets, and a child that refuses its job.
#[tokio::test(flavor = "multi_thread")]
async fn the_program_sends_its_spans_and_says_in_its_log_which_trace_a_line_is_about() {
    let collector = TestCollector::start().await.unwrap();
    let lab = Lab::start().await;
    let daemon = program()
        .env("AITK_TOKEN", &lab.token)
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint())
        .args([
            "--json-log",
            "--server",
            &lab.url(),
            "--devices",
            "cpu",
            "--name",
            "basement",
            "--data-dir",
        ])
        .arg(lab.path("w"))
        .spawn()
        .unwrap();
    let job = lab.submit_in(Some(client()), HashMap::new(), false).await;
    lab.until_state(&job, JobState::Failed).await;
    // What waits is sent at the end.
    let pid = nix::unistd::Pid::from_raw(i32::try_from(daemon.id()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    let output = tokio::task::spawn_blocking(move || daemon.wait_with_output().unwrap())
        .await
        .unwrap();
    let log = text(&output.stderr);
    assert!(output.status.success(), "{log}");

    let seen = collector.received();
    let [attempt] = named(&seen, "attempt")[..] else {
        panic!("{seen:#?}\n{log}")
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
