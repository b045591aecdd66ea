//! Results of an attempt: into object storage, then announced, in the order in which the child made them.
//!
//! Runs beside the child, so that training goes on while storage is slow. What waits is pinned (see [`Pins`]), so
//! that the child's own retention cannot take it away meanwhile.

use crate::context::Context;
use crate::outbox::Request;
use crate::session::{Answer, Reporter};
use crate::storage::failure;
use crate::trace::AttemptTrace;
use crate::unsent::{self, Unsent};
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::control::{Artifact, OfferedCheckpoint};
use aitk_common::fsutil::{self, FsError};
use aitk_common::hash::ContentHash;
use aitk_common::storage::{StorageError, checkpoints};
use std::collections::VecDeque;
use std::fs::{self, File};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Items between the child's events and the work on them; a full queue holds the child back.
pub(crate) const QUEUE: usize = 32;
/// How long storage may be in trouble before the user is told and newer results are looked at.
const TRY: Duration = Duration::from_secs(60);
/// Wait before a checkpoint that was kept is sent again; doubles, up to a minute.
const KEPT_AGAIN: Duration = Duration::from_secs(5);
/// Wait before the first of three more tries of a commit that was refused; doubles.
const COMMIT_AGAIN: Duration = Duration::from_secs(2);
/// How long a kept checkpoint is tried; then it is left for the next session. The coordinator waits no longer for it.
const KEPT_PATIENCE: Duration = Duration::from_secs(3600);
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
async fn ask_to_commit(reporter: &Reporter, manifest: ContentHash, step: u64) -> Answer {
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

/// Why a checkpoint that was kept did not arrive.
enum KeptTrouble {
    /// That may change.
    Again(String),
    /// Not in this session: nobody waits for it any more, or it may not be stored.
    NotNow(String),
    /// It, or what was made before it, is damaged.
    Damaged(String),
}

impl From<StorageError> for KeptTrouble {
    fn from(error: StorageError) -> Self {
        match error {
            error if error.is_full() || error.is_transient() => Self::Again(error.to_string()),
            StorageError::Malformed { .. } => Self::Damaged(error.to_string()),
            StorageError::Local(error) => Self::unreadable("its files", error.io()),
            error => Self::NotNow(error.to_string()),
        }
    }
}

impl KeptTrouble {
    fn unreadable(what: &str, error: &std::io::Error) -> Self {
        let words = format!("{what} cannot be read back: {error}");
        match error.kind() {
            std::io::ErrorKind::NotFound => Self::Damaged(words),
            _ => Self::NotNow(words),
        }
    }
}

/// Sends a checkpoint that was kept when its attempt ended, and before it what was made before it. Where there is no room for it,
/// it is tried again until there is, or until the coordinator does not wait for it any more; then the next session offers it again.
pub(crate) async fn send_kept(context: &Context, reporter: &Reporter, kept: &OfferedCheckpoint) {
    let (attempt, step) = (&kept.held.attempt, kept.step);
    let (mut wait, begun) = (KEPT_AGAIN, Instant::now());
    while let Err(trouble) = try_kept(context, reporter, kept).await {
        match trouble {
            KeptTrouble::Again(problem) if begun.elapsed() < KEPT_PATIENCE => {
                tracing::warn!(%attempt, step, problem, again_in = ?wait, "a checkpoint that was kept could not be sent");
            }
            KeptTrouble::Again(problem) | KeptTrouble::NotNow(problem) => {
                tracing::warn!(%attempt, step, problem, "a checkpoint that was kept could not be sent; it is offered again in the \
                    next session");
                return;
            }
            KeptTrouble::Damaged(problem) => {
                tracing::error!(%attempt, step, problem, "a checkpoint that was kept is damaged; it is removed");
                context.kept.forget(attempt);
                return;
            }
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(KEPT_AGAIN * 12);
    }
}

async fn try_kept(context: &Context, reporter: &Reporter, kept: &OfferedCheckpoint) -> Result<(), KeptTrouble> {
    let (attempt, step) = (&kept.held.attempt, kept.step);
    for (pin, unsent) in context.kept.unsent(attempt) {
        send_unsent(context, reporter, &pin, unsent).await?;
        unsent::settle(&pin);
    }
    let folder = context.kept.checkpoint(attempt);
    let folder = &folder;
    let sent = context
        .storage
        .retry(context.storage_patience, |store| {
            Box::pin(async move { checkpoints::upload(store.as_ref(), folder, &mut |_| {}).await })
        })
        .await;
    let answer = ask_to_commit(reporter, sent?, step).await;
    if !answer.accepted {
        // Where it is not wanted the coordinator has said so with a fence by now.
        return Err(KeptTrouble::Again(answer.message));
    }
    tracing::info!(%attempt, step, "a checkpoint that was kept is committed");
    context.kept.forget(attempt);
    Ok(())
}

/// Sends something that was made before a checkpoint that was kept.
///
/// # Errors
/// Why it did not arrive.
async fn send_unsent(context: &Context, reporter: &Reporter, pin: &Path, unsent: Unsent) -> Result<(), KeptTrouble> {
    let request = match unsent {
        Unsent::Removed(name) => Request::ArtifactRemoved(name),
        Unsent::Artifact(artifact) => {
            let hashed = hash_of(pin).await;
            let (hash, bytes) =
                hashed.map_err(|error| KeptTrouble::unreadable(&format!("the file {}", artifact.name), &error))?;
            let put = context.storage.retry(context.storage_patience, |store| {
                Box::pin(async move { store.put_file(hash, pin).await })
            });
            put.await?;
            Request::ArtifactReady(stored(artifact, hash, bytes))
        }
    };
    let answer = reporter.request(request).await;
    if answer.accepted {
        Ok(())
    } else {
        Err(KeptTrouble::Again(answer.message))
    }
}

/// The hash and the size of a file.
async fn hash_of(path: &Path) -> std::io::Result<(ContentHash, u64)> {
    let path = path.to_owned();
    let hashed = tokio::task::spawn_blocking(move || ContentHash::of_reader(File::open(path)?)).await;
    hashed.map_err(std::io::Error::other)?
}

/// A file as the coordinator is told of it.
fn stored(artifact: Artifact, hash: ContentHash, bytes: u64) -> Artifact {
    Artifact {
        hash: Some(hash),
        bytes,
        local_path: None,
        ..artifact
    }
}

/// Whether a path that a child announced is in this folder of its own, without links on the way.
pub(crate) fn is_below(folder: &Path, path: &Path) -> bool {
    let Ok(rest) = path.strip_prefix(folder) else {
        return false;
    };
    let mut at = folder.to_owned();
    let mut parts = rest.components().peekable();
    parts.peek().is_some()
        && parts.all(|part| {
            at.push(part);
            matches!(part, Component::Normal(_)) && !fs::symlink_metadata(&at).is_ok_and(|data| data.is_symlink())
        })
}

/// Keeps what the child announced, by hard links in a folder of our own: the child may delete or replace its file,
/// ours stays.
#[derive(Clone, Debug)]
pub(crate) struct Pins {
    folder: Arc<PathBuf>,
    /// Items that the coordinator knows, or that later ones made superfluous.
    settled: Arc<AtomicU64>,
}

impl Pins {
    pub(crate) fn new(folder: PathBuf) -> Self {
        Self {
            folder: Arc::new(folder),
            settled: Arc::default(),
        }
    }

    /// Where something of this number is pinned, or noted.
    pub(crate) fn at(&self, number: u64) -> PathBuf {
        self.folder.join(number.to_string())
    }

    fn one_settled(&self) {
        self.settled.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether nothing waits of so many items that were handed on.
    pub(crate) fn all_settled(&self, handed_on: u64) -> bool {
        self.settled.load(Ordering::Relaxed) >= handed_on
    }

    /// Pins a file, or the files of a flat folder. A disk without hard links gets copies.
    pub(crate) async fn pin(&self, path: PathBuf, number: u64) -> Result<PathBuf, FsError> {
        let target = self.at(number);
        self.work(move || link(&path, &target).map(|()| target)).await
    }

    /// Notes what is still to be announced, where its pin lies or would lie.
    pub(crate) async fn note(&self, unsent: Unsent, number: u64) -> Result<(), FsError> {
        let pin = self.at(number);
        self.work(move || unsent::note(&pin, &unsent)).await
    }

    async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, FsError> + Send + 'static,
    ) -> Result<T, FsError> {
        let result = tokio::task::spawn_blocking(work).await;
        result.unwrap_or_else(|error| Err(FsError::new("pin", self.folder.as_path(), std::io::Error::other(error))))
    }
}

fn link(from: &Path, to: &Path) -> Result<(), FsError> {
    let failed = |error| FsError::new("keep", from, error);
    // What is behind a link is not the child's, and a pipe or a device has no end.
    let kind = fs::symlink_metadata(from).map_err(failed)?;
    if !kind.is_dir() && !kind.is_file() {
        return Err(failed(std::io::Error::other("it is no regular file")));
    }
    if kind.is_file() {
        return fs::hard_link(from, to)
            .or_else(|_| fs::copy(from, to).map(drop))
            .map_err(failed);
    }
    fsutil::create_dir_all(to)?;
    for entry in fs::read_dir(from).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        link(&entry.path(), &to.join(entry.file_name()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

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
    async fn a_child_announces_regular_files_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("output");
        fs::create_dir_all(output.join("deep")).unwrap();
        fs::write(folder.path().join("token"), "secret").unwrap();
        fs::write(output.join("deep/a.png"), "image").unwrap();
        std::os::unix::fs::symlink(folder.path().join("token"), output.join("link")).unwrap();
        std::os::unix::fs::symlink(folder.path(), output.join("up")).unwrap();
        nix::unistd::mkfifo(&output.join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(is_below(&output, &output.join("deep/a.png")) && is_below(&output, &output.join("not there yet")));
        for other in ["", "../token", "deep/../../token", "link", "up/token"] {
            assert!(!is_below(&output, &output.join(other)), "{other}");
        }
        for other in ["/etc/passwd", "output", ""] {
            assert!(!is_below(&output, Path::new(other)), "{other}");
        }
        fs::create_dir(folder.path().join("pins")).unwrap();
        let pins = Pins::new(folder.path().join("pins"));
        pins.pin(output.join("deep/a.png"), 1).await.unwrap();
        for (number, other) in [(2, "link"), (3, "fifo")] {
            assert!(pins.pin(output.join(other), number).await.is_err(), "{other}");
        }
        // Nor inside a folder that is announced.
        assert!(pins.pin(output.clone(), 4).await.is_err());
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

    #[tokio::test]
    async fn a_pin_outlives_the_childs_retention() {
        let folder = tempfile::tempdir().unwrap();
        let made = folder.path().join("step_1");
        fs::create_dir(&made).unwrap();
        fs::write(made.join("manifest.json"), "{}").unwrap();
        let pins = Pins::new(folder.path().join("pins"));
        fs::create_dir(folder.path().join("pins")).unwrap();
        let pinned = pins.pin(made.clone(), 1).await.unwrap();
        fs::remove_dir_all(&made).unwrap();
        assert_eq!(fs::read_to_string(pinned.join("manifest.json")).unwrap(), "{}");
        assert!(pins.pin(made, 2).await.is_err());
    }
}
