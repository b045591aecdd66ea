//! Finds out why a job waits and on which devices it could run, with the checks that placement uses.

use super::class_fits::device_fit;
use super::eligibility::{ASSUMED_PASSES, Obstacle, passes_left};
use super::messages::{MAX_AHEAD, NO_WORKER, fit_line, job_status, no_device, not_this_device, wait_reason};
use super::model::{ArrayMembership, Job, Preemption, QueueState, Requirements, SlotId, Worker};
use super::placement::{is_gpu, seconds_until};
use super::queue::StartCondition;
use super::reasons::{Availability, DependencyJob, FitLine, JobLabel, JobStatus, WaitReason};
use super::state::State;
use super::state::classes::{DeviceFit, DeviceNeeds, FitError, FittingProfile};
use super::state::slots::Slot;
use aitk_common::capability::DeviceRef;
use aitk_common::control_plane::{AttemptState, DeviceForecast, Forecast, JobState, UnixMillis};
use aitk_common::id::{JobId, UserName, WorkerId};

/// A connected device as a job sees it.
struct DeviceVerdict<'a> {
    slot: SlotId,
    device: &'a Slot,
    worker: &'a Worker,
    fit: Result<Fit<'a>, FitError>,
}

/// A device on which a job fits.
struct Fit<'a> {
    device_fit: DeviceFit,
    availability: Availability<'a>,
}

impl<'a> DeviceVerdict<'a> {
    fn fit(&self) -> Option<&Fit<'a>> {
        self.fit.as_ref().ok()
    }

    fn is_ready(&self) -> bool {
        self.fit()
            .is_some_and(|fit| matches!(fit.availability, Availability::Ready))
    }
}

/// The job, submitted or not, that devices are checked for.
#[derive(Clone, Copy)]
struct Subject<'a> {
    needs: &'a DeviceNeeds,
    owner: &'a UserName,
    /// None: it is not submitted yet.
    job: Option<&'a Job>,
}

impl<'a> Subject<'a> {
    fn of(job: &'a Job, needs: &'a DeviceNeeds) -> Self {
        Self {
            needs,
            owner: &job.requirements.owner,
            job: Some(job),
        }
    }
}

impl State {
    /// Checks every connected device for a job.
    fn check_devices<'a>(&'a self, now: UnixMillis, subject: Subject<'_>) -> Vec<DeviceVerdict<'a>> {
        let connected = self.slots.iter().filter(|(_, slot)| slot.connected);
        let devices: Vec<_> = connected
            .filter_map(|(id, slot)| Some((id, slot, self.workers.get(&slot.worker)?)))
            .map(|(id, slot, worker)| {
                // A job that runs on a device fits there, whatever is predicted.
                let own = subject.job.filter(|job| slot.running.contains_key(&job.id));
                let device_fit = match own {
                    Some(job) => Ok(self.current_fit(job, slot, subject.needs)),
                    None => device_fit(&self.speeds, subject.needs, worker, &slot.device),
                };
                (id, slot, worker, device_fit, own.is_some())
            })
            .collect();
        let fastest = devices
            .iter()
            .filter(|(_, slot, ..)| slot.accepts_jobs)
            .filter_map(|(_, slot, worker, device_fit, _)| {
                let seconds = device_fit.as_ref().ok()?.seconds_per_pass;
                Some((seconds, device_label(worker, slot)))
            })
            .min_by(|a, b| a.0.total_cmp(&b.0))
            .unwrap_or((f64::INFINITY, String::new()));
        devices
            .into_iter()
            .map(|(slot, device, worker, device_fit, runs_here)| DeviceVerdict {
                slot,
                device,
                worker,
                fit: device_fit.map(|device_fit| Fit {
                    device_fit,
                    availability: match runs_here {
                        true => Availability::RunsHere,
                        false => self.availability(now, subject, (slot, device, worker), &device_fit, &fastest),
                    },
                }),
            })
            .collect()
    }

    /// How a job runs on the device where it is.
    fn current_fit(&self, job: &Job, slot: &Slot, needs: &DeviceNeeds) -> DeviceFit {
        let attempt = job.live_attempt();
        let profile = attempt.map_or(slot.device.profile, |attempt| attempt.profile);
        DeviceFit {
            fitting: FittingProfile {
                profile,
                bytes: attempt.and_then(|attempt| attempt.memory),
            },
            seconds_per_pass: self
                .speeds
                .seconds_per_pass(&slot.device, needs.family.as_deref(), profile),
        }
    }

    /// Whether a job may start on a device on which it fits, and if not, why. `fastest` is the fastest device that accepts jobs and that
    /// fits: its seconds per pass, and its name.
    fn availability<'a>(
        &'a self,
        now: UnixMillis,
        subject: Subject<'_>,
        (slot_id, slot, worker): (SlotId, &'a Slot, &'a Worker),
        device_fit: &DeviceFit,
        fastest: &(f64, String),
    ) -> Availability<'a> {
        let job = (subject.needs, subject.job);
        let Err(obstacle) = self.check_start(now, job, (slot_id, slot), device_fit, fastest.0) else {
            return Availability::Ready;
        };
        match (obstacle, &slot.takeover_by) {
            (Obstacle::TooSlow, _) => Availability::TooSlow {
                times: device_fit.seconds_per_pass / fastest.0,
                fastest: fastest.1.clone(),
                kind: slot.device.id.kind,
            },
            (Obstacle::LeftToFaster, _) => Availability::LeftToFaster {
                faster: subject
                    .job
                    .map(|job| self.faster_devices(now, job, device_fit.seconds_per_pass))
                    .unwrap_or_default(),
            },
            (Obstacle::NotAccepting, _) if worker.drained => Availability::Drained { worker: &worker.name },
            (Obstacle::NotAccepting, _) if worker.leaving => Availability::Leaving { worker: &worker.name },
            (Obstacle::NotAccepting, _) if slot.quarantined.is_some() => Availability::Quarantined {
                worker: &worker.name,
                reason: Self::quarantine_reason(worker, slot.device.id),
            },
            (Obstacle::Reserved, Some(id)) if slot.running.is_empty() => {
                Availability::Reserved(self.label(id, subject.owner))
            }
            (Obstacle::Busy | Obstacle::Reserved | Obstacle::NotAccepting, _) => {
                let gives_way = |job: &Job| matches!(job.preemption, Some(Preemption::ForJob(_)));
                let jobs = slot.running.keys().map(|id| {
                    let preempted = self.jobs.get(id).is_some_and(gives_way);
                    (self.label(id, subject.owner), preempted)
                });
                Availability::Busy(jobs.collect())
            }
        }
    }

    /// A job as this user may see it.
    fn label<'a>(&'a self, id: &'a JobId, to: &UserName) -> JobLabel<'a> {
        match self.jobs.get(id) {
            Some(job) if job.requirements.owner == *to => JobLabel::Own { id, name: &job.name },
            Some(job) => JobLabel::OfUser(&job.requirements.owner),
            None => JobLabel::Unknown(id),
        }
    }

    /// Why a waiting job waits, as text.
    pub(super) fn explain(&self, now: UnixMillis, job: &Job) -> String {
        wait_reason(&self.wait_reason(now, job))
    }

    /// Why a waiting job waits.
    fn wait_reason<'a>(&'a self, now: UnixMillis, job: &'a Job) -> WaitReason<'a> {
        if let Some(offer) = self.offers.get(&job.id).filter(|_| !job.paused) {
            let left = offer.until.since(now);
            return WaitReason::CheckpointUpload { offer, left };
        }
        match self.start_condition(now, job) {
            StartCondition::Paused => {
                let last = job.attempts.last();
                let stopped = last.is_some_and(|last| last.state == AttemptState::Stopped);
                return WaitReason::Paused {
                    job: &job.id,
                    stopped: stopped.then_some(job.reason.as_str()),
                };
            }
            StartCondition::After(before) => {
                let condition = job.condition(&before);
                let before = self.dependency_job(before);
                return WaitReason::Dependency { before, condition };
            }
            StartCondition::NotBefore(time) => {
                let left = time.since(self.wall_time(now));
                return WaitReason::StartTime { left };
            }
            StartCondition::RetryAt(time) => return wait_for_retry(now, time, job),
            StartCondition::Met => {}
        }
        if let Some((free, reserved)) = self.storage_full {
            return WaitReason::StorageFull { free, reserved };
        }
        if let Some(error) = &self.storage_refusal {
            return WaitReason::StorageRefusal { error };
        }
        if let (
            QueueState::ArrayLimited,
            Some(ArrayMembership {
                id,
                at_most: Some(at_most),
                ..
            }),
        ) = (job.queue_state, job.array.as_deref())
        {
            return WaitReason::ArrayLimit {
                array: id,
                at_most: *at_most,
            };
        }
        let verdicts = self.check_devices(now, Subject::of(job, &DeviceNeeds::of(job)));
        if verdicts.is_empty() {
            return WaitReason::NoWorker;
        }
        let owner = &job.requirements.owner;
        if self.at_quota(owner) && verdicts.iter().any(|verdict| verdict.fit.is_ok()) {
            let quota = self.settings.quotas.of(owner).unwrap_or(0);
            return WaitReason::Quota { owner, quota };
        }
        self.wait_for_devices(job, verdicts)
    }

    fn dependency_job(&self, before: JobId) -> DependencyJob<'_> {
        match (self.jobs.get(&before), self.array_summary(&before)) {
            (Some(job), _) => DependencyJob::Job(job),
            (None, Some((name, counts))) => DependencyJob::Array {
                id: before,
                name,
                counts,
            },
            (None, None) => DependencyJob::Unknown(before),
        }
    }

    /// Why no device takes a job that waits for nothing else.
    fn wait_for_devices<'a>(&'a self, job: &'a Job, verdicts: Vec<DeviceVerdict<'a>>) -> WaitReason<'a> {
        if verdicts.iter().any(DeviceVerdict::is_ready) {
            return WaitReason::StartsNow;
        }
        let (mut fitting, mut fit_errors) = (Vec::new(), Vec::new());
        for verdict in verdicts {
            match verdict.fit {
                Ok(fit) => fitting.push((verdict.device, verdict.worker, fit)),
                Err(fit_error) => fit_errors.push(fit_error),
            }
        }
        let accepts_jobs = |(device, ..): &&(&Slot, &Worker, Fit<'_>)| device.accepts_jobs;
        if !fitting.iter().any(|one| accepts_jobs(&one)) {
            let count = fitting.len();
            return match fitting.into_iter().next() {
                None => WaitReason::NoDeviceFits(fit_errors),
                Some((.., first)) => WaitReason::NoDeviceAccepts {
                    fitting: count,
                    first: first.availability,
                },
            };
        }
        let preempted = fitting
            .iter()
            .filter(accepts_jobs)
            .flat_map(|(device, ..)| device.running.keys())
            .find(|id| {
                let preemption = self.jobs.get(id).and_then(|job| job.preemption.as_ref());
                matches!(preemption, Some(Preemption::ForJob(to)) if *to == job.id)
            });
        if let Some(preempted) = preempted {
            return WaitReason::Preempting(self.label(preempted, &job.requirements.owner));
        }
        let mut devices = 0;
        for (device, worker, fit) in fitting.into_iter().filter(|one| accepts_jobs(&one)) {
            match fit.availability {
                Availability::LeftToFaster { faster } => {
                    let device = device_label(worker, device);
                    return WaitReason::LeftToFaster { device, faster };
                }
                Availability::TooSlow { .. } => {}
                _ => devices += 1,
            }
        }
        let ahead = self.queue.range(..job.queue_key()).take(MAX_AHEAD + 1).count();
        WaitReason::InQueue {
            ahead: Some(ahead).filter(|ahead| *ahead <= MAX_AHEAD),
            devices,
        }
    }

    /// Why a job waits or what it does, and every connected device as the job sees it; an array like a job.
    #[must_use]
    pub fn explain_job(&self, now: UnixMillis, id: &JobId) -> Option<Forecast> {
        let Some(job) = self.jobs.get(id) else {
            return self.explain_array(now, id);
        };
        let summary = match job.state {
            JobState::Queued => self.explain(now, job),
            _ => job_status(&self.job_status(now, job)),
        };
        let needs = DeviceNeeds::of(job);
        let verdicts = self.check_devices(now, Subject::of(job, &needs));
        Some(Forecast {
            summary,
            devices: self.forecast(verdicts, &needs, passes_left(job), Some(job)),
        })
    }

    /// The status of a job that does not wait.
    fn job_status<'a>(&self, now: UnixMillis, job: &'a Job) -> JobStatus<'a> {
        let running = job.live_attempt().map(|attempt| {
            let since = self.wall_time(now).since(attempt.created);
            (since, attempt.worker_name.as_str(), device_name(attempt.device))
        });
        // The reason of a job that runs undisturbed names its device, which is said anyway.
        let undisturbed =
            job.state == JobState::Running && job.preemption.is_none() && self.absent_worker(job).is_none();
        JobStatus {
            state: job.state,
            running,
            reason: match undisturbed {
                true => String::new(),
                false => self.reason(now, job),
            },
        }
    }

    /// Where a job with these requirements could run if it were submitted now.
    #[must_use]
    pub fn forecast_new_job(&self, requirements: &Requirements) -> Forecast {
        let needs = DeviceNeeds::of_requirements(requirements, false, None);
        let units = requirements
            .demand
            .as_ref()
            .map_or(ASSUMED_PASSES, |demand| demand.passes());
        let subject = Subject {
            needs: &needs,
            owner: &requirements.owner,
            job: None,
        };
        let verdicts = self.check_devices(UnixMillis(0), subject);
        let fit_errors: Vec<FitError> = verdicts
            .iter()
            .filter_map(|verdict| verdict.fit.as_ref().err().cloned())
            .collect();
        let devices = self.forecast(verdicts, &needs, units, None);
        let summary = match (devices.iter().find(|device| device.fits), devices.is_empty()) {
            (_, true) => NO_WORKER.to_owned(),
            (None, _) => no_device(fit_errors.iter().collect()),
            (Some(best), _) if best.can_start_now => format!("would start now on {}", best.description),
            (Some(best), _) => format!("would wait for a device; the best is {}", best.description),
        };
        Forecast { summary, devices }
    }

    /// The devices in order: those that fit first, of them the ready ones, of them the fastest.
    fn forecast(
        &self,
        mut verdicts: Vec<DeviceVerdict<'_>>,
        needs: &DeviceNeeds,
        units: f64,
        job: Option<&Job>,
    ) -> Vec<DeviceForecast> {
        let rank = |verdict: &DeviceVerdict<'_>| match verdict.fit() {
            Some(fit) => (0, !verdict.is_ready(), fit.device_fit.seconds_per_pass),
            None => (1, true, 0.0),
        };
        verdicts.sort_by(|a, b| {
            let (a_rank, b_rank) = (rank(a), rank(b));
            let order = (a_rank.0, a_rank.1).cmp(&(b_rank.0, b_rank.1));
            let budget = |verdict: &DeviceVerdict<'_>| verdict.device.device.memory_budget;
            order
                .then(a_rank.2.total_cmp(&b_rank.2))
                .then((budget(a), a.slot).cmp(&(budget(b), b.slot)))
        });
        let family = needs.family.as_deref();
        let own = job.and_then(measured_pace);
        let describe = |verdict: &DeviceVerdict<'_>| {
            let here =
                own.filter(|(worker, device, _)| *worker == &verdict.worker.id && *device == verdict.device.device.id);
            self.device_forecast(verdict, family, units, here.map(|(_, _, seconds)| seconds))
        };
        verdicts.iter().map(describe).collect()
    }

    /// One device of a forecast. `own`: the seconds that are left to a job that runs there, at its own pace.
    fn device_forecast(
        &self,
        verdict: &DeviceVerdict<'_>,
        family: Option<&str>,
        units: f64,
        own: Option<f64>,
    ) -> DeviceForecast {
        let device = &verdict.device.device;
        let is_speed_measured = own.is_some() || self.speeds.is_measured(device, family);
        let label = device_label(verdict.worker, verdict.device);
        let mut forecast = DeviceForecast {
            worker: verdict.worker.id.clone(),
            worker_name: verdict.worker.name.clone(),
            device: device.id,
            device_name: device.name.clone(),
            budget: device.memory_budget,
            fits: false,
            can_start_now: false,
            profile: None,
            memory: None,
            seconds: None,
            is_speed_measured,
            description: String::new(),
        };
        match &verdict.fit {
            Err(fit_error) => forecast.description = format!("{label}: {}", not_this_device(fit_error)),
            Ok(Fit {
                device_fit,
                availability,
            }) => {
                let FittingProfile { profile, bytes } = device_fit.fitting;
                let seconds = own.or(family.map(|_| units * device_fit.seconds_per_pass));
                forecast.description = fit_line(&FitLine {
                    device: &label,
                    profile: profile.name(),
                    bytes,
                    budget: device.memory_budget,
                    seconds,
                    is_speed_measured,
                    availability,
                });
                forecast.fits = true;
                forecast.can_start_now = verdict.is_ready();
                forecast.profile = Some(profile);
                forecast.memory = bytes;
                forecast.seconds = seconds.filter(|seconds| seconds.is_finite());
            }
        }
        forecast
    }
}

/// Why a job waits that is tried again at `time`.
fn wait_for_retry(now: UnixMillis, time: UnixMillis, job: &Job) -> WaitReason<'_> {
    let (seconds, last) = (seconds_until(now, time), job.reason.as_str());
    if (job.network_outage.is_some() || job.storage_failures > 0) && job.failures == 0 {
        return WaitReason::UncountedRetry { seconds, last };
    }
    WaitReason::Retry {
        number: u64::from(job.failures.max(1)) + 1,
        max: u64::from(job.requirements.retries) + 1,
        seconds,
        last,
    }
}

/// Where a job runs, and the seconds that it still takes there, from the steps that it has taken.
fn measured_pace(job: &Job) -> Option<(&WorkerId, DeviceRef, f64)> {
    if !job.reports_work() {
        return None;
    }
    let (attempt, progress) = (job.live_attempt()?, job.progress?);
    #[allow(clippy::cast_precision_loss)]
    let left = progress.total.checked_sub(progress.done)? as f64;
    let seconds = left * progress.seconds_per_step?;
    seconds
        .is_finite()
        .then_some((&attempt.worker, attempt.device, seconds))
}

/// `box cuda:0`; the CPU has no number.
fn device_label(worker: &Worker, slot: &Slot) -> String {
    format!("{} {}", worker.name, device_name(slot.device.id))
}

/// `cuda:0`, `cpu`.
fn device_name(device: DeviceRef) -> String {
    if is_gpu(device.kind) {
        format!("{}:{}", device.kind.name(), device.index)
    } else {
        device.kind.name().to_owned()
    }
}
