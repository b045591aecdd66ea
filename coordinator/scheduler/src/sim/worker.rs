//! A simulated worker that follows the protocol: it sends heartbeats, repeats unanswered requests, and obeys the coordinator.

use super::random::Random;
use crate::tests::{device, manifest, registration};
use crate::{Event, PlacedAttempt, SessionId};
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::capability::{Device, DeviceKind};
use aitk_common::control_plane::{AttemptRef, OfferedCheckpoint, Progress, Registration, Report, ToWorker, UnixMillis};
use aitk_common::id::{AttemptId, WorkerId};
use aitk_common::plan::profile::MemoryProfile;
use std::collections::BTreeMap;

const GIB: u64 = 1 << 30;
/// The values of the label `site`.
pub(super) const SITES: [&str; 2] = ["cellar", "attic"];
/// How many times an offered checkpoint is sent.
const OFFER_REPEATS: u32 = 10;
/// The most ticks until the watchdog ends an attempt that hangs.
const WATCHDOG: u32 = 6;

/// An attempt on the worker.
#[derive(Clone, Debug)]
pub(super) struct SimAttempt {
    pub(super) held: AttemptRef,
    step: u64,
    total: u64,
    seq: u64,
    /// It was asked to save and stop.
    stopping: bool,
    /// It hangs, and is ended after this many ticks.
    hangs: Option<u32>,
    /// A step that was saved and not committed: storage was full, or the coordinator refused the worker.
    uncommitted: Option<u64>,
    /// Its outcome, which is repeated until it is answered.
    ended: Option<Outcome>,
}

/// The faults that concern a worker at a moment.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ActiveFaults {
    /// Random faults occur.
    pub(super) faults: bool,
    /// Storage has no room for checkpoints and results.
    pub(super) full: bool,
}

/// A simulated worker.
#[derive(Debug)]
pub(super) struct SimWorker {
    pub(super) index: usize,
    pub(super) session: Option<SessionId>,
    /// When it sent its registration; none: it is welcomed or not connected.
    pub(super) connecting_since: Option<UnixMillis>,
    pub(super) attempts: BTreeMap<AttemptId, SimAttempt>,
    /// Attempts that it once had; faults make it report on them.
    pub(super) earlier_attempts: Vec<AttemptRef>,
    /// It is suspended until then, like a laptop with a closed lid.
    pub(super) sleeps_until: UnixMillis,
    /// Its process does not run until then.
    pub(super) dead_until: UnixMillis,
    /// It announced its shutdown.
    pub(super) leaving: bool,
    /// The coordinator refuses it until then: its attempts go on, and it has no session.
    pub(super) refused_until: UnixMillis,
    /// Checkpoints that it saved and could not commit, and how many times it still sends each.
    offers: Vec<(OfferedCheckpoint, u32)>,
    /// Its labels; another value for a while when its owner moves it.
    labels: BTreeMap<String, String>,
    /// Its owner offers only half of its memory.
    offers_half_memory: bool,
}

impl SimWorker {
    pub(super) fn new(index: usize) -> Self {
        Self {
            index,
            session: None,
            connecting_since: None,
            attempts: BTreeMap::new(),
            earlier_attempts: Vec::new(),
            sleeps_until: UnixMillis(0),
            dead_until: UnixMillis(0),
            leaving: false,
            refused_until: UnixMillis(0),
            offers: Vec::new(),
            labels: BTreeMap::new(),
            offers_half_memory: false,
        }
    }

    /// The newest saved checkpoints of its attempts.
    fn saved(&self) -> Vec<OfferedCheckpoint> {
        let newest = |attempt: &SimAttempt| match attempt.ended {
            None => Some(attempt.step).filter(|step| *step > 0),
            Some(_) => attempt.uncommitted,
        };
        let attempts = self.attempts.values();
        attempts
            .filter_map(|attempt| {
                Some(OfferedCheckpoint {
                    held: attempt.held.clone(),
                    step: newest(attempt)?,
                    bytes: 0,
                })
            })
            .collect()
    }

    pub(super) fn name(&self) -> String {
        format!("w{}", self.index)
    }

    /// The devices of this worker; the machines are unequal.
    fn devices(&self) -> Vec<Device> {
        let gpu = |index, gib: u64| Device {
            name: format!("card {gib}"),
            memory_budget: gib * GIB,
            profile: MemoryProfile::for_gpu_budget(gib * GIB),
            // That of the smallest card was not measured.
            gflops: 4_000 * (gib - 7),
            ..device(DeviceKind::Cuda, index)
        };
        let mut devices = match self.index {
            0 => vec![gpu(0, 22), gpu(1, 11)],
            1 => vec![gpu(0, 7)],
            2 => vec![Device {
                memory_budget: 45 * GIB,
                ..device(DeviceKind::Metal, 0)
            }],
            _ => vec![device(DeviceKind::Cpu, 0)],
        };
        for device in devices.iter_mut().filter(|_| self.offers_half_memory) {
            device.memory_budget /= 2;
        }
        devices
    }

    pub(super) fn is_awake(&self, now: UnixMillis) -> bool {
        self.sleeps_until <= now && self.dead_until <= now
    }

    /// Changes its labels or the memory that it offers; the coordinator learns of it from the next registration.
    pub(super) fn change_settings(&mut self, random: &mut Random) {
        let site = random.pick(&SITES).copied().unwrap_or_default();
        self.labels = BTreeMap::from([("site".into(), site.into())]);
        self.offers_half_memory = random.once_in(4);
    }

    /// Opens a session and registers.
    pub(super) fn connect(&mut self, now: UnixMillis, session: SessionId) -> Event {
        self.session = Some(session);
        self.connecting_since = Some(now);
        self.leaving = false;
        let running = self.attempts.values().map(|attempt| attempt.held.clone()).collect();
        let mut offers = self.saved();
        offers.extend(self.offers.iter().map(|(offer, _)| offer.clone()));
        Event::WorkerRegistered {
            session,
            fresh_id: WorkerId::new("never"),
            same_machine: self.index.is_multiple_of(2),
            registration: Box::new(Registration {
                offers,
                labels: self.labels.clone(),
                ..registration(&self.name(), self.devices(), running)
            }),
        }
    }

    pub(super) fn crash(&mut self, until: UnixMillis) {
        let saved = self.saved();
        self.offers.extend(saved.into_iter().map(|offer| (offer, 0)));
        self.attempts.clear();
        self.session = None;
        self.connecting_since = None;
        self.dead_until = until;
    }

    pub(super) fn start_attempt(&mut self, random: &mut Random, placed: &PlacedAttempt) {
        self.earlier_attempts.push(placed.held.clone());
        // Members of arrays take long on the slow machines, so that takeovers pay.
        let slowness = if placed.job.as_str().contains('-') {
            self.index as u64 * 50
        } else {
            0
        };
        self.attempts
            .entry(placed.held.attempt.clone())
            .or_insert_with(|| SimAttempt {
                held: placed.held.clone(),
                step: 0,
                total: 5 + slowness + random.below(20),
                seq: 0,
                stopping: false,
                hangs: None,
                uncommitted: None,
                ended: None,
            });
    }

    /// Simulates half a second in which the coordinator refuses the worker: attempts go on to their next checkpoint, save it, and stop.
    pub(super) fn refused_tick(&mut self, random: &mut Random) {
        for attempt in self
            .attempts
            .values_mut()
            .filter(|attempt| attempt.ended.is_none() && attempt.hangs.is_none())
        {
            attempt.step = (attempt.step + 1).min(attempt.total);
            if random.once_in(4) {
                attempt.uncommitted = Some(attempt.step);
                attempt.ended = Some(Outcome::Failed {
                    cause: FailureCause::Interrupted,
                    message: "refused for a while".into(),
                });
            }
        }
    }

    pub(super) fn receive(&mut self, message: ToWorker) {
        match message {
            ToWorker::Welcome { keep, wanted, .. } => {
                self.connecting_since = None;
                let saved = self.saved();
                self.offers.extend(saved.into_iter().map(|offer| (offer, 0)));
                self.offers.retain(|(offer, _)| wanted.contains(&offer.held.attempt));
                for (_, times) in &mut self.offers {
                    *times = OFFER_REPEATS;
                }
                self.attempts.retain(|id, _| keep.contains(id));
            }
            ToWorker::Fence { held, .. } => {
                self.attempts.remove(&held.attempt);
            }
            ToWorker::Stop { held, save } => {
                if let Some(attempt) = self.attempts.get_mut(&held.attempt) {
                    attempt.stopping = true;
                    if !save && attempt.ended.is_none() {
                        attempt.ended = Some(Outcome::stopped());
                    }
                }
            }
            ToWorker::Answer { request, .. } => {
                // An ended attempt is removed once its end is answered; other answers are ignored.
                self.attempts
                    .retain(|_, attempt| attempt.ended.is_none() || end_request(attempt) != request);
            }
            ToWorker::GoingAway { .. } => {
                self.session = None;
                self.connecting_since = None;
            }
            // It commits checkpoints at random steps anyway.
            ToWorker::HeartbeatReply { .. } | ToWorker::Assign(_) | ToWorker::RequestOutputs { .. } => {}
        }
    }

    /// Half a second of the worker. Returns what it sends.
    pub(super) fn tick(&mut self, random: &mut Random, now: UnixMillis, active: ActiveFaults) -> Vec<Event> {
        let ActiveFaults { faults, full } = active;
        let Some(session) = self.session.filter(|_| self.connecting_since.is_none()) else {
            return Vec::new();
        };
        let mut events = Vec::new();
        let mut held: Vec<AttemptRef> = self.attempts.values().map(|attempt| attempt.held.clone()).collect();
        if faults && random.once_in(40) {
            // It omits an attempt, and lists one that it had earlier.
            held.pop();
            held.extend(random.pick(&self.earlier_attempts).cloned());
        }
        events.push(Event::Heartbeat { session, running: held });
        // Sent several times, because the network may lose it.
        for (offer, times) in &mut self.offers {
            *times = times.saturating_sub(1);
            events.push(Event::CommitCheckpoint {
                session,
                request: 1,
                held: offer.held.clone(),
                manifest: manifest(&format!("{}{}", offer.held.attempt, offer.step)),
                step: offer.step,
            });
        }
        self.offers.retain(|(_, times)| *times > 0);
        for attempt in self.attempts.values_mut() {
            let held = attempt.held.clone();
            // The end of an attempt waits until its checkpoint is uploaded, and that waits until the disk has room.
            if full && (attempt.uncommitted.is_some() || attempt.ended == Some(Outcome::Completed)) {
                continue;
            }
            if let Some(step) = attempt.uncommitted.take() {
                events.push(Event::CommitCheckpoint {
                    session,
                    request: 1,
                    held: held.clone(),
                    manifest: manifest(&format!("{}{step}", held.attempt)),
                    step,
                });
            }
            if let Some(left) = &mut attempt.hangs
                && attempt.ended.is_none()
            {
                *left -= 1;
                if *left == 0 {
                    // Sometimes its process cannot be killed.
                    let cause = match random.once_in(5) {
                        true => FailureCause::DeviceStuck,
                        false => FailureCause::NoProgress,
                    };
                    attempt.ended = Some(Outcome::Failed {
                        cause,
                        message: "no progress for a while".into(),
                    });
                }
                continue;
            }
            if let Some(outcome) = attempt.ended.clone() {
                events.push(Event::Finished {
                    session,
                    request: end_request(attempt),
                    held,
                    outcome,
                });
                continue;
            }
            attempt.step += 1;
            attempt.seq += 1;
            let progress = Progress {
                done: attempt.step,
                total: attempt.total,
                seconds_per_step: None,
            };
            events.push(Event::AttemptEvent {
                session,
                held: held.clone(),
                seq: attempt.seq,
                time: now,
                report: Report::Progress(progress),
            });
            if attempt.stopping || random.once_in(4) {
                // Committed with the next tick. While the disk is full, only the newest is kept.
                attempt.uncommitted = Some(attempt.step);
            }
            if attempt.stopping {
                attempt.ended = Some(Outcome::stopped());
            } else if attempt.step >= attempt.total {
                attempt.ended = Some(Outcome::Completed);
            } else if faults && random.once_in(100) {
                attempt.hangs = Some(1 + random.below(u64::from(WATCHDOG)) as u32);
            } else if faults && random.once_in(25) {
                attempt.ended = Some(failure(random));
            } else if faults && self.index == 1 && random.once_in(3) {
                // One machine has a bad driver: it is quarantined in almost every run.
                attempt.ended = Some(Outcome::Failed {
                    cause: FailureCause::Machine,
                    message: "driver".into(),
                });
            }
        }
        if faults && random.once_in(60) {
            // It commits a checkpoint of an attempt that it has lost.
            events.extend(random.pick(&self.earlier_attempts).map(|held| Event::CommitCheckpoint {
                session,
                request: 2,
                held: held.clone(),
                manifest: manifest("late"),
                step: random_step(now),
            }));
        }
        events
    }
}

fn random_step(now: UnixMillis) -> u64 {
    now.0 % 40
}

/// The request number of an attempt's end, the same for each repetition.
fn end_request(attempt: &SimAttempt) -> u64 {
    let text = attempt.held.attempt.as_str();
    text.bytes()
        .fold(7_u64, |hash, byte| hash.wrapping_mul(31).wrapping_add(u64::from(byte)))
        | (1 << 40)
}

fn failure(random: &mut Random) -> Outcome {
    let causes = [
        FailureCause::OutOfMemory,
        FailureCause::OutOfMemory,
        FailureCause::Machine,
        FailureCause::Machine,
        FailureCause::Storage,
        FailureCause::DiskFull,
        FailureCause::BadInput,
        FailureCause::Network,
        FailureCause::Network,
        FailureCause::NoProgress,
        FailureCause::DeviceStuck,
        FailureCause::Interrupted,
        FailureCause::Job,
        FailureCause::StorageRefused,
        FailureCause::Unknown,
    ];
    Outcome::Failed {
        cause: random.pick(&causes).copied().unwrap_or(FailureCause::Machine),
        message: "boom".into(),
    }
}
