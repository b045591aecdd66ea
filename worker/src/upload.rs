//! Results of an attempt: into object storage, then announced, in the order in which the child made them.
//!
//! Runs beside the child, so that training goes on while storage is slow. What waits is pinned (see [`Pins`]), so
//! that the child's own retention cannot take it away meanwhile.

use crate::context::Context;
use crate::outbox::Request;
use crate::outcome::failure;
use crate::pins::Pins;
use crate::session::{Answer, Reporter};
use crate::trace::AttemptTrace;
use crate::unsent;
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::control::Artifact;
use aitk_common::hash::ContentHash;
use aitk_common::storage::{StorageError, checkpoints};
use std::collections::VecDeque;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Items between the child's events and the work on them; a full queue holds the child back.
pub(crate) const QUEUE: usize = 32;
/// How long storage may be in trouble before the user is told and newer results are looked at.
const TRY: Duration = Duration::from_secs(60);
/// Wait before the first of three more tries of a commit that was refused; doubles.
const COMMIT_AGAIN: Duration = Duration::from_secs(2);
/// Waits between tries of what could not be stored; each is twice the one before.
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// Items taken over to see what later ones make superfluous.
const BACKLOG: usize = 256;

/// Something that the child made.
#[derive(Debug)]
pub(crate) enum Item {
    /// A file. `artifact.local_path` says where the child put it.
    Artifact { artifact: Artifact, pinned: PathBuf },
    /// A file is gone. `pinned` names the note of that.
    Removed { name: String, pinned: PathBuf },
    /// A complete training state.
    Checkpoint { pinned: PathBuf, step: u64 },
}

/// Why something was not stored.
enum Trouble {
    /// Storage has no room or cannot be reached: the job goes on, and what it made is tried again.
    Storage(StorageError),
    /// The attempt ends with this.
    End(Outcome),
}

impl From<Outcome> for Trouble {
    fn from(outcome: Outcome) -> Self {
        Self::End(outcome)
    }
}

/// Works off the queue until it closes. What storage cannot take now is kept and tried again while the job goes on; only the end
/// of the job waits for it.
///
/// # Errors
/// How the attempt ends when something cannot be stored for good.
pub(crate) async fn run(
    context: &Context,
    reporter: &Reporter,
    trace: &AttemptTrace,
    local: bool,
    mut queue: mpsc::Receiver<Item>,
    pins: &Pins,
) -> Result<(), Outcome> {
    let mut backlog = VecDeque::new();
    let mut retries = Retries::default();
    let over = |pinned: &Path| {
        // Where a job runs in place, that is its user's own file.
        if !local {
            unsent::settle(pinned);
        }
        pins.one_settled();
    };
    while let Some(item) = next(&mut queue, &mut backlog, &over).await {
        match handle(context, reporter, trace, local, &item).await {
            Ok(()) => {
                if retries.is_over() {
                    reporter
                        .log("info", "object storage takes results again".to_owned())
                        .await;
                }
                if let Item::Checkpoint { step, .. } = item {
                    context.kept.settled(reporter.attempt(), step);
                }
                over(item.pinned());
            }
            Err(Trouble::End(outcome)) => return Err(outcome),
            Err(Trouble::Storage(error)) => {
                let ended = queue.is_closed() && queue.is_empty();
                let Some(wait) = retries.next(ended, context.end_patience) else {
                    return Err(failure(&format!("could not store {}", item.name()), &error));
                };
                let goes_on = if ended {
                    "the job ends when it is stored"
                } else {
                    "the job goes on"
                };
                let seconds = wait.as_secs().max(1);
                let words = format!(
                    "{} could not be stored: {error}; {goes_on}, next try in {seconds} s",
                    item.name()
                );
                reporter.log("warn", words).await;
                backlog.push_front(item);
                rest(wait, &mut queue, &mut backlog).await;
            }
        }
    }
    Ok(())
}

/// Waits, and takes over what the child makes meanwhile, so that it is not held back.
async fn rest(wait: Duration, queue: &mut mpsc::Receiver<Item>, backlog: &mut VecDeque<Item>) {
    let over = tokio::time::sleep(wait);
    tokio::pin!(over);
    loop {
        tokio::select! {
            () = &mut over => return,
            Some(item) = queue.recv(), if backlog.len() < BACKLOG => backlog.push_back(item),
        }
    }
}

/// Tries in a row that storage could not take.
#[derive(Debug, Default)]
struct Retries {
    wait: Option<Duration>,
    /// The end of the job has waited since.
    since: Option<Instant>,
}

impl Retries {
    /// How long to wait before the next try; none when the end of the job has waited for too long.
    fn next(&mut self, ended: bool, patience: Duration) -> Option<Duration> {
        let since = ended.then(|| *self.since.get_or_insert_with(Instant::now));
        if since.is_some_and(|since| since.elapsed() >= patience) {
            return None;
        }
        let wait = self.wait.unwrap_or(FIRST_WAIT);
        self.wait = Some((wait * 2).min(LONGEST_WAIT));
        Some(wait)
    }

    /// Something was stored. Whether that ends a time of trouble.
    fn is_over(&mut self) -> bool {
        self.since = None;
        self.wait.take().is_some()
    }
}

impl Item {
    fn pinned(&self) -> &Path {
        match self {
            Self::Artifact { pinned, .. } | Self::Removed { pinned, .. } | Self::Checkpoint { pinned, .. } => pinned,
        }
    }

    /// What it is, for messages.
    fn name(&self) -> String {
        match self {
            Self::Artifact { artifact, .. } => format!("the file {}", artifact.name),
            Self::Removed { name, .. } => format!("the removal of {name}"),
            Self::Checkpoint { step, .. } => format!("the checkpoint of step {step}"),
        }
    }
}

/// Deals with one item.
async fn handle(
    context: &Context,
    reporter: &Reporter,
    trace: &AttemptTrace,
    local: bool,
    item: &Item,
) -> Result<(), Trouble> {
    match item {
        Item::Removed { name, .. } => {
            let answer = reporter.request(Request::ArtifactRemoved(name.clone())).await;
            if !answer.accepted {
                reporter
                    .log("warn", format!("a removed file was not noted: {}", answer.message))
                    .await;
            }
            Ok(())
        }
        Item::Artifact { artifact, .. } if local => Ok(announce(reporter, artifact.clone()).await?),
        Item::Checkpoint { .. } if local => Ok(()),
        Item::Artifact { artifact, pinned } => {
            let patience = TRY.min(context.storage_patience);
            let artifact = store(context, artifact.clone(), pinned, patience).await?;
            Ok(announce(reporter, artifact).await?)
        }
        Item::Checkpoint { pinned, step } => commit(context, reporter, trace, pinned, *step).await,
    }
}

/// What an error of storage means for a result.
fn trouble(what: &str, error: StorageError) -> Trouble {
    match error {
        error if error.is_full() || error.is_transient() => Trouble::Storage(error),
        // Something of ours: its next try is another attempt's.
        error => Trouble::End(failure(what, &error)),
    }
}

/// The next item that still matters. `over` is told what was pinned for the others.
async fn next(
    queue: &mut mpsc::Receiver<Item>,
    backlog: &mut VecDeque<Item>,
    over: &(dyn Fn(&Path) + Sync),
) -> Option<Item> {
    loop {
        while backlog.len() < BACKLOG {
            match queue.try_recv() {
                Ok(item) => backlog.push_back(item),
                Err(_) => break,
            }
        }
        let item = match backlog.pop_front() {
            Some(item) => item,
            None => queue.recv().await?,
        };
        match superseded(&item, backlog) {
            Some(pinned) => over(pinned),
            None => return Some(item),
        }
    }
}

/// Whether a later item makes this one pointless: a newer checkpoint, a newer version of the file, or its removal.
/// Returns what was pinned for it.
fn superseded<'a>(item: &'a Item, later: &VecDeque<Item>) -> Option<&'a Path> {
    match item {
        Item::Checkpoint { pinned, .. } => later
            .iter()
            .any(|other| matches!(other, Item::Checkpoint { .. }))
            .then_some(pinned),
        Item::Artifact { artifact, pinned } => later
            .iter()
            .any(|other| match other {
                Item::Artifact { artifact: other, .. } => other.name == artifact.name,
                Item::Removed { name, .. } => *name == artifact.name,
                Item::Checkpoint { .. } => false,
            })
            .then_some(pinned),
        Item::Removed { .. } => None,
    }
}

async fn store(context: &Context, artifact: Artifact, pinned: &Path, patience: Duration) -> Result<Artifact, Trouble> {
    let name = artifact.name.clone();
    let (hash, bytes) = hash_of(pinned).await.map_err(|error| Outcome::Failed {
        cause: FailureCause::Machine,
        message: format!("the file {name} cannot be read back: {error}"),
    })?;
    context
        .storage
        .retry(patience, |store| {
            Box::pin(async move { store.put_file(hash, pinned).await })
        })
        .await
        .map_err(|error| trouble(&format!("could not store the file {name}"), error))?;
    Ok(stored(artifact, hash, bytes))
}

/// Tells the coordinator of a file.
///
/// # Errors
/// When it does not take it, for example because storage does not say whether the bytes are there: a job must not
/// pass for complete without its results. Another try makes them again.
async fn announce(reporter: &Reporter, artifact: Artifact) -> Result<(), Outcome> {
    let name = artifact.name.clone();
    let answer = reporter.request(Request::ArtifactReady(artifact)).await;
    if answer.accepted {
        return Ok(());
    }
    Err(Outcome::Failed {
        cause: FailureCause::Storage,
        message: format!("the file {name} was not accepted: {}", answer.message),
    })
}

async fn commit(
    context: &Context,
    reporter: &Reporter,
    trace: &AttemptTrace,
    pinned: &Path,
    step: u64,
) -> Result<(), Trouble> {
    let kept = trace.step("checkpoint").of_training(step);
    let mut upload = kept.step("upload");
    let manifest = context
        .storage
        .retry(TRY.min(context.storage_patience), |store| {
            Box::pin(async move { checkpoints::upload(store.as_ref(), pinned, &mut |_| {}).await })
        })
        .await
        .map_err(|error| {
            upload.failed(error.to_string());
            trouble(&format!("could not store the checkpoint of step {step}"), error)
        })?;
    drop(upload);
    let mut step_of_trace = kept.step("commit");
    let answer = ask_to_commit(reporter, manifest, step).await;
    if !answer.accepted {
        step_of_trace.failed(answer.message.as_str());
        reporter
            .log(
                "warn",
                format!("the checkpoint of step {step} was not committed: {}", answer.message),
            )
            .await;
    }
    Ok(())
}

/// Asks the coordinator to commit a checkpoint that is in storage. A refusal may be a hiccup of its storage, so it is asked again:
/// this may be the last checkpoint that there is.
pub(crate) async fn ask_to_commit(reporter: &Reporter, manifest: ContentHash, step: u64) -> Answer {
    let mut wait = COMMIT_AGAIN;
    loop {
        let answer = reporter.request(Request::Commit { manifest, step }).await;
        if answer.accepted || wait > COMMIT_AGAIN * 4 {
            return answer;
        }
        tokio::time::sleep(wait).await;
        wait *= 2;
    }
}

/// The hash and the size of a file.
pub(crate) async fn hash_of(path: &Path) -> std::io::Result<(ContentHash, u64)> {
    let path = path.to_owned();
    let hashed = tokio::task::spawn_blocking(move || ContentHash::of_reader(File::open(path)?)).await;
    hashed.map_err(std::io::Error::other)?
}

/// A file as the coordinator is told of it.
pub(crate) fn stored(artifact: Artifact, hash: ContentHash, bytes: u64) -> Artifact {
    Artifact {
        hash: Some(hash),
        bytes,
        local_path: None,
        ..artifact
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    fn artifact(name: &str) -> Item {
        let artifact = Artifact {
            name: name.into(),
            kind: "lora".into(),
            hash: None,
            bytes: 0,
            step: None,
            index: None,
            local_path: None,
        };
        Item::Artifact {
            artifact,
            pinned: PathBuf::from("/nowhere"),
        }
    }

    fn checkpoint(step: u64) -> Item {
        Item::Checkpoint {
            pinned: PathBuf::from("/nowhere"),
            step,
        }
    }

    #[tokio::test]
    async fn what_is_overtaken_while_storage_is_slow_is_not_sent() {
        let (send, mut queue) = mpsc::channel(QUEUE);
        let items = [
            artifact("a"),
            checkpoint(1),
            artifact("b"),
            checkpoint(2),
            Item::Removed {
                name: "a".into(),
                pinned: PathBuf::from("/nowhere"),
            },
            artifact("b"),
        ];
        for item in items {
            send.try_send(item).unwrap();
        }
        drop(send);
        let (mut backlog, mut got) = (VecDeque::new(), Vec::new());
        let overtaken = AtomicU64::new(0);
        let over = |_: &Path| {
            overtaken.fetch_add(1, Ordering::Relaxed);
        };
        while let Some(item) = next(&mut queue, &mut backlog, &over).await {
            got.push(match item {
                Item::Artifact { artifact, .. } => artifact.name,
                Item::Removed { name, .. } => format!("-{name}"),
                Item::Checkpoint { step, .. } => step.to_string(),
            });
        }
        assert_eq!(got, ["2", "-a", "b"]);
        assert_eq!(overtaken.into_inner(), 3);
    }

    #[tokio::test]
    async fn while_storage_is_full_newer_checkpoints_take_the_place_of_older_ones_and_only_the_end_waits() {
        let (send, mut queue) = mpsc::channel(QUEUE);
        let mut backlog = VecDeque::from([checkpoint(1)]);
        let mut retries = Retries::default();
        let patience = Duration::from_secs(100);
        // While the job runs there is no end to the tries, and what it makes is taken over.
        for step in 2..100 {
            send.try_send(checkpoint(step)).unwrap();
            let wait = retries.next(false, patience).unwrap();
            assert!(wait <= LONGEST_WAIT);
            rest(Duration::from_millis(1), &mut queue, &mut backlog).await;
            let Some(Item::Checkpoint { step: newest, pinned }) = next(&mut queue, &mut backlog, &|_| {}).await else {
                panic!("a checkpoint waits");
            };
            assert_eq!(newest, step);
            backlog.push_front(Item::Checkpoint { step: newest, pinned });
        }
        assert_eq!(backlog.len(), 1);
        assert_eq!(retries.next(true, patience), Some(LONGEST_WAIT));
        assert_eq!(
            retries.next(true, Duration::ZERO),
            None,
            "the end has waited for long enough"
        );
        assert!(retries.is_over() && !retries.is_over());
    }
}
