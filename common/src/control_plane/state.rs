//! States of jobs and attempts.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The state of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// Waits for a device, or for the time of its next attempt.
    Queued,
    /// Has a live attempt.
    Running,
    /// Was asked to stop; its attempt is saving.
    Stopping,
    /// Stopped on request; can be resumed.
    Stopped,
    /// All work is done.
    Completed,
    /// Failed for good; see the reason. Can be resumed.
    Failed,
}

impl JobState {
    /// The name in tables and in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
            Self::Completed => "completed",
            Self::Failed => "failed",
        }
    }

    /// The display name, which depends on whether the user paused the job: `pausing` while it saves, then `paused` until it is
    /// resumed.
    #[must_use]
    pub fn status(self, paused: bool) -> &'static str {
        match self {
            Self::Queued if paused => "paused",
            Self::Running if paused => "pausing",
            state => state.name(),
        }
    }

    /// Whether the state is final unless a user resumes the job.
    #[must_use]
    pub fn is_ended(self) -> bool {
        matches!(self, Self::Stopped | Self::Completed | Self::Failed)
    }
}

impl fmt::Display for JobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The state of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttemptState {
    /// Sent to a worker that has not confirmed it yet.
    Assigned,
    /// The worker runs it.
    Running,
    /// Did all the work.
    Completed,
    /// Stopped on request; its message says what was saved.
    Stopped,
    /// Ended with an error.
    Failed,
    /// Its lease expired, or its worker no longer knows it.
    Lost,
}

impl AttemptState {
    /// The name in tables and in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Assigned => "assigned",
            Self::Running => "running",
            Self::Completed => "completed",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
            Self::Lost => "lost",
        }
    }

    /// Whether it may still send reports.
    #[must_use]
    pub fn is_live(self) -> bool {
        matches!(self, Self::Assigned | Self::Running)
    }
}
