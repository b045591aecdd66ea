//! Metrics and health checks over HTTP.

use crate::support::{self, FakeWorker, config, eventually, held_attempt, within};
use aitk_common::attempt::Outcome;
use aitk_common::control_plane::{Submission, ToCoordinator, Verdict};
use aitk_coordinator::{Config, StartError, start};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Sends a GET request. Returns the status line and the body.
async fn get(addr: SocketAddr, path: &str) -> (String, String) {
    within(async {
        let mut stream = TcpStream::connect(addr).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.lines().next().unwrap().to_owned(), body.to_owned())
    })
    .await
}

#[tokio::test]
async fn metrics_follow_a_job_from_submission_to_completion() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config {
        metrics: Some("127.0.0.1:0".parse().unwrap()),
        ..config(dir.path(), Duration::from_secs(10))
    };
    let running = start(config).await.unwrap();
    let addr = running.metrics.unwrap();
    let clients = aitk_proto::client::connect(&running.url(), &running.token, None)
        .await
        .unwrap();
    assert_eq!(get(addr, "/healthz").await.0, "HTTP/1.1 200 OK");
    assert_eq!(get(addr, "/readyz").await.0, "HTTP/1.1 200 OK");
    assert_eq!(get(addr, "/").await.0, "HTTP/1.1 404 Not Found");

    let submission = Submission {
        inputs: BTreeMap::new(),
        ..support::submission("secret-name")
    };
    let request = aitk_proto::v1::SubmitRequest::from(submission);
    within(clients.jobs.clone().submit(request)).await.unwrap();
    let (_, text) = get(addr, "/metrics").await;
    for line in [
        r#"aitk_jobs{state="queued"} 1"#,
        r#"aitk_workers{state="connected"} 0"#,
        "aitk_jobs_submitted_total 1",
        r#"aitk_jobs_ended_total{state="failed"} 0"#,
        r#"aitk_attempts_total{state="lost"} 0"#,
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }

    let mut worker = FakeWorker::register(&clients, FakeWorker::registration("box", None, Vec::new())).await;
    let work = worker.next_assignment().await;
    let (_, text) = get(addr, "/metrics").await;
    assert!(text.contains(r#"aitk_devices{kind="cpu",state="busy"} 1"#), "{text}");
    let held = held_attempt(&work);
    let (verdict, _) = worker
        .request(|request| ToCoordinator::Finished {
            request,
            held,
            outcome: Outcome::Completed,
        })
        .await;
    assert_eq!(verdict, Verdict::Accepted);
    let (_, text) = get(addr, "/metrics").await;
    for line in [
        r#"aitk_jobs{state="queued"} 0"#,
        r#"aitk_jobs_ended_total{state="completed"} 1"#,
        r#"aitk_attempts_total{state="assigned"} 1"#,
        r#"aitk_devices{kind="cpu",state="idle"} 1"#,
        "aitk_job_first_wait_seconds_count 1",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
    // Devices of a disconnected worker are not listed, and metrics never contain job names.
    drop(worker);
    eventually("the worker to be away", || async {
        let (_, text) = get(addr, "/metrics").await;
        assert!(!text.contains("secret-name"), "{text}");
        (text.contains(r#"aitk_workers{state="away"} 1"#) && !text.contains("aitk_devices{")).then_some(())
    })
    .await;
    within(running.shutdown()).await;
    assert!(TcpStream::connect(addr).await.is_err(), "it still listens");
}

#[tokio::test]
async fn metrics_are_only_served_on_loopback() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config {
        metrics: Some("0.0.0.0:0".parse().unwrap()),
        ..config(dir.path(), Duration::from_secs(10))
    };
    let refused = start(config).await.unwrap_err();
    assert!(matches!(refused, StartError::Metrics { .. }), "{refused}");
    assert!(refused.to_string().contains("loopback"), "{refused}");
}
