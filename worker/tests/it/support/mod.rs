//! Test support: a coordinator in this process, and workers whose children are shell scripts.

use aitk_common::capability::{Device, DeviceKind, DeviceRef};
use aitk_common::checkpoint::CheckpointWriter;
use aitk_common::control_plane::{JobState, JobView};
use aitk_common::hash::ContentHash;
use aitk_common::plan::profile::MemoryProfile;
use aitk_common::storage::BlobStore;
use aitk_common::storage::snapshot::{Snapshot, SnapshotFile};
use aitk_common::telemetry::context::TraceContext;
use aitk_common::telemetry::traces::Traces;
use aitk_proto::client::{Clients, connect};
use aitk_proto::remote_blobs::RemoteBlobs;
use aitk_proto::v1;
use aitk_worker::{Config, Status, WorkerHandle};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The time-out of every wait; no test waits for it to pass.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);
/// Far longer than a heartbeat or a reconnection takes on a loaded machine.
const LEASE: Duration = Duration::from_secs(10);

/// A parsed job whose model is the input `model`.
pub(crate) const JOB: &str = r#"{"job":"generate","name":"n","meta":{},"config":{},"cluster":{},"process":[{"type":"to_folder","kind":{"generate":{
    "output_folder":"out","model":{"name_or_path":"model"},"generate":{"prompts":["a cat"]}}}}]}"#;

/// A training job.
const TRAINING: &str = r#"{"job":"extension","name":"n","meta":{},"config":{},"cluster":{},"process":[{"type":"sd_trainer","kind":{"train":{
    "training_folder":"out","model":{"arch":"sd1","name_or_path":"model","dtype":"float32"},"network":{},"datasets":[{"folder_path":"data"}]}}}]}"#;

/// Uploads a placeholder model for tests whose children are scripts. Returns its snapshot.
pub(crate) async fn put_model(store: &dyn BlobStore) -> ContentHash {
    let content = b"a model".as_slice();
    let file = SnapshotFile {
        path: "model_index.json".into(),
        bytes: content.len() as u64,
        sha256: ContentHash::of(content),
    };
    store.put_bytes(file.sha256, content.into()).await.unwrap();
    let snapshot = Snapshot::new(vec![file], false).unwrap();
    store
        .put_bytes(snapshot.id(), snapshot.to_bytes().into())
        .await
        .unwrap();
    snapshot.id()
}

pub(crate) struct TestCluster {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) coordinator: Option<aitk_coordinator::CoordinatorHandle>,
    pub(crate) addr: SocketAddr,
    pub(crate) token: String,
    pub(crate) traces: Traces,
}

impl TestCluster {
    pub(crate) async fn start() -> Self {
        Self::start_with_traces(Traces::default()).await
    }

    /// Starts a coordinator that, like its workers, sends spans to `traces`.
    pub(crate) async fn start_with_traces(traces: Traces) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
        let coordinator = coordinator(folder.path(), any_port, &traces).await;
        let (addr, token) = (coordinator.addr, coordinator.token.clone());
        Self {
            folder,
            coordinator: Some(coordinator),
            addr,
            token,
            traces,
        }
    }

    /// Stops the coordinator; its data stays on disk.
    pub(crate) async fn stop_coordinator(&mut self) {
        self.coordinator.take().unwrap().shutdown().await;
    }

    /// Restarts the coordinator at the same address.
    pub(crate) async fn start_coordinator(&mut self) {
        self.coordinator = Some(coordinator(self.folder.path(), self.addr, &self.traces).await);
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    pub(crate) async fn clients(&self) -> Clients {
        connect(&self.url(), &self.token, None).await.unwrap()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts a worker whose children run this script: `$2` is the specification, `$PWD` the attempt's folder.
    pub(crate) async fn worker(&self, name: &str, script: &str) -> WorkerHandle {
        let worker = aitk_worker::start(self.config(name, script)).await.unwrap();
        wait_until_connected(&worker).await;
        worker
    }

    pub(crate) fn config(&self, name: &str, script: &str) -> Config {
        let mut config = Config::new(self.url(), self.token.clone(), self.path(name));
        config.name = name.to_owned();
        config.devices = vec![device()];
        config.attempt_command = ["sh", "-c", script].map(Into::into).to_vec();
        config.grace = Duration::from_secs(60);
        config.shutdown_timeout = TIMEOUT;
        config.traces.clone_from(&self.traces);
        config
    }

    pub(crate) async fn submit(&self, inputs: HashMap<String, String>, local: bool) -> String {
        self.submit_in_trace(None, inputs, local).await
    }

    /// Submits a job that is part of a trace.
    pub(crate) async fn submit_in_trace(
        &self,
        trace: Option<TraceContext>,
        inputs: HashMap<String, String>,
        local: bool,
    ) -> String {
        let mut inputs = inputs;
        if !local {
            let store = RemoteBlobs::new(&self.clients().await);
            inputs.insert("model".to_owned(), put_model(&store).await.to_hex());
        }
        let request = v1::SubmitRequest {
            config_text: "job: generate".into(),
            config_format: "yaml".into(),
            job_json: JOB.into(),
            inputs,
            local,
            ..v1::SubmitRequest::default()
        };
        let mut request = tonic::Request::new(request);
        aitk_proto::trace::insert(request.metadata_mut(), trace);
        self.clients()
            .await
            .jobs
            .submit(request)
            .await
            .unwrap()
            .into_inner()
            .job_id
    }

    /// Submits a training job: the reason of its end names its checkpoints.
    pub(crate) async fn submit_training(&self) -> String {
        let store = RemoteBlobs::new(&self.clients().await);
        let input = put_model(&store).await.to_hex();
        let request = v1::SubmitRequest {
            config_text: "job: extension".into(),
            config_format: "yaml".into(),
            job_json: TRAINING.into(),
            // The script decides what happens with the inputs.
            inputs: HashMap::from([("model".to_owned(), input.clone()), ("data".to_owned(), input)]),
            ..v1::SubmitRequest::default()
        };
        let submitted = self.clients().await.jobs.submit(request).await.unwrap();
        submitted.into_inner().job_id
    }

    pub(crate) async fn stop(&self, id: &str) {
        let request = v1::StopJobRequest {
            job_id: id.to_owned(),
            ..v1::StopJobRequest::default()
        };
        self.clients().await.jobs.stop(request).await.unwrap();
    }

    pub(crate) async fn job(&self, id: &str) -> JobView {
        let request = v1::GetJobRequest { job_id: id.to_owned() };
        self.clients()
            .await
            .jobs
            .get(request)
            .await
            .unwrap()
            .into_inner()
            .try_into()
            .unwrap()
    }

    /// Waits until a condition on the job is true. `what` describes it.
    pub(crate) async fn wait_until(&self, id: &str, what: &str, is_true: impl Fn(&JobView) -> bool) -> JobView {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let job = self.job(id).await;
            if is_true(&job) {
                return job;
            }
            assert!(
                Instant::now() < deadline,
                "the job is not {what}: {job:#?}\nits log: {:#?}",
                self.log(id).await
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) async fn wait_for_state(&self, id: &str, state: JobState) -> JobView {
        self.wait_until(id, state.name(), |job| job.state == state).await
    }

    /// Every log line of the job.
    pub(crate) async fn log(&self, id: &str) -> Vec<String> {
        let request = v1::EventsRequest {
            job_id: id.to_owned(),
            cursor: 0,
            follow: false,
        };
        let mut events = self.clients().await.jobs.events(request).await.unwrap().into_inner();
        let mut lines = Vec::new();
        while let Ok(Some(event)) = events.message().await {
            if let Some(v1::job_event::Body::Log(line)) = event.body {
                lines.push(line.message);
            }
        }
        lines
    }

    /// Makes a complete checkpoint on disk, for a script to announce.
    pub(crate) fn checkpoint(&self, step: u64) -> PathBuf {
        let parent = self.path("made");
        std::fs::create_dir_all(&parent).unwrap();
        let mut writer = CheckpointWriter::new(&parent, step).unwrap();
        writer
            .add_bytes("state.json", "state", format!("state of {step}").as_bytes())
            .unwrap();
        writer.commit(serde_json::Map::new()).unwrap()
    }

    /// Returns whether the worker has no folders of attempts.
    pub(crate) fn has_no_attempt_folders(&self, worker: &str) -> bool {
        std::fs::read_dir(self.path(worker).join("attempts"))
            .unwrap()
            .next()
            .is_none()
    }
}

async fn coordinator(folder: &Path, bind: SocketAddr, traces: &Traces) -> aitk_coordinator::CoordinatorHandle {
    let mut config = aitk_coordinator::Config::new(folder.join("coordinator"));
    config.bind = bind;
    config.lease = LEASE;
    config.traces.clone_from(traces);
    let deadline = Instant::now() + TIMEOUT;
    loop {
        // Another connection may hold the port for a moment.
        match aitk_coordinator::start(config.clone()).await {
            Ok(running) => return running,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Starts a worker in the folder of a worker that was just dropped, as soon as the lock is free.
pub(crate) async fn restart_worker(config: Config) -> WorkerHandle {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match aitk_worker::start(config.clone()).await {
            Ok(worker) => return worker,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub(crate) async fn wait_until_connected(worker: &WorkerHandle) {
    let mut status = worker.status();
    let waiting = status.wait_for(|status| matches!(status, Status::Connected(_)));
    tokio::time::timeout(TIMEOUT, waiting)
        .await
        .expect("the worker does not connect")
        .unwrap();
}

/// Polls until a condition is true.
pub(crate) async fn eventually(what: &str, mut is_true: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !is_true() {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub(crate) fn device() -> Device {
    Device {
        id: DeviceRef {
            kind: DeviceKind::Cpu,
            index: 0,
        },
        name: "test".into(),
        architecture: "x86_64".into(),
        memory_total: 8 << 30,
        memory_budget: 4 << 30,
        dtypes: vec!["f32".into()],
        attention: vec!["eager".into()],
        profile: MemoryProfile::CpuOnly,
        gflops: 0,
    }
}

/// Shell code that emits an event.
pub(crate) fn emit(event: serde_json::Value) -> String {
    format!("echo '{event}'\n")
}

/// Shell code that copies a checkpoint (see [`TestCluster::checkpoint`]) into the attempt's folder, and announces it.
pub(crate) fn emit_checkpoint(checkpoint: &Path, step: u64) -> String {
    let name = checkpoint.file_name().unwrap().to_str().unwrap();
    let event = serde_json::json!({"event": "checkpoint", "path": "HERE", "step": step}).to_string();
    let event = event.replace("HERE", &format!("'\"$PWD\"'/output/{name}"));
    format!(
        "mkdir -p output && cp -r '{}' output/\necho '{event}'\n",
        checkpoint.display()
    )
}

pub(crate) fn emit_finished(outcome: &str) -> String {
    emit(serde_json::json!({ "event": "finished", "outcome": { "outcome": outcome } }))
}

pub(crate) fn wait_for(path: &Path) -> String {
    format!("while [ ! -e '{}' ]; do sleep 0.02; done\n", path.display())
}

pub(crate) fn script(parts: &[&str]) -> String {
    parts.concat()
}
