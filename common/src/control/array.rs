//! Arrays: jobs that were submitted together and are seen as one.

use super::JobState;
use crate::id::JobId;
use serde::{Deserialize, Serialize};

/// Members of one array at the most: what one submission may hold, and what one transaction stores.
pub const MEMBERS_MOST: usize = 1000;

/// What a view has to do with an array: the view of a member, or of the array itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArrayView {
    /// The array.
    pub id: JobId,
    /// Which of its members this is, counted from 0; none: the array itself, seen as one job.
    pub index: Option<u32>,
    /// Members that it was submitted with.
    pub size: u32,
    /// Members that may run at the same time; none: as many as there is room for.
    pub at_most: Option<u32>,
    /// Its members are parts of one job.
    pub split: bool,
    /// How many members stand where; zeros for a member.
    pub counts: ArrayCounts,
}

/// How many members of an array stand where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArrayCounts {
    /// Wait, and are not paused.
    pub waiting: u32,
    /// Wait until they are resumed.
    #[serde(default)]
    pub paused: u32,
    /// Run, or stop.
    pub running: u32,
    /// All work is done.
    pub completed: u32,
    /// Gave up.
    pub failed: u32,
    /// Were stopped.
    pub stopped: u32,
}

impl ArrayCounts {
    /// Counts one member; `paused`: its user paused it.
    pub fn add(&mut self, state: JobState, paused: bool) {
        let count = match state {
            JobState::Queued if paused => &mut self.paused,
            JobState::Queued => &mut self.waiting,
            JobState::Running | JobState::Stopping => &mut self.running,
            JobState::Completed => &mut self.completed,
            JobState::Failed => &mut self.failed,
            JobState::Stopped => &mut self.stopped,
        };
        *count = count.saturating_add(1);
    }

    /// Counts those of another array as well.
    pub fn merge(&mut self, other: Self) {
        let pairs = [
            (&mut self.waiting, other.waiting),
            (&mut self.paused, other.paused),
            (&mut self.running, other.running),
            (&mut self.completed, other.completed),
            (&mut self.failed, other.failed),
            (&mut self.stopped, other.stopped),
        ];
        for (count, more) in pairs {
            *count = count.saturating_add(more);
        }
    }

    /// In words: `12 completed, 2 running, 26 waiting`.
    #[must_use]
    pub fn words(&self) -> String {
        let parts = [
            (self.completed, "completed"),
            (self.running, "running"),
            (self.waiting, "waiting"),
            (self.paused, "paused"),
            (self.failed, "failed"),
            (self.stopped, "stopped"),
        ];
        let said: Vec<String> = parts
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        said.join(", ")
    }
}

/// What an array is submitted with beside what its members share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewMember {
    /// `JobSpec` as JSON.
    pub job_json: String,
    /// Members with the same number get the same seed.
    pub twin: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_said_without_zeros() {
        let mut counts = ArrayCounts::default();
        for (state, paused) in [
            (JobState::Queued, false),
            (JobState::Queued, true),
            (JobState::Queued, false),
            (JobState::Stopping, false),
            (JobState::Completed, false),
        ] {
            counts.add(state, paused);
        }
        assert_eq!(counts.words(), "1 completed, 1 running, 2 waiting, 1 paused");
        assert_eq!(ArrayCounts::default().words(), "");
    }
}
