//! Why a waiting job waits, and where a job could run, as one would say it.

use super::messages::{gib, no_device, not_this_device, span};
use super::model::{ArrayPlace, Condition, Job, QueueState, Recall, SlotId, Wants, Worker};
use super::placement::{USUAL_UNITS, is_gpu, seconds_until, work_left};
use super::queue::StartCondition;
use super::state::State;
use super::state::classes::{Misfit, Needs, fit};
use super::state::slots::Slot;
use super::state::speeds::TOO_SLOW;
use aitk_common::capability::DeviceRef;
use aitk_common::control::{DeviceForecast, Forecast, JobState, UnixMillis};
use aitk_common::id::{JobId, UserName, WorkerId};
use aitk_common::plan::profile::MemoryProfile;
use std::time::Duration;

/// Beyond so many, it does not matter how many are ahead.
const AHEAD_MOST: usize = 1000;

/// Why a part of a job does not begin on a slow device.
const LEFT: &str = "faster devices are through with all that waits before it would be with this part";

/// What is said of the device on which a job runs.
const RUNS_HERE: &str = "runs here";

/// A device as a job sees it.
struct DeviceVerdict<'a> {
    slot: SlotId,
    device: &'a Slot,
    worker: &'a Worker,
    fit: FitCheck,
}

/// What a device is to a job.
enum FitCheck {
    Unfit(Misfit),
    Fit {
        profile: MemoryProfile,
        bytes: Option<u64>,
        seconds_per_unit: f64,
        /// What keeps it from starting there now; empty: nothing.
        hindrance: String,
        ready: bool,
    },
}

impl State {
    /// Every connected device as a job of this user with these needs sees it.
    fn check_devices(
        &self,
        now: UnixMillis,
        needs: &Needs,
        owner: &UserName,
        job: Option<&Job>,
    ) -> Vec<DeviceVerdict<'_>> {
        let family = needs.family.as_deref();
        let mut verdicts: Vec<DeviceVerdict<'_>> = Vec::new();
        for (id, slot) in self.slots.iter().filter(|(_, slot)| slot.connected) {
            let Some(worker) = self.workers.get(&slot.worker) else {
                continue;
            };
            let fit = match fit(needs, worker, &slot.device) {
                // Whatever is predicted: it is there.
                _ if job.is_some_and(|job| slot.running.contains_key(&job.id)) => self.own_place(job, slot, family),
                Err(misfit) => FitCheck::Unfit(misfit),
                Ok((profile, bytes)) => {
                    let ready = slot.open
                        && slot.has_room()
                        && slot.has_room_for(needs.held(bytes), None)
                        && !self.is_kept_from(needs, slot)
                        && !job.is_some_and(|job| self.is_reserved_for_other(job, slot));
                    let speed = self.speeds.seconds_per_unit(&slot.device, family, profile);
                    let slow = job.filter(|job| {
                        let takes = work_left(job) * speed * (slot.running.len() as f64 + 1.0);
                        ready && self.is_left_to_faster(now, job, id, speed, takes)
                    });
                    if let Some(job) = slow {
                        let fit = FitCheck::Fit {
                            profile,
                            bytes,
                            seconds_per_unit: speed,
                            hindrance: format!("{LEFT}, {}", self.faster_ones(now, job, speed)),
                            ready: false,
                        };
                        verdicts.push(DeviceVerdict {
                            slot: id,
                            device: slot,
                            worker,
                            fit,
                        });
                        continue;
                    }
                    FitCheck::Fit {
                        profile,
                        bytes,
                        seconds_per_unit: speed,
                        hindrance: if ready {
                            String::new()
                        } else {
                            self.hindrance(slot, worker, owner)
                        },
                        ready,
                    }
                }
            };
            verdicts.push(DeviceVerdict {
                slot: id,
                device: slot,
                worker,
                fit,
            });
        }
        if needs.device.is_none() {
            Self::mark_too_slow(&mut verdicts);
        }
        verdicts
    }

    /// The device on which a job runs, as that job sees it.
    fn own_place(&self, job: Option<&Job>, slot: &Slot, family: Option<&str>) -> FitCheck {
        let attempt = job.and_then(Job::current);
        let profile = attempt.map_or(slot.device.profile, |attempt| attempt.profile);
        FitCheck::Fit {
            profile,
            bytes: attempt.and_then(|attempt| attempt.memory),
            seconds_per_unit: self.speeds.seconds_per_unit(&slot.device, family, profile),
            hindrance: RUNS_HERE.to_owned(),
            ready: false,
        }
    }

    /// A device on which the work would take many times as long as on another one is not taken.
    fn mark_too_slow(verdicts: &mut [DeviceVerdict<'_>]) {
        let speed = |verdict: &DeviceVerdict<'_>| match &verdict.fit {
            FitCheck::Fit { seconds_per_unit, .. } if verdict.device.open => Some((*seconds_per_unit, name(verdict))),
            _ => None,
        };
        let best = verdicts.iter().filter_map(speed).min_by(|a, b| a.0.total_cmp(&b.0));
        let Some((best, fastest)) = best else { return };
        for verdict in verdicts {
            if let FitCheck::Fit {
                seconds_per_unit,
                hindrance,
                ready,
                ..
            } = &mut verdict.fit
                && *seconds_per_unit > best * TOO_SLOW
                && hindrance != RUNS_HERE
            {
                *ready = false;
                *hindrance = format!(
                    "it would take about {:.0} times as long as on {fastest}; `cluster.device: {}` allows it",
                    *seconds_per_unit / best,
                    verdict.device.device.device.kind.name()
                );
            }
        }
    }

    /// A job as this user may know it: of other people's no more than whose it is.
    fn known_as(&self, id: &JobId, to: &UserName) -> String {
        match self.jobs.get(id) {
            Some(job) if job.wants.owner == *to => format!("{id} ({})", job.name),
            Some(job) => format!("a job of {}", job.wants.owner),
            None => id.to_string(),
        }
    }

    fn hindrance(&self, slot: &Slot, worker: &Worker, owner: &UserName) -> String {
        if worker.drained {
            return format!("{} is drained", worker.name);
        }
        if worker.leaving {
            return format!("{} is leaving", worker.name);
        }
        if slot.quarantined.is_some() {
            return format!(
                "quarantined: {}; `aitk worker undrain {}` frees it",
                Self::quarantine_reason(worker, slot.device.device),
                worker.name
            );
        }
        if let (true, Some(id)) = (slot.running.is_empty(), &slot.reserved_for) {
            return format!(
                "kept for {}, which comes from a slower device",
                self.known_as(id, owner)
            );
        }
        let busy: Vec<String> = slot
            .running
            .keys()
            .map(|id| {
                let job = self.jobs.get(id);
                let gives_way = job.is_some_and(|job| matches!(job.recall, Some(Recall::GiveWay(_))));
                let doing = if gives_way { ", which saves and gives way" } else { "" };
                format!("{}{doing}", self.known_as(id, owner))
            })
            .collect();
        format!("busy with {}", busy.join(" and "))
    }

    /// Why a waiting job waits.
    pub(super) fn explain(&self, now: UnixMillis, job: &Job) -> String {
        if let Some(offer) = self.offers.get(&job.id).filter(|_| !job.paused) {
            return offer.reason(now);
        }
        match self.start_condition(now, job) {
            StartCondition::Paused => {
                // What was saved when it paused, if it ran.
                let paused = Some(&job.reason).filter(|reason| reason.starts_with("paused"));
                let paused = paused.map_or("paused", String::as_str);
                return format!("{paused}; `aitk resume {}` lets it go on", job.id);
            }
            StartCondition::After(before) => return self.explain_after(&before, job.condition(&before)),
            StartCondition::Until(time) if job.attempts.is_empty() => {
                let left = span(time.since(now));
                return format!("starts in {left} at the earliest, as its config asks");
            }
            StartCondition::Until(time) => {
                let wait = seconds_until(now, time);
                if (job.network.is_some() || job.storage_failures > 0) && job.failures == 0 {
                    return format!("tried again in {wait} s; before: {}", job.reason);
                }
                let (failures, tries) = (job.failures.max(1), u64::from(job.wants.retries) + 1);
                return format!(
                    "try {} of {tries} in {wait} s; before: {}",
                    u64::from(failures) + 1,
                    job.reason
                );
            }
            StartCondition::Open => {}
        }
        if let Some((free, reserve)) = self.storage_full {
            let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
            return format!(
                "waits: the coordinator's disk is full ({:.1} GiB free, {:.1} GiB reserved)",
                gib(free),
                gib(reserve)
            );
        }
        if let (
            QueueState::Held,
            Some(ArrayPlace {
                id,
                at_most: Some(most),
                ..
            }),
        ) = (job.queue_state, job.array.as_deref())
        {
            return format!("{most} of its array {id} may run at the same time and do; one of them has to end first");
        }
        let verdicts = self.check_devices(now, &Needs::of(job), &job.wants.owner, Some(job));
        if verdicts.is_empty() {
            return "no worker is connected; `aitk-worker` starts one".into();
        }
        let owner = &job.wants.owner;
        if self.at_quota(owner)
            && verdicts
                .iter()
                .any(|verdict| matches!(verdict.fit, FitCheck::Fit { .. }))
        {
            let quota = self.settings.quotas.of(owner).unwrap_or(0);
            return format!(
                "user {owner} may hold {quota} devices at once and does; one of those jobs has to end first"
            );
        }
        self.explain_devices(job, &verdicts)
    }

    fn explain_after(&self, before: &JobId, condition: Condition) -> String {
        let ends = match condition {
            Condition::Completed => "",
            Condition::Ended => " to end",
            Condition::Failed => " to fail",
        };
        match (self.jobs.get(before), condition) {
            (Some(before), Condition::Completed) if matches!(before.state, JobState::Failed | JobState::Stopped) => {
                format!(
                    "waits for {} ({}), which has {}; `aitk resume {}` lets that go on, `aitk stop` ends this one",
                    before.id, before.name, before.state, before.id
                )
            }
            (Some(before), _) => format!(
                "waits for {} ({}){ends}, which is {}",
                before.id, before.name, before.state
            ),
            (None, _) => match self.array_summary(before) {
                Some((name, counts)) => format!("waits for the array {before} ({name}){ends}: {counts}"),
                None => format!("waits for {before}, which is not known any more; `aitk stop` ends this one"),
            },
        }
    }

    fn explain_devices(&self, job: &Job, verdicts: &[DeviceVerdict<'_>]) -> String {
        let fitting: Vec<&DeviceVerdict<'_>> = verdicts
            .iter()
            .filter(|verdict| matches!(verdict.fit, FitCheck::Fit { .. }))
            .collect();
        let usable: Vec<&&DeviceVerdict<'_>> = fitting.iter().filter(|verdict| verdict.device.open).collect();
        let ready = fitting
            .iter()
            .any(|verdict| matches!(verdict.fit, FitCheck::Fit { ready: true, .. }));
        if ready {
            // Placement follows every change, so this is only ever seen between two steps.
            return "starts now".into();
        }
        if let (Some(first), true) = (fitting.first(), usable.is_empty()) {
            let FitCheck::Fit { hindrance, .. } = &first.fit else {
                return String::new();
            };
            let others = match fitting.len() {
                1 => "the one device that fits is not taken".to_owned(),
                several => format!("none of the {several} devices that fit is taken"),
            };
            return format!("{others}: {hindrance}");
        }
        if fitting.is_empty() {
            return no_device(misfits(verdicts));
        }
        let giving = usable
            .iter()
            .flat_map(|verdict| verdict.device.running.keys())
            .find(|id| matches!(&self.jobs.get(id).and_then(|job| job.recall.clone()), Some(Recall::GiveWay(to)) if *to == job.id));
        if let Some(giving) = giving {
            let giving = self.known_as(giving, &job.wants.owner);
            return format!("starts when {giving} has saved and given way");
        }
        let left = usable.iter().find_map(|verdict| match &verdict.fit {
            FitCheck::Fit { hindrance, .. } if hindrance.starts_with(LEFT) => Some((name(verdict), hindrance)),
            _ => None,
        });
        if let Some((slow, why)) = left {
            return format!("not begun on {slow}: {why}");
        }
        let fast = |verdict: &&&&DeviceVerdict<'_>| !matches!(&verdict.fit, FitCheck::Fit { hindrance, .. } if hindrance.starts_with("it would"));
        let devices = match usable.iter().filter(fast).count() {
            1 => "the one device that fits is".to_owned(),
            several => format!("all {several} devices that fit are"),
        };
        let ahead = self.queue.range(..job.queue_key()).take(AHEAD_MOST + 1).count();
        match ahead {
            0 => format!("next in line; {devices} busy"),
            ahead if ahead > AHEAD_MOST => format!("more than {AHEAD_MOST} ahead in line; {devices} busy"),
            ahead => format!("{ahead} ahead in line; {devices} busy"),
        }
    }

    /// A waiting or running job or array, and every connected device as it sees it.
    #[must_use]
    pub fn explain_job(&self, now: UnixMillis, id: &JobId) -> Option<Forecast> {
        let Some(job) = self.jobs.get(id) else {
            return self.explain_array(now, id);
        };
        let summary = match job.state {
            JobState::Queued => self.explain(now, job),
            _ => self.where_it_stands(now, job),
        };
        Some(Forecast {
            summary,
            devices: self.forecast(now, &Needs::of(job), &job.wants.owner, work_left(job), Some(job)),
        })
    }

    /// What is to be said of a job that does not wait.
    fn where_it_stands(&self, now: UnixMillis, job: &Job) -> String {
        let reason = self.reason(now, job);
        let place = job.current().map(|attempt| {
            let since = span(now.since(attempt.created));
            let device = device_name(attempt.device);
            format!("{} for {since} on {} {device}", job.state, attempt.worker_name)
        });
        // Placement's own words for the same place.
        let says_more = !reason.is_empty() && !reason.starts_with("on ");
        match (place, !says_more) {
            (Some(place), true) => place,
            (Some(place), false) => format!("{place}: {reason}"),
            (None, true) => job.state.to_string(),
            (None, false) => format!("{}: {reason}", job.state),
        }
    }

    /// Where a job with these wishes could run, were it submitted now.
    #[must_use]
    pub fn fit(&self, wants: &Wants) -> Forecast {
        let needs = Needs::of_wants(wants, false, None);
        let units = wants.demand.as_ref().map_or(USUAL_UNITS, |demand| demand.units());
        let devices = self.forecast(UnixMillis(0), &needs, &wants.owner, units, None);
        let fitting: Vec<&DeviceForecast> = devices.iter().filter(|device| device.fits).collect();
        let summary = match (fitting.first(), devices.is_empty()) {
            (_, true) => "no worker is connected; `aitk-worker` starts one".to_owned(),
            (None, _) => no_device(misfits(&self.check_devices(UnixMillis(0), &needs, &wants.owner, None))),
            (Some(best), _) if best.ready => format!("would start now on {}", best.description),
            (Some(best), _) => format!("would wait for a device; the best is {}", best.description),
        };
        Forecast { summary, devices }
    }

    fn forecast(
        &self,
        now: UnixMillis,
        needs: &Needs,
        owner: &UserName,
        units: f64,
        job: Option<&Job>,
    ) -> Vec<DeviceForecast> {
        let family = needs.family.as_deref();
        let mut verdicts = self.check_devices(now, needs, owner, job);
        let rank = |verdict: &DeviceVerdict<'_>| match &verdict.fit {
            FitCheck::Fit {
                seconds_per_unit,
                ready,
                ..
            } => (0, !ready, *seconds_per_unit),
            FitCheck::Unfit(_) => (1, true, 0.0),
        };
        verdicts.sort_by(|a, b| {
            let (a_rank, b_rank) = (rank(a), rank(b));
            let order = (a_rank.0, a_rank.1).cmp(&(b_rank.0, b_rank.1));
            let budget = |verdict: &DeviceVerdict<'_>| verdict.device.device.memory_budget;
            order
                .then(a_rank.2.total_cmp(&b_rank.2))
                .then((budget(a), a.slot).cmp(&(budget(b), b.slot)))
        });
        let own = job.and_then(own_pace);
        let say = |verdict: &DeviceVerdict<'_>| {
            let here = own
                .filter(|(worker, device, _)| *worker == &verdict.worker.id && *device == verdict.device.device.device);
            self.say(verdict, family, units, here.map(|(_, _, seconds)| seconds))
        };
        verdicts.iter().map(say).collect()
    }

    /// `own`: what a job that runs there has left, at its own pace.
    fn say(&self, verdict: &DeviceVerdict<'_>, family: Option<&str>, units: f64, own: Option<f64>) -> DeviceForecast {
        let device = &verdict.device.device;
        let measured = own.is_some() || self.speeds.is_measured(device, family);
        let name = name(verdict);
        let mut said = DeviceForecast {
            worker: verdict.worker.id.clone(),
            worker_name: verdict.worker.name.clone(),
            device: device.device,
            device_name: device.name.clone(),
            budget: device.memory_budget,
            fits: false,
            ready: false,
            profile: None,
            memory: None,
            seconds: None,
            measured,
            description: String::new(),
        };
        match &verdict.fit {
            FitCheck::Unfit(misfit) => said.description = format!("{name}: {}", not_this_device(misfit)),
            FitCheck::Fit {
                profile,
                bytes,
                seconds_per_unit,
                hindrance,
                ready,
            } => {
                let seconds = own.or(family.map(|_| units * seconds_per_unit));
                let need = match bytes {
                    Some(bytes) => format!("{} of {}", gib(*bytes), gib(device.memory_budget)),
                    None => format!("all of {}, its need is not known", gib(device.memory_budget)),
                };
                let time = match seconds {
                    Some(seconds) if seconds.is_finite() => {
                        let time = span(Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX));
                        let how = if measured { "" } else { ", a guess" };
                        format!(", about {time}{how}")
                    }
                    _ => String::new(),
                };
                let now = if *ready { "free" } else { hindrance.as_str() };
                said.description = format!("{name}: {} ({need}{time}); {now}", profile.name());
                said.fits = true;
                said.ready = *ready;
                said.profile = Some(*profile);
                said.memory = *bytes;
                said.seconds = seconds.filter(|seconds| seconds.is_finite());
            }
        }
        said
    }
}

/// Where a job runs, and the seconds that it still takes there, from the steps that it has taken.
fn own_pace(job: &Job) -> Option<(&WorkerId, DeviceRef, f64)> {
    if !job.works() {
        return None;
    }
    let (attempt, progress) = (job.current()?, job.progress?);
    #[allow(clippy::cast_precision_loss)]
    let left = progress.total.checked_sub(progress.done)? as f64;
    let seconds = left * progress.seconds_per_step?;
    seconds
        .is_finite()
        .then_some((&attempt.worker, attempt.device, seconds))
}

/// `box cuda:0`; the CPU has no number.
fn name(verdict: &DeviceVerdict<'_>) -> String {
    format!("{} {}", verdict.worker.name, device_name(verdict.device.device.device))
}

/// `cuda:0`, `cpu`.
fn device_name(device: DeviceRef) -> String {
    if is_gpu(device.kind) {
        format!("{}:{}", device.kind.name(), device.index)
    } else {
        device.kind.name().to_owned()
    }
}

fn misfits<'a>(verdicts: &'a [DeviceVerdict<'_>]) -> Vec<&'a Misfit> {
    let unfit = |verdict: &'a DeviceVerdict<'_>| match &verdict.fit {
        FitCheck::Unfit(misfit) => Some(misfit),
        FitCheck::Fit { .. } => None,
    };
    verdicts.iter().filter_map(unfit).collect()
}
