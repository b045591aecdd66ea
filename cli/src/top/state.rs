//! What the screen knows. Pure: no terminal, no clock, no connection.

use aitk_common::control::{ArrayCounts, Forecast, JobState, JobView, WorkerView};
use aitk_common::id::JobId;

/// What the user wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    /// Back to the shell.
    Leave,
    /// The job above.
    Up,
    /// The job below.
    Down,
    /// The first job.
    First,
    /// The last job.
    Last,
    /// Only draw again.
    Other,
}

/// One look at the coordinator.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// Jobs, those that have not ended first.
    pub(super) jobs: Vec<JobView>,
    /// Workers.
    pub(super) workers: Vec<WorkerView>,
    /// Why this job waits.
    pub(super) forecast: Option<(JobId, Forecast)>,
}

/// Whether a job is one whose waiting can be explained.
pub(super) fn waits(job: &JobView) -> bool {
    job.state == JobState::Queued
}

/// Everything that is drawn.
#[derive(Debug)]
pub(super) struct State {
    pub(super) server: String,
    pub(super) color: bool,
    pub(super) seen: Seen,
    /// Why the last look failed.
    pub(super) problem: Option<String>,
    /// The choice stays with the job when rows move.
    chosen: Option<JobId>,
}

impl State {
    pub(super) fn new(server: &str, color: bool) -> Self {
        Self {
            server: server.to_owned(),
            color,
            seen: Seen::default(),
            problem: None,
            chosen: None,
        }
    }

    pub(super) fn see(&mut self, seen: Seen) {
        let row = self.row();
        self.seen = seen;
        self.problem = None;
        if self.row().is_none() {
            // The chosen job is gone: the one that moved into its place.
            self.choose(row.unwrap_or(0));
        }
    }

    pub(super) fn lost(&mut self, why: &str) {
        self.problem = Some(why.to_owned());
    }

    pub(super) fn press(&mut self, key: Key) {
        let row = self.row().unwrap_or(0);
        match key {
            Key::Up => self.choose(row.saturating_sub(1)),
            Key::Down => self.choose(row + 1),
            Key::First => self.choose(0),
            Key::Last => self.choose(usize::MAX),
            Key::Leave | Key::Other => {}
        }
    }

    /// The row of the chosen job.
    pub(super) fn row(&self) -> Option<usize> {
        let chosen = self.chosen.as_ref()?;
        self.seen.jobs.iter().position(|job| job.id == *chosen)
    }

    pub(super) fn chosen(&self) -> Option<&JobView> {
        self.seen.jobs.get(self.row()?)
    }

    pub(super) fn chosen_id(&self) -> Option<JobId> {
        self.chosen.clone()
    }

    fn choose(&mut self, row: usize) {
        let last = self.seen.jobs.len().saturating_sub(1);
        self.chosen = self.seen.jobs.get(row.min(last)).map(|job| job.id.clone());
    }

    /// `1 of 2 workers, 3 running, 12 waiting`: jobs, not rows, so each member of an array counts.
    pub(super) fn counts(&self) -> String {
        let mut counts = ArrayCounts::default();
        for job in &self.seen.jobs {
            match job.array.as_ref().filter(|array| array.index.is_none()) {
                Some(array) => counts.merge(array.counts),
                None => counts.add(job.state, job.paused),
            }
        }
        let connected = self.seen.workers.iter().filter(|worker| worker.connected).count();
        let paused = match counts.paused {
            0 => String::new(),
            paused => format!(", {paused} paused"),
        };
        format!(
            "{connected} of {} workers, {} running, {} waiting{paused}",
            self.seen.workers.len(),
            counts.running,
            counts.waiting,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::tests::job;
    use aitk_common::control::ArrayView;

    #[test]
    fn members_of_an_array_are_counted_one_by_one() {
        let mut array = job("a", "a", JobState::Running, 0);
        array.array = Some(ArrayView {
            id: JobId::new("a"),
            index: None,
            size: 9,
            at_most: None,
            split: false,
            counts: ArrayCounts {
                running: 2,
                waiting: 3,
                paused: 1,
                completed: 3,
                ..ArrayCounts::default()
            },
        });
        let mut paused = job("p", "p", JobState::Queued, 0);
        paused.paused = true;
        let mut state = State::new("s", false);
        state.see(Seen {
            jobs: vec![array, job("b", "b", JobState::Queued, 0), paused],
            ..Seen::default()
        });
        assert_eq!(state.counts(), "0 of 0 workers, 2 running, 4 waiting, 2 paused");
    }
}
