//! The state of the screen, without terminal, clock and connection.

use aitk_common::control_plane::{ArrayCounts, Forecast, JobState, JobView, WorkerView};
use aitk_common::id::JobId;

/// A command from the keyboard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    /// Quit.
    Quit,
    /// Select the job above.
    Up,
    /// Select the job below.
    Down,
    /// Select the first job.
    First,
    /// Select the last job.
    Last,
    /// Only render again.
    Other,
}

/// The data of one poll of the coordinator.
#[derive(Clone, Debug, Default)]
pub(super) struct Snapshot {
    /// Jobs; those that have not ended come first.
    pub(super) jobs: Vec<JobView>,
    /// Workers.
    pub(super) workers: Vec<WorkerView>,
    /// Why the selected job waits, with its id.
    pub(super) forecast: Option<(JobId, Forecast)>,
}

/// Whether a job is queued, so that the coordinator can explain why it waits.
pub(super) fn is_waiting(job: &JobView) -> bool {
    job.state == JobState::Queued
}

/// Everything that is rendered.
#[derive(Debug)]
pub(super) struct State {
    pub(super) server: String,
    pub(super) color: bool,
    pub(super) snapshot: Snapshot,
    /// Why the last poll failed.
    pub(super) problem: Option<String>,
    /// The id of the selected job, because its row may change.
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
            // The selected job was removed: select the one in its row.
            self.select(row.unwrap_or(0));
        }
    }

    pub(super) fn set_problem(&mut self, why: &str) {
        self.problem = Some(why.to_owned());
    }

    pub(super) fn handle_key(&mut self, key: Key) {
        let row = self.row().unwrap_or(0);
        match key {
            Key::Up => self.select(row.saturating_sub(1)),
            Key::Down => self.select(row + 1),
            Key::First => self.select(0),
            Key::Last => self.select(usize::MAX),
            Key::Quit | Key::Other => {}
        }
    }

    /// Returns the row of the selected job.
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

    /// Returns `1 of 2 workers, 3 running, 12 waiting`. Each member of an array counts as a job.
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
    use aitk_common::control_plane::ArrayView;

    #[test]
    fn each_member_of_an_array_counts_as_a_job() {
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
