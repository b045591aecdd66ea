//! Tests of the scheduler, one event at a time.

mod arrays;
mod attempts;
mod clocks;
mod endings;
mod offers;
mod placement;
mod preemption;
mod queue;
mod requested_outputs;
mod retention;
mod rules;

use super::check;
use super::model::job_of;
use super::{
    Effect, Event, NewJob, Payload, Quotas, Record, Refusal, Reply, Requirements, SessionId, Settings, State, Ticket,
};
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::capability::{Device, DeviceKind, DeviceRef};
use aitk_common::control_plane::{
    Artifact, AttemptRef, AttemptState, JobState, JobView, Progress, Registration, Report,
};
use aitk_common::control_plane::{ToWorker, UnixMillis, Verdict};
use aitk_common::hash::ContentHash;
use aitk_common::id::{AttemptId, Epoch, JobId, UserName, WorkerId};
use aitk_common::plan::profile::MemoryProfile;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

pub(super) fn settings() -> Settings {
    Settings {
        lease: Duration::from_millis(6000),
        heartbeat_interval: Duration::from_millis(1000),
        disconnect_grace: Duration::from_millis(3000),
        backoff: Duration::from_millis(1000),
        backoff_limit: Duration::from_millis(8000),
        network_backoff: Duration::from_millis(2000),
        network_timeout: Duration::from_secs(3600),
        quarantine: Duration::from_secs(60),
        quotas: Quotas::default(),
        user_limits: super::UserLimits::default(),
    }
}

pub(super) fn device(kind: DeviceKind, index: u32) -> Device {
    let profile = if kind == DeviceKind::Cpu {
        MemoryProfile::CpuOnly
    } else {
        MemoryProfile::FullGpu
    };
    Device {
        id: DeviceRef { kind, index },
        name: kind.name().into(),
        architecture: "x".into(),
        memory_total: 24 << 30,
        memory_budget: 20 << 30,
        dtypes: vec!["f32".into()],
        attention: vec!["eager".into()],
        profile,
        gflops: 0,
    }
}

pub(super) fn registration(worker: &str, devices: Vec<Device>, running: Vec<AttemptRef>) -> Registration {
    Registration {
        protocol: 1,
        worker: Some(WorkerId::new(worker)),
        name: worker.into(),
        version: "0".into(),
        host: "h".into(),
        devices,
        labels: BTreeMap::new(),
        running,
        confinement: None,
        offers: Vec::new(),
        outputs_on_request: true,
    }
}

pub(super) fn new_job(id: &str, requirements: Requirements) -> NewJob {
    NewJob {
        id: JobId::new(id),
        seed: 7,
        name: id.into(),
        kind: "extension".into(),
        requirements,
        local: false,
        idempotency_key: None,
        sees_all: true,
        after: Vec::new(),
        not_before: None,
        trace: None,
        user_limits_apply: false,
        config_bytes: 0,
        payload: Arc::new(Payload::default()),
    }
}

pub(super) fn manifest(text: &str) -> ContentHash {
    ContentHash::of(text.as_bytes())
}

/// A scheduler whose clock a test moves.
struct World {
    state: State,
    now: UnixMillis,
    last: Vec<Effect>,
    sessions: u64,
}

impl World {
    fn new() -> Self {
        Self {
            state: State::new(settings()),
            now: UnixMillis(1_000_000),
            last: Vec::new(),
            sessions: 0,
        }
    }

    fn step(&mut self, event: Event) -> &[Effect] {
        self.last = self.state.handle(self.now, event);
        check(&self.state).unwrap();
        &self.last
    }

    fn pass(&mut self, seconds: u64) {
        self.now = self.now.after(Duration::from_secs(seconds));
        self.step(Event::Tick);
    }

    fn submit(&mut self, id: &str, requirements: Requirements) {
        self.step(Event::JobSubmitted {
            ticket: Ticket(1),
            job: Box::new(new_job(id, requirements)),
        });
    }

    fn worker(&mut self, name: &str, devices: Vec<Device>, running: Vec<AttemptRef>) -> SessionId {
        self.sessions += 1;
        let session = SessionId(self.sessions);
        let registration = Box::new(registration(name, devices, running));
        self.step(Event::WorkerRegistered {
            session,
            fresh_id: WorkerId::new("fresh"),
            same_machine: true,
            registration,
        });
        session
    }

    fn cpu(&mut self, name: &str) -> SessionId {
        self.worker(name, vec![device(DeviceKind::Cpu, 0)], Vec::new())
    }

    fn heartbeat(&mut self, session: SessionId, running: &[AttemptRef]) {
        self.step(Event::Heartbeat {
            session,
            running: running.to_vec(),
        });
    }

    fn commit(&mut self, session: SessionId, held: &AttemptRef, step: u64) -> Verdict {
        let manifest = manifest(&step.to_string());
        self.step(Event::CommitCheckpoint {
            session,
            request: 5,
            held: held.clone(),
            manifest,
            step,
        });
        self.verdict()
    }

    fn finish(&mut self, session: SessionId, held: &AttemptRef, outcome: Outcome) -> Verdict {
        self.step(Event::Finished {
            session,
            request: 5,
            held: held.clone(),
            outcome,
        });
        self.verdict()
    }

    fn stop(&mut self, job: &str, now: bool) -> Result<JobView, Refusal> {
        self.step(Event::StopRequested {
            ticket: Ticket(3),
            job: job.into(),
            now,
        });
        self.reply()
    }

    fn resume(&mut self, job: &str) -> Result<JobView, Refusal> {
        self.step(Event::ResumeRequested {
            ticket: Ticket(4),
            job: job.into(),
        });
        self.reply()
    }

    fn reply(&self) -> Result<JobView, Refusal> {
        let reply = self.last.iter().find_map(|effect| match effect {
            Effect::Reply(_, reply) => Some(reply.clone()),
            _ => None,
        });
        reply.expect("no reply").map(|reply| match reply {
            Reply::Job(view) => *view,
            other => panic!("{other:?}"),
        })
    }

    fn verdict(&self) -> Verdict {
        let verdict = self.last.iter().find_map(|effect| match effect {
            Effect::Send(
                _,
                ToWorker::Answer {
                    request: 5, verdict, ..
                },
            ) => Some(*verdict),
            _ => None,
        });
        verdict.expect("no answer")
    }

    fn assigned(&self) -> Vec<(SessionId, AttemptRef)> {
        let assigned = self.last.iter().filter_map(|effect| match effect {
            Effect::Assign(session, placed) => Some((*session, placed.held.clone())),
            _ => None,
        });
        assigned.collect()
    }

    fn sent(&self, is_wanted: impl Fn(&ToWorker) -> bool) -> bool {
        self.last
            .iter()
            .any(|effect| matches!(effect, Effect::Send(_, message) if is_wanted(message)))
    }

    fn view(&self, job: &str) -> JobView {
        self.state.job_view(self.now, &JobId::new(job)).unwrap()
    }

    fn submit_after(&mut self, id: &str, requirements: Requirements, after: &[&str], not_before: Option<UnixMillis>) {
        let job = NewJob {
            after: after.iter().map(|id| (*id).into()).collect(),
            not_before,
            ..new_job(id, requirements)
        };
        self.step(Event::JobSubmitted {
            ticket: Ticket(1),
            job: Box::new(job),
        });
    }

    fn gpus(&mut self, name: &str, count: u32) -> SessionId {
        let devices = (0..count).map(|index| device(DeviceKind::Cuda, index)).collect();
        self.worker(name, devices, Vec::new())
    }

    fn state(&self, job: &str) -> JobState {
        self.view(job).state
    }

    fn reason(&self, job: &str) -> String {
        self.view(job).reason
    }

    fn is_asked_to_save(&self, job: &str, epoch: u64) -> bool {
        self.sent(|message| matches!(message, ToWorker::Stop { held: asked, save: true } if *asked == held(job, epoch)))
    }

    fn running(&self) -> Vec<String> {
        let mut running: Vec<String> = self.state.live.keys().map(ToString::to_string).collect();
        running.sort();
        running
    }
}

fn held(job: &str, epoch: u64) -> AttemptRef {
    AttemptRef {
        attempt: AttemptId::new(format!("{job}-{epoch}")),
        epoch: Epoch(epoch),
    }
}

fn failed(cause: FailureCause) -> Outcome {
    Outcome::Failed {
        cause,
        message: "boom".into(),
    }
}

fn retries(retries: u32) -> Requirements {
    Requirements {
        retries,
        ..Requirements::default()
    }
}

/// An ordinary job: it does not yield, and is retried three times.
fn ordinary() -> Requirements {
    retries(3)
}

fn of(owner: &str) -> Requirements {
    Requirements {
        owner: UserName::new(owner),
        ..ordinary()
    }
}

fn yielding() -> Requirements {
    Requirements {
        yields: true,
        ..retries(3)
    }
}
