//! What the screen knows. Pure: no terminal, no clock, no connection.

use aitk_common::control::{ArrayCounts, Forecast, JobState, JobView, WorkerView};
use aitk_common::id::JobId;

/// What the user wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    /// Back to the shell.
    Quit,
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
pub(super) struct Snapshot {
    /// Jobs, those that have not ended first.
    pub(super) jobs: Vec<JobView>,
    /// Workers.
    pub(super) workers: Vec<WorkerView>,
    /// Why this job waits.
    pub(super) forecast: Option<(JobId, Forecast)>,
}

/// Whether a job is one whose waiting can be explained.
pub(super) fn is_waiting(job: &JobView) -> bool {
    job.state == JobState::Queued
}

/// Everything that is drawn.
#[derive(Debug)]
pub(super) struct State {
    pub(super) server: String,
    pub(super) color: bool,
    pub(super) snapshot: Snapshot,
    /// Why the last look failed.
    pub(super) problem: Option<String>,
    /// The choice stays with the job when rows move.
    selected: Option<JobId>,
}

impl State {
    pub(super) fn new(server: &str, color: bool) -> Self {
        Self {
            server: server.to_owned(),
            color,
            snapshot: Snapshot::default(),
            problem: None,
            selected: None,
        }
    }

    pub(super) fn update(&mut self, snapshot: Snapshot) {
        let row = self.row();
        self.snapshot = snapshot;
        self.problem = None;
        if self.row().is_none() {
            // The chosen job is gone: the one that moved into its place.
            self.select(row.unwrap_or(0));
        }
    }

    pub(super) fn set_problem(&mut self, why: &str) {
        self.problem = Some(why.to_owned());
    }

    pub(super) fn press(&mut self, key: Key) {
        let row = self.row().unwrap_or(0);
        match key {
            Key::Up => self.select(row.saturating_sub(1)),
            Key::Down => self.select(row + 1),
            Key::First => self.select(0),
            Key::Last => self.select(usize::MAX),
            Key::Quit | Key::Other => {}
        }
    }

    /// The row of the chosen job.
    pub(super) fn row(&self) -> Option<usize> {
        let selected = self.selected.as_ref()?;
        self.snapshot.jobs.iter().position(|job| job.id == *selected)
    }

    pub(super) fn selected(&self) -> Option<&JobView> {
        self.snapshot.jobs.get(self.row()?)
    }

    pub(super) fn selected_id(&self) -> Option<JobId> {
        self.selected.clone()
    }

    fn select(&mut self, row: usize) {
        let last = self.snapshot.jobs.len().saturating_sub(1);
        self.selected = self.snapshot.jobs.get(row.min(last)).map(|job| job.id.clone());
    }

    /// `1 of 2 workers, 3 running, 12 waiting`: jobs, not rows, so each member of an array counts.
    pub(super) fn counts(&self) -> String {
        let mut counts = ArrayCounts::default();
        for job in &self.snapshot.jobs {
            match job.array.as_ref().filter(|array| array.index.is_none()) {
                Some(array) => counts.merge(array.counts),
                None => counts.add(job.state, job.paused),
            }
        }
        let connected = self.snapshot.workers.iter().filter(|worker| worker.connected).count();
        let paused = match counts.paused {
            0 => String::new(),
            paused => format!(", {paused} paused"),
        };
        format!(
            "{connected} of {} workers, {} running, {} waiting{paused}",
            self.snapshot.workers.len(),
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
        state.update(Snapshot {
            jobs: vec![array, job("b", "b", JobState::Queued, 0), paused],
            ..Snapshot::default()
        });
        assert_eq!(state.counts(), "0 of 0 workers, 2 running, 4 waiting, 2 paused");
    }
}
