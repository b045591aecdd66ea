//! Random lives of a pool: jobs, workers that come, sleep, die and repeat themselves, a coordinator that restarts.
//! After every step the invariants hold and the store knows what the core knows; once the trouble is over, everything
//! ends.

use super::tests::{device, manifest, new_job, registration, settings};
use super::{Effect, Event, Job, NewJob, Record, Restored, SessionId, State, Ticket, Wants, Worker, check};
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::capability::DeviceKind;
use aitk_common::control::{HeldAttempt, JobEvent, Report, ToWorker, UnixMillis, Verdict};
use aitk_common::id::{Epoch, JobId, WorkerId};
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const WORKERS: usize = 3;

#[derive(Clone, Debug)]
enum Op {
    Submit { priority: i64, retries: u32, keyed: bool },
    Connect { worker: usize, remembers: bool },
    Disconnect { worker: usize },
    Leave { worker: usize },
    Beat { worker: usize, forgets: bool },
    Log { worker: usize, which: usize, seq: u64 },
    Commit { worker: usize, which: usize, step: u64 },
    Finish { worker: usize, which: usize, how: u8 },
    Garbage { worker: usize, epoch: u64 },
    Stop { job: usize, now: bool },
    Resume { job: usize },
    Pass { millis: u64 },
    Restart,
}

fn op() -> impl Strategy<Value = Op> {
    let worker = 0..WORKERS;
    let which = 0..4_usize;
    prop_oneof![
        3 => (-1..2_i64, 0..4_u32, any::<bool>()).prop_map(|(priority, retries, keyed)| Op::Submit { priority, retries, keyed }),
        4 => (worker.clone(), any::<bool>()).prop_map(|(worker, remembers)| Op::Connect { worker, remembers }),
        2 => worker.clone().prop_map(|worker| Op::Disconnect { worker }),
        1 => worker.clone().prop_map(|worker| Op::Leave { worker }),
        6 => (worker.clone(), prop::bool::weighted(0.1)).prop_map(|(worker, forgets)| Op::Beat { worker, forgets }),
        3 => (worker.clone(), which.clone(), 0..6_u64).prop_map(|(worker, which, seq)| Op::Log { worker, which, seq }),
        3 => (worker.clone(), which.clone(), 0..50_u64).prop_map(|(worker, which, step)| Op::Commit { worker, which, step }),
        3 => (worker.clone(), which, 0..5_u8).prop_map(|(worker, which, how)| Op::Finish { worker, which, how }),
        1 => (worker, any::<u64>()).prop_map(|(worker, epoch)| Op::Garbage { worker, epoch }),
        2 => (0..6_usize, any::<bool>()).prop_map(|(job, now)| Op::Stop { job, now }),
        2 => (0..6_usize).prop_map(|job| Op::Resume { job }),
        4 => (0..9000_u64).prop_map(|millis| Op::Pass { millis }),
        1 => Just(Op::Restart),
    ]
}

/// What a store would hold.
#[derive(Default)]
struct Kept {
    jobs: BTreeMap<JobId, Job>,
    workers: BTreeMap<WorkerId, Worker>,
    events: BTreeMap<JobId, Vec<(JobEvent, Option<u64>)>>,
}

impl Kept {
    fn apply(&mut self, record: Record) {
        match record {
            Record::NewJob(job, _) => assert!(self.jobs.insert(job.id.clone(), *job).is_none(), "stored twice"),
            Record::Job(job) => assert!(
                self.jobs.insert(job.id.clone(), *job).is_some(),
                "changed before it was new"
            ),
            Record::Worker(worker) => {
                self.workers.insert(worker.id.clone(), *worker);
            }
            Record::Event { job, event, seq } => {
                let log = self.events.entry(job).or_default();
                assert_eq!(event.cursor, log.len() as u64 + 1, "a gap in the log");
                log.push((*event, seq));
            }
            Record::Artifact(..) | Record::ArtifactGone(..) => {}
        }
    }

    /// As a database would: through text and back.
    fn load(&self, now: UnixMillis) -> State {
        let jobs = self.jobs.values().map(|job| {
            let job: Job = serde_json::from_str(&serde_json::to_string(job).unwrap()).unwrap();
            let log = self.events.get(&job.id).map(Vec::as_slice).unwrap_or_default();
            let current = job.current().map(|attempt| attempt.id.clone());
            let seqs = log
                .iter()
                .filter(|(event, _)| event.attempt == current)
                .filter_map(|(_, seq)| *seq);
            Restored {
                cursor: log.last().map_or(0, |(event, _)| event.cursor),
                seq: seqs.max().unwrap_or(0),
                job,
            }
        });
        let workers = self
            .workers
            .values()
            .map(|w| serde_json::from_str(&serde_json::to_string(w).unwrap()).unwrap());
        State::restore(settings(), now, jobs.collect(), workers.collect())
    }
}

/// The part of the state that a restart must not change.
fn durable(state: &State) -> (BTreeMap<JobId, Job>, BTreeMap<WorkerId, Worker>) {
    let mut jobs = state.jobs.clone();
    for job in jobs.values_mut() {
        (job.live, job.progress, job.phase) = (None, None, None);
    }
    let mut workers = state.workers.clone();
    for worker in workers.values_mut() {
        (worker.session, worker.leaving, worker.same_machine, worker.last_seen) = (None, false, false, UnixMillis(0));
    }
    (jobs, workers)
}

#[derive(Default)]
struct SimWorker {
    session: Option<SessionId>,
    /// Every attempt it was ever given: the newest last.
    given: Vec<HeldAttempt>,
    /// Those it still works on.
    works: BTreeSet<String>,
}

struct Sim {
    state: State,
    kept: Kept,
    now: UnixMillis,
    workers: Vec<SimWorker>,
    jobs: Vec<JobId>,
    next: u64,
    /// The newest epoch that was ever handed out.
    epochs: BTreeMap<JobId, Epoch>,
    committed: BTreeMap<JobId, u64>,
}

impl Sim {
    fn new() -> Self {
        Self {
            state: State::new(settings()),
            kept: Kept::default(),
            now: UnixMillis(1_000_000),
            workers: (0..WORKERS).map(|_| SimWorker::default()).collect(),
            jobs: Vec::new(),
            next: 1,
            epochs: BTreeMap::new(),
            committed: BTreeMap::new(),
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn step(&mut self, event: Event) {
        let about = match &event {
            Event::CommitCheckpoint { held, step, .. } => Some((held.clone(), Some(*step))),
            Event::Finished { held, .. } => Some((held.clone(), None)),
            _ => None,
        };
        let effects = self.state.handle(self.now, event);
        check(&self.state).unwrap();
        for effect in effects {
            match effect {
                Effect::Persist(record) => self.kept.apply(record),
                Effect::Assign(session, placed) => {
                    let newest = self.epochs.entry(placed.job.clone()).or_default();
                    assert!(placed.held.epoch > *newest, "an epoch was handed out twice");
                    *newest = placed.held.epoch;
                    let worker = self.workers.iter_mut().find(|worker| worker.session == Some(session));
                    let worker = worker.expect("work for a session that is not open");
                    worker.works.insert(placed.held.attempt.to_string());
                    worker.given.push(placed.held);
                }
                Effect::Send(
                    _,
                    ToWorker::Answer {
                        verdict: Verdict::Accepted,
                        ..
                    },
                ) => {
                    let (held, step) = about.clone().expect("an answer to nothing");
                    let job = super::model::job_of(&held.attempt).unwrap();
                    if let Some(step) = step {
                        assert_eq!(self.epochs[&job], held.epoch, "a stale epoch committed");
                        let before = self.committed.insert(job, step);
                        assert!(before.is_none_or(|before| before <= step), "a checkpoint regressed");
                    }
                }
                Effect::Send(session, ToWorker::Fence { held, .. }) => {
                    for worker in self.workers.iter_mut().filter(|worker| worker.session == Some(session)) {
                        worker.works.remove(held.attempt.as_str());
                    }
                }
                Effect::Close { session, .. } => {
                    for worker in self.workers.iter_mut().filter(|worker| worker.session == Some(session)) {
                        worker.session = None;
                    }
                }
                _ => {}
            }
        }
        let loaded = self.kept.load(self.now);
        check(&loaded).unwrap();
        assert_eq!(durable(&loaded), durable(&self.state), "the store knows something else");
    }

    /// One of the attempts that a worker was given, perhaps long ago.
    fn pick(&self, worker: usize, which: usize) -> Option<(SessionId, HeldAttempt)> {
        let worker = &self.workers[worker];
        let held = worker
            .given
            .len()
            .checked_sub(which + 1)
            .and_then(|index| worker.given.get(index));
        worker.session.zip(held.cloned())
    }

    fn connect(&mut self, index: usize, remembers: bool) {
        let session = SessionId(self.number());
        let worker = &mut self.workers[index];
        if !remembers {
            worker.works.clear();
        }
        let running = worker
            .given
            .iter()
            .filter(|held| worker.works.contains(held.attempt.as_str()))
            .cloned()
            .collect();
        worker.session = Some(session);
        let registration = Box::new(registration(
            &format!("w{index}"),
            vec![device(DeviceKind::Cpu, 0)],
            running,
        ));
        self.step(Event::WorkerRegistered {
            session,
            fresh_id: WorkerId::new("f"),
            same_machine: true,
            registration,
        });
    }

    fn beat(&mut self, index: usize, forgets: bool) {
        let worker = &self.workers[index];
        let Some(session) = worker.session else { return };
        let works = worker
            .given
            .iter()
            .filter(|held| worker.works.contains(held.attempt.as_str()));
        let running = if forgets { Vec::new() } else { works.cloned().collect() };
        self.step(Event::WorkerBeat { session, running });
    }

    fn finish(&mut self, session: SessionId, held: HeldAttempt, how: u8) {
        for worker in self.workers.iter_mut().filter(|worker| worker.session == Some(session)) {
            worker.works.remove(held.attempt.as_str());
        }
        let failed = |cause| Outcome::Failed {
            cause,
            message: "boom".into(),
        };
        let outcome = match how {
            0 => Outcome::Completed,
            1 => Outcome::Stopped,
            2 => failed(FailureCause::BadInput),
            3 => failed(FailureCause::OutOfMemory),
            _ => failed(FailureCause::Machine),
        };
        self.step(Event::Finished {
            session,
            request: 1,
            held,
            outcome,
        });
    }

    fn act(&mut self, op: Op) {
        match op {
            Op::Submit {
                priority,
                retries,
                keyed,
            } => {
                let id = JobId::new(format!("j{}", self.number()));
                let key = keyed.then(|| format!("k{priority}"));
                let wants = Wants {
                    priority,
                    retries,
                    ..Wants::default()
                };
                let job = Box::new(NewJob {
                    idempotency_key: key,
                    ..new_job(id.as_str(), wants)
                });
                self.step(Event::JobSubmitted { ticket: Ticket(1), job });
                if self.state.job(&id).is_some() {
                    self.jobs.push(id);
                }
            }
            Op::Connect { worker, remembers } => self.connect(worker, remembers),
            Op::Disconnect { worker } => {
                if let Some(session) = self.workers[worker].session.take() {
                    self.step(Event::WorkerLost { session });
                }
            }
            Op::Leave { worker } => {
                if let Some(session) = self.workers[worker].session {
                    self.step(Event::WorkerLeaving {
                        session,
                        reason: String::new(),
                    });
                }
            }
            Op::Beat { worker, forgets } => self.beat(worker, forgets),
            Op::Log { worker, which, seq } => {
                if let Some((session, held)) = self.pick(worker, which) {
                    let report = Report::Log {
                        level: "info".into(),
                        message: "x".into(),
                    };
                    self.step(Event::AttemptEvent {
                        session,
                        held,
                        seq,
                        time: self.now,
                        report,
                    });
                }
            }
            Op::Commit { worker, which, step } => {
                if let Some((session, held)) = self.pick(worker, which) {
                    let manifest = manifest(&format!("{step}{which}"));
                    self.step(Event::CommitCheckpoint {
                        session,
                        request: 1,
                        held,
                        manifest,
                        step,
                    });
                }
            }
            Op::Finish { worker, which, how } => {
                if let Some((session, held)) = self.pick(worker, which) {
                    self.finish(session, held, how);
                }
            }
            Op::Garbage { worker, epoch } => {
                if let Some((session, held)) = self.pick(worker, 0) {
                    let held = HeldAttempt {
                        epoch: Epoch(epoch),
                        ..held
                    };
                    self.step(Event::WorkerBeat {
                        session,
                        running: vec![held.clone()],
                    });
                    self.step(Event::Finished {
                        session: SessionId(epoch),
                        request: 1,
                        held,
                        outcome: Outcome::Stopped,
                    });
                }
            }
            Op::Stop { job, now } => {
                let job = self.jobs.get(job).map_or("nobody".into(), ToString::to_string);
                self.step(Event::StopRequested {
                    ticket: Ticket(1),
                    job,
                    now,
                });
            }
            Op::Resume { job } => {
                let job = self.jobs.get(job).map_or("nobody".into(), ToString::to_string);
                self.step(Event::ResumeRequested { ticket: Ticket(1), job });
            }
            Op::Pass { millis } => {
                self.now = self.now.after(Duration::from_millis(millis));
                self.step(Event::Tick);
            }
            Op::Restart => {
                self.now = self.now.after(Duration::from_millis(10));
                self.state = self.kept.load(self.now);
                for worker in &mut self.workers {
                    worker.session = None;
                }
            }
        }
    }

    /// No more trouble: whoever is given work does it.
    fn settle(&mut self) {
        for _ in 0..100 {
            if self.state.jobs.values().all(|job| job.state.is_ended()) {
                return;
            }
            for index in 0..WORKERS {
                let leaving = |id: &WorkerId| self.state.workers.get(id).is_none_or(|worker| worker.leaving);
                if self.workers[index].session.is_none() || leaving(&WorkerId::new(format!("w{index}"))) {
                    self.connect(index, true);
                }
                self.beat(index, false);
                let worker = &self.workers[index];
                let todo: Vec<_> = worker
                    .given
                    .iter()
                    .filter(|held| worker.works.contains(held.attempt.as_str()))
                    .cloned()
                    .collect();
                for held in todo {
                    if let Some(session) = self.workers[index].session {
                        self.finish(session, held, 0);
                    }
                }
            }
            self.now = self.now.after(Duration::from_secs(2));
            self.step(Event::Tick);
        }
        panic!("some job never ends: {:?}", self.state.job_views(self.now, true, 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_lost_nothing_is_doubled_and_everything_ends(ops in vec(op(), 1..120)) {
        let mut sim = Sim::new();
        for op in ops {
            sim.act(op);
        }
        sim.settle();
    }
}
