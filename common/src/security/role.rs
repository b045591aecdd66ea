//! What a token's owner may do.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// What a token's owner may do. Each may do less, not more, than what its line says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Sees all jobs, their logs and files; changes nothing.
    Viewer,
    /// Submits jobs; sees and changes their own, and nobody else's.
    Submitter,
    /// Sees and changes everybody's jobs, and the workers.
    Operator,
    /// Everything, tokens and the audit log included.
    Admin,
    /// A machine: opens a worker's session, and moves the blobs of what it runs. Sees no job list.
    Worker,
}

/// Something that is done with a coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Right {
    /// Ask the coordinator about itself.
    Greet,
    /// Look at a job, its log and its files.
    SeeJobs,
    /// Look at the machines.
    SeeWorkers,
    /// Submit a job.
    Submit,
    /// Stop, resume or otherwise change a job.
    ChangeJobs,
    /// Drain a machine and the like.
    ChangeWorkers,
    /// Open a worker's session.
    Work,
    /// Turn a join token into a certificate. No role has it: the join token does.
    Join,
    /// Put blobs in, and ask which are there.
    Upload,
    /// Fetch a blob; which ones is another question.
    Download,
    /// Tokens, join tokens, the audit log, garbage.
    Administer,
}

impl Role {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Viewer, Self::Submitter, Self::Operator, Self::Admin, Self::Worker];

    /// The name used on screens and in JSON.
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

    /// Whether this role may do that at all. Whose job it may be is another question: [`Self::sees_all`],
    /// [`Self::changes_all`].
    #[must_use]
    pub fn may(self, right: Right) -> bool {
        match right {
            Right::Greet | Right::Download => true,
            Right::SeeJobs | Right::SeeWorkers => self != Self::Worker,
            Right::Submit | Right::ChangeJobs => matches!(self, Self::Submitter | Self::Operator | Self::Admin),
            Right::Upload => self != Self::Viewer,
            Right::ChangeWorkers => matches!(self, Self::Operator | Self::Admin),
            Right::Work => matches!(self, Self::Worker | Self::Admin),
            Right::Administer => self == Self::Admin,
            Right::Join => false,
        }
    }

    /// Whether other people's jobs are seen.
    #[must_use]
    pub fn sees_all(self) -> bool {
        matches!(self, Self::Viewer | Self::Operator | Self::Admin)
    }

    /// Whether other people's jobs may be changed, and jobs be submitted in other people's names.
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

/// Not a role.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no role; expected viewer, submitter, operator, admin or worker")]
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
            Self::Greet => "ask about the coordinator",
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
    fn nobody_may_more_than_the_table_says() {
        let rights = [
            Right::Greet,
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
