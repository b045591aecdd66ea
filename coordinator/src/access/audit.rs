//! Lines of the audit log on their way into the store.

use crate::error_chain::error_chain;
use crate::store::{AuditLine, Store, StoreError};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// A store that fails is tried again for this long.
const STORE_PATIENCE: Duration = Duration::from_secs(30);
/// Name of the file with lines that no store took, in the data folder, and its largest size.
pub(super) const UNWRITTEN: &str = "audit-unwritten.jsonl";
const UNWRITTEN_MOST: u64 = 16 << 20;
/// How long refusals are counted.
const MINUTE: Duration = Duration::from_secs(60);
/// Lines about refusals that one token may cause in that time.
const REFUSALS: u32 = 60;
/// The same for all who showed no good token.
const MAX_UNAUTHENTICATED: u32 = 600;

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
        let most = if by.is_empty() { MAX_UNAUTHENTICATED } else { REFUSALS };
        let used = self.used.entry(by.to_owned()).or_default();
        *used = used.saturating_add(1);
        *used <= most
    }
}

/// Writes lines that nobody waits for. What the store does not take, because another coordinator leads or the database is
/// away, is kept in a file until this one leads again.
pub(super) async fn write(store: &dyn Store, lines: &[AuditLine], unwritten: &Path) {
    let deadline = Instant::now() + STORE_PATIENCE;
    let mut wait = Duration::from_millis(100);
    while let Err(error) = store.administer(&[], lines).await {
        if !error.is_transient() || Instant::now() + wait > deadline {
            match keep(unwritten, lines) {
                Ok(()) => tracing::warn!(
                    error = %error_chain(&error),
                    lines = lines.len(),
                    file = %unwritten.display(),
                    "lines of the audit log are kept in a file until this coordinator leads again"
                ),
                Err(lost) => {
                    tracing::error!(error = %error_chain(&error), %lost, lines = lines.len(), "lines of the audit log were lost")
                }
            }
            return;
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(Duration::from_secs(5));
    }
}

/// Adds lines to the file of those that no store took.
fn keep(path: &Path, lines: &[AuditLine]) -> io::Result<()> {
    let mut text = String::new();
    for line in lines {
        text.push_str(&serde_json::to_string(line)?);
        text.push('\n');
    }
    let mut file = File::options().create(true).append(true).mode(0o600).open(path)?;
    if file.metadata()?.len() + text.len() as u64 > UNWRITTEN_MOST {
        return Err(io::Error::other(format!("{} is full", path.display())));
    }
    file.write_all(text.as_bytes())?;
    file.sync_data()
}

/// Stores what an earlier run, or an earlier turn of leading, could not. A line that is stored already is there once.
pub(super) async fn write_kept(store: &dyn Store, path: &Path) -> Result<(), StoreError> {
    let Ok(text) = std::fs::read_to_string(path) else {
        return Ok(());
    };
    // A line that was cut by a crash is none.
    let lines: Vec<AuditLine> = text
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
    use aitk_common::control::UnixMillis;

    #[test]
    fn a_flood_of_refusals_is_cut_for_the_one_who_makes_it() {
        let (mut budget, now) = (Budget::default(), Instant::now());
        for _ in 0..REFUSALS {
            assert!(budget.spend(now, "t1"));
        }
        assert!(!budget.spend(now, "t1") && budget.spend(now, "t2") && budget.spend(now, ""));
        assert!(budget.spend(now + MINUTE, "t1"));
    }

    #[tokio::test]
    async fn lines_that_no_store_takes_are_there_when_one_does() {
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
        keep(&path, &[line("a")]).unwrap();
        keep(&path, &[line("b")]).unwrap();
        // A crash in the middle of a line.
        let mut file = File::options().append(true).open(&path).unwrap();
        file.write_all(b"{\"id\":\"c").unwrap();
        write_kept(&store, &path).await.unwrap();
        let ids = |lines: Vec<(u64, AuditLine)>| lines.into_iter().map(|(_, line)| line.id).collect::<Vec<_>>();
        assert_eq!(ids(store.audit(0, 10).await.unwrap()), ["a", "b"]);
        assert!(!path.exists());
        // And refusals do not stay for ever, while what was done does.
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
