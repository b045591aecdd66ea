//! A line of the audit log.

use aitk_common::control_plane::UnixMillis;
use serde::{Deserialize, Serialize};

/// Who did what to which object, from where, and whether it was allowed. Never contains a secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditLine {
    /// Unique id: a line that is written twice is stored once.
    pub id: String,
    /// Time of the action.
    pub time: UnixMillis,
    /// Name of the caller; empty if unknown.
    pub who: String,
    /// Id of the token or enrolment that authenticated the caller.
    pub by: String,
    /// IP address of the caller.
    pub from: String,
    /// The action: `job.submit`, `token.create`, `login`, ….
    pub action: String,
    /// Id of the object of the action.
    pub object: String,
    /// Whether the action was allowed and done.
    pub done: bool,
    /// Further detail: a reason, a role.
    pub detail: String,
}

impl AuditLine {
    /// Returns a new id.
    pub(crate) fn new_id() -> String {
        uuid::Uuid::new_v4().simple().to_string()
    }

    /// Maximum characters of a quoted text.
    const MAX_CHARS: usize = 200;

    /// Makes a text from a client safe to show: bounded, without control characters.
    pub(crate) fn quote(text: &str) -> String {
        let safe = text.chars().map(|c| if c.is_control() { '\u{FFFD}' } else { c });
        safe.take(Self::MAX_CHARS).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quoted_text_is_bounded_and_has_no_control_characters() {
        let quoted = AuditLine::quote(&format!("a\nb\u{1b}[31m{}", "x".repeat(1000)));
        assert!(
            quoted.chars().count() == AuditLine::MAX_CHARS && !quoted.contains(char::is_control),
            "{quoted:?}"
        );
    }
}
