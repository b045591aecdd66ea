//! A line of the audit log.

use aitk_common::control::UnixMillis;
use serde::{Deserialize, Serialize};

/// Who did what to which thing, from where, and whether it was allowed. Never holds a secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditLine {
    /// Its own: a line that is stored twice is there once.
    pub id: String,
    /// When.
    pub time: UnixMillis,
    /// Name of whoever it was; empty when that is not known.
    pub who: String,
    /// Id of the token or certificate that was shown.
    pub by: String,
    /// Address it came from.
    pub from: String,
    /// What: `job.submit`, `token.create`, `login`, ….
    pub action: String,
    /// On what: an id.
    pub object: String,
    /// Whether it was done.
    pub done: bool,
    /// What else there is to say: a reason, a role.
    pub detail: String,
}

impl AuditLine {
    /// A fresh id.
    pub(crate) fn fresh_id() -> String {
        uuid::Uuid::new_v4().simple().to_string()
    }

    /// Longest text that a stranger may put into a line.
    const MOST: usize = 200;

    /// A text from outside, safe to show: bounded, without control characters.
    pub(crate) fn quote(text: &str) -> String {
        let safe = text.chars().map(|c| if c.is_control() { '\u{FFFD}' } else { c });
        safe.take(Self::MOST).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_stranger_says_is_bounded_and_shows_as_one_line() {
        let quoted = AuditLine::quote(&format!("a\nb\u{1b}[31m{}", "x".repeat(1000)));
        assert!(
            quoted.chars().count() == AuditLine::MOST && !quoted.contains(char::is_control),
            "{quoted:?}"
        );
    }
}
