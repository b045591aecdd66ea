//! A coordinator that assigns jobs that it should have refused: the worker checks them itself before it fetches or
//! starts anything, and reports what is wrong.

use crate::support::{JOB, TIMEOUT, device, eventually};
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::control_plane::{Assignment, AttemptRef, ToCoordinator, ToWorker, Verdict};
use aitk_common::id::{AttemptId, Epoch, JobId, TaskId, UserName, WorkerId};
use aitk_common::plan::profile::MemoryProfile;
use aitk_proto::v1;
use aitk_proto::v1::workers_server::{Workers, WorkersServer};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Request, Response, Status, Streaming};

type Wire = Result<v1::CoordinatorMessage, Status>;

/// One session; the test holds both of its streams.
struct HostileCoordinator(mpsc::Sender<(Streaming<v1::WorkerMessage>, mpsc::Sender<Wire>)>);

#[tonic::async_trait]
impl Workers for HostileCoordinator {
    type SessionStream = ReceiverStream<Wire>;

    async fn session(
        &self,
        request: Request<Streaming<v1::WorkerMessage>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let (wire, messages) = mpsc::channel(16);
        let opened = self.0.send((request.into_inner(), wire)).await;
        opened.map_err(|_| Status::unavailable("the test is over"))?;
        Ok(Response::new(ReceiverStream::new(messages)))
    }

    async fn join(&self, _: Request<v1::JoinRequest>) -> Result<Response<v1::JoinReply>, Status> {
        Err(Status::unimplemented("nobody joins"))
    }

    async fn renew(&self, _: Request<v1::RenewRequest>) -> Result<Response<v1::RenewReply>, Status> {
        Err(Status::unimplemented("nobody renews"))
    }
}

struct Session {
    messages: Streaming<v1::WorkerMessage>,
    wire: mpsc::Sender<Wire>,
    number: u64,
}

impl Session {
    async fn next(&mut self) -> ToCoordinator {
        let message = tokio::time::timeout(TIMEOUT, self.messages.message()).await;
        let message = message.expect("the worker is silent").unwrap();
        message.expect("the worker went away").try_into().unwrap()
    }

    async fn send(&self, message: ToWorker) {
        self.wire.send(Ok(message.into())).await.unwrap();
    }

    /// Assigns a job, and waits for its outcome.
    async fn assign(&mut self, job_json: &str, local: bool) -> Outcome {
        self.number += 1;
        let job = JobId::new(format!("j{}", self.number));
        let held = AttemptRef {
            attempt: AttemptId::new(format!("{job}-0-1")),
            epoch: Epoch(1),
        };
        let assignment = Assignment {
            task: TaskId::new(format!("{job}-0")),
            job,
            attempt: held.attempt.clone(),
            epoch: held.epoch,
            job_json: job_json.to_owned(),
            config_text: String::new(),
            config_format: "yaml".into(),
            inputs: BTreeMap::new(),
            local,
            resume: None,
            device: device().id,
            profile: MemoryProfile::CpuOnly,
            seed: 1,
            generated: Vec::new(),
            trace: None,
            owner: Some(UserName::new("eve")),
        };
        self.send(ToWorker::Assign(Box::new(assignment))).await;
        loop {
            match self.next().await {
                ToCoordinator::Finished {
                    request,
                    held: of,
                    outcome,
                } if of == held => {
                    let message = String::new();
                    let verdict = Verdict::Accepted;
                    self.send(ToWorker::Answer {
                        request,
                        verdict,
                        message,
                    })
                    .await;
                    return outcome;
                }
                ToCoordinator::Heartbeat { .. } => self.send(ToWorker::HeartbeatReply { events: Vec::new() }).await,
                _ => {}
            }
        }
    }
}

/// A training on the folder `data`.
fn training() -> Value {
    json!({"job": "extension", "name": "n", "meta": {}, "config": {}, "cluster": {}, "process": [
        {"type": "sd_trainer", "kind": {"train": {"training_folder": "out", "network": {},
            "model": {"arch": "sd1", "name_or_path": "org/model", "dtype": "float32"}, "datasets": [{"folder_path": "data"}]}}}]})
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_job_is_refused_by_the_worker_before_its_child_starts() {
    let folder = tempfile::tempdir().unwrap();
    let canary = folder.path().join("canary");
    std::fs::create_dir(&canary).unwrap();
    std::fs::write(canary.join("secret.txt"), "the secret").unwrap();
    let secret = canary.join("secret.txt").display().to_string();

    let listener = tokio::net::TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0)))
        .await
        .unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (opened, mut sessions) = mpsc::channel(1);
    let server = tokio::spawn(
        tonic::transport::Server::builder()
            .add_service(WorkersServer::new(HostileCoordinator(opened)))
            .serve_with_incoming(TcpListenerStream::new(listener)),
    );
    let marker = folder.path().join("a child ran");
    let mut config = aitk_worker::Config::new(url, "any-token-that-is-long-enough", folder.path().join("worker"));
    config.devices = vec![device()];
    config.attempt_command = ["sh", "-c", &format!("touch '{}'", marker.display())]
        .map(Into::into)
        .to_vec();
    config.shutdown_timeout = TIMEOUT;
    let worker = aitk_worker::start(config).await.unwrap();
    let (messages, wire) = tokio::time::timeout(TIMEOUT, sessions.recv()).await.unwrap().unwrap();
    let mut session = Session {
        messages,
        wire,
        number: 0,
    };
    let ToCoordinator::Register(registration) = session.next().await else {
        panic!("the first message registers");
    };
    session
        .send(ToWorker::Welcome {
            worker: registration.worker.unwrap_or_else(|| WorkerId::new("w1")),
            heartbeat_interval: Duration::from_millis(200),
            lease: Duration::from_secs(20),
            storage_url: None,
            keep: Vec::new(),
            wanted: Vec::new(),
        })
        .await;

    let with = |pointer: &str, value: Value| {
        let mut job = training();
        *job.pointer_mut(pointer).unwrap() = value;
        job.to_string()
    };
    let generate = |prompts: &str| {
        JOB.replace(r#"["a cat"]"#, &json!(prompts).to_string())
            .replace(r#""model"}"#, r#""org/model"}"#)
    };
    let data = "/process/0/kind/train/datasets/0/folder_path";
    let model = "/process/0/kind/train/model/name_or_path";
    let hostile = [
        (generate(&secret), "generate.prompts"),
        (generate("/proc/self/environ"), "generate.prompts"),
        (with("/name", json!("../../canary/x")), "cannot name a folder"),
        (
            with("/name", json!(canary.display().to_string())),
            "cannot name a folder",
        ),
        (with(data, json!(canary.display().to_string())), "folder_path"),
        // The folder was never uploaded.
        (training().to_string(), "folder_path"),
        (with(model, json!(secret)), "name_or_path"),
        (with(model, json!("../canary")), "name_or_path"),
        (with("/process/0/type", json!("run_this")), "type"),
        (with("/process/0/kind/train/network", json!({"linear": -4})), "network"),
        ("[]".to_owned(), "job"),
        ("{".to_owned(), "job"),
    ];
    for (job, expected) in hostile {
        let Outcome::Failed { cause, message } = session.assign(&job, false).await else {
            panic!("the job ran: {job}");
        };
        assert_eq!(cause, FailureCause::BadInput, "{job}: {message}");
        assert!(
            message.starts_with("this worker does not run the job: ") && message.contains(expected),
            "{job}: {message}"
        );
        assert!(!message.contains("the secret"), "{message}");
        assert!(!marker.exists(), "{job}");
    }
    let remaining: Vec<_> = std::fs::read_dir(&canary)
        .unwrap()
        .flatten()
        .map(|entry| entry.file_name())
        .collect();
    assert_eq!(remaining, ["secret.txt"]);

    // A child that runs creates the marker.
    let in_place = JOB.replace(r#""model"}"#, &format!("{}}}", json!(canary.display().to_string())));
    session.assign(&in_place, true).await;
    assert!(marker.exists());
    let attempts = folder.path().join("worker/attempts");
    eventually("an attempt's folder was not removed", || {
        std::fs::read_dir(&attempts).unwrap().next().is_none()
    })
    .await;
    drop(session);
    server.abort();
    worker.shutdown().await;
}
