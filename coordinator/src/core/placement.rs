//! Which waiting job goes to which device: a pure function of the state, and the same rules in words.

use super::Step;
use super::event::{Effect, Placed};
use super::model::{DeviceKey, Job, Live, State, Worker, device_key};
use aitk_common::capability::{Device, DeviceKind, DeviceRef};
use aitk_common::control::{AttemptState, AttemptView, EventBody, HeldAttempt, JobState, UnixMillis};
use aitk_common::id::{JobId, WorkerId};
use aitk_common::plan::profile::MemoryProfile;
use std::collections::BTreeSet;

/// A job and the device that it gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Placement {
    pub(super) job: JobId,
    pub(super) worker: WorkerId,
    pub(super) device: DeviceRef,
    pub(super) profile: MemoryProfile,
}

/// Why a device is not for a job. Ordered: of several devices, the reason that came closest is shown.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Misfit {
    OtherMachine,
    Label(String, String),
    Kind(DeviceKind),
    Profile(MemoryProfile),
    Memory { wanted: u64, most: u64 },
    NoBudget,
}

/// Whether the device can run the job when it is idle, and with which profile.
fn fits(job: &Job, worker: &Worker, device: &Device) -> Result<MemoryProfile, Misfit> {
    if job.local && !worker.same_machine {
        return Err(Misfit::OtherMachine);
    }
    if let Some((key, value)) = job
        .wants
        .labels
        .iter()
        .find(|(key, value)| worker.labels.get(*key) != Some(*value))
    {
        return Err(Misfit::Label(key.clone(), value.clone()));
    }
    if let Some(kind) = job.wants.device.filter(|kind| *kind != device.device.kind) {
        return Err(Misfit::Kind(kind));
    }
    let profile = job.wants.profile.unwrap_or(device.profile);
    if (profile == MemoryProfile::CpuOnly) != (device.device.kind == DeviceKind::Cpu) {
        return Err(Misfit::Profile(profile));
    }
    match job.wants.memory {
        Some(wanted) if wanted > device.memory_budget => Err(Misfit::Memory {
            wanted,
            most: device.memory_budget,
        }),
        _ if device.memory_budget == 0 => Err(Misfit::NoBudget),
        _ => Ok(profile),
    }
}

/// Whoever asks for no device kind wants the fastest: processors only where no machine offers a fitting GPU.
fn skips_cpu(job: &Job, candidates: &[Candidate<'_>]) -> bool {
    job.wants.device.is_none()
        && candidates
            .iter()
            .any(|one| one.device.device.kind != DeviceKind::Cpu && fits(job, one.worker, one.device).is_ok())
}

struct Candidate<'a> {
    worker: &'a Worker,
    device: &'a Device,
}

impl State {
    /// Devices of workers that take work, idle or not.
    fn candidates(&self) -> Vec<Candidate<'_>> {
        self.workers
            .values()
            .filter(|worker| worker.session.is_some() && !worker.leaving)
            .flat_map(|worker| worker.devices.iter().map(move |device| Candidate { worker, device }))
            .collect()
    }

    fn is_idle(&self, one: &Candidate<'_>, taken: &BTreeSet<(WorkerId, DeviceKey)>) -> bool {
        let key = device_key(one.device.device);
        let busy = self
            .busy
            .get(&one.worker.id)
            .is_some_and(|devices| devices.contains_key(&key));
        !busy && !taken.contains(&(one.worker.id.clone(), key))
    }

    /// What can start now: by priority, then first in, first out. A job that fits nothing now holds up nobody.
    pub(super) fn placements(&self, now: UnixMillis) -> Vec<Placement> {
        let candidates = self.candidates();
        let mut taken = BTreeSet::new();
        let mut placements = Vec::new();
        let mut idle = candidates.iter().filter(|one| self.is_idle(one, &taken)).count();
        for (_, _, id) in &self.queue {
            if idle == 0 {
                break;
            }
            let Some(job) = self.jobs.get(id).filter(|job| job.not_before <= now) else {
                continue;
            };
            let skips_cpu = skips_cpu(job, &candidates);
            let best = candidates
                .iter()
                .filter(|one| self.is_idle(one, &taken))
                .filter(|one| !(skips_cpu && one.device.device.kind == DeviceKind::Cpu))
                .filter_map(|one| fits(job, one.worker, one.device).ok().map(|profile| (one, profile)))
                .min_by_key(|(one, _)| preference(job, one));
            if let Some((one, profile)) = best {
                taken.insert((one.worker.id.clone(), device_key(one.device.device)));
                idle -= 1;
                placements.push(Placement {
                    job: id.clone(),
                    worker: one.worker.id.clone(),
                    device: one.device.device,
                    profile,
                });
            }
        }
        placements
    }

    /// Starts what can start.
    pub(super) fn place(&mut self, step: &mut Step) {
        self.replace = false;
        for placement in self.placements(step.now) {
            self.assign(step, placement);
        }
        self.replace = false;
    }

    fn assign(&mut self, step: &mut Step, placement: Placement) {
        let Placement {
            job: id,
            worker: worker_id,
            device,
            profile,
        } = placement;
        let Some(worker) = self.workers.get(&worker_id) else {
            return;
        };
        let Some(session) = worker.session else { return };
        let worker_name = worker.name.clone();
        let lease_until = step.now.after(self.settings.lease);
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let epoch = job.epoch().next();
        let attempt = job.attempt_id(epoch);
        job.attempts.push(AttemptView {
            id: attempt.clone(),
            epoch,
            worker: worker_id.clone(),
            worker_name: worker_name.clone(),
            device,
            profile,
            state: AttemptState::Assigned,
            created: step.now,
            ended: None,
            message: String::new(),
        });
        job.started = job.started.or(Some(step.now));
        job.live = Some(Live { lease_until, seq: 0 });
        let placed = Placed {
            job: id.clone(),
            task: job.task(),
            held: HeldAttempt {
                attempt: attempt.clone(),
                epoch,
            },
            local: job.local,
            resume: job.checkpoint.as_ref().map(|checkpoint| checkpoint.manifest),
            device,
            profile,
            seed: job.seed,
        };
        self.live.insert(id.clone());
        self.busy
            .entry(worker_id)
            .or_default()
            .insert(device_key(device), id.clone());
        let place = format!("on {worker_name}, {} {}", device.kind.name(), device.index);
        self.set_state(step, &id, JobState::Running, place);
        let body = EventBody::Attempt {
            state: AttemptState::Assigned,
            worker_name,
            device,
            message: String::new(),
        };
        self.log(step, &id, Some(attempt), body, None);
        step.push(Effect::Assign(session, Box::new(placed)));
    }

    /// Why a waiting job waits, as one would say it.
    pub(super) fn explain(&self, now: UnixMillis, job: &Job) -> String {
        if job.not_before > now {
            let wait = job.not_before.since(now).as_millis().div_ceil(1000);
            let (failures, tries) = (job.failures.max(1), u64::from(job.wants.retries) + 1);
            return format!(
                "try {} of {tries} in {wait} s; before: {}",
                u64::from(failures) + 1,
                job.reason
            );
        }
        let candidates = self.candidates();
        if candidates.is_empty() {
            return "no worker is connected; `aitk-worker` starts one".into();
        }
        let skips_cpu = skips_cpu(job, &candidates);
        let mut fitting = 0_usize;
        let mut idle = 0_usize;
        let mut misfits = Vec::new();
        for one in &candidates {
            if skips_cpu && one.device.device.kind == DeviceKind::Cpu {
                continue;
            }
            match fits(job, one.worker, one.device) {
                Ok(_) => {
                    fitting += 1;
                    idle += usize::from(self.is_idle(one, &BTreeSet::new()));
                }
                Err(misfit) => misfits.push(misfit),
            }
        }
        if fitting > 0 {
            let ahead = self.queue.iter().take_while(|key| **key < job.queue_key()).count();
            let devices = if fitting == 1 {
                "the one device that fits is".to_owned()
            } else {
                format!("all {fitting} devices that fit are")
            };
            return match (idle, ahead) {
                (0, 0) => format!("next in line; {devices} busy"),
                (0, ahead) => format!("{ahead} ahead in line; {devices} busy"),
                // Placement follows every change, so this is only ever seen between two steps.
                _ => "starts now".into(),
            };
        }
        // Sorted so that the misfit which came closest is last.
        misfits.sort();
        match misfits.pop() {
            None | Some(Misfit::NoBudget) => "no connected device has memory to offer".into(),
            Some(Misfit::OtherMachine) => "it runs in place, and no worker of this machine is connected".into(),
            Some(Misfit::Label(key, value)) => {
                format!("no connected worker carries all its labels; missing is {key}: {value}")
            }
            Some(Misfit::Kind(kind)) => format!("no connected device is of kind {}", kind.name()),
            Some(Misfit::Profile(profile)) => match profile {
                MemoryProfile::CpuOnly => "it asks for the profile cpu_only, and no connected device is a CPU".into(),
                other => format!(
                    "it asks for the profile {}, and no connected device is a GPU",
                    other.name()
                ),
            },
            Some(Misfit::Memory { wanted, most }) => {
                format!(
                    "it asks for {} of device memory; the most that fits otherwise has {}",
                    gib(wanted),
                    gib(most)
                )
            }
        }
    }
}

/// Smaller is better: not where it failed last, fast kinds first, then where its files are, then the most memory.
fn preference(job: &Job, one: &Candidate<'_>) -> (bool, u8, bool, std::cmp::Reverse<u64>) {
    let last = job.attempts.last();
    let here_before = last.is_some_and(|attempt| attempt.worker == one.worker.id);
    let failed_here =
        here_before && last.is_some_and(|attempt| matches!(attempt.state, AttemptState::Failed | AttemptState::Lost));
    let kind = match one.device.device.kind {
        DeviceKind::Cuda => 0,
        DeviceKind::Metal => 1,
        DeviceKind::Cpu => 2,
    };
    (
        failed_here,
        kind,
        !here_before,
        std::cmp::Reverse(one.device.memory_budget),
    )
}

/// Bytes as people read them, with one decimal.
fn gib(bytes: u64) -> String {
    let tenths = u128::from(bytes) * 10 / (1 << 30);
    format!("{}.{} GiB", tenths / 10, tenths % 10)
}
