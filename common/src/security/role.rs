//! Roles of tokens and their rights.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The role of a token, which limits what its owner may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Sees all jobs, their logs and files; changes nothing.
    Viewer,
    /// Submits jobs; sees and changes only their own.
    Submitter,
    /// Sees and changes everybody's jobs, and the workers.
    Operator,
    /// Everything, tokens and the audit log included.
    Admin,
    /// A worker machine: opens a session and transfers the blobs of its jobs. Cannot list jobs.
    Worker,
}

/// The right to do something with a coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Right {
    /// Read information about the coordinator.
    ReadInfo,
    /// See jobs, their logs and files.
    SeeJobs,
    /// See workers.
    SeeWorkers,
    /// Submit jobs.
    Submit,
    /// Stop, resume or otherwise change jobs.
    ChangeJobs,
    /// Drain or otherwise change workers.
    ChangeWorkers,
    /// Open a worker session.
    Work,
    /// Exchange a join token for a certificate. No role has this right; the join token itself grants it.
    Join,
    /// Upload blobs, and check which exist.
    Upload,
    /// Download blobs. Other checks decide which ones.
    Download,
    /// Manage tokens, join tokens, the audit log and garbage collection.
    Administer,
}

impl Role {
    /// All roles.
    pub const ALL: [Self; 5] = [Self::Viewer, Self::Submitter, Self::Operator, Self::Admin, Self::Worker];

    /// The name in tables and in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Submitter => "submitter",
            Self::Operator => "operator",
            Self::Admin => "admin",
            Self::Worker => "worker",
        }
    }

    /// Whether this role has the right at all. [`Self::sees_all`] and [`Self::changes_all`] say for whose jobs.
    #[must_use]
    pub fn may(self, right: Right) -> bool {
        match right {
            Right::ReadInfo | Right::Download => true,
            Right::SeeJobs | Right::SeeWorkers => self != Self::Worker,
            Right::Submit | Right::ChangeJobs => matches!(self, Self::Submitter | Self::Operator | Self::Admin),
            Right::Upload => self != Self::Viewer,
            Right::ChangeWorkers => matches!(self, Self::Operator | Self::Admin),
            Right::Work => matches!(self, Self::Worker | Self::Admin),
            Right::Administer => self == Self::Admin,
            Right::Join => false,
        }
    }

    /// Whether the role may see other users' jobs.
    #[must_use]
    pub fn sees_all(self) -> bool {
        matches!(self, Self::Viewer | Self::Operator | Self::Admin)
    }

    /// Whether the role may change other users' jobs, and submit jobs for other users.
    #[must_use]
    pub fn changes_all(self) -> bool {
        matches!(self, Self::Operator | Self::Admin)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A text that is not a role.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a role; expected viewer, submitter, operator, admin or worker")]
pub struct BadRole {
    text: String,
}

impl FromStr for Role {
    type Err = BadRole;

    fn from_str(text: &str) -> Result<Self, BadRole> {
        let found = Self::ALL.into_iter().find(|role| role.name() == text);
        found.ok_or_else(|| BadRole {
            text: text.chars().take(40).collect(),
        })
    }
}

impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ReadInfo => "read information about the coordinator",
            Self::SeeJobs => "look at jobs",
            Self::SeeWorkers => "look at workers",
            Self::Submit => "submit jobs",
            Self::ChangeJobs => "change jobs",
            Self::ChangeWorkers => "change workers",
            Self::Work => "work",
            Self::Join => "join as a worker (a join token may: `aitk-coordinator worker join-token`)",
            Self::Upload => "upload",
            Self::Download => "download",
            Self::Administer => "administer the coordinator",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_role_has_exactly_the_rights_in_the_table() {
        let rights = [
            Right::ReadInfo,
            Right::SeeJobs,
            Right::SeeWorkers,
            Right::Submit,
            Right::ChangeJobs,
            Right::ChangeWorkers,
            Right::Work,
            Right::Upload,
            Right::Download,
            Right::Administer,
            Right::Join,
        ];
        let table = [
            (Role::Viewer, [1, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0]),
            (Role::Submitter, [1, 1, 1, 1, 1, 0, 0, 1, 1, 0, 0]),
            (Role::Operator, [1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 0]),
            (Role::Admin, [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0]),
            (Role::Worker, [1, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0]),
        ];
        for (role, allowed) in table {
            for (right, allowed) in rights.into_iter().zip(allowed) {
                assert_eq!(role.may(right), allowed == 1, "{role}: {right}");
            }
            assert_eq!(role.name().parse(), Ok(role));
        }
        assert!("Admin".parse::<Role>().is_err() && "".parse::<Role>().is_err());
        assert!(!Role::Submitter.sees_all() && !Role::Viewer.changes_all());
    }
}
