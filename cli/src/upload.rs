//! Uploads local inputs to the coordinator's storage. Files are hashed here; content that is stored already is not
//! sent.

use crate::api::{Api, is_busy, status_failure};
use crate::download::disk_failure;
use crate::exit::Exit;
use crate::failure::Failure;
use crate::output::Ui;
use crate::output::format::printable_lines;
use aitk_common::fsutil::regular;
use aitk_common::hash::ContentHash;
use aitk_common::storage::StorageError;
use aitk_common::storage::snapshot::{ScannedSnapshot, scan};
use aitk_proto::v1::{self, put_blob_request::Part};
use aitk_proto::{BLOB_CHUNK_BYTES, is_unusable_offset, upload_name};
use bytes::Bytes;
use futures::{StreamExt, stream};
use std::collections::{BTreeMap, BTreeSet};
use std::io::SeekFrom;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncSeekExt};
use tokio_stream::wrappers::ReceiverStream;

/// Number of hashes in one `Has` request; the protocol allows 1,000.
const HAS_BATCH: usize = 1000;
/// The largest number of concurrent uploads, enough to use the bandwidth with small files.
const MAX_CONCURRENT_FILES: usize = 8;
/// The largest number of concurrent uploads of large files. Each has half of a slow line then, which the coordinator would otherwise end as
/// too slow, and a broken connection costs two of them.
const MAX_CONCURRENT_LARGE_FILES: usize = 2;
/// The size from which a file is large, in bytes.
const LARGE_FILE_BYTES: u64 = 8 << 20;
/// Number of pieces read ahead per file: 4 MiB.
const READ_AHEAD: usize = 16;
/// How often an upload is attempted that gets no further: with half a minute of pauses, in which a coordinator restarts or another one becomes the leader.
const MAX_ATTEMPTS: u32 = 8;
/// The pause after the first attempt; it doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// How long the coordinator may take to say how much of an upload has arrived.
const ARRIVED_TIMEOUT: Duration = Duration::from_secs(30);
/// How often the progress bar is updated.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// An input of a config that is in storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagedInput {
    /// Its path as the config has it.
    pub config_path: String,
    /// The id of its snapshot.
    pub snapshot: ContentHash,
    /// Number of files.
    pub files: u64,
    /// Size of the files in bytes.
    pub bytes: u64,
    /// Bytes that were sent. Content that two inputs share is counted for the first.
    pub sent_bytes: u64,
}

/// Hashes every input, with a progress bar.
///
/// # Errors
/// When a file cannot be read, or its name is not portable.
pub async fn hash_inputs(
    ui: &Ui,
    inputs: &BTreeMap<String, PathBuf>,
) -> Result<Vec<(String, ScannedSnapshot)>, Failure> {
    let mut staged = Vec::new();
    for (config_path, path) in inputs {
        let mut indicator = ui.byte_progress("hashing", 0);
        let (done, total) = (AtomicU64::new(0), AtomicU64::new(0));
        let counters = std::sync::Arc::new((done, total));
        let (counted, scanned_path) = (counters.clone(), path.clone());
        let mut scanning = tokio::task::spawn_blocking(move || {
            scan(&scanned_path, &mut |progress| {
                counted.0.store(progress.bytes, Ordering::Relaxed);
                counted.1.store(progress.bytes_total, Ordering::Relaxed);
            })
        });
        let scanned = loop {
            tokio::select! {
                scanned = &mut scanning => break scanned,
                () = tokio::time::sleep(PROGRESS_INTERVAL) => {
                    indicator.set(counters.0.load(Ordering::Relaxed), counters.1.load(Ordering::Relaxed));
                }
            }
        };
        let scanned = scanned.map_err(|error| Failure::failed(format!("{}: {error}", path.display())))?;
        let scanned = scanned.map_err(|error| storage_failure(path, error))?;
        if scanned.snapshot.files.is_empty() {
            return Err(Failure::failed(format!("{} has no files", path.display()))
                .hint("files whose names begin with a dot, and cached latents, are not counted"));
        }
        staged.push((config_path.clone(), scanned));
    }
    Ok(staged)
}

fn storage_failure(path: &Path, error: StorageError) -> Failure {
    match error {
        StorageError::Local(error) => disk_failure(&error),
        other => Failure::failed(format!("{}: {other}", path.display())),
    }
}

/// The source of a blob.
enum Source {
    File(PathBuf),
    Bytes(Bytes),
}

/// The blobs that the coordinator does not have yet.
pub struct Upload {
    staged: Vec<StagedInput>,
    missing: Vec<(ContentHash, u64, Source)>,
}

impl Upload {
    /// Asks the coordinator which blobs it does not have yet.
    ///
    /// # Errors
    /// When the call fails.
    pub async fn plan(api: &Api, ui: &Ui, inputs: Vec<(String, ScannedSnapshot)>) -> Result<Self, Failure> {
        let mut all = BTreeSet::new();
        for (_, scanned) in &inputs {
            all.extend(scanned.snapshot.files.iter().map(|file| file.sha256));
            all.insert(scanned.snapshot.id());
        }
        let all: Vec<ContentHash> = all.into_iter().collect();
        let _spinner = (ui.has_bars() && all.len() > HAS_BATCH).then(|| ui.spinner("checking what is stored already"));
        let mut absent = BTreeSet::new();
        for batch in all.chunks(HAS_BATCH) {
            let request = v1::HasRequest {
                sha256: batch.iter().map(|hash| hash.to_hex()).collect(),
                ..Default::default()
            };
            let reply = find_present(api, request).await?;
            if reply.present.len() != batch.len() {
                return Err(Failure::failed("the coordinator's answer does not cover every file"));
            }
            absent.extend(
                batch
                    .iter()
                    .zip(reply.present)
                    .filter(|(_, there)| !there)
                    .map(|(hash, _)| *hash),
            );
        }
        let mut upload = Self {
            staged: Vec::new(),
            missing: Vec::new(),
        };
        // The list of a snapshot is sent after its files, because a stored list means that its files are stored.
        let mut lists = Vec::new();
        for (config_path, scanned) in inputs {
            let snapshot = &scanned.snapshot;
            let mut sent_bytes = 0;
            for file in &snapshot.files {
                if absent.remove(&file.sha256)
                    && let Some(path) = scanned.sources.get(&file.sha256)
                {
                    sent_bytes += file.bytes;
                    upload
                        .missing
                        .push((file.sha256, file.bytes, Source::File(path.clone())));
                }
            }
            let (id, list) = (snapshot.id(), Bytes::from(snapshot.to_bytes()));
            if absent.remove(&id) {
                lists.push((id, list.len() as u64, Source::Bytes(list)));
            }
            upload.staged.push(StagedInput {
                config_path,
                snapshot: id,
                files: snapshot.files.len() as u64,
                bytes: snapshot.total_bytes(),
                sent_bytes,
            });
        }
        upload.missing.extend(lists);
        Ok(upload)
    }

    /// Returns the bytes that have to be sent.
    #[must_use]
    pub fn missing_bytes(&self) -> u64 {
        self.missing.iter().map(|(_, bytes, _)| bytes).sum()
    }

    /// Sends the blobs, with a progress bar.
    ///
    /// # Errors
    /// When a file has changed since it was hashed, the connection breaks too often, or the store refuses a blob.
    pub async fn send(self, api: &Api, ui: &Ui) -> Result<Vec<StagedInput>, Failure> {
        let total = self.missing_bytes();
        if self.missing.is_empty() {
            return Ok(self.staged);
        }
        let mut indicator = ui.byte_progress("uploading", total);
        let sent = AtomicI64::new(0);
        let (lists, files): (Vec<_>, Vec<_>) = self
            .missing
            .iter()
            .partition(|(_, _, source)| matches!(source, Source::Bytes(_)));
        let (large, small): (Vec<_>, Vec<_>) = files.into_iter().partition(|(_, bytes, _)| *bytes >= LARGE_FILE_BYTES);
        for (group, max_concurrent) in [
            (small, MAX_CONCURRENT_FILES),
            (large, MAX_CONCURRENT_LARGE_FILES),
            (lists, MAX_CONCURRENT_FILES),
        ] {
            let sends = group
                .into_iter()
                .map(|(hash, bytes, source)| send_one(api, *hash, *bytes, source, &sent));
            let mut sends = stream::iter(sends).buffer_unordered(max_concurrent);
            loop {
                tokio::select! {
                    next = sends.next() => match next {
                        Some(done) => done?,
                        None => break,
                    },
                    () = tokio::time::sleep(PROGRESS_INTERVAL) => {}
                }
                indicator.set(u64::try_from(sent.load(Ordering::Relaxed)).unwrap_or(0), total);
            }
        }
        Ok(self.staged)
    }
}

/// Asks which blobs the coordinator has, and asks again while it is busy.
async fn find_present(api: &Api, request: v1::HasRequest) -> Result<v1::HasReply, Failure> {
    let mut retries = Retries::new();
    loop {
        let mut blobs = api.clients().blobs;
        let status = match blobs.has(request.clone()).await {
            Ok(reply) => return Ok(reply.into_inner()),
            Err(status) => status,
        };
        let failure = status_failure(api.server(), &status);
        let pause = is_busy(&status).then(|| retries.next_pause()).flatten();
        let Some(pause) = pause else {
            return Err(failure);
        };
        api.show_wait(&failure);
        tokio::time::sleep(pause).await;
    }
}

/// When an upload that broke is attempted again.
struct Retries {
    /// Attempts since the upload last got further.
    attempts: u32,
    next_pause: Duration,
    /// The most bytes that have arrived so far.
    furthest: u64,
}

impl Retries {
    fn new() -> Self {
        Self {
            attempts: 1,
            next_pause: FIRST_PAUSE,
            furthest: 0,
        }
    }

    /// The pause before the next attempt; `None` if there is none.
    fn next_pause(&mut self) -> Option<Duration> {
        let pause = self.next_pause;
        self.next_pause *= 2;
        self.attempts += 1;
        (self.attempts <= MAX_ATTEMPTS).then_some(pause)
    }

    /// Takes note of how many bytes have arrived. An upload that gets further than ever before is continued however often it breaks.
    fn arrived(&mut self, bytes: u64) {
        if bytes > self.furthest {
            *self = Self {
                furthest: bytes,
                ..Self::new()
            };
        }
    }
}

async fn send_one(api: &Api, hash: ContentHash, bytes: u64, source: &Source, sent: &AtomicI64) -> Result<(), Failure> {
    let (mut retries, mut offset) = (Retries::new(), 0);
    loop {
        let sent_in_attempt = AtomicI64::new(0);
        match Box::pin(try_send(api, hash, (offset, bytes), source, &sent_in_attempt, sent)).await {
            // It has lost what arrived, or another coordinator has become the leader.
            Err(SendError::UnusableOffset) => {
                sent.fetch_sub(sent_in_attempt.load(Ordering::Relaxed), Ordering::Relaxed);
                offset = 0;
            }
            Err(SendError::Failure(failure)) if failure.exit == Exit::Unreachable => {
                let Some(pause) = retries.next_pause() else {
                    return Err(failure);
                };
                sent.fetch_sub(sent_in_attempt.load(Ordering::Relaxed), Ordering::Relaxed);
                tracing::debug!(%failure, attempts = retries.attempts, "upload broke off");
                tokio::time::sleep(pause).await;
                offset = arrived(api, hash).await.min(bytes);
                retries.arrived(offset);
            }
            Err(SendError::Failure(failure)) => return Err(failure),
            Ok(()) => return Ok(()),
        }
    }
}

/// Why a blob was not sent.
enum SendError {
    /// The coordinator cannot continue the upload.
    UnusableOffset,
    Failure(Failure),
}

impl From<Failure> for SendError {
    fn from(failure: Failure) -> Self {
        Self::Failure(failure)
    }
}

/// How many bytes of an upload that broke have arrived; 0 if the coordinator does not say. A blob that is stored is noticed when it is sent.
async fn arrived(api: &Api, hash: ContentHash) -> u64 {
    let request = v1::HasRequest {
        sha256: vec![hash.to_hex()],
        upload: upload_name().to_owned(),
    };
    let mut blobs = api.clients().blobs;
    match tokio::time::timeout(ARRIVED_TIMEOUT, blobs.has(request)).await {
        Ok(Ok(answer)) => answer.into_inner().received,
        Ok(Err(_)) | Err(_) => 0,
    }
}

/// Sends a blob of `bytes` bytes from `offset` on. Bytes before it count as sent.
async fn try_send(
    api: &Api,
    hash: ContentHash,
    (offset, bytes): (u64, u64),
    source: &Source,
    sent_in_attempt: &AtomicI64,
    sent: &AtomicI64,
) -> Result<(), SendError> {
    let (pieces, requests) = tokio::sync::mpsc::channel(READ_AHEAD);
    let header = v1::PutBlobRequest {
        part: Some(Part::Header(v1::BlobHeader {
            sha256: hash.to_hex(),
            bytes,
            offset,
            upload: upload_name().to_owned(),
        })),
    };
    let count = |length: u64| {
        let length = i64::try_from(length).unwrap_or(0);
        sent_in_attempt.fetch_add(length, Ordering::Relaxed);
        sent.fetch_add(length, Ordering::Relaxed);
    };
    count(offset);
    let mut blobs = api.clients().blobs;
    let call = blobs.put(ReceiverStream::new(requests));
    let send_pieces = send_pieces(header, source, offset, pieces, count);
    let (pieces_sent, put) = futures::join!(send_pieces, call);
    pieces_sent?;
    match put {
        Ok(_) => Ok(()),
        Err(status) if offset > 0 && is_unusable_offset(&status) => Err(SendError::UnusableOffset),
        Err(status) if status.code() == tonic::Code::InvalidArgument => {
            let name = match source {
                Source::File(path) => path.display().to_string(),
                Source::Bytes(_) => "the list of files".to_owned(),
            };
            let reason = printable_lines(status.message());
            let failure = Failure::failed(format!("{name} was refused: {reason}"))
                .hint("the file may have changed during the upload; submit again");
            Err(failure.into())
        }
        Err(status) => {
            let failure = status_failure(api.server(), &status);
            if is_busy(&status) {
                api.show_wait(&failure);
            }
            Err(failure.into())
        }
    }
}

/// Writes the pieces of a blob, from `offset` on, into a call. The function owns `pieces`, so the stream ends when it returns. After an
/// error the stream is shorter than announced, and the blob is not stored.
async fn send_pieces(
    header: v1::PutBlobRequest,
    source: &Source,
    offset: u64,
    pieces: tokio::sync::mpsc::Sender<v1::PutBlobRequest>,
    count: impl Fn(u64),
) -> Result<(), Failure> {
    // A closed channel means that the call has ended; its status has the error.
    if pieces.send(header).await.is_err() {
        return Ok(());
    }
    match source {
        Source::Bytes(all) => {
            let rest = usize::try_from(offset).ok().and_then(|offset| all.get(offset..));
            for piece in rest.unwrap_or_default().chunks(BLOB_CHUNK_BYTES) {
                let part = v1::PutBlobRequest {
                    part: Some(Part::Data(piece.to_vec())),
                };
                if pieces.send(part).await.is_err() {
                    return Ok(());
                }
                count(piece.len() as u64);
            }
        }
        Source::File(path) => {
            let unreadable = |error: std::io::Error| Failure::file("read", path, &error);
            let own = path.clone();
            // `regular::open` refuses a path that has become a pipe since it was hashed.
            let opened = tokio::task::spawn_blocking(move || regular::open(&own)).await;
            let opened = opened.unwrap_or_else(|error| Err(std::io::Error::other(error)));
            let mut file = tokio::fs::File::from_std(opened.map_err(unreadable)?.0);
            file.seek(SeekFrom::Start(offset)).await.map_err(unreadable)?;
            loop {
                let mut piece = Vec::new();
                (&mut file)
                    .take(BLOB_CHUNK_BYTES as u64)
                    .read_to_end(&mut piece)
                    .await
                    .map_err(unreadable)?;
                let length = piece.len() as u64;
                if length == 0 {
                    break;
                }
                let part = v1::PutBlobRequest {
                    part: Some(Part::Data(piece)),
                };
                if pieces.send(part).await.is_err() {
                    return Ok(());
                }
                count(length);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_begin_anew_only_for_an_upload_that_gets_further_than_ever() {
        let mut retries = Retries::new();
        assert_eq!(retries.next_pause(), Some(FIRST_PAUSE));
        retries.arrived(5);
        assert_eq!(retries.next_pause(), Some(FIRST_PAUSE));
        // It was sent from the beginning again, and broke at the same place.
        let mut pauses = 1;
        loop {
            retries.arrived(0);
            retries.arrived(5);
            match retries.next_pause() {
                Some(_) => pauses += 1,
                None => break,
            }
        }
        assert_eq!(pauses, MAX_ATTEMPTS - 1);
    }
}
