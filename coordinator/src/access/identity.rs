//! The identity of a caller.

use crate::store::AuditLine;
use aitk_common::control_plane::UnixMillis;
use aitk_common::id::UserName;
use aitk_common::security::role::Role;
use std::net::SocketAddr;

/// Stands for the token id of the token in the data folder.
pub(super) const DATA_FOLDER_TOKEN_ID: &str = "file";

/// An authenticated caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) name: UserName,
    pub(crate) role: Role,
    /// Id of the token, or of the enrolment of the certificate, that authenticated the call.
    pub(crate) by: String,
    /// Address of the client.
    pub(crate) from: Option<SocketAddr>,
    /// When the client certificate expires; `None` when the caller used a token.
    pub(crate) certificate: Option<UnixMillis>,
}

impl Identity {
    /// Returns the default owner of jobs that this caller submits. Jobs submitted with the token in the data folder
    /// belong to the default user, as when there is no other token.
    pub(crate) fn owner(&self) -> UserName {
        if self.by == DATA_FOLDER_TOKEN_ID {
            UserName::default()
        } else {
            self.name.clone()
        }
    }

    /// Returns the stored form of an idempotency key. It includes the user, so that another user with the same key
    /// does not get this user's job.
    pub(crate) fn idempotency_key(&self, key: &str) -> String {
        if self.by == DATA_FOLDER_TOKEN_ID {
            key.to_owned()
        } else {
            format!("{}/{key}", self.name)
        }
    }

    /// Whether the caller may see jobs of this owner.
    pub(crate) fn can_see(&self, owner: &UserName) -> bool {
        self.role.sees_all() || self.name == *owner
    }

    /// Whether the caller may change jobs of this owner, given the right to change jobs at all.
    pub(crate) fn can_change(&self, owner: &UserName) -> bool {
        self.role.changes_all() || self.name == *owner
    }

    /// Creates an audit line about an action of this caller, marked as done.
    pub(crate) fn audit_line(&self, now: UnixMillis, action: &str, object: &str) -> AuditLine {
        AuditLine {
            id: AuditLine::new_id(),
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
