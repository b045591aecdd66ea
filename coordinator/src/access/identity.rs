//! Who calls.

use crate::store::AuditLine;
use aitk_common::control::UnixMillis;
use aitk_common::id::UserName;
use aitk_common::security::role::Role;
use std::net::SocketAddr;

/// What stands for the id of the token in the data folder.
pub(super) const FILE: &str = "file";

/// Whoever calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) name: UserName,
    pub(crate) role: Role,
    /// Id of the token that was shown, or of the enrolment whose certificate was.
    pub(crate) by: String,
    /// Where from.
    pub(crate) from: Option<SocketAddr>,
    /// When the certificate ends that was shown; none: a token was.
    pub(crate) certificate: Option<UnixMillis>,
}

impl Identity {
    /// Whose a job is that this caller submits and says no more of. With the token in the data folder nobody needs a name:
    /// such jobs belong to the default user, as they do where there is no other token.
    pub(crate) fn owner(&self) -> UserName {
        if self.by == FILE {
            UserName::default()
        } else {
            self.name.clone()
        }
    }

    /// The key of a submission. It is its user's: another one who uses the same text is not told of this job.
    pub(crate) fn key(&self, key: &str) -> String {
        if self.by == FILE {
            key.to_owned()
        } else {
            format!("{}/{key}", self.name)
        }
    }

    /// Whether a job of this owner may be looked at.
    pub(crate) fn sees(&self, owner: &UserName) -> bool {
        self.role.sees_all() || self.name == *owner
    }

    /// Whether a job of this owner may be changed, given the right to change jobs at all.
    pub(crate) fn changes(&self, owner: &UserName) -> bool {
        self.role.changes_all() || self.name == *owner
    }

    /// A line about something that this caller wants done.
    pub(crate) fn line(&self, now: UnixMillis, action: &str, object: &str) -> AuditLine {
        AuditLine {
            id: AuditLine::fresh_id(),
            time: now,
            who: self.name.to_string(),
            by: self.by.clone(),
            from: address(self.from),
            action: action.to_owned(),
            object: AuditLine::quote(object),
            done: true,
            detail: String::new(),
        }
    }
}

pub(super) fn address(from: Option<SocketAddr>) -> String {
    from.map(|from| from.ip().to_canonical().to_string())
        .unwrap_or_default()
}
