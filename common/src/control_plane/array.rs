//! Job arrays: jobs that are submitted together and shown as one.

use super::state::JobState;
use crate::id::JobId;
use serde::{Deserialize, Serialize};

/// The most members of an array. One transaction stores all of them.
pub const MAX_ARRAY_MEMBERS: usize = 1000;

/// The array of a [`super::JobView`], which shows a member or the array itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArrayView {
    /// The array's id.
    pub id: JobId,
    /// The member's index, counted from 0; none: this is the array itself, shown as one job.
    pub index: Option<u32>,
    /// Number of members.
    pub size: u32,
    /// Limit of members that run at the same time; none: no limit.
    pub at_most: Option<u32>,
    /// Whether the members are parts of one job (`cluster.split`).
    pub split: bool,
    /// Number of members in each state; zeros for a member.
    pub counts: ArrayCounts,
}

/// Number of an array's members in each state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArrayCounts {
    /// Waiting and not paused.
    pub waiting: u32,
    /// Paused.
    #[serde(default)]
    pub paused: u32,
    /// Running or stopping.
    pub running: u32,
    /// Completed.
    pub completed: u32,
    /// Failed.
    pub failed: u32,
    /// Stopped.
    pub stopped: u32,
}

impl ArrayCounts {
    /// Counts one member. `paused` says whether the user paused it.
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

    /// Adds the counts of another array.
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

    /// Formats the counts: `12 completed, 2 running, 26 waiting`.
    #[must_use]
    pub fn summary(&self) -> String {
        let parts = [
            (self.completed, "completed"),
            (self.running, "running"),
            (self.waiting, "waiting"),
            (self.paused, "paused"),
            (self.failed, "failed"),
            (self.stopped, "stopped"),
        ];
        let texts: Vec<String> = parts
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        texts.join(", ")
    }
}

/// A member of a submitted array, without what all members share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewMember {
    /// `JobSpec` as JSON.
    pub job_json: String,
    /// Members with the same number get the same seed.
    pub seed_group: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_omits_zeros() {
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
        assert_eq!(counts.summary(), "1 completed, 1 running, 2 waiting, 1 paused");
        assert_eq!(ArrayCounts::default().summary(), "");
    }
}
