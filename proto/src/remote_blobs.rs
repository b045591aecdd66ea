//! A [`BlobStore`] that transfers blobs through the coordinator, for clients that cannot access the storage itself.
//!
//! A call that fails because the coordinator is unreachable or restarts, or because its storage fails, is retried for some time. A transfer
//! that breaks is continued where it stopped, if the coordinator can do that. Downloads are verified against their hash before they become visible.

use crate::client::{AuthChannel, Clients};
use crate::v1;
use crate::v1::blobs_client::BlobsClient;
use crate::{
    BLOB_CHUNK_BYTES, RETRY_HEADER, RETRY_NEVER, is_storage_full, is_storage_refused, is_unusable_offset, upload_name,
};
use aitk_common::backoff::Backoff;
use aitk_common::fsutil::{self, FsError};
use aitk_common::hash::ContentHash;
use aitk_common::storage::{BlobInfo, BlobStore, StorageError};
use async_trait::async_trait;
use bytes::Bytes;
use std::future::Future;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncSeekExt};
use tokio::sync::{Mutex, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

/// The most hashes in one `Has` call.
const MAX_HASHES: usize = 1000;
/// The capacity of the channel between file and socket in chunks: 4 MiB.
const CHANNEL_CHUNKS: usize = 16;
/// The timeout for sending or receiving a chunk.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);
/// The timeout for a response, besides the time in which the coordinator uploads a blob to its own storage.
const STORE_TIMEOUT: Duration = Duration::from_secs(600);
/// The lowest rate of that upload in bytes per second; slower ones count as stuck. Several uploads may share a slow line.
const MIN_STORE_RATE: u64 = 32 << 10;
/// What [`BlobStore::has`] does, in errors.
const LOOK_UP: &str = "look for blobs";
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(100);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(5);

/// The default time for which a failing call is retried. A transfer that was resumed has it again after each break.
pub const DEFAULT_BUDGET: Duration = Duration::from_secs(180);

/// A blob store behind the coordinator. Cheap to clone.
#[derive(Clone, Debug)]
pub struct RemoteBlobs {
    client: BlobsClient<AuthChannel>,
    budget: Duration,
}

/// The failure of one attempt of a call.
enum Failure {
    /// An error from the coordinator or the connection.
    Status(Status),
    /// A permanent error.
    Final(StorageError),
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

impl From<StorageError> for Failure {
    fn from(error: StorageError) -> Self {
        Self::Final(error)
    }
}

/// The timeout for the response after the last byte of a blob.
fn store_timeout(bytes: u64) -> Duration {
    STORE_TIMEOUT + Duration::from_secs(bytes / MIN_STORE_RATE)
}

fn timed_out() -> Failure {
    broken(Status::deadline_exceeded("the coordinator did not answer in time"))
}

fn cut_short() -> Failure {
    broken(Status::unavailable("the download was cut short"))
}

/// A failure of the connection. As in tonic, the status has a source, by which it is distinguished from the coordinator's answers.
fn broken(mut status: Status) -> Failure {
    let source = io::Error::other(status.message().to_owned());
    status.set_source(Arc::new(source));
    Failure::Status(status)
}

fn is_retryable(status: &Status) -> bool {
    // A broken connection gives Unknown, Cancelled or Internal, depending on where it broke.
    let is_outage = matches!(
        status.code(),
        Code::Unavailable | Code::DeadlineExceeded | Code::Unknown | Code::Cancelled | Code::Aborted | Code::Internal
    );
    if is_storage_refused(status) {
        return false;
    }
    match status.metadata().get(RETRY_HEADER) {
        Some(value) => value != RETRY_NEVER,
        None => is_outage,
    }
}

impl RemoteBlobs {
    /// Creates a store that uses this coordinator.
    #[must_use]
    pub fn new(clients: &Clients) -> Self {
        Self::with_budget(clients, DEFAULT_BUDGET)
    }

    /// [`Self::new`] with another time limit for retries.
    #[must_use]
    pub fn with_budget(clients: &Clients, budget: Duration) -> Self {
        Self {
            client: clients.blobs.clone(),
            budget,
        }
    }

    /// Retries a call until it succeeds, fails permanently, or the budget is used up.
    async fn retry<T, F>(
        &self,
        what: &'static str,
        hash: Option<ContentHash>,
        call: impl FnMut() -> F,
    ) -> Result<T, StorageError>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        retry_while_it_progresses(self.budget, what, hash, &AtomicU64::new(0), call).await
    }

    /// Uploads a blob of `bytes` bytes, of which `arrived` bytes have arrived, until it succeeds, fails permanently, or the budget is used up.
    /// After a break only what has not arrived is sent. `open` returns a reader from an offset.
    async fn upload<R, O>(
        &self,
        hash: ContentHash,
        bytes: u64,
        arrived: u64,
        open: impl Fn(u64) -> O,
    ) -> Result<(), StorageError>
    where
        R: AsyncRead + Unpin + Send,
        O: Future<Output = Result<R, StorageError>>,
    {
        let (furthest, is_first) = (AtomicU64::new(arrived), AtomicBool::new(true));
        retry_while_it_progresses(self.budget, "store a blob", Some(hash), &furthest, || async {
            let arrived = match is_first.swap(false, Ordering::Relaxed) {
                true => Some(arrived),
                false => self.arrived(hash).await?,
            };
            let Some(offset) = arrived.map(|arrived| arrived.min(bytes)) else {
                return Ok(());
            };
            furthest.fetch_max(offset, Ordering::Relaxed);
            match self.send(hash, bytes, offset, open(offset).await?).await {
                // The coordinator has lost them, another one has become the leader, or the file changed meanwhile.
                Err(Failure::Status(status)) if offset > 0 && is_unusable_offset(&status) => {
                    self.send(hash, bytes, 0, open(0).await?).await
                }
                sent => sent,
            }
        })
        .await
    }

    /// How many bytes of an upload have arrived; `None` if the blob is stored.
    async fn arrived(&self, hash: ContentHash) -> Result<Option<u64>, Failure> {
        let mut client = self.client.clone();
        let call = client.has(v1::HasRequest {
            sha256: vec![hash.to_hex()],
            upload: upload_name().to_owned(),
        });
        let answer = tokio::time::timeout(STORE_TIMEOUT, call)
            .await
            .map_err(|_| timed_out())??;
        let answer = answer.into_inner();
        Ok(match answer.present.first() {
            Some(true) => None,
            _ => Some(answer.received),
        })
    }

    /// Uploads a blob of `bytes` bytes. The reader provides those from `offset` on.
    async fn send(
        &self,
        hash: ContentHash,
        bytes: u64,
        offset: u64,
        mut from: impl AsyncRead + Unpin + Send,
    ) -> Result<(), Failure> {
        use v1::put_blob_request::Part;
        let (sender, receiver) = mpsc::channel(CHANNEL_CHUNKS);
        let mut client = self.client.clone();
        let call = async move { client.put(ReceiverStream::new(receiver)).await };
        let feed = async move {
            let header = v1::BlobHeader {
                sha256: hash.to_hex(),
                bytes,
                offset,
                upload: upload_name().to_owned(),
            };
            let mut part = Part::Header(header);
            loop {
                let message = v1::PutBlobRequest { part: Some(part) };
                match tokio::time::timeout(STALL_TIMEOUT, sender.send(message)).await {
                    Ok(Ok(())) => {}
                    // The call has ended; its response says how.
                    Ok(Err(_)) => return Ok(()),
                    Err(_) => return Err(timed_out()),
                }
                let mut data = Vec::with_capacity(BLOB_CHUNK_BYTES);
                let read = (&mut from).take(BLOB_CHUNK_BYTES as u64).read_to_end(&mut data).await;
                match read {
                    Ok(0) => return Ok(()),
                    Ok(_) => part = Part::Data(data),
                    Err(error) => {
                        return Err(Failure::Final(
                            FsError::new("read", format!("blob {hash}"), error).into(),
                        ));
                    }
                }
            }
        };
        tokio::pin!(call, feed);
        tokio::select! {
            answer = &mut call => return answer.map(|_| ()).map_err(Failure::Status),
            fed = &mut feed => fed?,
        }
        match tokio::time::timeout(store_timeout(bytes), call).await {
            Ok(answer) => answer.map(|_| ()).map_err(Failure::Status),
            Err(_) => Err(timed_out()),
        }
    }

    /// Starts a download at `offset`. Returns the header, with the blob's size and the actual offset (0 if the coordinator does
    /// not support offsets), and the stream of chunks.
    async fn open(
        &self,
        hash: ContentHash,
        offset: u64,
    ) -> Result<(v1::BlobHeader, Streaming<v1::GetBlobReply>), Failure> {
        let mut client = self.client.clone();
        let request = v1::GetBlobRequest {
            sha256: hash.to_hex(),
            offset,
        };
        // The coordinator downloads the blob from its own storage before it responds.
        let answer = tokio::time::timeout(STORE_TIMEOUT, client.get(request))
            .await
            .map_err(|_| timed_out())?;
        let mut parts = answer?.into_inner();
        match next(&mut parts).await? {
            Some(v1::get_blob_reply::Part::Header(header)) => Ok((header, parts)),
            _ => Err(Failure::Status(Status::internal("a blob without a header"))),
        }
    }
}

/// Retries a call until it succeeds, fails permanently, or the budget is used up. The budget begins again when a call fails that got
/// further than any before it: a large blob takes hours on a slow line, and its connection may break more than once.
async fn retry_while_it_progresses<T, F>(
    budget: Duration,
    what: &'static str,
    hash: Option<ContentHash>,
    received: &AtomicU64,
    mut call: impl FnMut() -> F,
) -> Result<T, StorageError>
where
    F: Future<Output = Result<T, Failure>>,
{
    let start = || (Instant::now(), Backoff::new(FIRST_RETRY_DELAY, MAX_RETRY_DELAY, budget));
    let (mut begin, mut backoff) = start();
    let mut furthest = 0;
    loop {
        let status = match call().await {
            Ok(value) => return Ok(value),
            Err(Failure::Final(error)) => return Err(error),
            Err(Failure::Status(status)) => status,
        };
        if !is_retryable(&status) {
            return Err(final_error(what, hash, &status));
        }
        let reached = received.load(Ordering::Relaxed);
        if reached > furthest {
            furthest = reached;
            (begin, backoff) = start();
        }
        let Some(delay) = backoff.next_delay() else {
            let message = format!("through the coordinator: {}", status.message());
            return Err(StorageError::Unavailable {
                what,
                after: begin.elapsed(),
                message,
            });
        };
        tokio::time::sleep(delay).await;
    }
}

/// The bytes of a blob received before the connection broke.
struct Partial {
    file: tempfile::NamedTempFile,
    received: u64,
}

/// Truncates a partly written file.
fn truncate(file: &mut tempfile::NamedTempFile) -> std::io::Result<()> {
    file.as_file().set_len(0)?;
    file.as_file_mut().rewind()
}

async fn next(parts: &mut Streaming<v1::GetBlobReply>) -> Result<Option<v1::get_blob_reply::Part>, Failure> {
    let message = tokio::time::timeout(STALL_TIMEOUT, parts.message())
        .await
        .map_err(|_| timed_out())??;
    match message {
        None => Ok(None),
        Some(v1::GetBlobReply { part: Some(part) }) => Ok(Some(part)),
        Some(_) => Err(Failure::Status(Status::internal("an empty chunk of a blob"))),
    }
}

async fn next_data(parts: &mut Streaming<v1::GetBlobReply>) -> Result<Option<Vec<u8>>, Failure> {
    match next(parts).await? {
        None => Ok(None),
        Some(v1::get_blob_reply::Part::Data(data)) => Ok(Some(data)),
        Some(v1::get_blob_reply::Part::Header(_)) => Err(Failure::Status(Status::internal("a second header"))),
    }
}

/// Converts a permanent error of the coordinator.
fn final_error(what: &'static str, hash: Option<ContentHash>, status: &Status) -> StorageError {
    let message = status.message().to_owned();
    if is_storage_full(status) {
        return StorageError::Full { what, message };
    }
    if is_storage_refused(status) {
        return StorageError::CoordinatorRefused { what, message };
    }
    match (status.code(), hash) {
        (Code::NotFound, Some(hash)) => StorageError::NotFound { hash },
        (Code::Unauthenticated, _) => StorageError::Unauthenticated { what, message },
        // The message may be the coordinator's own or that of the storage behind it.
        (Code::PermissionDenied | Code::FailedPrecondition, _) => StorageError::Denied {
            what,
            message: format!("through the coordinator: {message}"),
        },
        _ => StorageError::Failed {
            what,
            message: format!("through the coordinator: {message}"),
        },
    }
}

/// Runs file operations on a blocking thread.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StorageError> + Send + 'static,
) -> Result<T, StorageError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| StorageError::Failed {
            what: "work on a file",
            message: error.to_string(),
        })?
}

fn check(what: String, expected: ContentHash, found: ContentHash) -> Result<(), StorageError> {
    if expected == found {
        Ok(())
    } else {
        Err(StorageError::Corrupt { what, expected, found })
    }
}

#[async_trait]
impl BlobStore for RemoteBlobs {
    async fn has(&self, hashes: &[ContentHash]) -> Result<Vec<bool>, StorageError> {
        let mut all = Vec::with_capacity(hashes.len());
        for batch in hashes.chunks(MAX_HASHES) {
            let sha256: Vec<String> = batch.iter().map(|hash| hash.to_hex()).collect();
            let present = self
                .retry(LOOK_UP, None, || async {
                    let mut client = self.client.clone();
                    let call = client.has(v1::HasRequest {
                        sha256: sha256.clone(),
                        upload: String::new(),
                    });
                    let answer = tokio::time::timeout(STORE_TIMEOUT, call)
                        .await
                        .map_err(|_| timed_out())??;
                    Ok(answer.into_inner().present)
                })
                .await?;
            if present.len() != batch.len() {
                let message = format!("the response has {} entries for {} hashes", present.len(), batch.len());
                return Err(StorageError::Failed { what: LOOK_UP, message });
            }
            all.extend(present);
        }
        Ok(all)
    }

    async fn put_file(&self, hash: ContentHash, path: &Path) -> Result<(), StorageError> {
        let Some(arrived) = self.retry(LOOK_UP, None, || self.arrived(hash)).await? else {
            return Ok(());
        };
        // Checked before the upload, so that a file that changed after it was hashed is not transferred.
        let (target, name) = (path.to_owned(), path.display().to_string());
        let bytes = blocking(move || {
            let failed = |error| FsError::new("read", &target, error);
            let file = std::fs::File::open(&target).map_err(failed)?;
            let (found, bytes) = ContentHash::of_reader(file).map_err(failed)?;
            check(name, hash, found).map(|()| bytes)
        })
        .await?;
        self.upload(hash, bytes, arrived, |offset| async move {
            let failed = |error| StorageError::from(FsError::new("read", path, error));
            let mut file = tokio::fs::File::open(path).await.map_err(failed)?;
            file.seek(SeekFrom::Start(offset)).await.map_err(failed)?;
            Ok(file)
        })
        .await
    }

    async fn put_bytes(&self, hash: ContentHash, bytes: Bytes) -> Result<(), StorageError> {
        check("bytes to be stored".into(), hash, ContentHash::of(&bytes))?;
        let Some(arrived) = self.retry(LOOK_UP, None, || self.arrived(hash)).await? else {
            return Ok(());
        };
        self.upload(hash, bytes.len() as u64, arrived, |offset| {
            let rest = usize::try_from(offset).ok().and_then(|offset| bytes.get(offset..));
            std::future::ready(Ok(rest.unwrap_or_default()))
        })
        .await
    }

    async fn get_to_file(&self, hash: ContentHash, path: &Path) -> Result<u64, StorageError> {
        // Kept between attempts, so that only the rest is downloaded after a broken connection.
        let partial: Mutex<Option<Partial>> = Mutex::new(None);
        let written = AtomicU64::new(0);
        retry_while_it_progresses(self.budget, "fetch a blob", Some(hash), &written, || async {
            let (mut file, mut received) = match partial.lock().await.take() {
                Some(partial) => (partial.file, partial.received),
                None => {
                    let target = path.to_owned();
                    let file = blocking(move || {
                        fsutil::temporary_file(fsutil::folder_of(&target), 0o666)
                            .map_err(|error| FsError::new("write", target, error).into())
                    });
                    (file.await?, 0)
                }
            };
            let opened = self.open(hash, received).await;
            let (header, mut parts) = match opened {
                Ok(opened) => opened,
                Err(failure) => {
                    *partial.lock().await = Some(Partial { file, received });
                    return Err(failure);
                }
            };
            if header.offset != received {
                let target = path.to_owned();
                file = blocking(move || match truncate(&mut file) {
                    Ok(()) => Ok(file),
                    Err(error) => Err(FsError::new("write", target, error).into()),
                })
                .await?;
                received = 0;
            }
            loop {
                let data = match next_data(&mut parts).await {
                    Ok(Some(data)) => data,
                    Ok(None) => break,
                    Err(failure) => {
                        *partial.lock().await = Some(Partial { file, received });
                        return Err(failure);
                    }
                };
                received = received.saturating_add(data.len() as u64);
                let target = path.to_owned();
                file = blocking(move || {
                    let result = file.as_file_mut().write_all(&data);
                    result
                        .map(|()| file)
                        .map_err(|error| FsError::new("write", target, error).into())
                })
                .await?;
                written.store(received, Ordering::Relaxed);
            }
            if received != header.bytes {
                // A download with more bytes than announced cannot be continued.
                if received < header.bytes {
                    *partial.lock().await = Some(Partial { file, received });
                }
                return Err(cut_short());
            }
            let (target, name) = (path.to_owned(), format!("blob {hash}"));
            blocking(move || {
                let failed = |error| FsError::new("write", &target, error);
                file.as_file().sync_all().map_err(failed)?;
                let reader = file.reopen().map_err(failed)?;
                let (found, _) = ContentHash::of_reader(reader).map_err(failed)?;
                check(name, hash, found)?;
                Ok(fsutil::publish(file, &target)?)
            })
            .await?;
            Ok(received)
        })
        .await
    }

    async fn get_bytes(&self, hash: ContentHash, limit: u64) -> Result<Bytes, StorageError> {
        let all = self
            .retry("fetch a blob", Some(hash), || async {
                let (v1::BlobHeader { bytes, .. }, mut parts) = self.open(hash, 0).await?;
                if bytes > limit {
                    return Err(Failure::Final(StorageError::TooLarge { hash, bytes, limit }));
                }
                let mut all = Vec::new();
                while let Some(data) = next_data(&mut parts).await? {
                    // Extra bytes are dropped; the hash check then fails.
                    let room = usize::try_from(bytes - all.len() as u64).unwrap_or(usize::MAX);
                    all.extend_from_slice(&data[..data.len().min(room)]);
                }
                if all.len() as u64 != bytes {
                    return Err(cut_short());
                }
                Ok(all)
            })
            .await?;
        check(format!("blob {hash}"), hash, ContentHash::of(&all))?;
        Ok(all.into())
    }

    async fn delete(&self, _: ContentHash) -> Result<(), StorageError> {
        // Only the coordinator knows which blobs are still needed.
        Err(StorageError::Unsupported {
            what: "delete blobs through the coordinator",
        })
    }

    async fn list(&self) -> Result<Vec<BlobInfo>, StorageError> {
        Err(StorageError::Unsupported {
            what: "list blobs through the coordinator",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RETRY_LATER;

    /// Calls that fail this many times, each after `more` further bytes. Returns how often it was called.
    async fn calls(failures: u32, more: u64) -> (Result<(), StorageError>, u32) {
        let (received, mut count) = (AtomicU64::new(0), 0);
        let result = retry_while_it_progresses(Duration::from_secs(1), "fetch a blob", None, &received, || {
            count += 1;
            received.fetch_add(more, Ordering::Relaxed);
            let result = match count > failures {
                true => Ok(()),
                false => Err(Failure::Status(Status::unavailable("lost"))),
            };
            async { result }
        })
        .await;
        (result, count)
    }

    #[test]
    fn a_large_blob_has_time_to_reach_the_coordinators_storage_over_a_slow_line() {
        // 24 GiB at a quarter of 1.5 Mbit/s.
        let bytes = 24 << 30;
        assert!(store_timeout(bytes) >= Duration::from_secs(bytes / (1_500_000 / 8 / 4)));
        assert_eq!(store_timeout(0), STORE_TIMEOUT);
    }

    /// Coordinators of older versions do not know `received`, and take the rest of a blob for the whole.
    #[test]
    fn an_upload_to_an_older_coordinator_starts_over() {
        use prost::Message;
        // `present` alone: field 1, packed, one entry.
        let reply = v1::HasReply::decode([0x0a, 1, 0].as_slice()).unwrap();
        assert_eq!((reply.present, reply.received), (vec![false], 0));
        let answer = Status::invalid_argument("data: 5 bytes received, 9 were announced; send the blob again");
        assert!(is_unusable_offset(&answer) && !is_unusable_offset(&Status::unavailable("")));
        // An upload from the beginning is the message of older clients, with one field that older coordinators skip.
        let header = v1::BlobHeader {
            sha256: "a".to_owned(),
            bytes: 9,
            offset: 0,
            upload: "u1".to_owned(),
        };
        assert_eq!(header.encode_to_vec(), b"\x0a\x01a\x10\x09\x22\x02u1");
    }

    /// A worker decides by these errors whether a failure counts against its job.
    #[test]
    fn an_unauthenticated_caller_is_another_error_than_a_refused_blob() {
        let error = |code| final_error("store a blob", None, &Status::new(code, "no"));
        assert!(matches!(
            error(Code::Unauthenticated),
            StorageError::Unauthenticated { .. }
        ));
        assert!(matches!(error(Code::PermissionDenied), StorageError::Denied { .. }));
        let StorageError::Failed { message, .. } = error(Code::ResourceExhausted) else {
            panic!("a limit of the coordinator");
        };
        assert_eq!(message, "through the coordinator: no");
        // Too many calls at once: the same call may succeed soon.
        let mut busy = Status::resource_exhausted("no");
        assert!(!is_retryable(&busy));
        busy.metadata_mut().insert(RETRY_HEADER, RETRY_LATER.parse().unwrap());
        assert!(is_retryable(&busy));
    }

    /// A broken connection has the code `internal` too. Before, the refusal counted as an outage, and the job was tried again for ever.
    #[test]
    fn a_permanent_error_of_the_coordinators_storage_is_not_an_outage() {
        let mut refused = Status::internal("400 Bad Request");
        assert!(is_retryable(&refused));
        refused
            .metadata_mut()
            .insert(RETRY_HEADER, RETRY_NEVER.parse().unwrap());
        assert!(!is_retryable(&refused));
        let StorageError::Failed { message, .. } = final_error("store a blob", None, &refused) else {
            panic!("a refusal");
        };
        assert_eq!(message, "through the coordinator: 400 Bad Request");
    }

    /// Every other blob would fail as well, so the job is not to blame.
    #[test]
    fn a_storage_that_refuses_the_coordinator_is_neither_an_outage_nor_a_refusal() {
        let mut status = Status::unavailable("403 Forbidden");
        assert!(is_retryable(&status));
        status
            .metadata_mut()
            .insert(crate::STORAGE_HEADER, crate::STORAGE_REFUSED.parse().unwrap());
        assert!(!is_retryable(&status));
        let error = final_error("store a blob", None, &status);
        assert!(matches!(error, StorageError::CoordinatorRefused { .. }) && error.is_refusal());
        assert_eq!(error.to_string(), "the coordinator cannot store a blob: 403 Forbidden");
    }

    #[tokio::test]
    async fn a_download_that_progresses_is_continued_however_often_it_breaks() {
        let (result, count) = calls(6, 1).await;
        assert!(result.is_ok() && count == 7, "{result:?} {count}");
        let (result, count) = calls(u32::MAX, 0).await;
        assert!(matches!(result, Err(StorageError::Unavailable { .. })), "{result:?}");
        assert!(count < 7, "the delays double, and a second is over: {count}");
    }
}
