//! Writes lines of the audit log to the store in the background.

use crate::store::{AuditLine, Store, StoreError};
use aitk_common::backoff::Backoff;
use aitk_common::error_chain::error_chain;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a failing store is retried.
const STORE_RETRY_TIME: Duration = Duration::from_secs(30);
/// File in the data folder for lines that could not be stored, and its maximum size in bytes.
pub(super) const UNWRITTEN: &str = "audit-unwritten.jsonl";
const UNWRITTEN_MAX_BYTES: u64 = 16 << 20;
/// Interval in which refusals are counted.
const REFUSAL_WINDOW: Duration = Duration::from_secs(60);
/// Maximum number of refusal lines per token in that interval.
const MAX_REFUSALS: u32 = 60;
/// The same for all unauthenticated callers together.
const MAX_UNAUTHENTICATED: u32 = 600;

/// Limits how many refusals are logged, so that a client that retries in a loop does not fill the disk.
#[derive(Debug, Default)]
pub(super) struct RefusalBudget {
    since: Option<Instant>,
    /// By token id; bounded by the number of tokens.
    used: HashMap<String, u32>,
}

impl RefusalBudget {
    /// Counts a refusal of this token. Returns whether it may be logged.
    pub(super) fn try_spend(&mut self, now: Instant, by: &str) -> bool {
        if self
            .since
            .is_none_or(|since| now.duration_since(since) >= REFUSAL_WINDOW)
        {
            self.since = Some(now);
            self.used.clear();
        }
        let max = if by.is_empty() {
            MAX_UNAUTHENTICATED
        } else {
            MAX_REFUSALS
        };
        let used = self.used.entry(by.to_owned()).or_default();
        *used = used.saturating_add(1);
        *used <= max
    }
}

/// Writes lines to the store. Lines that cannot be stored, because another coordinator leads or the database is
/// unreachable, go to a file until this coordinator leads again.
pub(super) async fn write(store: &dyn Store, lines: &[AuditLine], unwritten: &Path) {
    let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5), STORE_RETRY_TIME);
    while let Err(error) = store.administer(&[], lines).await {
        let Some(delay) = backoff.next_delay().filter(|_| error.is_transient()) else {
            match append_unwritten(unwritten, lines) {
                Ok(()) => tracing::warn!(
                    error = %error_chain(&error),
                    lines = lines.len(),
                    file = %unwritten.display(),
                    "lines of the audit log are kept in a file until it leads again"
                ),
                Err(lost) => {
                    tracing::error!(error = %error_chain(&error), %lost, lines = lines.len(), "lines of the audit log were lost")
                }
            }
            return;
        };
        tokio::time::sleep(delay).await;
    }
}

/// Appends lines to the file of unwritten lines.
fn append_unwritten(path: &Path, lines: &[AuditLine]) -> io::Result<()> {
    let mut text = String::new();
    for line in lines {
        text.push_str(&serde_json::to_string(line)?);
        text.push('\n');
    }
    let mut file = File::options().create(true).append(true).mode(0o600).open(path)?;
    if file.metadata()?.len() + text.len() as u64 > UNWRITTEN_MAX_BYTES {
        return Err(io::Error::other(format!("{} is full", path.display())));
    }
    file.write_all(text.as_bytes())?;
    file.sync_data()
}

/// Stores the lines that an earlier run, or an earlier term as leader, could not store. A line that is already stored
/// is not duplicated.
pub(super) async fn store_unwritten(store: &dyn Store, path: &Path) -> Result<(), StoreError> {
    let Ok(bytes) = std::fs::read(path) else {
        return Ok(());
    };
    // An incomplete line, left by a crash, is skipped. It may end in the middle of a character.
    let lines: Vec<AuditLine> = String::from_utf8_lossy(&bytes)
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect();
    for some in lines.chunks(256) {
        store.administer(&[], some).await?;
    }
    if let Err(error) = std::fs::remove_file(path) {
        tracing::warn!(%error, file = %path.display(), "lines of the audit log that are stored could not be removed from their file");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use aitk_common::control_plane::UnixMillis;

    #[test]
    fn refusal_lines_are_limited_per_token() {
        let (mut budget, now) = (RefusalBudget::default(), Instant::now());
        for _ in 0..MAX_REFUSALS {
            assert!(budget.try_spend(now, "t1"));
        }
        assert!(!budget.try_spend(now, "t1") && budget.try_spend(now, "t2") && budget.try_spend(now, ""));
        assert!(budget.try_spend(now + REFUSAL_WINDOW, "t1"));
    }

    #[tokio::test]
    async fn lines_that_could_not_be_stored_are_stored_later() {
        let folder = tempfile::tempdir().unwrap();
        let store = crate::store::SqlStore::sqlite(&folder.path().join("db")).await.unwrap();
        let path = folder.path().join(UNWRITTEN);
        let line = |id: &str| AuditLine {
            id: id.to_owned(),
            time: UnixMillis(1000),
            who: String::new(),
            by: String::new(),
            from: "10.0.0.9".to_owned(),
            action: "login".to_owned(),
            object: String::new(),
            done: false,
            detail: String::new(),
        };
        append_unwritten(&path, &[line("a")]).unwrap();
        append_unwritten(&path, &[line("b")]).unwrap();
        // A crash in the middle of a line, and of a character.
        let mut file = File::options().append(true).open(&path).unwrap();
        file.write_all(b"{\"id\":\"c\xc3").unwrap();
        store_unwritten(&store, &path).await.unwrap();
        let ids = |lines: Vec<(u64, AuditLine)>| lines.into_iter().map(|(_, line)| line.id).collect::<Vec<_>>();
        assert_eq!(ids(store.audit(0, 10).await.unwrap()), ["a", "b"]);
        assert!(!path.exists());
        // Old refusals are removed; lines about completed actions stay.
        let mut done = line("d");
        done.done = true;
        store.administer(&[], &[done]).await.unwrap();
        let forgotten = store.forget_refusals(0, UnixMillis(1000)).await.unwrap();
        assert_eq!((forgotten.lines, forgotten.after), (0, 0));
        let forgotten = store.forget_refusals(0, UnixMillis(1001)).await.unwrap();
        assert_eq!((forgotten.lines, forgotten.more), (2, false));
        assert_eq!(ids(store.audit(0, 10).await.unwrap()), ["d"]);
        assert_eq!(
            store
                .forget_refusals(forgotten.after, UnixMillis(2000))
                .await
                .unwrap()
                .lines,
            0
        );
    }
}
