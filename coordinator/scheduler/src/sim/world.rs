//! The simulated world around the scheduler: time, network, store, workers and users.

use super::random::Random;
use super::rules::check_step;
use super::script::{Script, placed_by};
use super::store::{MemoryStore, durable};
use super::worker::{ActiveFaults, SimWorker};
use crate::model::job_of;
use crate::tests::settings;
use crate::{Effect, Event, Job, PlacedAttempt, Preemption, Quotas, Record, Reply, SessionId, Settings, State, check};
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::capability::DeviceRef;
use aitk_common::control_plane::{AttemptRef, JobState, ToWorker, UnixMillis, Verdict};
use aitk_common::id::{Epoch, JobId, UserName, WorkerId};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub(super) const WORKERS: usize = 4;

/// An event that will happen in the simulation.
pub(super) enum SimEvent {
    /// A message arrives at the coordinator.
    ToCoordinator(Event),
    /// A message arrives at a worker, if this is its session.
    ToWorker(usize, SessionId, ToWorker),
    /// An assignment arrives at a worker, if this is its session.
    Assignment(usize, SessionId, PlacedAttempt),
    /// Half a second of a worker.
    WorkerTick(usize),
    /// The coordinator's clock ticks.
    Tick,
    /// The coordinator checks its disk.
    DiskCheck,
    /// A user does something, or something breaks.
    RandomAction,
}

/// How often each situation occurred in a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Stats {
    pub(super) events: u64,
    jobs: u64,
    attempts: u64,
    shared: u64,
    preempted: u64,
    array_limited: u64,
    taken_over: u64,
    fenced: u64,
    crashes: u64,
    store_failures: u64,
    dropped: u64,
    duplicated: u64,
    quarantines: u64,
    smaller_profiles: u64,
    removed: u64,
    expired_checkpoints: u64,
    late_checkpoints: u64,
    outages: u64,
    hung: u64,
    stuck: u64,
    interrupted: u64,
    refused: u64,
    disk_full: u64,
    storage_refused: u64,
    at_quota: u64,
    labelled: u64,
    stated_memory: u64,
    stated_profile: u64,
    over_budget: u64,
}

impl Stats {
    pub(super) fn add(&mut self, one: &Self) {
        for (sum, part) in self.all().into_iter().zip(one.clone().all()) {
            *sum.1 += *part.1;
        }
    }

    fn all(&mut self) -> [(&'static str, &mut u64); 29] {
        [
            ("events", &mut self.events),
            ("jobs", &mut self.jobs),
            ("attempts", &mut self.attempts),
            ("placements while a device was shared", &mut self.shared),
            ("preempted jobs", &mut self.preempted),
            (
                "steps with members that wait for their array's limit",
                &mut self.array_limited,
            ),
            ("parts that a faster device took over", &mut self.taken_over),
            ("fences", &mut self.fenced),
            ("crashes", &mut self.crashes),
            ("store failures", &mut self.store_failures),
            ("dropped messages", &mut self.dropped),
            ("duplicated messages", &mut self.duplicated),
            ("steps with a quarantine", &mut self.quarantines),
            ("attempts with a smaller profile", &mut self.smaller_profiles),
            ("removed jobs", &mut self.removed),
            ("expired checkpoints", &mut self.expired_checkpoints),
            (
                "checkpoints that were committed after their attempt",
                &mut self.late_checkpoints,
            ),
            ("steps with a network outage", &mut self.outages),
            ("attempts that hung", &mut self.hung),
            ("devices that were stuck", &mut self.stuck),
            ("attempts that a refusal interrupted", &mut self.interrupted),
            ("ticks of refused workers with attempts", &mut self.refused),
            ("steps with a full disk and waiting jobs", &mut self.disk_full),
            (
                "steps with a refused coordinator and waiting jobs",
                &mut self.storage_refused,
            ),
            ("steps with a waiting job of a user at the quota", &mut self.at_quota),
            ("attempts of jobs with labels", &mut self.labelled),
            ("attempts of jobs with a memory of their own", &mut self.stated_memory),
            ("attempts of jobs with a profile of their own", &mut self.stated_profile),
            (
                "steps with a device that offers less memory than its attempts use",
                &mut self.over_budget,
            ),
        ]
    }

    /// All counts with their names.
    pub(super) fn counts(&self) -> Vec<(&'static str, u64)> {
        let mut copy = self.clone();
        copy.all().into_iter().map(|(name, count)| (name, *count)).collect()
    }
}

/// What is known of an attempt before its failure is reported.
struct BeforeFailure {
    cause: FailureCause,
    job: JobId,
    failures: u32,
    worker: WorkerId,
    device: DeviceRef,
    faults: u32,
}

/// The scheduler, and everything around it.
pub(super) struct World {
    pub(super) random: Random,
    pub(super) state: State,
    store: MemoryStore,
    pub(super) now: UnixMillis,
    pub(super) workers: Vec<SimWorker>,
    pending: BTreeMap<(UnixMillis, u64), SimEvent>,
    next_number: u64,
    faults: bool,
    trace: bool,
    /// The coordinator's disk has no room for results until then.
    pub(super) full_until: UnixMillis,
    /// The last report to the scheduler was that the disk is full.
    reported_full: bool,
    /// The object storage refuses the coordinator until then.
    pub(super) storage_refused_until: UnixMillis,
    /// The last report to the scheduler was that the object storage refuses the coordinator.
    reported_refusal: bool,
    /// Jobs and arrays whose submission was acknowledged to a client.
    pub(super) acknowledged: BTreeSet<JobId>,
    /// The newest epoch of each job.
    epochs: BTreeMap<JobId, Epoch>,
    /// The step of each job's newest committed checkpoint.
    committed: BTreeMap<JobId, u64>,
    stats: Stats,
    settings: Settings,
    /// What happened to the scheduler so far, if it is recorded.
    script: Option<Script>,
}

impl World {
    pub(super) fn new(seed: u64, trace: bool) -> Self {
        let mut random = Random(seed);
        let settings = Settings {
            quotas: random_quotas(&mut random),
            ..settings()
        };
        let mut world = Self {
            random,
            state: State::new(settings.clone()),
            store: MemoryStore::default(),
            now: UnixMillis(1_000_000),
            workers: (0..WORKERS).map(SimWorker::new).collect(),
            pending: BTreeMap::new(),
            next_number: 1,
            faults: true,
            trace,
            full_until: UnixMillis(0),
            storage_refused_until: UnixMillis(0),
            reported_refusal: false,
            reported_full: false,
            acknowledged: BTreeSet::new(),
            epochs: BTreeMap::new(),
            committed: BTreeMap::new(),
            stats: Stats::default(),
            settings,
            script: None,
        };
        for index in 0..WORKERS {
            world.schedule(index as u64 * 100, SimEvent::WorkerTick(index));
        }
        world.schedule(50, SimEvent::Tick);
        world.schedule(70, SimEvent::DiskCheck);
        world.schedule(10, SimEvent::RandomAction);
        world
    }

    /// The same life, recorded in `script`.
    pub(super) fn recorded(seed: u64) -> (Self, Script) {
        let mut world = Self::new(seed, false);
        let script = Script::new(world.settings.clone());
        world.script = Some(script.clone());
        (world, script)
    }

    /// Runs this many events with faults, then without faults until every job has ended.
    pub(super) fn run(mut self, events: u64) -> Stats {
        while self.stats.events < events {
            self.next_event();
        }
        self.faults = false;
        self.recover();
        let deadline = self.now.after(Duration::from_secs(3000));
        while self.state.jobs.values().any(|job| !job.state.is_ended()) {
            assert!(
                self.now < deadline,
                "some job does not end although all faults are over: {:#?}",
                self.state
                    .list_all_jobs(self.now, false, true)
                    .iter()
                    .filter(|job| !job.state.is_ended())
                    .map(|job| format!("{} {}: {}", job.id, job.state, job.reason))
                    .collect::<Vec<_>>()
            );
            self.next_event();
            if self.stats.events.is_multiple_of(64) {
                self.stop_unstartable_jobs();
            }
        }
        self.stats
    }

    pub(super) fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    pub(super) fn schedule(&mut self, millis: u64, what: SimEvent) {
        let number = self.number();
        self.pending
            .insert((self.now.after(Duration::from_millis(millis)), number), what);
    }

    /// The delay of a message in milliseconds; a few messages are overtaken by many others.
    fn delay(&mut self) -> u64 {
        match self.faults && self.random.once_in(30) {
            true => self.random.below(8000),
            false => 1 + self.random.below(40),
        }
    }

    /// Sends a message over the network, which may lose or duplicate it.
    fn send(&mut self, mut what: impl FnMut() -> SimEvent) {
        if self.faults && self.random.once_in(60) {
            self.stats.dropped += 1;
            return;
        }
        let delay = self.delay();
        self.schedule(delay, what());
        if self.faults && self.random.once_in(60) {
            self.stats.duplicated += 1;
            let delay = self.delay();
            self.schedule(delay, what());
        }
    }

    pub(super) fn next_event(&mut self) {
        let Some(((time, _), what)) = self.pending.pop_first() else {
            panic!("no event is pending")
        };
        self.now = self.now.max(time);
        match what {
            SimEvent::ToCoordinator(event) => self.handle(event),
            SimEvent::ToWorker(index, session, message) => {
                let worker = &mut self.workers[index];
                // A suspended worker receives the message when it wakes up.
                if worker.sleeps_until > self.now {
                    let wait = worker.sleeps_until.since(self.now).as_millis() as u64 + 1;
                    self.schedule(wait, SimEvent::ToWorker(index, session, message));
                } else if worker.session == Some(session) && worker.dead_until <= self.now {
                    worker.receive(message);
                }
            }
            SimEvent::Assignment(index, session, placed) => {
                let worker = &mut self.workers[index];
                if worker.session == Some(session) && worker.is_awake(self.now) {
                    worker.start_attempt(&mut self.random, &placed);
                }
            }
            SimEvent::WorkerTick(index) => self.tick_worker(index),
            SimEvent::Tick => {
                self.handle(Event::Tick);
                self.schedule(300, SimEvent::Tick);
            }
            SimEvent::DiskCheck => {
                self.check_disk();
                self.check_storage();
                self.schedule(400, SimEvent::DiskCheck);
            }
            SimEvent::RandomAction => {
                if self.faults {
                    self.random_action();
                    let wait = self.random.below(400);
                    self.schedule(wait, SimEvent::RandomAction);
                }
            }
        }
    }

    fn is_full(&self) -> bool {
        self.full_until > self.now
    }

    /// Reports to the scheduler while the object storage refuses the coordinator, and once when it accepts it again.
    fn check_storage(&mut self) {
        let is_refused = self.storage_refused_until > self.now;
        if is_refused || self.reported_refusal {
            self.reported_refusal = is_refused;
            let error = is_refused.then(|| "403 Forbidden".to_owned());
            self.handle(Event::StorageRefusal { error });
        }
    }

    /// Reports to the scheduler while the disk is full, and once when there is room again.
    fn check_disk(&mut self) {
        let is_full = self.is_full();
        if is_full || self.reported_full {
            self.reported_full = is_full;
            let full = is_full.then_some((1 << 20, 1 << 30));
            self.handle(Event::StorageSpace { full });
        }
    }

    fn tick_worker(&mut self, index: usize) {
        self.schedule(500, SimEvent::WorkerTick(index));
        let worker = &mut self.workers[index];
        if !worker.is_awake(self.now) {
            return;
        }
        if worker.session.is_none() && worker.refused_until > self.now {
            self.stats.refused += u64::from(!worker.attempts.is_empty());
            return worker.refused_tick(&mut self.random);
        }
        let timed_out = worker
            .connecting_since
            .is_some_and(|since| self.now.since(since) > Duration::from_secs(3));
        if worker.session.is_none() || timed_out || (worker.leaving && !self.faults) {
            if let Some(old) = worker.session.take() {
                self.send(|| SimEvent::ToCoordinator(Event::SessionClosed { session: old }));
            }
            let session = SessionId(self.number());
            let event = self.workers[index].connect(self.now, session);
            return self.send(|| SimEvent::ToCoordinator(event.clone()));
        }
        let active = ActiveFaults {
            faults: self.faults,
            full: self.is_full(),
        };
        let events = self.workers[index].tick(&mut self.random, self.now, active);
        for event in events {
            self.send(|| SimEvent::ToCoordinator(event.clone()));
        }
    }

    /// Crashes the coordinator and restores it from its store.
    pub(super) fn crash(&mut self) {
        self.stats.crashes += 1;
        self.now = self.now.after(Duration::from_millis(10));
        self.state = self.store.load(&self.settings, self.now);
        if let Some(script) = &self.script {
            script.record_restart(self.now);
        }
        (self.reported_full, self.reported_refusal) = (false, false);
        check(&self.state).unwrap();
        for id in &self.acknowledged {
            let known = self.state.jobs.contains_key(id) || self.state.is_array(id);
            assert!(known, "{id} was acknowledged and is lost");
        }
        for worker in &mut self.workers {
            worker.session = None;
            worker.connecting_since = None;
        }
    }

    pub(super) fn handle(&mut self, event: Event) {
        self.stats.events += 1;
        if self.trace {
            println!("{} {event:?}", self.now.0);
        }
        let about = match &event {
            Event::CommitCheckpoint { held, step, .. } => Some((held.clone(), *step)),
            _ => None,
        };
        let before = self.before_failure(&event);
        if let Some(script) = &self.script {
            script.record(self.now, event.clone());
        }
        let effects = self.state.handle(self.now, event);
        check(&self.state).unwrap();
        if let Some(before) = before {
            self.check_failure_counts(&before);
        }
        let placed = placed_by(&effects);
        check_step(&self.state, self.now, &placed);
        let quarantined = self.state.slots.iter().any(|(_, slot)| slot.quarantined.is_some());
        self.stats.quarantines += u64::from(quarantined);
        self.stats.outages += u64::from(self.state.jobs.values().any(|job| job.network_outage.is_some()));
        let waits = |job: &Job| job.state == JobState::Queued;
        let any_waits = self.state.jobs.values().any(waits);
        self.stats.disk_full += u64::from(self.state.storage_full.is_some() && any_waits);
        self.stats.storage_refused += u64::from(self.state.storage_refusal.is_some() && any_waits);
        let held_back = |job: &Job| waits(job) && self.state.at_quota(&job.requirements.owner);
        self.stats.at_quota += u64::from(self.state.jobs.values().any(held_back));
        let over_budget = self
            .state
            .slots
            .iter()
            .any(|(_, slot)| slot.connected && slot.running.len() > 1 && slot.reserved > slot.device.memory_budget);
        self.stats.over_budget += u64::from(over_budget);
        self.stats.array_limited += u64::from(self.state.arrays.values().any(|array| !array.over_limit.is_empty()));
        let (mut records, mut rest) = (Vec::new(), Vec::new());
        for effect in effects {
            match effect {
                Effect::Persist(record) => records.push(record),
                other => rest.push(other),
            }
        }
        let cut = (self.faults && self.random.once_in(150)).then(|| self.random.below(rest.len() as u64 + 2) as usize);
        if cut == Some(0) {
            // The store fails, or the process dies before the transaction: nothing of this step is stored.
            self.stats.store_failures += 1;
            if let Some(script) = &self.script {
                script.forget_last();
            }
            return self.crash();
        }
        for record in records {
            self.observe(&record);
            self.store.apply(record);
        }
        for (done, effect) in rest.into_iter().enumerate() {
            if cut == Some(done + 1) {
                return self.crash();
            }
            self.apply_effect(effect, about.as_ref());
        }
        if self.stats.events.is_multiple_of(16) {
            let loaded = self.store.load(&self.settings, self.now);
            check(&loaded).unwrap();
            let (stored, known) = (durable(&loaded), durable(&self.state));
            for (one, other) in stored.0.values().zip(known.0.values()) {
                assert_eq!(one, other, "the stored job differs from the scheduler's");
            }
            assert_eq!(
                stored.0.len(),
                known.0.len(),
                "the store holds other jobs than the scheduler"
            );
            assert_eq!(stored.1, known.1, "the stored workers differ from the scheduler's");
        }
    }

    /// What is known of an attempt before its failure is reported.
    fn before_failure(&self, event: &Event) -> Option<BeforeFailure> {
        let Event::Finished {
            session,
            held,
            outcome: Outcome::Failed { cause, .. },
            ..
        } = event
        else {
            return None;
        };
        let worker = self.state.sessions.get(session)?;
        let job = self.state.job(&JobId::new(job_of(&held.attempt)?))?;
        let live = job
            .live_attempt()
            .filter(|live| live.id == held.attempt && live.worker == *worker)?;
        Some(BeforeFailure {
            cause: *cause,
            job: job.id.clone(),
            failures: job.failures,
            worker: worker.clone(),
            device: live.device,
            faults: self.faults_of(worker, live.device),
        })
    }

    fn faults_of(&self, worker: &WorkerId, device: DeviceRef) -> u32 {
        let worker = self.state.workers.get(worker);
        let health = worker.and_then(|worker| worker.health.iter().find(|one| one.device == device));
        health.map_or(0, |health| health.faults)
    }

    /// Checks that a failure was counted against the right one: the job, the device, or neither.
    fn check_failure_counts(&mut self, before: &BeforeFailure) {
        let faults = self.faults_of(&before.worker, before.device);
        let of_device = matches!(
            before.cause,
            FailureCause::Machine | FailureCause::NoProgress | FailureCause::DeviceStuck
        );
        assert_eq!(
            faults > before.faults,
            of_device,
            "{:?} and the faults of its device: {} before, {faults} after",
            before.cause,
            before.faults
        );
        let elsewhere = matches!(
            before.cause,
            FailureCause::Storage | FailureCause::Network | FailureCause::Interrupted
        );
        let failures = self.state.job(&before.job).map_or(0, |job| job.failures);
        assert!(
            !elsewhere || failures <= before.failures,
            "{:?} was counted against {}",
            before.cause,
            before.job
        );
        self.stats.hung += u64::from(before.cause == FailureCause::NoProgress);
        self.stats.stuck += u64::from(before.cause == FailureCause::DeviceStuck);
        self.stats.interrupted += u64::from(before.cause == FailureCause::Interrupted);
    }

    /// Updates the expectations for jobs that are removed or lose their checkpoint.
    fn observe(&mut self, record: &Record) {
        match record {
            Record::JobRemoved(id) => {
                self.acknowledged.remove(id);
                if let Some((array, _)) = id.as_str().rsplit_once('-') {
                    // An array is removed as a whole.
                    self.acknowledged.remove(&JobId::new(array));
                }
                self.stats.removed += 1;
            }
            Record::Job(job) if job.checkpoint.is_none() => {
                self.stats.expired_checkpoints += u64::from(self.committed.remove(&job.id).is_some());
            }
            _ => {}
        }
    }

    fn apply_effect(&mut self, effect: Effect, about: Option<&(AttemptRef, u64)>) {
        match effect {
            Effect::Assign(session, placed) => {
                let newest = self.epochs.entry(placed.job.clone()).or_default();
                assert!(placed.held.epoch > *newest, "an epoch was handed out twice");
                *newest = placed.held.epoch;
                self.count(&placed);
                if let Some(index) = self.worker_of_session(session) {
                    self.send(|| SimEvent::Assignment(index, session, (*placed).clone()));
                }
            }
            Effect::Send(session, message) => {
                if let ToWorker::Answer {
                    request: 1 | 2,
                    verdict: Verdict::Accepted,
                    ..
                } = &message
                {
                    let (held, step) = about.expect("an answer without a request");
                    let job = JobId::new(job_of(&held.attempt).unwrap());
                    let live = self.state.job(&job).and_then(|job| job.live_attempt());
                    self.stats.late_checkpoints += u64::from(live.is_none_or(|live| live.id != held.attempt));
                    assert_eq!(self.epochs[&job], held.epoch, "a stale epoch committed");
                    let before = self.committed.insert(job, *step);
                    assert!(before.is_none_or(|before| before <= *step), "a checkpoint regressed");
                }
                match &message {
                    ToWorker::Fence { .. } => self.stats.fenced += 1,
                    ToWorker::Stop { held, .. } => {
                        let job = job_of(&held.attempt).and_then(|id| self.state.jobs.find(id));
                        let preempted = job.is_some_and(|job| matches!(job.preemption, Some(Preemption::ForJob(_))));
                        self.stats.preempted += u64::from(preempted);
                        let is_takeover =
                            job.is_some_and(|job| matches!(job.preemption, Some(Preemption::FasterDevice { .. })));
                        self.stats.taken_over += u64::from(is_takeover);
                    }
                    _ => {}
                }
                if let Some(index) = self.worker_of_session(session) {
                    self.send(|| SimEvent::ToWorker(index, session, message.clone()));
                }
            }
            Effect::Close { session, retry, .. } => {
                if let Some(index) = self.worker_of_session(session) {
                    let reason = String::new();
                    self.schedule(
                        1,
                        SimEvent::ToWorker(index, session, ToWorker::GoingAway { reason, retry }),
                    );
                }
            }
            Effect::Reply(_, Ok(Reply::Submitted(submitted))) => {
                self.stats.jobs += u64::from(!submitted.existed);
                self.acknowledged.insert(submitted.job);
            }
            Effect::Persist(_) | Effect::ForeignReport { .. } | Effect::Publish(..) | Effect::Reply(..) => {}
        }
    }

    fn worker_of_session(&self, session: SessionId) -> Option<usize> {
        self.workers.iter().position(|worker| worker.session == Some(session))
    }

    fn count(&mut self, placed: &PlacedAttempt) {
        self.stats.attempts += 1;
        let Some(job) = self.state.job(&placed.job) else { return };
        self.stats.smaller_profiles += u64::from(job.max_profile.is_some());
        self.stats.labelled += u64::from(!job.requirements.labels.is_empty());
        self.stats.stated_memory += u64::from(job.requirements.memory.is_some());
        self.stats.stated_profile += u64::from(job.requirements.profile.is_some());
        let places = self.state.slots.iter().map(|(_, slot)| slot.running.len());
        self.stats.shared += u64::from(places.max().is_some_and(|max| max > 1));
    }
}

/// Quotas in every second life.
fn random_quotas(random: &mut Random) -> Quotas {
    if random.once_in(2) {
        return Quotas::default();
    }
    Quotas {
        everyone: random.once_in(2).then(|| 1 + random.below(3) as u32),
        users: [(UserName::new("ada"), 1 + random.below(2) as u32)].into(),
    }
}
