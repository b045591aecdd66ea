//! Views of jobs and workers for clients.

use super::model::{Job, SessionId, Worker};
use super::state::State;
use aitk_common::control_plane::{AttemptRef, JobState, JobView, UnixMillis, WorkerDeviceView, WorkerView};
use aitk_common::hash::ContentHash;
use aitk_common::id::{AttemptId, JobId, WorkerId};

/// How many ended jobs a list shows by default.
pub(super) const ENDED_SHOWN: usize = 10;

/// The most attempts of a job that are shown; the newest count.
const MAX_ATTEMPTS_SHOWN: usize = 50;

/// The most ended jobs that a list shows.
pub(super) fn max_ended_shown(all: bool, limit: usize, usual: usize) -> usize {
    match (limit, all) {
        (0, true) => usize::MAX,
        (0, false) => usual,
        (limit, _) => limit,
    }
}

/// A live attempt, for access control of the storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningAttempt {
    /// The attempt.
    pub attempt: AttemptId,
    /// Its job.
    pub job: JobId,
    /// The manifest of the job's last checkpoint.
    pub checkpoint: Option<ContentHash>,
}

impl State {
    /// The view of a job, or of an array as one job.
    #[must_use]
    pub fn job_view(&self, now: UnixMillis, id: &JobId) -> Option<JobView> {
        match self.jobs.get(id) {
            Some(job) => Some(self.view(now, job)),
            None => self.array_view(now, id),
        }
    }

    /// All workers that ever registered: connected ones first, then by name. Of their jobs, those for which `is_visible` is true.
    #[must_use]
    pub fn worker_views(&self, is_visible: impl Fn(&Job) -> bool) -> Vec<WorkerView> {
        let mut workers: Vec<&Worker> = self.workers.values().collect();
        workers.sort_by_key(|worker| (worker.session.is_none(), &worker.name, &worker.id));
        workers
            .into_iter()
            .map(|worker| self.view_of_worker(worker, &is_visible))
            .collect()
    }

    /// The view of one worker.
    pub(super) fn worker_view(&self, id: &WorkerId) -> Option<WorkerView> {
        self.workers
            .get(id)
            .map(|worker| self.view_of_worker(worker, &|_| true))
    }

    fn view_of_worker(&self, worker: &Worker, is_visible: &dyn Fn(&Job) -> bool) -> WorkerView {
        let devices = worker.devices.iter().map(|device| {
            let slot = self
                .slots
                .find(&worker.id, device.id)
                .and_then(|slot| self.slots.get(slot));
            let health = worker.health.iter().find(|one| one.device == device.id);
            WorkerDeviceView {
                device: device.clone(),
                jobs: slot
                    .map(|slot| {
                        let visible = |id: &&JobId| self.job(id).is_some_and(is_visible);
                        slot.running.keys().filter(visible).cloned().collect()
                    })
                    .unwrap_or_default(),
                reserved: slot.map_or(0, |slot| slot.reserved),
                faults: health.map_or(0, |health| health.faults),
                quarantined: health.is_some_and(|health| health.quarantined_until.is_some()),
                quarantine_reason: health
                    .filter(|health| health.quarantined_until.is_some())
                    .map(|_| Self::quarantine_reason(worker, device.id).to_owned())
                    .unwrap_or_default(),
            }
        });
        WorkerView {
            id: worker.id.clone(),
            name: worker.name.clone(),
            version: worker.version.clone(),
            host: worker.host.clone(),
            connected: worker.session.is_some(),
            leaving: worker.leaving,
            drained: worker.drained,
            last_seen: worker.last_seen,
            devices: devices.collect(),
            labels: worker.labels.clone(),
            confinement: worker.confinement.clone(),
        }
    }

    /// The live attempts on these workers, and attempts whose offered checkpoints the workers still upload.
    #[must_use]
    pub fn running_on(&self, workers: &[WorkerId]) -> Vec<RunningAttempt> {
        let jobs = workers.iter().flat_map(|worker| self.slots.jobs_of(worker));
        let running = jobs.filter_map(|id| {
            let job = self.job(&id)?;
            Some(RunningAttempt {
                attempt: job.live_attempt()?.id.clone(),
                checkpoint: job.checkpoint.as_ref().map(|checkpoint| checkpoint.manifest),
                job: id,
            })
        });
        // An offered checkpoint is uploaded in the name of its attempt.
        let offered = self.offers.iter().filter(|(_, offer)| workers.contains(offer.worker()));
        let offered = offered.map(|(id, offer)| RunningAttempt {
            attempt: offer.attempt().clone(),
            job: id.clone(),
            checkpoint: None,
        });
        running.chain(offered).collect()
    }

    /// Whether this session's worker holds this attempt, and the attempt is the live one of its job or the job waits for its
    /// offered checkpoint.
    #[must_use]
    pub fn is_current(&self, session: SessionId, held: &AttemptRef) -> bool {
        self.current_job(session, held).is_some() || self.is_offered(session, held)
    }

    /// Whether a worker has an open session.
    #[must_use]
    pub fn is_connected(&self, worker: &WorkerId) -> bool {
        self.workers.get(worker).is_some_and(|worker| worker.session.is_some())
    }

    /// Whether a worker has an open session, or was the last worker of a job that has not ended. A worker that registers with
    /// its id could get those jobs.
    #[must_use]
    pub fn is_in_use(&self, worker: &WorkerId) -> bool {
        let was_with = |job: &Job| job.attempts.last().is_some_and(|last| last.worker == *worker);
        let mut unended = self.jobs.values().filter(|job| !job.state.is_ended());
        self.is_connected(worker) || unended.any(was_with)
    }

    /// The number of open sessions, and of jobs that have not ended.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        (self.sessions.len() as u64, (self.queue.len() + self.live.len()) as u64)
    }

    fn view(&self, now: UnixMillis, job: &Job) -> JobView {
        JobView {
            id: job.id.clone(),
            name: job.name.clone(),
            kind: job.kind.clone(),
            state: job.state,
            reason: self.reason(now, job),
            owner: job.requirements.owner.clone(),
            priority: job.requirements.priority,
            paused: job.paused,
            yields: job.requirements.yields,
            local: job.local,
            created: job.created,
            started: job.started,
            ended: job.ended,
            progress: job.progress,
            phase: job.phase.clone(),
            loss: job.loss,
            checkpoint_step: job.checkpoint.as_ref().map(|checkpoint| checkpoint.step),
            attempts: job
                .attempts
                .iter()
                .rev()
                .take(MAX_ATTEMPTS_SHOWN)
                .rev()
                .cloned()
                .collect(),
            failures: job.failures,
            retries: job.requirements.retries,
            array: Self::array_membership(job),
            config_text: None,
            config_format: None,
        }
    }

    /// Why a job is in its state, as text.
    pub(super) fn reason(&self, now: UnixMillis, job: &Job) -> String {
        if job.state == JobState::Queued {
            return self.explain(now, job);
        }
        // Without this, a running job would look undisturbed while its worker is not connected.
        match (self.absent_worker(job), job.live) {
            (Some(worker), Some(live)) => {
                let left = live.lease_until.since(now).as_secs();
                format!("{} is not connected; waiting {left} s more for it", worker.name)
            }
            _ => job.reason.clone(),
        }
    }

    /// The worker of a job's live attempt, if it is not connected.
    pub(super) fn absent_worker(&self, job: &Job) -> Option<&Worker> {
        job.live_attempt()
            .and_then(|attempt| self.workers.get(&attempt.worker))
            .filter(|worker| worker.session.is_none())
    }
}
