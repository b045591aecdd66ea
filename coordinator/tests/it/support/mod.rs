//! A coordinator in the test process, and workers that a test drives message by message.

pub(crate) mod daemon;
pub(crate) mod data_sets;
pub(crate) mod postgres;

use aitk_common::attempt::Outcome;
use aitk_common::capability::{Device, DeviceKind, DeviceRef};
use aitk_common::checkpoint::{FORMAT_VERSION, FileEntry, Manifest};
use aitk_common::control_plane::{
    Assignment, AttemptRef, EventBody, JobEvent, JobState, JobView, PROTOCOL_VERSION, Registration, Report, Submission,
    SubmissionReceipt, ToCoordinator, ToWorker, UnixMillis, Verdict,
};
use aitk_common::hash::ContentHash;
use aitk_common::id::{AttemptId, WorkerId};
use aitk_common::plan::profile::MemoryProfile;
use aitk_common::storage::BlobStore;
use aitk_common::storage::snapshot::Snapshot;
use aitk_coordinator::{Config, CoordinatorHandle, start};
use aitk_proto::client::{Clients, connect};
use aitk_proto::remote_blobs::RemoteBlobs;
use aitk_proto::v1;
use std::collections::BTreeMap;
use std::future::Future;
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

/// Longer than anything in these tests takes, even on a busy machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);

/// Awaits the future, and fails the test after [`TIMEOUT`].
pub(crate) async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(TIMEOUT, future).await.expect("the test timed out")
}

/// Calls `poll` until it returns a value, and fails the test after [`TIMEOUT`].
pub(crate) async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, mut poll: impl FnMut() -> F) -> T {
    let begin = Instant::now();
    loop {
        if let Some(found) = poll().await {
            return found;
        }
        assert!(
            begin.elapsed() < TIMEOUT,
            "timed out after {TIMEOUT:?} waiting for {what}"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub(crate) fn config(dir: &Path, lease: Duration) -> Config {
    Config {
        bind: "127.0.0.1:0".parse().unwrap(),
        lease,
        ..Config::new(dir)
    }
}

/// A coordinator with SQLite in a temporary folder, and an administrator's clients.
pub(crate) struct TestCoordinator {
    pub(crate) running: CoordinatorHandle,
    pub(crate) clients: Clients,
    pub(crate) dir: tempfile::TempDir,
    lease: Duration,
}

impl TestCoordinator {
    pub(crate) async fn start(lease: Duration) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let running = start(config(dir.path(), lease)).await.unwrap();
        let clients = connect(&running.url(), &running.token, None).await.unwrap();
        let coordinator = Self {
            running,
            clients,
            dir,
            lease,
        };
        let input = input();
        within(coordinator.blobs().put_bytes(input.id(), input.to_bytes().into()))
            .await
            .unwrap();
        coordinator
    }

    /// Shuts the coordinator down and starts it again on the same folder, on another port.
    pub(crate) async fn restart(self) -> Self {
        let Self {
            running, dir, lease, ..
        } = self;
        within(running.shutdown()).await;
        let running = start(config(dir.path(), lease)).await.unwrap();
        let clients = connect(&running.url(), &running.token, None).await.unwrap();
        Self {
            running,
            clients,
            dir,
            lease,
        }
    }

    pub(crate) fn blobs(&self) -> RemoteBlobs {
        RemoteBlobs::with_budget(&self.clients, Duration::from_secs(5))
    }

    pub(crate) async fn put(&self, bytes: &'static [u8]) -> ContentHash {
        let hash = ContentHash::of(bytes);
        within(self.blobs().put_bytes(hash, bytes.into())).await.unwrap();
        hash
    }

    /// Stores a checkpoint of one file. Returns the hash of its manifest.
    pub(crate) async fn checkpoint(&self, step: u64) -> ContentHash {
        put_checkpoint(&self.blobs(), step).await
    }

    pub(crate) async fn submit(&self, name: &str) -> SubmissionReceipt {
        within(
            self.clients
                .jobs
                .clone()
                .submit(v1::SubmitRequest::from(submission(name))),
        )
        .await
        .unwrap()
        .into_inner()
        .try_into()
        .unwrap()
    }

    pub(crate) async fn job(&self, id: &str) -> JobView {
        let request = v1::GetJobRequest { job_id: id.into() };
        within(self.clients.jobs.clone().get(request))
            .await
            .unwrap()
            .into_inner()
            .try_into()
            .unwrap()
    }

    pub(crate) async fn in_state(&self, id: &str, state: JobState) -> JobView {
        eventually(&format!("{id} {state}"), || async {
            Some(self.job(id).await).filter(|view| view.state == state)
        })
        .await
    }

    /// Reads the events after a cursor until the stream ends.
    pub(crate) async fn events(&self, id: &str, cursor: u64, follow: bool) -> Vec<JobEvent> {
        let request = v1::EventsRequest {
            job_id: id.into(),
            cursor,
            follow,
        };
        within(async {
            let mut stream = self.clients.jobs.clone().events(request).await.unwrap().into_inner();
            let mut events = Vec::new();
            while let Some(event) = stream.message().await.unwrap() {
                events.push(event.try_into().unwrap());
            }
            events
        })
        .await
    }
}

/// The input of every test job: an empty data set.
pub(crate) fn input() -> Snapshot {
    Snapshot::new(Vec::new(), false).unwrap()
}

/// The text of the manifest of a checkpoint of one file, and the content of that file.
pub(crate) fn checkpoint(step: u64) -> (String, Vec<u8>) {
    let file = format!("weights of step {step}").into_bytes();
    let manifest = Manifest {
        format_version: FORMAT_VERSION,
        job: "test".into(),
        step,
        epoch: 0,
        created: jiff::Timestamp::UNIX_EPOCH,
        state: serde_json::Map::new(),
        files: vec![FileEntry {
            path: "adapter.safetensors".into(),
            sha256: ContentHash::of(&file),
            bytes: file.len() as u64,
            role: "adapter".into(),
        }],
    };
    (manifest.to_text().unwrap(), file)
}

/// Stores a checkpoint of one file. Returns the hash of its manifest.
pub(crate) async fn put_checkpoint(blobs: &dyn BlobStore, step: u64) -> ContentHash {
    let (manifest, file) = checkpoint(step);
    let hash = ContentHash::of(manifest.as_bytes());
    within(blobs.put_bytes(ContentHash::of(&file), file.into()))
        .await
        .unwrap();
    within(blobs.put_bytes(hash, manifest.into())).await.unwrap();
    hash
}

/// A small job as parsing a config gives it, with this `cluster` section. The memory that its model needs is unknown.
pub(crate) fn job_json(name: &str, cluster: &str) -> String {
    format!(
        r#"{{"job":"generate","name":"{name}","meta":{{}},"config":{{}},"process":[{{"type":"to_folder","kind":{{"generate":{{
        "output_folder":"out","model":{{"name_or_path":"org/model"}},"generate":{{"prompts":["a cat"]}}}}}}}}],"cluster":{{{cluster}}}}}"#
    )
}

pub(crate) fn submission(name: &str) -> Submission {
    Submission {
        config_text: format!("name: {name}\n"),
        config_format: "yaml".into(),
        job_json: job_json(name, ""),
        inputs: BTreeMap::from([("./data".to_owned(), input().id())]),
        local: false,
        idempotency_key: None,
        owner: None,
        parameter_counts: None,
        image_batches: Vec::new(),
        longest_prompt: None,
        images: None,
    }
}

pub(crate) fn cpu() -> Device {
    Device {
        id: DeviceRef {
            kind: DeviceKind::Cpu,
            index: 0,
        },
        name: "cpu".into(),
        architecture: "x86_64".into(),
        memory_total: 8 << 30,
        memory_budget: 4 << 30,
        dtypes: vec!["f32".into()],
        attention: vec!["eager".into()],
        profile: MemoryProfile::CpuOnly,
        gflops: 0,
    }
}

pub(crate) fn held_attempt(work: &Assignment) -> AttemptRef {
    AttemptRef {
        attempt: work.attempt.clone(),
        epoch: work.epoch,
    }
}

/// A worker that does only what the test calls. It holds the worker's side of a session.
pub(crate) struct FakeWorker {
    sender: mpsc::Sender<v1::WorkerMessage>,
    messages: Streaming<v1::CoordinatorMessage>,
    pub(crate) id: WorkerId,
    pub(crate) keep: Vec<AttemptId>,
    last_request: u64,
}

impl FakeWorker {
    pub(crate) fn registration(name: &str, worker: Option<WorkerId>, running: Vec<AttemptRef>) -> Registration {
        Registration {
            protocol: PROTOCOL_VERSION,
            worker,
            name: name.into(),
            version: "test".into(),
            host: "here".into(),
            devices: vec![cpu()],
            labels: BTreeMap::new(),
            running,
            confinement: None,
            offers: Vec::new(),
            outputs_on_request: true,
        }
    }

    pub(crate) async fn open(
        clients: &Clients,
        first: Option<ToCoordinator>,
    ) -> Result<(mpsc::Sender<v1::WorkerMessage>, Streaming<v1::CoordinatorMessage>), Status> {
        let (sender, receiver) = mpsc::channel(64);
        if let Some(first) = first {
            sender.send(first.into()).await.unwrap();
        }
        let answer = within(clients.workers.clone().session(ReceiverStream::new(receiver))).await?;
        Ok((sender, answer.into_inner()))
    }

    pub(crate) async fn register(clients: &Clients, registration: Registration) -> Self {
        Self::try_register(clients, registration)
            .await
            .expect("the coordinator sends a welcome")
    }

    /// Returns `None` when the coordinator's first message is not a welcome.
    pub(crate) async fn try_register(clients: &Clients, registration: Registration) -> Option<Self> {
        let first = ToCoordinator::Register(Box::new(registration));
        let (sender, messages) = Self::open(clients, Some(first)).await.ok()?;
        let mut worker = Self {
            sender,
            messages,
            id: WorkerId::new("none"),
            keep: Vec::new(),
            last_request: 0,
        };
        let Some(ToWorker::Welcome { worker: id, keep, .. }) = worker.next().await else {
            return None;
        };
        (worker.id, worker.keep) = (id, keep);
        Some(worker)
    }

    pub(crate) async fn new(coordinator: &TestCoordinator, name: &str) -> Self {
        Self::register(&coordinator.clients, Self::registration(name, None, Vec::new())).await
    }

    /// The next message; `None` when the session has ended.
    pub(crate) async fn next(&mut self) -> Option<ToWorker> {
        match within(self.messages.message()).await {
            Ok(message) => message.map(|message| message.try_into().unwrap()),
            Err(_) => None,
        }
    }

    /// Skips messages until `pick` returns a value for one.
    pub(crate) async fn wait_for_message<T>(&mut self, mut pick: impl FnMut(ToWorker) -> Option<T>) -> T {
        loop {
            let message = self.next().await.expect("the session ended");
            if let Some(found) = pick(message) {
                return found;
            }
        }
    }

    pub(crate) async fn next_assignment(&mut self) -> Assignment {
        self.wait_for_message(|message| {
            if let ToWorker::Assign(work) = message {
                Some(*work)
            } else {
                None
            }
        })
        .await
    }

    pub(crate) async fn send(&self, message: ToCoordinator) {
        // A closed session is noticed when its messages are read.
        let _ = self.sender.send(message.into()).await;
    }

    pub(crate) async fn heartbeat(&self, running: &[AttemptRef]) {
        self.send(ToCoordinator::Heartbeat {
            running: running.to_vec(),
        })
        .await;
    }

    pub(crate) async fn log(&self, work: &Assignment, seq: u64, text: &str) {
        let report = Report::Log {
            level: "info".into(),
            message: text.into(),
        };
        self.send(ToCoordinator::Event {
            held: held_attempt(work),
            seq,
            time: UnixMillis(1),
            report,
        })
        .await;
    }

    /// Sends a request and waits for the verdict on it.
    pub(crate) async fn request(&mut self, message: impl FnOnce(u64) -> ToCoordinator) -> (Verdict, String) {
        self.last_request += 1;
        let id = self.last_request;
        self.send(message(id)).await;
        self.wait_for_message(|message| match message {
            ToWorker::Answer {
                request,
                verdict,
                message,
            } if request == id => Some((verdict, message)),
            _ => None,
        })
        .await
    }

    pub(crate) async fn commit(&mut self, held: &AttemptRef, manifest: ContentHash, step: u64) -> Verdict {
        let held = held.clone();
        self.request(|request| ToCoordinator::Commit {
            request,
            held,
            manifest,
            step,
        })
        .await
        .0
    }

    pub(crate) async fn finish(&mut self, held: &AttemptRef, outcome: Outcome) -> Verdict {
        let held = held.clone();
        self.request(|request| ToCoordinator::Finished { request, held, outcome })
            .await
            .0
    }
}

/// The messages of the log lines among the events.
pub(crate) fn logs(events: &[JobEvent]) -> Vec<&str> {
    events
        .iter()
        .filter_map(|event| {
            if let EventBody::Log { message, .. } = &event.body {
                Some(message.as_str())
            } else {
                None
            }
        })
        .collect()
}
