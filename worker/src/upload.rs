//! Uploads the results of a running attempt to object storage and announces them, in the order in which the child
//! made them.
//!
//! Runs concurrently with the child, so that training goes on while storage is slow. Queued files are pinned (see
//! [`PinFolder`]), so that the child's own retention cannot remove them.

use crate::announcement;
use crate::context::Context;
use crate::outbox::Request;
use crate::outcome::storage_failure;
use crate::pins::PinFolder;
use crate::session::{Answer, Reporter};
use crate::trace::AttemptTrace;
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::control_plane::Artifact;
use aitk_common::hash::ContentHash;
use aitk_common::storage::{StorageError, checkpoints};
use std::collections::VecDeque;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Capacity of the channel from the child's events to the uploader. The child blocks while it is full.
pub(crate) const QUEUE_CAPACITY: usize = 32;
/// How long an upload is retried before the user gets a warning and newer results are considered.
const TRY_TIMEOUT: Duration = Duration::from_secs(60);
/// Delay before a refused request is sent again; it doubles.
const REFUSAL_RETRY_DELAY: Duration = Duration::from_secs(2);
/// How often a commit is asked for: 14 seconds of delays.
const COMMIT_TRIES: u32 = 4;
/// How often a file that is refused is announced: 62 seconds of delays. Without it the attempt fails.
const ANNOUNCEMENT_TRIES: u32 = 6;
/// Delays between retries of a failed upload; each is twice the one before.
const FIRST_RETRY_DELAY: Duration = Duration::from_secs(1);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(30);
/// Items read ahead, to find those that later ones supersede.
const BACKLOG_CAPACITY: usize = 256;

/// A result of the child.
#[derive(Debug)]
pub(crate) enum ResultItem {
    /// A file. `artifact.local_path` is where the child wrote it.
    Artifact { artifact: Artifact, pinned: PathBuf },
    /// A file was removed. `pinned` is the path of the saved announcement.
    Removed { name: String, pinned: PathBuf },
    /// A complete checkpoint.
    Checkpoint { pinned: PathBuf, step: u64 },
}

/// Why a result was not stored.
enum UploadError {
    /// Storage is full, unreachable or refuses the coordinator: the job goes on, and the upload is retried.
    Retryable {
        /// The error, for the log of the job.
        problem: String,
        /// How the attempt ends if its end has waited for too long.
        outcome: Outcome,
    },
    /// The attempt fails with this outcome.
    Fatal(Outcome),
}

impl From<Outcome> for UploadError {
    fn from(outcome: Outcome) -> Self {
        Self::Fatal(outcome)
    }
}

/// Uploads queued results until the queue closes. A failed upload is retried while the job goes on; only the end of
/// the job waits for it.
///
/// # Errors
/// The outcome of the attempt if a result cannot be stored for good.
pub(crate) async fn run(
    context: &Context,
    reporter: &Reporter,
    trace: &AttemptTrace,
    local: bool,
    mut queue: mpsc::Receiver<ResultItem>,
    pins: &PinFolder,
) -> Result<(), Outcome> {
    let mut backlog = VecDeque::new();
    let mut retry_delay = RetryDelay::default();
    let settle = |pinned: &Path| {
        // For a job that runs in place, the path is the user's own file.
        if !local {
            announcement::remove(pinned);
        }
        pins.mark_settled();
    };
    while let Some(item) = next_item(&mut queue, &mut backlog, &settle).await {
        match upload_item(context, reporter, trace, local, &item).await {
            Ok(()) => {
                if retry_delay.reset() {
                    reporter
                        .log("info", "object storage accepts results again".to_owned())
                        .await;
                }
                if let ResultItem::Checkpoint { step, .. } = item {
                    context.uncommitted.remove_pending(reporter.attempt(), step);
                }
                settle(item.pinned());
            }
            Err(UploadError::Fatal(outcome)) => return Err(outcome),
            Err(UploadError::Retryable { problem, outcome }) => {
                let has_job_ended = queue.is_closed() && queue.is_empty();
                let Some(delay) = retry_delay.next_delay(has_job_ended, context.end_timeout) else {
                    return Err(outcome);
                };
                if has_job_ended {
                    reporter.phase("waiting for object storage").await;
                }
                let goes_on = if has_job_ended {
                    "the job ends when it is stored"
                } else {
                    "the job goes on"
                };
                let seconds = delay.as_secs().max(1);
                let message = format!(
                    "{} could not be stored: {problem}; {goes_on}, next try in {seconds} s",
                    item.name()
                );
                reporter.log("warn", message).await;
                backlog.push_front(item);
                wait_and_collect(delay, &mut queue, &mut backlog).await;
            }
        }
    }
    Ok(())
}

/// Waits, and reads new results into the backlog meanwhile, so that the child is not blocked.
async fn wait_and_collect(delay: Duration, queue: &mut mpsc::Receiver<ResultItem>, backlog: &mut VecDeque<ResultItem>) {
    let timer = tokio::time::sleep(delay);
    tokio::pin!(timer);
    loop {
        tokio::select! {
            () = &mut timer => return,
            Some(item) = queue.recv(), if backlog.len() < BACKLOG_CAPACITY => backlog.push_back(item),
        }
    }
}

/// The retry delay while storage fails.
#[derive(Debug, Default)]
struct RetryDelay {
    delay: Option<Duration>,
    /// When the job began to wait for its last results.
    waiting_since: Option<Instant>,
}

impl RetryDelay {
    /// The delay before the next try; `None` if the finished job has waited longer than `timeout`.
    fn next_delay(&mut self, has_job_ended: bool, timeout: Duration) -> Option<Duration> {
        let waiting_since = has_job_ended.then(|| *self.waiting_since.get_or_insert_with(Instant::now));
        if waiting_since.is_some_and(|waiting_since| waiting_since.elapsed() >= timeout) {
            return None;
        }
        let delay = self.delay.unwrap_or(FIRST_RETRY_DELAY);
        self.delay = Some((delay * 2).min(MAX_RETRY_DELAY));
        Some(delay)
    }

    /// Resets the delay after a success. Returns whether storage had failed before.
    fn reset(&mut self) -> bool {
        self.waiting_since = None;
        self.delay.take().is_some()
    }
}

impl ResultItem {
    fn pinned(&self) -> &Path {
        match self {
            Self::Artifact { pinned, .. } | Self::Removed { pinned, .. } | Self::Checkpoint { pinned, .. } => pinned,
        }
    }

    /// A description for messages.
    fn name(&self) -> String {
        match self {
            Self::Artifact { artifact, .. } => format!("the file {}", artifact.name),
            Self::Removed { name, .. } => format!("the removal of {name}"),
            Self::Checkpoint { step, .. } => format!("the checkpoint of step {step}"),
        }
    }
}

/// Uploads or announces one item, or announces a removal.
async fn upload_item(
    context: &Context,
    reporter: &Reporter,
    trace: &AttemptTrace,
    local: bool,
    item: &ResultItem,
) -> Result<(), UploadError> {
    match item {
        ResultItem::Removed { name, .. } => {
            let answer = reporter.request(Request::ArtifactRemoved(name.clone())).await;
            if !answer.accepted {
                reporter
                    .log(
                        "warn",
                        format!(
                            "the coordinator did not accept the removal of a file: {}",
                            answer.message
                        ),
                    )
                    .await;
            }
            Ok(())
        }
        ResultItem::Artifact { artifact, .. } if local => {
            announce(reporter, artifact.clone(), REFUSAL_RETRY_DELAY).await
        }
        ResultItem::Checkpoint { .. } if local => Ok(()),
        ResultItem::Artifact { artifact, pinned } => {
            let timeout = TRY_TIMEOUT.min(context.storage_timeout);
            let artifact = upload_file(context, artifact.clone(), pinned, timeout).await?;
            announce(reporter, artifact, REFUSAL_RETRY_DELAY).await
        }
        ResultItem::Checkpoint { pinned, step } => commit_checkpoint(context, reporter, trace, pinned, *step).await,
    }
}

/// Decides whether a storage error can be retried.
fn classify_error(what: &str, error: StorageError) -> UploadError {
    match error {
        error if error.is_full() || error.is_transient() => retryable(what, &error),
        // An operator has to mend the coordinator's storage. Another attempt would end in the same way, and its work would be lost.
        StorageError::CoordinatorRefused { .. } => retryable(what, &error),
        // The session of this worker ends too, and the next one has a new token or certificate.
        StorageError::Unauthenticated { .. } => retryable(what, &error),
        // Repeating the request does not help. Another attempt tries again; a refusal counts as a failure of the job.
        error => UploadError::Fatal(storage_failure(what, &error)),
    }
}

fn retryable(what: &str, error: &StorageError) -> UploadError {
    UploadError::Retryable {
        problem: error.to_string(),
        outcome: storage_failure(what, error),
    }
}

/// Returns the next item that is not superseded. Calls `settle` with the pins of superseded items.
async fn next_item(
    queue: &mut mpsc::Receiver<ResultItem>,
    backlog: &mut VecDeque<ResultItem>,
    settle: &(dyn Fn(&Path) + Sync),
) -> Option<ResultItem> {
    loop {
        while backlog.len() < BACKLOG_CAPACITY {
            match queue.try_recv() {
                Ok(item) => backlog.push_back(item),
                Err(_) => break,
            }
        }
        let item = match backlog.pop_front() {
            Some(item) => item,
            None => queue.recv().await?,
        };
        match superseded_pin(&item, backlog) {
            Some(pinned) => settle(pinned),
            None => return Some(item),
        }
    }
}

/// Returns the pin of `item` if a later item supersedes it: a newer checkpoint, a newer version of the file, or its
/// removal.
fn superseded_pin<'a>(item: &'a ResultItem, later: &VecDeque<ResultItem>) -> Option<&'a Path> {
    match item {
        ResultItem::Checkpoint { pinned, .. } => later
            .iter()
            .any(|other| matches!(other, ResultItem::Checkpoint { .. }))
            .then_some(pinned),
        ResultItem::Artifact { artifact, pinned } => later
            .iter()
            .any(|other| match other {
                ResultItem::Artifact { artifact: other, .. } => other.name == artifact.name,
                ResultItem::Removed { name, .. } => *name == artifact.name,
                ResultItem::Checkpoint { .. } => false,
            })
            .then_some(pinned),
        ResultItem::Removed { .. } => None,
    }
}

async fn upload_file(
    context: &Context,
    artifact: Artifact,
    pinned: &Path,
    timeout: Duration,
) -> Result<Artifact, UploadError> {
    let name = artifact.name.clone();
    let (hash, bytes) = hash_file(pinned).await.map_err(|error| Outcome::Failed {
        cause: FailureCause::Machine,
        message: format!("the file {name} cannot be read back: {error}"),
    })?;
    context
        .storage
        .retry(timeout, |store| {
            Box::pin(async move { store.put_file(hash, pinned).await })
        })
        .await
        .map_err(|error| classify_error(&format!("could not store the file {name}"), error))?;
    Ok(stored_artifact(artifact, hash, bytes))
}

/// Announces a file to the coordinator.
///
/// # Errors
/// If the coordinator does not accept it: a job must not count as complete without its results. While the coordinator cannot decide, because
/// its storage does not answer or refuses it, the file is announced again. If it refuses the file [`ANNOUNCEMENT_TRIES`] times, for example
/// because this worker stores its files where the coordinator does not find them, another attempt makes the file again. That counts as a failure,
/// because the job would otherwise be tried again for ever.
async fn announce(reporter: &Reporter, artifact: Artifact, first_delay: Duration) -> Result<(), UploadError> {
    let name = artifact.name.clone();
    let request = || Request::ArtifactReady(artifact.clone());
    let answer = request_until_accepted(reporter, request, ANNOUNCEMENT_TRIES, first_delay).await;
    if answer.accepted {
        return Ok(());
    }
    let failed = |cause| Outcome::Failed {
        cause,
        message: format!("the file {name} was not accepted: {}", answer.message),
    };
    Err(match answer.is_temporary {
        true => UploadError::Retryable {
            problem: answer.message.clone(),
            outcome: failed(FailureCause::Storage),
        },
        false => UploadError::Fatal(failed(FailureCause::Machine)),
    })
}

async fn commit_checkpoint(
    context: &Context,
    reporter: &Reporter,
    trace: &AttemptTrace,
    pinned: &Path,
    step: u64,
) -> Result<(), UploadError> {
    let checkpoint_span = trace.start_step("checkpoint").with_training_step(step);
    let mut upload = checkpoint_span.start_step("upload");
    let manifest = context
        .storage
        .retry(TRY_TIMEOUT.min(context.storage_timeout), |store| {
            Box::pin(async move { checkpoints::upload(store.as_ref(), pinned, &mut |_| {}).await })
        })
        .await
        .map_err(|error| {
            upload.set_error(error.to_string());
            classify_error(&format!("could not store the checkpoint of step {step}"), error)
        })?;
    drop(upload);
    let mut commit_span = checkpoint_span.start_step("commit");
    let answer = request_commit(reporter, manifest, step).await;
    if answer.accepted {
        return Ok(());
    }
    commit_span.set_error(answer.message.as_str());
    let message = format!("the checkpoint of step {step} was not committed: {}", answer.message);
    if answer.is_temporary {
        // It may be the only one. A newer one replaces it.
        return Err(UploadError::Retryable {
            problem: answer.message,
            outcome: Outcome::Failed {
                cause: FailureCause::Storage,
                message,
            },
        });
    }
    reporter.log("warn", message).await;
    Ok(())
}

/// Asks the coordinator to commit an uploaded checkpoint, which may be the only one.
pub(crate) async fn request_commit(reporter: &Reporter, manifest: ContentHash, step: u64) -> Answer {
    let request = || Request::Commit { manifest, step };
    request_until_accepted(reporter, request, COMMIT_TRIES, REFUSAL_RETRY_DELAY).await
}

/// Repeats a request that is refused, because another coordinator may see what this one does not. The delay doubles after each try. The
/// number of tries is small: other results wait behind this one, and a refusal may be for good. An answer that says that the coordinator cannot
/// decide now is returned at once.
async fn request_until_accepted(
    reporter: &Reporter,
    request: impl Fn() -> Request,
    tries: u32,
    first_delay: Duration,
) -> Answer {
    let (mut delay, mut left) = (first_delay, tries);
    loop {
        let answer = reporter.request(request()).await;
        left -= 1;
        if answer.accepted || answer.is_temporary || left == 0 {
            return answer;
        }
        tokio::time::sleep(delay).await;
        delay *= 2;
    }
}

/// Computes the hash and the size of a file.
pub(crate) async fn hash_file(path: &Path) -> std::io::Result<(ContentHash, u64)> {
    let path = path.to_owned();
    let hashed = tokio::task::spawn_blocking(move || ContentHash::of_reader(File::open(path)?)).await;
    hashed.map_err(std::io::Error::other)?
}

/// The artifact as it is announced to the coordinator after its upload.
pub(crate) fn stored_artifact(artifact: Artifact, hash: ContentHash, bytes: u64) -> Artifact {
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
    use crate::session::FromAttempt;
    use aitk_common::control_plane::AttemptRef;
    use aitk_common::id::{AttemptId, Epoch};
    use std::sync::atomic::{AtomicU64, Ordering};

    fn artifact(name: &str) -> ResultItem {
        let artifact = Artifact {
            name: name.into(),
            kind: "lora".into(),
            hash: None,
            bytes: 0,
            step: None,
            index: None,
            local_path: None,
        };
        ResultItem::Artifact {
            artifact,
            pinned: PathBuf::from("/nowhere"),
        }
    }

    fn checkpoint(step: u64) -> ResultItem {
        ResultItem::Checkpoint {
            pinned: PathBuf::from("/nowhere"),
            step,
        }
    }

    /// Announces a file to a coordinator that does not accept it this many times. The result, and how many announcements there were.
    async fn announced(refusals: u32, is_temporary: bool) -> (Result<(), UploadError>, u32) {
        let held = AttemptRef {
            attempt: AttemptId::new("j1-0-1"),
            epoch: Epoch(1),
        };
        let (session, mut requests) = mpsc::channel(1);
        let reporter = Reporter::new(held, session);
        let coordinator = async move {
            let mut count = 0;
            while let Some(FromAttempt::Request { reply, .. }) = requests.recv().await {
                count += 1;
                let answer = Answer {
                    accepted: count > refusals,
                    is_temporary,
                    message: "storage took too long".to_owned(),
                };
                reply.send(answer).unwrap();
            }
            count
        };
        let worker = async move {
            let ResultItem::Artifact { artifact: file, .. } = artifact("a") else {
                panic!("a file");
            };
            announce(&reporter, file, Duration::ZERO).await
        };
        tokio::join!(worker, coordinator)
    }

    #[tokio::test]
    async fn a_file_that_is_refused_for_a_time_is_announced_again() {
        assert!(matches!(announced(2, false).await, (Ok(()), 3)));
        let (refused, count) = announced(u32::MAX, false).await;
        assert_eq!(count, ANNOUNCEMENT_TRIES);
        let Err(UploadError::Fatal(Outcome::Failed { cause, message })) = refused else {
            panic!("a file that is never accepted ends the attempt");
        };
        assert_eq!(cause, FailureCause::Machine);
        assert_eq!(message, "the file a was not accepted: storage took too long");
    }

    /// Before, the attempt failed after a minute, and its work was lost.
    #[tokio::test]
    async fn a_file_is_kept_while_the_coordinator_cannot_decide() {
        let (waiting, count) = announced(u32::MAX, true).await;
        assert_eq!(count, 1);
        let Err(UploadError::Retryable { problem, outcome }) = waiting else {
            panic!("the attempt goes on");
        };
        assert_eq!(problem, "storage took too long");
        assert!(matches!(
            outcome,
            Outcome::Failed {
                cause: FailureCause::Storage,
                ..
            }
        ));
    }

    #[test]
    fn a_result_that_the_storage_refuses_for_good_ends_the_attempt_with_a_failure_that_counts() {
        let refused = StorageError::Failed {
            what: "store a blob",
            message: "through the coordinator: 9 bytes exceed the limit".to_owned(),
        };
        let UploadError::Fatal(Outcome::Failed { cause, message }) =
            classify_error("could not store the file a", refused)
        else {
            panic!("a refusal is not retried within the attempt");
        };
        assert_eq!(cause, FailureCause::StorageRefused);
        assert_eq!(
            message,
            "could not store the file a: object storage could not store a blob: through the coordinator: 9 bytes exceed the limit"
        );
        let (what, message) = ("store a blob", String::new());
        let full = StorageError::Full {
            what,
            message: message.clone(),
        };
        let coordinator_refused = StorageError::CoordinatorRefused {
            what,
            message: message.clone(),
        };
        for temporary in [
            full,
            coordinator_refused,
            StorageError::Unauthenticated { what, message },
        ] {
            assert!(matches!(classify_error("", temporary), UploadError::Retryable { .. }));
        }
    }

    #[tokio::test]
    async fn results_superseded_while_storage_is_slow_are_not_uploaded() {
        let (send, mut queue) = mpsc::channel(QUEUE_CAPACITY);
        let items = [
            artifact("a"),
            checkpoint(1),
            artifact("b"),
            checkpoint(2),
            ResultItem::Removed {
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
        let superseded = AtomicU64::new(0);
        let settle = |_: &Path| {
            superseded.fetch_add(1, Ordering::Relaxed);
        };
        while let Some(item) = next_item(&mut queue, &mut backlog, &settle).await {
            got.push(match item {
                ResultItem::Artifact { artifact, .. } => artifact.name,
                ResultItem::Removed { name, .. } => format!("-{name}"),
                ResultItem::Checkpoint { step, .. } => step.to_string(),
            });
        }
        assert_eq!(got, ["2", "-a", "b"]);
        assert_eq!(superseded.into_inner(), 3);
    }

    #[tokio::test]
    async fn while_storage_is_full_newer_checkpoints_replace_older_ones_and_only_the_end_of_the_job_waits() {
        let (send, mut queue) = mpsc::channel(QUEUE_CAPACITY);
        let mut backlog = VecDeque::from([checkpoint(1)]);
        let mut retry_delay = RetryDelay::default();
        let timeout = Duration::from_secs(100);
        // While the job runs, retries never end and new results are read.
        for step in 2..100 {
            send.try_send(checkpoint(step)).unwrap();
            let delay = retry_delay.next_delay(false, timeout).unwrap();
            assert!(delay <= MAX_RETRY_DELAY);
            wait_and_collect(Duration::from_millis(1), &mut queue, &mut backlog).await;
            let Some(ResultItem::Checkpoint { step: newest, pinned }) =
                next_item(&mut queue, &mut backlog, &|_| {}).await
            else {
                panic!("a checkpoint waits");
            };
            assert_eq!(newest, step);
            backlog.push_front(ResultItem::Checkpoint { step: newest, pinned });
        }
        assert_eq!(backlog.len(), 1);
        assert_eq!(retry_delay.next_delay(true, timeout), Some(MAX_RETRY_DELAY));
        assert_eq!(
            retry_delay.next_delay(true, Duration::ZERO),
            None,
            "the end has waited for long enough"
        );
        assert!(retry_delay.reset() && !retry_delay.reset());
    }
}
