//! Arrays as clients see them: each as if it were one job.

use super::model::Job;
use super::state::State;
use super::state::array::Array;
use aitk_common::control::{ArrayCounts, ArrayView, Forecast, JobState, JobView, Progress, UnixMillis};
use aitk_common::id::JobId;

impl State {
    fn of_array<'a>(&'a self, array: &'a Array) -> impl Iterator<Item = &'a Job> {
        array.members.values().filter_map(|id| self.job(id))
    }

    /// What the view of a member says of its array.
    pub(super) fn place_in_array(job: &Job) -> Option<ArrayView> {
        job.array.as_ref().map(|place| ArrayView {
            id: place.id.clone(),
            index: Some(place.index),
            size: place.size,
            at_most: place.at_most,
            split: place.split,
            counts: ArrayCounts::default(),
        })
    }

    /// The array as one job.
    pub(super) fn array_view(&self, now: UnixMillis, id: &JobId) -> Option<JobView> {
        let array = self.arrays.get(id)?;
        let first = self.of_array(array).next()?;
        let counts = self.count(array);
        let state = state_of(counts, self.of_array(array));
        let ended = state.is_ended();
        let waiting: Vec<&Job> = self
            .of_array(array)
            .filter(|job| job.state == JobState::Queued)
            .collect();
        let shown = waiting.first().copied().unwrap_or(first);
        Some(JobView {
            id: id.clone(),
            name: array.name.clone(),
            kind: first.kind.clone(),
            state,
            reason: self.array_reason(now, array, counts),
            owner: first.wants.owner.clone(),
            priority: shown.wants.priority,
            paused: !ended && self.of_array(array).all(|job| job.paused || job.state.is_ended()),
            yields: first.wants.yields,
            local: false,
            created: first.created,
            started: self.of_array(array).filter_map(|job| job.started).min(),
            ended: self.of_array(array).filter_map(|job| job.ended).max().filter(|_| ended),
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
            retries: first.wants.retries,
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

    /// Its name, and how many of its members stand where.
    pub(super) fn array_summary(&self, id: &JobId) -> Option<(&str, String)> {
        let array = self.arrays.get(id)?;
        Some((&array.name, self.count(array).summary()))
    }

    fn count(&self, array: &Array) -> ArrayCounts {
        let mut counts = ArrayCounts::default();
        for job in self.of_array(array) {
            counts.add(job.state, job.paused);
        }
        counts
    }

    /// How many stand where, and what is to be said of the first one that waits or failed.
    fn array_reason(&self, now: UnixMillis, array: &Array, counts: ArrayCounts) -> String {
        let in_state = |state| self.of_array(array).filter(move |job| job.state == state);
        // Who may wait for a device has more to say than who waits for the others.
        let waits = in_state(JobState::Queued).min_by_key(|job| (!array.ready.contains(&job.id), job.queue_key()));
        let told = match (in_state(JobState::Failed).next(), waits) {
            (Some(failed), _) => format!("{} failed: {}", failed.id, failed.reason),
            (None, Some(job)) => self.explain(now, job),
            (None, None) => return counts.summary(),
        };
        format!("{}; {told}", counts.summary())
    }

    /// Why an array is where it is, and every connected device as its first waiting member sees it.
    pub(super) fn explain_array(&self, now: UnixMillis, id: &JobId) -> Option<Forecast> {
        let array = self.arrays.get(id)?;
        let summary = self.array_view(now, id)?.reason;
        let waits = self.of_array(array).find(|job| job.state == JobState::Queued);
        let shown = waits.or_else(|| self.of_array(array).find(|job| !job.state.is_ended()));
        let devices = match shown.or_else(|| self.of_array(array).next()) {
            Some(job) => self.explain_job(now, &job.id)?.devices,
            None => Vec::new(),
        };
        Some(Forecast { summary, devices })
    }
}

/// The state of all of them together.
fn state_of<'a>(counts: ArrayCounts, mut members: impl Iterator<Item = &'a Job>) -> JobState {
    match counts {
        ArrayCounts { running: 1.., .. } => {
            let stops = members.all(|job| job.state != JobState::Running && job.state != JobState::Queued);
            if stops { JobState::Stopping } else { JobState::Running }
        }
        ArrayCounts { waiting: 1.., .. } | ArrayCounts { paused: 1.., .. } => JobState::Queued,
        ArrayCounts { failed: 1.., .. } => JobState::Failed,
        ArrayCounts { stopped: 1.., .. } => JobState::Stopped,
        _ => JobState::Completed,
    }
}
