//! One line of the audit log.

use crate::runner::full;
use crate::store::Store;
use aitk_common::control::UnixMillis;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// A store that fails is tried again for this long.
const STORE_PATIENCE: Duration = Duration::from_secs(30);
/// How long refusals are counted.
const MINUTE: Duration = Duration::from_secs(60);
/// Lines about refusals that one token may cause in that time.
const REFUSALS: u32 = 60;
/// The same for all who showed no good token.
const STRANGERS: u32 = 600;

/// Bounds how fast the log grows by what is refused: whoever tries the same thing in a loop fills no disk.
#[derive(Debug, Default)]
pub(super) struct Budget {
    since: Option<Instant>,
    /// By the id of the token; as many as there are tokens.
    used: HashMap<String, u32>,
}

impl Budget {
    /// Whether one more line may be written about a refusal of this token.
    pub(super) fn spend(&mut self, now: Instant, by: &str) -> bool {
        if self.since.is_none_or(|since| now.duration_since(since) >= MINUTE) {
            self.since = Some(now);
            self.used.clear();
        }
        let most = if by.is_empty() { STRANGERS } else { REFUSALS };
        let used = self.used.entry(by.to_owned()).or_default();
        *used = used.saturating_add(1);
        *used <= most
    }
}

/// Writes lines that nobody waits for. Lines that no store takes are lost, and the program's own log says so.
pub(super) async fn write(store: &dyn Store, lines: &[AuditLine]) {
    let deadline = Instant::now() + STORE_PATIENCE;
    let mut wait = Duration::from_millis(100);
    while let Err(error) = store.administer(&[], lines).await {
        if !error.is_transient() || Instant::now() + wait > deadline {
            tracing::error!(error = %full(&error), lines = lines.len(), "lines of the audit log were lost");
            return;
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(Duration::from_secs(5));
    }
}

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
    pub(super) fn fresh_id() -> String {
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
    fn a_flood_of_refusals_is_cut_for_the_one_who_makes_it() {
        let (mut budget, now) = (Budget::default(), Instant::now());
        for _ in 0..REFUSALS {
            assert!(budget.spend(now, "t1"));
        }
        assert!(!budget.spend(now, "t1") && budget.spend(now, "t2") && budget.spend(now, ""));
        assert!(budget.spend(now + MINUTE, "t1"));
    }

    #[test]
    fn what_a_stranger_says_is_bounded_and_shows_as_one_line() {
        let quoted = AuditLine::quote(&format!("a\nb\u{1b}[31m{}", "x".repeat(1000)));
        assert!(
            quoted.chars().count() == AuditLine::MOST && !quoted.contains(char::is_control),
            "{quoted:?}"
        );
    }
}
