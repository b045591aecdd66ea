//! One job is one trace, from the command line to the child process of its attempt.

use crate::run::generate;
use crate::support::{Home, code, err};
use aitk_tests::trace_collector::{ReceivedSpan, TraceCollector};
use std::net::TcpListener;
use std::process::Output;

async fn run(home: &Home, endpoint: &str, more: &[(&str, &str)]) -> Output {
    let mut command = home.aitk();
    command
        .args(["run", "one.yaml", "--device", "cpu"])
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        .envs(more.iter().copied());
    tokio::task::spawn_blocking(move || command.output().unwrap())
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn client_coordinator_worker_and_child_process_write_one_trace() {
    let collector = TraceCollector::start().await.unwrap();
    let home = Home::new();
    generate(&home, "one");
    let above = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let output = run(&home, &collector.endpoint(), &[("TRACEPARENT", above)]).await;
    assert_eq!(code(&output), 0, "{}", err(&output));

    let seen = collector.received();
    let one = |name: &str| -> &ReceivedSpan {
        let found: Vec<&ReceivedSpan> = seen.iter().filter(|span| span.name == name).collect();
        let [one] = found[..] else {
            panic!("{name} in {seen:#?}")
        };
        one
    };
    let above_span = "b7ad6b7169203331";
    // Name, service and parent of each span.
    let expected = [
        ("submit", "aitk", above_span),
        ("job", "aitk-coordinator", &*one("submit").span),
        ("queued", "aitk-coordinator", &one("job").span),
        ("assigned", "aitk-coordinator", &one("job").span),
        ("attempt", "aitk-worker", &one("assigned").span),
        ("staging", "aitk-worker", &one("attempt").span),
        ("loading model", "aitk-attempt", &one("attempt").span),
        ("generating", "aitk-attempt", &one("attempt").span),
    ];
    for (name, service, parent) in expected {
        let span = one(name);
        assert_eq!((&*span.service, &*span.parent), (service, parent), "{span:#?}");
        assert_eq!(span.trace, "0af7651916cd43dd8448eb211c80319c");
        assert_eq!(span.attributes["aitk.job.id"], one("job").attributes["aitk.job.id"]);
    }
    assert_eq!(one("attempt").attributes["aitk.process.type"], "to_folder");
    assert_eq!(seen.len(), expected.len(), "{seen:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_completes_without_a_working_collector() {
    let home = Home::new();
    generate(&home, "one");
    // Accepts connections, and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let dead = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for address in [silent.local_addr().unwrap(), dead] {
        let output = run(&home, &format!("http://{address}"), &[]).await;
        assert_eq!(code(&output), 0, "{}", err(&output));
        assert_eq!(
            err(&output).matches("traces do not reach").count(),
            1,
            "{}",
            err(&output)
        );
    }
}
