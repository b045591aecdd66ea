//! A worker as the protocol asks for one: it beats, repeats what was not answered, and obeys.

use super::random::Random;
use crate::tests::{device, manifest, registration};
use crate::{Event, PlacedAttempt, SessionId};
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::capability::{Device, DeviceKind};
use aitk_common::control::{HeldAttempt, OfferedCheckpoint, Progress, Registration, Report, ToWorker, UnixMillis};
use aitk_common::id::{AttemptId, WorkerId};
use aitk_common::plan::profile::MemoryProfile;
use std::collections::BTreeMap;

const GIB: u64 = 1 << 30;
/// How often a kept checkpoint is sent.
const TIMES: u32 = 10;
/// Ticks until the watchdog ends a child that hangs.
const WATCHDOG: u32 = 6;

/// What it knows of an attempt.
#[derive(Clone, Debug)]
pub(super) struct Work {
    pub(super) held: HeldAttempt,
    step: u64,
    total: u64,
    seq: u64,
    saves: bool,
    /// Its child hangs, and is ended after so many ticks.
    hangs: Option<u32>,
    /// A step that was saved and not committed: storage took nothing, or the coordinator refused its worker.
    unsent: Option<u64>,
    /// What it says until that is answered.
    ended: Option<Outcome>,
}

/// What is wrong at a moment, as a worker sees it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Trouble {
    /// Anything may go wrong.
    pub(super) faults: bool,
    /// Storage has no room for checkpoints and results.
    pub(super) full: bool,
}

#[derive(Debug)]
pub(super) struct SimWorker {
    pub(super) index: usize,
    pub(super) session: Option<SessionId>,
    /// When it asked to be let in; none: it is in.
    pub(super) connecting_since: Option<UnixMillis>,
    pub(super) works: BTreeMap<AttemptId, Work>,
    /// Attempts that it once had: it talks of them when it is confused.
    pub(super) past: Vec<HeldAttempt>,
    /// Stopped, as a laptop whose lid is closed.
    pub(super) sleeps_until: UnixMillis,
    /// Its process is gone until then.
    pub(super) dead_until: UnixMillis,
    pub(super) leaves: bool,
    /// The coordinator refuses it until then: its work goes on, and it has no session.
    pub(super) refused_until: UnixMillis,
    /// Checkpoints that it saved and could not commit, and how often it sends each.
    kept: Vec<(OfferedCheckpoint, u32)>,
}

impl SimWorker {
    pub(super) fn new(index: usize) -> Self {
        Self {
            index,
            session: None,
            connecting_since: None,
            works: BTreeMap::new(),
            past: Vec::new(),
            sleeps_until: UnixMillis(0),
            dead_until: UnixMillis(0),
            leaves: false,
            refused_until: UnixMillis(0),
            kept: Vec::new(),
        }
    }

    /// What its attempts have saved.
    fn saved(&self) -> Vec<OfferedCheckpoint> {
        let newest = |work: &Work| match work.ended {
            None => Some(work.step).filter(|step| *step > 0),
            Some(_) => work.unsent,
        };
        let works = self.works.values();
        works
            .filter_map(|work| {
                Some(OfferedCheckpoint {
                    held: work.held.clone(),
                    step: newest(work)?,
                    bytes: 0,
                })
            })
            .collect()
    }

    pub(super) fn name(&self) -> String {
        format!("w{}", self.index)
    }

    /// Unequal machines, as people have them.
    fn devices(&self) -> Vec<Device> {
        let gpu = |index, gib: u64| Device {
            name: format!("card {gib}"),
            memory_budget: gib * GIB,
            profile: MemoryProfile::for_gpu_budget(gib * GIB),
            ..device(DeviceKind::Cuda, index)
        };
        match self.index {
            0 => vec![gpu(0, 22), gpu(1, 11)],
            1 => vec![gpu(0, 7)],
            2 => vec![Device {
                memory_budget: 45 * GIB,
                ..device(DeviceKind::Metal, 0)
            }],
            _ => vec![device(DeviceKind::Cpu, 0)],
        }
    }

    pub(super) fn is_awake(&self, now: UnixMillis) -> bool {
        self.sleeps_until <= now && self.dead_until <= now
    }

    /// Opens a session.
    pub(super) fn connect(&mut self, now: UnixMillis, session: SessionId) -> Event {
        self.session = Some(session);
        self.connecting_since = Some(now);
        self.leaves = false;
        let running = self.works.values().map(|work| work.held.clone()).collect();
        let mut offers = self.saved();
        offers.extend(self.kept.iter().map(|(offer, _)| offer.clone()));
        Event::WorkerRegistered {
            session,
            fresh_id: WorkerId::new("never"),
            same_machine: self.index.is_multiple_of(2),
            registration: Box::new(Registration {
                offers,
                ..registration(&self.name(), self.devices(), running)
            }),
        }
    }

    pub(super) fn crash(&mut self, until: UnixMillis) {
        let saved = self.saved();
        self.kept.extend(saved.into_iter().map(|offer| (offer, 0)));
        self.works.clear();
        self.session = None;
        self.connecting_since = None;
        self.dead_until = until;
    }

    pub(super) fn take(&mut self, random: &mut Random, placed: &PlacedAttempt) {
        self.past.push(placed.held.clone());
        // Members of arrays are long work on the slow machines: only then does it pay to change the device.
        let slowness = if placed.job.as_str().contains('-') {
            self.index as u64 * 50
        } else {
            0
        };
        self.works.entry(placed.held.attempt.clone()).or_insert_with(|| Work {
            held: placed.held.clone(),
            step: 0,
            total: 5 + slowness + random.below(20),
            seq: 0,
            saves: false,
            hangs: None,
            unsent: None,
            ended: None,
        });
    }

    /// Half a second without being let in: children go on to their next checkpoint, which is kept, and stop there.
    pub(super) fn refused_tick(&mut self, random: &mut Random) {
        for work in self
            .works
            .values_mut()
            .filter(|work| work.ended.is_none() && work.hangs.is_none())
        {
            work.step = (work.step + 1).min(work.total);
            if random.once_in(4) {
                work.unsent = Some(work.step);
                work.ended = Some(Outcome::Failed {
                    cause: FailureCause::Interrupted,
                    message: "refused for a while".into(),
                });
            }
        }
    }

    pub(super) fn hear(&mut self, message: ToWorker) {
        match message {
            ToWorker::Welcome { keep, wanted, .. } => {
                self.connecting_since = None;
                let saved = self.saved();
                self.kept.extend(saved.into_iter().map(|offer| (offer, 0)));
                self.kept.retain(|(offer, _)| wanted.contains(&offer.held.attempt));
                for (_, times) in &mut self.kept {
                    *times = TIMES;
                }
                self.works.retain(|id, _| keep.contains(id));
            }
            ToWorker::Fence { held, .. } => {
                self.works.remove(&held.attempt);
            }
            ToWorker::Stop { held, save } => {
                if let Some(work) = self.works.get_mut(&held.attempt) {
                    work.saves = true;
                    if !save && work.ended.is_none() {
                        work.ended = Some(Outcome::stopped());
                    }
                }
            }
            ToWorker::Answer { request, .. } => {
                // A finished attempt is forgotten once that is known; other answers need no memory here.
                self.works
                    .retain(|_, work| work.ended.is_none() || request_of(work) != request);
            }
            ToWorker::GoingAway { .. } => {
                self.session = None;
                self.connecting_since = None;
            }
            ToWorker::BeatReply { .. } | ToWorker::Assign(_) => {}
        }
    }

    /// What it does and says within half a second.
    pub(super) fn tick(&mut self, random: &mut Random, now: UnixMillis, trouble: Trouble) -> Vec<Event> {
        let Trouble { faults, full } = trouble;
        let Some(session) = self.session.filter(|_| self.connecting_since.is_none()) else {
            return Vec::new();
        };
        let mut events = Vec::new();
        let mut held: Vec<HeldAttempt> = self.works.values().map(|work| work.held.clone()).collect();
        if faults && random.once_in(40) {
            // It forgets one, or talks of one that it had long ago.
            held.pop();
            held.extend(random.pick(&self.past).cloned());
        }
        events.push(Event::WorkerBeat { session, running: held });
        // The network may lose it: it is sent several times.
        for (offer, times) in &mut self.kept {
            *times = times.saturating_sub(1);
            events.push(Event::CommitCheckpoint {
                session,
                request: 1,
                held: offer.held.clone(),
                manifest: manifest(&format!("{}{}", offer.held.attempt, offer.step)),
                step: offer.step,
            });
        }
        self.kept.retain(|(_, times)| *times > 0);
        for work in self.works.values_mut() {
            let held = work.held.clone();
            // The end of an attempt waits for what it saved, and that for room.
            if full && (work.unsent.is_some() || work.ended == Some(Outcome::Completed)) {
                continue;
            }
            if let Some(step) = work.unsent.take() {
                events.push(Event::CommitCheckpoint {
                    session,
                    request: 1,
                    held: held.clone(),
                    manifest: manifest(&format!("{}{step}", held.attempt)),
                    step,
                });
            }
            if let Some(left) = &mut work.hangs
                && work.ended.is_none()
            {
                *left -= 1;
                if *left == 0 {
                    // Now and then it does not even go when it is killed.
                    let cause = match random.once_in(5) {
                        true => FailureCause::DeviceStuck,
                        false => FailureCause::NoProgress,
                    };
                    work.ended = Some(Outcome::Failed {
                        cause,
                        message: "no progress for a while".into(),
                    });
                }
                continue;
            }
            if let Some(outcome) = work.ended.clone() {
                events.push(Event::Finished {
                    session,
                    request: request_of(work),
                    held,
                    outcome,
                });
                continue;
            }
            work.step += 1;
            work.seq += 1;
            let progress = Progress {
                done: work.step,
                total: work.total,
                seconds_per_step: None,
            };
            events.push(Event::AttemptEvent {
                session,
                held: held.clone(),
                seq: work.seq,
                time: now,
                report: Report::Progress(progress),
            });
            if work.saves || random.once_in(4) {
                // Sent with the next tick; the newest only, where there is no room for it.
                work.unsent = Some(work.step);
            }
            if work.saves {
                work.ended = Some(Outcome::stopped());
            } else if work.step >= work.total {
                work.ended = Some(Outcome::Completed);
            } else if faults && random.once_in(100) {
                work.hangs = Some(1 + random.below(u64::from(WATCHDOG)) as u32);
            } else if faults && random.once_in(25) {
                work.ended = Some(failure(random));
            } else if faults && self.index == 1 && random.once_in(3) {
                // One machine has a bad driver: it is quarantined in almost every life.
                work.ended = Some(Outcome::Failed {
                    cause: FailureCause::Machine,
                    message: "driver".into(),
                });
            }
        }
        if faults && random.once_in(60) {
            // It talks of an attempt that it lost.
            events.extend(random.pick(&self.past).map(|held| Event::CommitCheckpoint {
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

/// Of an attempt's end; the same each time it is said.
fn request_of(work: &Work) -> u64 {
    let text = work.held.attempt.as_str();
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
        FailureCause::Unknown,
    ];
    Outcome::Failed {
        cause: random.pick(&causes).copied().unwrap_or(FailureCause::Machine),
        message: "boom".into(),
    }
}
