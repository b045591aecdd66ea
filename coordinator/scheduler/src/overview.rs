//! Views of arrays for clients: each array as one job.

use super::model::Job;
use super::state::State;
use super::state::array::Array;
use aitk_common::control_plane::{ArrayCounts, ArrayView, Forecast, JobState, JobView, Progress, UnixMillis};
use aitk_common::id::JobId;

impl State {
    /// The jobs of an array that still exist.
    fn array_jobs<'a>(&'a self, array: &'a Array) -> impl Iterator<Item = &'a Job> {
        array.members.values().filter_map(|id| self.job(id))
    }

    /// The array of a member, for the member's view.
    pub(super) fn array_membership(job: &Job) -> Option<ArrayView> {
        job.array.as_ref().map(|membership| ArrayView {
            id: membership.id.clone(),
            index: Some(membership.index),
            size: membership.size,
            at_most: membership.at_most,
            split: membership.split,
            counts: ArrayCounts::default(),
        })
    }

    /// The view of an array as one job.
    pub(super) fn array_view(&self, now: UnixMillis, id: &JobId) -> Option<JobView> {
        let array = self.arrays.get(id)?;
        let first = self.array_jobs(array).next()?;
        let counts = self.count(array);
        let state = state_of(counts, self.array_jobs(array));
        let ended = state.is_ended();
        let waiting: Vec<&Job> = self
            .array_jobs(array)
            .filter(|job| job.state == JobState::Queued)
            .collect();
        let shown = waiting.first().copied().unwrap_or(first);
        Some(JobView {
            id: id.clone(),
            name: array.name.clone(),
            kind: first.kind.clone(),
            state,
            reason: self.array_reason(now, array, counts),
            owner: first.requirements.owner.clone(),
            priority: shown.requirements.priority,
            paused: !ended && self.array_jobs(array).all(|job| job.paused || job.state.is_ended()),
            yields: first.requirements.yields,
            local: false,
            created: first.created,
            started: self.array_jobs(array).filter_map(|job| job.started).min(),
            ended: self
                .array_jobs(array)
                .filter_map(|job| job.ended)
                .max()
                .filter(|_| ended),
            progress: Some(Progress {
                done: u64::from(counts.completed),
                total: array.members.len() as u64,
                seconds_per_step: None,
            }),
            phase: None,
            loss: None,
            checkpoint_step: None,
            attempts: Vec::new(),
            failures: 0,
            retries: first.requirements.retries,
            array: Some(ArrayView {
                id: id.clone(),
                index: None,
                size: array.size,
                at_most: array.at_most,
                split: array.split,
                counts,
            }),
            config_text: None,
            config_format: None,
        })
    }

    /// The name of an array, and how many of its members are in which state.
    pub(super) fn array_summary(&self, id: &JobId) -> Option<(&str, String)> {
        let array = self.arrays.get(id)?;
        Some((&array.name, self.count(array).summary()))
    }

    fn count(&self, array: &Array) -> ArrayCounts {
        let mut counts = ArrayCounts::default();
        for job in self.array_jobs(array) {
            counts.add(job.state, job.paused);
        }
        counts
    }

    /// How many members are in which state, and why the first failed one failed or the first waiting one waits.
    fn array_reason(&self, now: UnixMillis, array: &Array, counts: ArrayCounts) -> String {
        let failed = self.array_jobs(array).find(|job| job.state == JobState::Failed);
        let detail = match (failed, self.first_waiting(array)) {
            (Some(failed), _) => format!("{} failed: {}", failed.id, failed.reason),
            (None, Some(job)) => self.explain(now, job),
            (None, None) => return counts.summary(),
        };
        format!("{}; {detail}", counts.summary())
    }

    /// The member that says why the array waits: one that waits for a device has a more useful reason than one that waits for the
    /// array's limit.
    fn first_waiting<'a>(&'a self, array: &'a Array) -> Option<&'a Job> {
        let waiting = self.array_jobs(array).filter(|job| job.state == JobState::Queued);
        waiting.min_by_key(|job| (!array.ready.contains(&job.id), job.queue_key()))
    }

    /// Why an array is in its state, and every connected device as its first waiting member sees it.
    pub(super) fn explain_array(&self, now: UnixMillis, id: &JobId) -> Option<Forecast> {
        let array = self.arrays.get(id)?;
        let summary = self.array_view(now, id)?.reason;
        let shown = self.first_waiting(array);
        let shown = shown.or_else(|| self.array_jobs(array).find(|job| !job.state.is_ended()));
        let devices = match shown.or_else(|| self.array_jobs(array).next()) {
            Some(job) => self.explain_job(now, &job.id)?.devices,
            None => Vec::new(),
        };
        Some(Forecast { summary, devices })
    }
}

/// The state of an array as one job.
fn state_of<'a>(counts: ArrayCounts, mut members: impl Iterator<Item = &'a Job>) -> JobState {
    match counts {
        ArrayCounts { running: 1.., .. } => {
            let is_stopping = members.all(|job| job.state != JobState::Running && job.state != JobState::Queued);
            if is_stopping {
                JobState::Stopping
            } else {
                JobState::Running
            }
        }
        ArrayCounts { waiting: 1.., .. } | ArrayCounts { paused: 1.., .. } => JobState::Queued,
        ArrayCounts { failed: 1.., .. } => JobState::Failed,
        ArrayCounts { stopped: 1.., .. } => JobState::Stopped,
        _ => JobState::Completed,
    }
}
