//! Simulated workers: each has its own connection, sends heartbeats, and reports its jobs as finished at once.

use crate::failure::Failure;
use aitk_common::attempt::Outcome;
use aitk_common::capability::{Device, DeviceKind, DeviceRef};
use aitk_common::control_plane::{
    Assignment, AttemptRef, PROTOCOL_VERSION, Registration, ToCoordinator, ToWorker, Verdict,
};
use aitk_common::id::JobId;
use aitk_common::plan::profile::MemoryProfile;
use aitk_proto::client::connect;
use aitk_proto::v1;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::time::Instant;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

/// The label of the first worker alone, which never finishes a job.
pub(super) const STUCK_LABEL: &str = "bench";
/// The value of the label, and the name of the jobs for it.
pub(super) const STUCK: &str = "stuck";
/// Capacity of a worker's outgoing messages. A worker has one device, so at most one attempt and a heartbeat wait.
const OUTGOING: usize = 8;

/// Events that wait for the benchmark to count them. Workers wait when it is full; their times are measured before.
const EVENT_CAPACITY: usize = 1024;

/// An event of a simulated worker.
#[derive(Debug)]
pub(super) enum WorkerEvent {
    /// It has registered.
    Registered,
    /// It was assigned an attempt of this job.
    Assigned(JobId, Instant),
    /// The coordinator confirmed that the end of an attempt is stored.
    Finished(Instant),
}

/// Simulated workers that run until they are dropped.
pub(super) struct SimulatedWorkers {
    tasks: JoinSet<Result<(), Failure>>,
    events: mpsc::Receiver<WorkerEvent>,
}

impl SimulatedWorkers {
    /// Starts `count` workers, the first of which is the slow one, and returns when all have registered.
    ///
    /// # Errors
    /// When the coordinator refuses one of them.
    pub(super) async fn start(server: &str, token: &str, ca_file: &Path, count: usize) -> Result<Self, Failure> {
        let (sender, events) = mpsc::channel(EVENT_CAPACITY);
        let mut workers = Self {
            tasks: JoinSet::new(),
            events,
        };
        for number in 0..count {
            let slow = number == 0;
            let worker = run_worker(
                server.to_owned(),
                token.to_owned(),
                ca_file.to_owned(),
                number,
                slow,
                sender.clone(),
            );
            workers.tasks.spawn(worker);
        }
        let mut registered = 0;
        while registered < count {
            if matches!(workers.next().await?, WorkerEvent::Registered) {
                registered += 1;
            }
        }
        Ok(workers)
    }

    /// Returns the next event of any worker.
    ///
    /// # Errors
    /// When a worker lost its session.
    pub(super) async fn next(&mut self) -> Result<WorkerEvent, Failure> {
        tokio::select! {
            biased;
            Some(event) = self.events.recv() => Ok(event),
            Some(ended) = self.tasks.join_next() => Err(match ended {
                Ok(Err(failure)) => failure,
                Ok(Ok(())) => Failure::failed("the coordinator closed the session of a simulated worker"),
                Err(error) => Failure::failed(format!("a simulated worker failed: {error}")),
            }),
            else => Err(Failure::failed("there is no simulated worker")),
        }
    }
}

fn registration(number: usize, slow: bool) -> Registration {
    let device = Device {
        id: DeviceRef {
            kind: DeviceKind::Cpu,
            index: 0,
        },
        name: "simulated".to_owned(),
        architecture: std::env::consts::ARCH.to_owned(),
        memory_total: 8 << 30,
        memory_budget: 8 << 30,
        dtypes: vec!["f32".to_owned()],
        attention: vec!["eager".to_owned()],
        profile: MemoryProfile::CpuOnly,
        gflops: 0,
    };
    let mut labels = BTreeMap::new();
    if slow {
        labels.insert(STUCK_LABEL.to_owned(), STUCK.to_owned());
    }
    Registration {
        protocol: PROTOCOL_VERSION,
        worker: None,
        name: format!("simulated-{number:04}"),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        host: "simulated".to_owned(),
        devices: vec![device],
        labels,
        running: Vec::new(),
        confinement: None,
        offers: Vec::new(),
        outputs_on_request: false,
    }
}

struct SimulatedWorker {
    outgoing: mpsc::Sender<v1::WorkerMessage>,
    incoming: Streaming<v1::CoordinatorMessage>,
    attempts: HashMap<u64, AttemptRef>,
    request: u64,
    events: mpsc::Sender<WorkerEvent>,
}

async fn run_worker(
    server: String,
    token: String,
    ca_file: std::path::PathBuf,
    number: usize,
    slow: bool,
    events: mpsc::Sender<WorkerEvent>,
) -> Result<(), Failure> {
    let cannot = |what: &dyn std::fmt::Display| Failure::failed(format!("simulated worker {number}: {what}"));
    let mut clients = connect(&server, &token, Some(&ca_file))
        .await
        .map_err(|error| cannot(&error))?;
    let (outgoing, wire) = mpsc::channel(OUTGOING);
    let first = ToCoordinator::Register(Box::new(registration(number, slow)));
    // The channel is empty, so this cannot fail.
    let _ = outgoing.try_send(first.into());
    let session = clients.workers.session(ReceiverStream::new(wire)).await;
    let worker = SimulatedWorker {
        outgoing,
        incoming: session.map_err(|status| cannot(&status.message()))?.into_inner(),
        attempts: HashMap::new(),
        request: 0,
        events,
    };
    worker.run().await.map_err(|problem| cannot(&problem))
}

impl SimulatedWorker {
    async fn run(mut self) -> Result<(), String> {
        let far = std::time::Duration::from_secs(3600);
        let mut heartbeats = tokio::time::interval_at(tokio::time::Instant::now() + far, far);
        loop {
            let message = tokio::select! {
                message = self.incoming.message() => message.map_err(|status| status.message().to_owned())?,
                _ = heartbeats.tick() => {
                    let running = self.attempts.values().cloned().collect();
                    self.send(ToCoordinator::Heartbeat { running }).await?;
                    continue;
                }
            };
            let Some(message) = message else { return Ok(()) };
            match ToWorker::try_from(message).map_err(|error| error.to_string())? {
                ToWorker::Welcome { heartbeat_interval, .. } => {
                    heartbeats =
                        tokio::time::interval_at(tokio::time::Instant::now() + heartbeat_interval, heartbeat_interval);
                    self.report(WorkerEvent::Registered).await;
                }
                ToWorker::Assign(assignment) => self.accept(*assignment).await?,
                ToWorker::Answer {
                    request,
                    verdict,
                    message,
                } => {
                    if verdict != Verdict::Accepted {
                        return Err(format!("the end of an attempt was not accepted: {message}"));
                    }
                    self.attempts.remove(&request);
                    self.report(WorkerEvent::Finished(Instant::now())).await;
                }
                // A heartbeat named an attempt whose end was on its way. The answer about the end follows.
                ToWorker::Fence { .. } => {}
                ToWorker::GoingAway { reason, .. } => return Err(reason),
                ToWorker::HeartbeatReply { .. } | ToWorker::Stop { .. } | ToWorker::RequestOutputs { .. } => {}
            }
        }
    }

    async fn accept(&mut self, assignment: Assignment) -> Result<(), String> {
        self.report(WorkerEvent::Assigned(assignment.job, Instant::now())).await;
        let held = AttemptRef {
            attempt: assignment.attempt,
            epoch: assignment.epoch,
        };
        self.request += 1;
        self.attempts.insert(self.request, held.clone());
        if assignment.config_text.contains(STUCK) {
            return Ok(());
        }
        self.send(ToCoordinator::Finished {
            request: self.request,
            held,
            outcome: Outcome::Completed,
        })
        .await
    }

    async fn send(&self, message: ToCoordinator) -> Result<(), String> {
        let closed = |_| "the coordinator closed the session".to_owned();
        self.outgoing.send(message.into()).await.map_err(closed)
    }

    async fn report(&self, what: WorkerEvent) {
        // The receiver is closed when the benchmark has ended.
        let _ = self.events.send(what).await;
    }
}
