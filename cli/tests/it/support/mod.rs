//! Shared by the tests of the program: a home folder for each test, and a fake coordinator with scripted answers.

#![allow(unreachable_pub)]

use aitk_proto::v1::{self, jobs_server};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// A temporary home folder to run the program in.
pub struct Home {
    pub dir: tempfile::TempDir,
}

impl Home {
    pub fn new() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
        }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Returns a command for the program, without the real environment.
    pub fn aitk(&self) -> assert_cmd::Command {
        let mut command = assert_cmd::Command::cargo_bin("aitk").unwrap();
        command
            .env_clear()
            .env("HOME", self.path())
            .env("PATH", "/usr/bin:/bin")
            .current_dir(self.path());
        command.timeout(std::time::Duration::from_secs(120));
        command
    }

    pub fn write(&self, name: &str, text: &(impl AsRef<[u8]> + ?Sized)) -> PathBuf {
        let path = self.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        path
    }

    /// Writes a model that the engine can run into a folder. Its U-Net file gets an extra tensor of `more` bytes.
    pub fn write_model(&self, folder: &str, more: usize) {
        for name in MODEL_FILES {
            let mut bytes = file_of_model(name);
            if name == UNET {
                bytes = with_extra_tensor(&bytes, more);
            }
            self.write(&format!("{folder}/{name}"), &bytes);
        }
    }
}

pub fn code(output: &std::process::Output) -> i32 {
    output.status.code().unwrap_or(-1)
}

pub fn out(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub fn err(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Creates a job as a protobuf message.
pub fn job(id: &str, name: &str, state: v1::JobState) -> v1::Job {
    v1::Job {
        id: id.to_owned(),
        name: name.to_owned(),
        kind: "extension".to_owned(),
        state: state.into(),
        reason: "because the test says so".to_owned(),
        created_ms: 1_700_000_000_000,
        started_ms: Some(1_700_000_001_000),
        ended_ms: Some(1_700_000_061_000),
        ..v1::Job::default()
    }
}

/// The files of a Stable Diffusion 1.x model.
pub const MODEL_FILES: [&str; 10] = [
    "model_index.json",
    "unet/config.json",
    "unet/diffusion_pytorch_model.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "scheduler/scheduler_config.json",
    "tokenizer/vocab.json",
    "tokenizer/merges.txt",
];

pub const UNET: &str = "unet/diffusion_pytorch_model.safetensors";

/// Reads such a file of the tiny test model.
pub fn file_of_model(name: &str) -> Vec<u8> {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny_sd");
    std::fs::read(tiny.join(name)).unwrap()
}

/// Adds a tensor of `bytes` bytes to a safetensors file.
fn with_extra_tensor(file: &[u8], bytes: usize) -> Vec<u8> {
    let (length, rest) = file.split_at(8);
    let length = usize::try_from(u64::from_le_bytes(length.try_into().unwrap())).unwrap();
    let (header, data) = rest.split_at(length);
    let mut header: serde_json::Value = serde_json::from_slice(header).unwrap();
    let end = data.len() + bytes;
    header["more"] = serde_json::json!({"dtype": "U8", "shape": [bytes], "data_offsets": [data.len(), end]});
    let header = header.to_string();
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.bytes());
    out.extend(data);
    out.resize(out.len() + bytes, b'w');
    out
}

pub fn log(cursor: u64, message: &str) -> v1::JobEvent {
    let line = v1::LogLine {
        level: "info".to_owned(),
        message: message.to_owned(),
        ..v1::LogLine::default()
    };
    v1::JobEvent {
        cursor,
        time_ms: 1_700_000_000_000 + cursor * 1000,
        attempt_id: "a1".to_owned(),
        body: Some(v1::job_event::Body::Log(line)),
    }
}

/// The answer to one call of `Events`: these events, then an error or the end.
pub type Script = (Vec<v1::JobEvent>, Option<Status>);

#[derive(Default)]
pub struct FakeState {
    pub jobs: Vec<v1::Job>,
    pub scripts: VecDeque<Script>,
    /// Cursor and follow flag of each call of `Events`.
    pub event_calls: Vec<(u64, bool)>,
    pub refuse: Option<Status>,
    pub workers: Vec<v1::Worker>,
    pub artifacts: Vec<v1::Artifact>,
    /// Number of calls of `Get` that are answered after a job is followed; `None`: all.
    pub gets_to_answer: Option<u32>,
    /// Whether the other calls of `Get`, and followed events, hang. Otherwise they are refused, as by a coordinator
    /// that restarts.
    pub hang: bool,
    /// Number of calls of `Get` that were not answered.
    pub unanswered_gets: u32,
    /// What `jobs` is after the next call of `List`.
    pub jobs_after_list: Option<Vec<v1::Job>>,
    /// Whether calls of `List` hang, and how many did.
    pub hang_lists: bool,
    pub unanswered_lists: u32,
    /// Whether calls of `Submit` hang, and how many did.
    pub hang_submits: bool,
    pub unanswered_submits: u32,
}

/// A coordinator with scripted answers.
#[derive(Clone, Default)]
pub struct FakeCoordinator(pub Arc<Mutex<FakeState>>);

impl FakeCoordinator {
    pub async fn serve(&self) -> SocketAddr {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tonic::transport::Server::builder().add_service(jobs_server::JobsServer::new(self.clone()));
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        address
    }

    fn reply_with<T>(&self, answer: impl FnOnce(&mut FakeState) -> T) -> Result<Response<T>, Status> {
        let mut state = self.0.lock().unwrap();
        match &state.refuse {
            Some(status) => Err(status.clone()),
            None => Ok(Response::new(answer(&mut state))),
        }
    }

    /// Counts a call of `Get`, and returns whether it is not to be answered.
    fn is_unanswered_get(&self) -> bool {
        let mut state = self.0.lock().unwrap();
        let followed = state.event_calls.iter().any(|(_, follow)| *follow);
        match state.gets_to_answer.filter(|_| followed) {
            Some(0) => state.unanswered_gets += 1,
            Some(left) => state.gets_to_answer = Some(left - 1),
            None => {}
        }
        state.unanswered_gets > 0
    }

    fn job(&self, id: &str) -> Result<Response<v1::Job>, Status> {
        let jobs = self.reply_with(|state| state.jobs.clone())?.into_inner();
        let found = jobs.into_iter().find(|job| job.id.starts_with(id) || job.name == id);
        found
            .map(Response::new)
            .ok_or_else(|| Status::not_found(format!("no job {id}")))
    }
}

type Events = Pin<Box<dyn tokio_stream::Stream<Item = Result<v1::JobEvent, Status>> + Send>>;

#[tonic::async_trait]
impl jobs_server::Jobs for FakeCoordinator {
    type EventsStream = Events;

    async fn info(&self, _: Request<v1::InfoRequest>) -> Result<Response<v1::InfoReply>, Status> {
        self.reply_with(|_| v1::InfoReply {
            version: "0.1.0".to_owned(),
            protocol: 1,
            started_ms: 1_700_000_000_000,
            storage: "file".to_owned(),
            workers_connected: 1,
            jobs_active: 0,
        })
    }

    async fn submit(&self, _: Request<v1::SubmitRequest>) -> Result<Response<v1::SubmitReply>, Status> {
        let hangs = {
            let mut state = self.0.lock().unwrap();
            state.unanswered_submits += u32::from(state.hang_submits);
            state.hang_submits
        };
        if hangs {
            std::future::pending::<()>().await;
        }
        self.reply_with(|_| v1::SubmitReply {
            job_id: "j1".to_owned(),
            name: "a".to_owned(),
            existed: false,
        })
    }

    async fn submit_array(&self, _: Request<v1::SubmitArrayRequest>) -> Result<Response<v1::SubmitReply>, Status> {
        Err(Status::unimplemented("not here"))
    }

    async fn get(&self, request: Request<v1::GetJobRequest>) -> Result<Response<v1::Job>, Status> {
        if self.is_unanswered_get() {
            let hang = self.0.lock().unwrap().hang;
            if hang {
                std::future::pending::<()>().await;
            }
            return Err(Status::unavailable("it restarts"));
        }
        self.job(&request.into_inner().job_id)
    }

    async fn submission(&self, _: Request<v1::GetJobRequest>) -> Result<Response<v1::SubmitRequest>, Status> {
        Err(Status::unimplemented("not here"))
    }

    async fn list(&self, _: Request<v1::ListJobsRequest>) -> Result<Response<v1::ListJobsReply>, Status> {
        let hangs = {
            let mut state = self.0.lock().unwrap();
            state.unanswered_lists += u32::from(state.hang_lists);
            state.hang_lists
        };
        if hangs {
            std::future::pending::<()>().await;
        }
        self.reply_with(|state| {
            let jobs = state.jobs.clone();
            if let Some(next) = state.jobs_after_list.take() {
                state.jobs = next;
            }
            v1::ListJobsReply {
                jobs,
                ..Default::default()
            }
        })
    }

    async fn stop(&self, request: Request<v1::StopJobRequest>) -> Result<Response<v1::Job>, Status> {
        self.job(&request.into_inner().job_id)
    }

    async fn resume(&self, _: Request<v1::ResumeJobRequest>) -> Result<Response<v1::Job>, Status> {
        Err(Status::failed_precondition(
            "job j1 is completed: there is nothing to resume",
        ))
    }

    async fn pause(&self, request: Request<v1::PauseJobRequest>) -> Result<Response<v1::Job>, Status> {
        self.job(&request.into_inner().job_id)
    }

    async fn save(&self, request: Request<v1::SaveJobRequest>) -> Result<Response<v1::Job>, Status> {
        self.job(&request.into_inner().job_id)
    }

    async fn sample(&self, request: Request<v1::SampleJobRequest>) -> Result<Response<v1::Job>, Status> {
        self.job(&request.into_inner().job_id)
    }

    async fn set_priority(&self, request: Request<v1::SetPriorityRequest>) -> Result<Response<v1::Job>, Status> {
        self.job(&request.into_inner().job_id)
    }

    async fn explain(&self, _: Request<v1::ExplainRequest>) -> Result<Response<v1::ForecastReply>, Status> {
        Err(Status::unimplemented("not here"))
    }

    async fn fit(&self, _: Request<v1::SubmitRequest>) -> Result<Response<v1::ForecastReply>, Status> {
        Err(Status::unimplemented("not here"))
    }

    async fn drain_worker(&self, _: Request<v1::DrainWorkerRequest>) -> Result<Response<v1::Worker>, Status> {
        Err(Status::unimplemented("not here"))
    }

    async fn remove(&self, request: Request<v1::RemoveJobRequest>) -> Result<Response<v1::Job>, Status> {
        self.job(&request.into_inner().job_id)
    }

    async fn forget_worker(&self, _: Request<v1::ForgetWorkerRequest>) -> Result<Response<v1::Worker>, Status> {
        Err(Status::unimplemented("not here"))
    }

    async fn events(&self, request: Request<v1::EventsRequest>) -> Result<Response<Events>, Status> {
        let request = request.into_inner();
        let script = self.reply_with(|state| {
            state.event_calls.push((request.cursor, request.follow));
            let hang = state.hang && request.follow;
            (state.scripts.pop_front().unwrap_or_default(), hang)
        })?;
        let ((events, end), hang) = script.into_inner();
        let items = events.into_iter().map(Ok).chain(end.map(Err)).collect::<Vec<_>>();
        let items = tokio_stream::iter(items);
        let items: Events = match hang {
            true => Box::pin(items.chain(tokio_stream::pending())),
            false => Box::pin(items),
        };
        Ok(Response::new(items))
    }

    async fn artifacts(&self, _: Request<v1::ArtifactsRequest>) -> Result<Response<v1::ArtifactsReply>, Status> {
        self.reply_with(|state| v1::ArtifactsReply {
            job_id: "j1".to_owned(),
            artifacts: state.artifacts.clone(),
            ..Default::default()
        })
    }

    async fn list_workers(&self, _: Request<v1::ListWorkersRequest>) -> Result<Response<v1::ListWorkersReply>, Status> {
        self.reply_with(|state| v1::ListWorkersReply {
            workers: state.workers.clone(),
            ..Default::default()
        })
    }
}
