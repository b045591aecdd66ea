//! Random actions of users, random faults, and the recovery at the end.

use super::random::Random;
use super::worker::SITES;
use super::world::{SimEvent, WORKERS, World};
use crate::state::classes::{DeviceNeeds, check_fit};
use crate::tests::new_job;
use crate::{Dependency, DependencyCondition, Event, Job, NewArray, NewJob, Requirements, Ticket};
use aitk_common::capability::DeviceKind;
use aitk_common::control_plane::{JobState, UnixMillis};
use aitk_common::id::{JobId, UserName};
use aitk_common::plan::demand::Demand;
use aitk_common::plan::need::MemoryNeed;
use aitk_common::plan::profile::MemoryProfile;
use aitk_common::requested_outputs::RequestedOutputs;
use std::collections::BTreeMap;
use std::time::Duration;

/// The profiles that jobs ask for.
const PROFILES: [MemoryProfile; 4] = [
    MemoryProfile::FullGpu,
    MemoryProfile::Balanced,
    MemoryProfile::Extreme,
    MemoryProfile::CpuOnly,
];
/// The most jobs of a run: many for four machines, and few enough to check each of them after every step.
const JOBS: usize = 40;
const GIB: u64 = 1 << 30;

impl World {
    /// A random action of a user, or a random fault.
    pub(super) fn random_action(&mut self) {
        let index = self.random.below(WORKERS as u64) as usize;
        match self.random.below(34) {
            0..=7 => self.submit(),
            8 => self.submit_array(),
            9 => self.request(|ticket, job| Event::StopRequested {
                ticket,
                job,
                now: false,
            }),
            10 => self.request(|ticket, job| Event::StopRequested { ticket, job, now: true }),
            11..=13 => self.request(|ticket, job| Event::ResumeRequested { ticket, job }),
            14 => self.request(|ticket, job| Event::PauseRequested { ticket, job }),
            15 => {
                let priority = self.random.below(4) as i64 - 1;
                self.request(|ticket, job| Event::PriorityRequested { ticket, job, priority });
            }
            16 | 17 => {
                let event = Event::DrainRequested {
                    ticket: Ticket(1),
                    worker: format!("w{index}"),
                    drain: self.random.once_in(3),
                    now: self.random.once_in(2),
                };
                self.handle(event);
            }
            18 | 19 => {
                let until = self.now.after(Duration::from_millis(self.random.below(10_000)));
                let session = self.workers[index].session;
                self.workers[index].crash(until);
                if let Some(session) = session {
                    self.schedule(5, SimEvent::ToCoordinator(Event::SessionClosed { session }));
                }
            }
            20 | 21 => {
                let millis = self.random.below(15_000);
                self.workers[index].sleeps_until = self.now.after(Duration::from_millis(millis));
            }
            22 | 23 => {
                // The connection breaks, and both sides notice.
                if let Some(session) = self.workers[index].session.take() {
                    self.schedule(5, SimEvent::ToCoordinator(Event::SessionClosed { session }));
                }
            }
            24 => {
                if let Some(session) = self.workers[index].session {
                    self.workers[index].leaving = true;
                    let reason = String::new();
                    self.handle(Event::WorkerLeaving { session, reason });
                }
            }
            27 => {
                // The coordinator refuses the worker's token for a while.
                let millis = self.random.below(15_000);
                self.workers[index].refused_until = self.now.after(Duration::from_millis(millis));
                if let Some(session) = self.workers[index].session.take() {
                    self.schedule(5, SimEvent::ToCoordinator(Event::SessionClosed { session }));
                }
            }
            28 => {
                // The worker announces its shutdown and is killed before it has finished.
                let until = self.now.after(Duration::from_millis(self.random.below(10_000)));
                if let Some(session) = self.workers[index].session {
                    let reason = String::new();
                    self.handle(Event::WorkerLeaving { session, reason });
                    self.workers[index].crash(until);
                    self.schedule(5, SimEvent::ToCoordinator(Event::SessionClosed { session }));
                }
            }
            29 if self.random.once_in(4) => {
                // The coordinator's disk is full for a while, or the object storage refuses the coordinator.
                let until = self.now.after(Duration::from_millis(self.random.below(12_000)));
                match self.random.once_in(3) {
                    true => self.storage_refused_until = until,
                    false => self.full_until = until,
                }
            }
            // The owner of a machine moves it, or offers another part of its memory, and starts its worker again.
            30 | 31 if self.workers[index].is_awake(self.now) => {
                self.workers[index].change_settings(&mut self.random);
                if let Some(session) = self.workers[index].session.take() {
                    self.schedule(5, SimEvent::ToCoordinator(Event::SessionClosed { session }));
                }
            }
            33 => self.request(|ticket, job| Event::OutputsRequested {
                ticket,
                job,
                outputs: RequestedOutputs::SAVE,
            }),
            25 => self.crash(),
            26 => self.expire(),
            _ => {}
        }
    }

    /// Runs retention with limits as short as a run of the simulation.
    fn expire(&mut self) {
        let mut before = |at_most: u64| {
            let ago = self.random.below(at_most);
            (!self.random.once_in(4)).then(|| UnixMillis(self.now.0.saturating_sub(ago)))
        };
        let event = Event::Expire {
            jobs_before: before(60_000),
            checkpoints_before: before(30_000),
        };
        self.handle(event);
    }

    /// Sends a request about a random job or array.
    fn request(&mut self, event: impl FnOnce(Ticket, String) -> Event) {
        let mut jobs: Vec<JobId> = self.state.jobs.keys().cloned().collect();
        jobs.extend(self.state.arrays.keys().cloned());
        if let Some(job) = self.random.pick(&jobs) {
            let event = event(Ticket(1), job.to_string());
            self.handle(event);
        }
    }

    fn submit(&mut self) {
        if self.state.jobs.len() >= JOBS {
            return;
        }
        let random = &mut self.random;
        let small = random.once_in(2);
        // One of the machines fits every job.
        let need = if small {
            2 + random.below(3)
        } else {
            6 + random.below(15)
        };
        let memory = MemoryNeed::new(
            [[need * 2, need, need * 2 / 3, need / 2].map(|gib| gib * GIB); 2],
            [need * GIB; 4],
        );
        let family = if small { "sd1" } else { "sdxl" };
        let demand = Demand {
            family: family.into(),
            millipasses: 1000 * (1 + random.below(5000)),
            memory: (!random.once_in(4)).then_some(memory),
        };
        let devices = [
            None,
            None,
            None,
            Some(DeviceKind::Cuda),
            Some(DeviceKind::Cpu),
            Some(DeviceKind::Metal),
        ];
        let owners = ["ada", "bob", "cy"];
        let requirements = Requirements {
            priority: random.below(3) as i64 - 1,
            owner: UserName::new(*random.pick(&owners).unwrap_or(&"ada")),
            yields: random.once_in(3),
            exclusive: random.once_in(8),
            device: random.pick(&devices).copied().flatten(),
            demand: if random.once_in(5) { None } else { Some(demand) },
            time_limit: random.once_in(10).then(|| 4000 + random.below(8000)),
            retries: random.below(4) as u32,
            labels: random_labels(random),
            memory: random.once_in(8).then(|| (1 + random.below(24)) * GIB),
            profile: random.once_in(8).then(|| random.pick(&PROFILES).copied()).flatten(),
            ..Requirements::default()
        };
        let jobs: Vec<JobId> = self.acknowledged.iter().cloned().collect();
        let after = match random.once_in(6) {
            true => {
                let condition = match random.below(4) {
                    0 => DependencyCondition::Ended,
                    1 => DependencyCondition::Failed,
                    _ => DependencyCondition::Completed,
                };
                let job = random.pick(&jobs).map(ToString::to_string);
                job.map(|job| Dependency { job, condition }).into_iter().collect()
            }
            false => Vec::new(),
        };
        let not_before = random
            .once_in(10)
            .then(|| self.now.after(Duration::from_millis(random.below(9000))));
        let keyed = random.once_in(5);
        let number = self.number();
        let id = format!("j{number}");
        let job = NewJob {
            after,
            not_before,
            idempotency_key: keyed.then(|| format!("k{}", number % 7)),
            ..new_job(&id, requirements)
        };
        self.handle(Event::JobSubmitted {
            ticket: Ticket(1),
            job: Box::new(job),
        });
    }

    /// Submits an array, sometimes of parts, sometimes with a limit.
    fn submit_array(&mut self) {
        if self.state.jobs.len() >= JOBS {
            return;
        }
        let random = &mut self.random;
        let (split, count) = (!random.once_in(3), 2 + random.below(6));
        let owners = ["ada", "bob", "cy"];
        let demand = Demand {
            family: "sd1".into(),
            millipasses: 1000 * (50 + random.below(250)),
            memory: Some(MemoryNeed::flat(3 * GIB)),
        };
        let requirements = Requirements {
            owner: UserName::new(*random.pick(&owners).unwrap_or(&"ada")),
            priority: random.below(3) as i64 - 1,
            yields: random.once_in(4),
            exclusive: random.once_in(2),
            demand: Some(demand),
            retries: random.below(4) as u32,
            labels: random_labels(random),
            ..Requirements::default()
        };
        let at_most = random.once_in(3).then(|| 1 + random.below(3) as u32);
        let jobs: Vec<JobId> = self.acknowledged.iter().cloned().collect();
        let after: Vec<Dependency> = match self.random.once_in(6) {
            true => self
                .random
                .pick(&jobs)
                .map(|job| job.as_str().into())
                .into_iter()
                .collect(),
            false => Vec::new(),
        };
        let number = self.number();
        let id = format!("j{number}");
        let member = |index| NewJob {
            after: after.clone(),
            ..new_job(&format!("{id}-{index}"), requirements.clone())
        };
        let array = NewArray {
            id: JobId::new(&*id),
            name: id.clone(),
            at_most,
            split,
            idempotency_key: self.random.once_in(5).then(|| format!("a{}", number % 3)),
            members: (0..count).map(member).collect(),
        };
        self.handle(Event::ArraySubmitted {
            ticket: Ticket(1),
            array: Box::new(array),
        });
    }

    /// Ends all faults: machines are up and take work, drains end, and failed and stopped jobs are resumed, because other jobs
    /// may wait for them.
    pub(super) fn recover(&mut self) {
        for worker in &mut self.workers {
            worker.sleeps_until = self.now;
            worker.dead_until = self.now;
            worker.refused_until = self.now;
        }
        (self.full_until, self.storage_refused_until) = (self.now, self.now);
        for index in 0..WORKERS {
            self.handle(Event::DrainRequested {
                ticket: Ticket(1),
                worker: format!("w{index}"),
                drain: false,
                now: false,
            });
        }
        // Twice: a job that is still stopping can be resumed when it has stopped.
        for _ in 0..2 {
            for job in self.state.jobs.keys().cloned().collect::<Vec<_>>() {
                self.handle(Event::ResumeRequested {
                    ticket: Ticket(1),
                    job: job.to_string(),
                });
            }
            let until = self.now.after(Duration::from_secs(60));
            while self.now < until {
                self.next_event();
            }
        }
    }

    /// Whether a job fits on no device of any worker, even when all devices are idle.
    fn fits_nowhere(&self, job: &Job) -> bool {
        let needs = DeviceNeeds::of(job);
        self.state.workers.values().all(|worker| {
            let mut devices = worker.devices.iter();
            devices.all(|device| check_fit(&needs, worker, device).is_err())
        })
    }

    /// Stops the jobs that wait for a job which failed or was stopped, or for a device that no worker has. They would wait for
    /// ever.
    pub(super) fn stop_unstartable_jobs(&mut self) {
        let unplaceable: Vec<JobId> = self
            .state
            .jobs
            .values()
            .filter(|job| job.state == JobState::Queued && self.fits_nowhere(job))
            .map(|job| job.id.clone())
            .collect();
        for job in unplaceable {
            self.handle(Event::StopRequested {
                ticket: Ticket(1),
                job: job.to_string(),
                now: false,
            });
        }
        let waiting: Vec<JobId> = self
            .state
            .jobs
            .values()
            .filter(|job| job.state == JobState::Queued && !job.after.is_empty())
            .map(|job| job.id.clone())
            .collect();
        for job in waiting {
            let before = self.state.job(&job).map(|job| job.after.clone()).unwrap_or_default();
            let ended = |id: &JobId| {
                let members = self.state.members(id);
                members
                    .iter()
                    .filter_map(|id| self.state.job(id))
                    .any(|job| matches!(job.state, JobState::Failed | JobState::Stopped))
            };
            if before.iter().any(ended) {
                self.handle(Event::StopRequested {
                    ticket: Ticket(1),
                    job: job.to_string(),
                    now: false,
                });
            }
        }
    }
}

/// The labels that a job asks for: none, most of the time.
fn random_labels(random: &mut Random) -> BTreeMap<String, String> {
    let site = random.once_in(8).then(|| random.pick(&SITES).copied()).flatten();
    site.map(|site| ("site".into(), site.into())).into_iter().collect()
}
