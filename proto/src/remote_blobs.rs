//! The coordinator's object storage as a [`BlobStore`], for whoever cannot reach the storage itself.
//!
//! A call that fails because the coordinator is away, restarts, or has trouble with its own storage is repeated for a
//! while, so that an upload survives both. Whatever comes is checked against its hash before anybody sees it.

use crate::client::{AuthChannel, Clients};
use crate::v1;
use crate::v1::blobs_client::BlobsClient;
use crate::{BLOB_CHUNK_BYTES, STORAGE_HEADER};
use aitk_common::fsutil::{self, FsError};
use aitk_common::hash::ContentHash;
use aitk_common::storage::{BlobInfo, BlobStore, StorageError};
use async_trait::async_trait;
use bytes::Bytes;
use std::future::Future;
use std::io::{Seek, Write};
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::{Mutex, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

/// Hashes in one question.
const MOST_HASHES: usize = 1000;
/// Pieces between the file and the socket: 4 MiB.
const WIRE_BUFFER: usize = 4;
/// A coordinator that takes or sends nothing for so long is away.
const SILENCE: Duration = Duration::from_secs(60);
/// After the last byte the coordinator puts the blob into its own storage, which may be far away.
const STORE_TIMEOUT: Duration = Duration::from_secs(600);
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// How long a failing call is repeated, unless said otherwise.
pub const DEFAULT_BUDGET: Duration = Duration::from_secs(180);

/// Blobs through the coordinator. Cheap to clone.
#[derive(Clone, Debug)]
pub struct RemoteBlobs {
    client: BlobsClient<AuthChannel>,
    budget: Duration,
}

/// How one try of a call failed.
enum Failure {
    /// The coordinator, or the way to it.
    Status(Status),
    /// Something that another try does not change.
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

fn silent() -> Failure {
    Failure::Status(Status::deadline_exceeded("the coordinator did not answer in time"))
}

fn worth_another_try(status: &Status) -> bool {
    // A connection that breaks shows as Unknown, Cancelled or Internal, depending on where it broke.
    matches!(
        status.code(),
        Code::Unavailable | Code::DeadlineExceeded | Code::Unknown | Code::Cancelled | Code::Aborted | Code::Internal
    )
}

impl RemoteBlobs {
    /// Blobs through this coordinator.
    #[must_use]
    pub fn new(clients: &Clients) -> Self {
        Self::with_budget(clients, DEFAULT_BUDGET)
    }

    /// [`Self::new`] with another patience.
    #[must_use]
    pub fn with_budget(clients: &Clients, budget: Duration) -> Self {
        Self {
            client: clients.blobs.clone(),
            budget,
        }
    }

    /// Repeats a call until it succeeds, fails for good, or the budget is used up.
    async fn repeat<T, F>(
        &self,
        what: &'static str,
        hash: Option<ContentHash>,
        mut call: impl FnMut() -> F,
    ) -> Result<T, StorageError>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let begin = Instant::now();
        let mut wait = FIRST_WAIT;
        loop {
            let status = match call().await {
                Ok(value) => return Ok(value),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Status(status)) => status,
            };
            if !worth_another_try(&status) {
                return Err(refused(what, hash, &status));
            }
            if begin.elapsed() + wait >= self.budget {
                let message = format!("through the coordinator: {}", status.message());
                return Err(StorageError::Unavailable {
                    what,
                    after: begin.elapsed(),
                    message,
                });
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(LONGEST_WAIT);
        }
    }

    async fn is_there(&self, hash: ContentHash) -> Result<bool, StorageError> {
        Ok(self.has(&[hash]).await?.first() == Some(&true))
    }

    /// Sends what the reader gives. The header says how much that is.
    async fn send(
        &self,
        hash: ContentHash,
        bytes: u64,
        mut from: impl AsyncRead + Unpin + Send,
    ) -> Result<(), Failure> {
        use v1::put_blob_request::Part;
        let (sender, receiver) = mpsc::channel(WIRE_BUFFER);
        let mut client = self.client.clone();
        let call = async move { client.put(ReceiverStream::new(receiver)).await };
        let feed = async move {
            let header = v1::BlobHeader {
                sha256: hash.to_hex(),
                bytes,
                offset: 0,
            };
            let mut part = Part::Header(header);
            loop {
                let message = v1::PutBlobRequest { part: Some(part) };
                match tokio::time::timeout(SILENCE, sender.send(message)).await {
                    Ok(Ok(())) => {}
                    // The call has ended; its answer says how.
                    Ok(Err(_)) => return Ok(()),
                    Err(_) => return Err(silent()),
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
        match tokio::time::timeout(STORE_TIMEOUT, call).await {
            Ok(answer) => answer.map(|_| ()).map_err(Failure::Status),
            Err(_) => Err(silent()),
        }
    }

    /// The beginning of a download after so many bytes of the blob: its size, where the bytes begin (at 0, if the
    /// coordinator knows of no other way), and where they come from.
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
        // The coordinator fetches the blob from its own storage before it answers.
        let answer = tokio::time::timeout(STORE_TIMEOUT, client.get(request))
            .await
            .map_err(|_| silent())?;
        let mut parts = answer?.into_inner();
        match next(&mut parts).await? {
            Some(v1::get_blob_reply::Part::Header(header)) => Ok((header, parts)),
            _ => Err(Failure::Status(Status::internal("a blob without a header"))),
        }
    }
}

/// What came of a blob before the connection broke.
struct Partial {
    file: tempfile::NamedTempFile,
    received: u64,
}

/// Empties a file that was partly written.
fn begin_again(file: &mut tempfile::NamedTempFile) -> std::io::Result<()> {
    file.as_file().set_len(0)?;
    file.as_file_mut().rewind()
}

async fn next(parts: &mut Streaming<v1::GetBlobReply>) -> Result<Option<v1::get_blob_reply::Part>, Failure> {
    let message = tokio::time::timeout(SILENCE, parts.message())
        .await
        .map_err(|_| silent())??;
    match message {
        None => Ok(None),
        Some(v1::GetBlobReply { part: Some(part) }) => Ok(Some(part)),
        Some(_) => Err(Failure::Status(Status::internal("an empty piece of a blob"))),
    }
}

async fn next_data(parts: &mut Streaming<v1::GetBlobReply>) -> Result<Option<Vec<u8>>, Failure> {
    match next(parts).await? {
        None => Ok(None),
        Some(v1::get_blob_reply::Part::Data(data)) => Ok(Some(data)),
        Some(v1::get_blob_reply::Part::Header(_)) => Err(Failure::Status(Status::internal("a second header"))),
    }
}

/// What a final answer of the coordinator means.
fn refused(what: &'static str, hash: Option<ContentHash>, status: &Status) -> StorageError {
    let message = status.message().to_owned();
    if status.code() == Code::ResourceExhausted && status.metadata().contains_key(STORAGE_HEADER) {
        return StorageError::Full { what, message };
    }
    match (status.code(), hash) {
        (Code::NotFound, Some(hash)) => StorageError::NotFound { hash },
        (Code::Unauthenticated | Code::PermissionDenied | Code::FailedPrecondition, _) => {
            StorageError::Denied { what, message }
        }
        _ => StorageError::Failed { what, message },
    }
}

/// Work on files, off the threads that serve sockets.
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
        const WHAT: &str = "look for blobs";
        let mut all = Vec::with_capacity(hashes.len());
        for some in hashes.chunks(MOST_HASHES) {
            let sha256: Vec<String> = some.iter().map(|hash| hash.to_hex()).collect();
            let present = self
                .repeat(WHAT, None, || async {
                    let mut client = self.client.clone();
                    let call = client.has(v1::HasRequest { sha256: sha256.clone() });
                    let answer = tokio::time::timeout(STORE_TIMEOUT, call)
                        .await
                        .map_err(|_| silent())??;
                    Ok(answer.into_inner().present)
                })
                .await?;
            if present.len() != some.len() {
                let message = format!("{} answers to {} questions", present.len(), some.len());
                return Err(StorageError::Failed { what: WHAT, message });
            }
            all.extend(present);
        }
        Ok(all)
    }

    async fn put_file(&self, hash: ContentHash, path: &Path) -> Result<(), StorageError> {
        if self.is_there(hash).await? {
            return Ok(());
        }
        // Checked here, before it is sent: a file that changed since it was hashed costs no transfer.
        let (target, name) = (path.to_owned(), path.display().to_string());
        let bytes = blocking(move || {
            let failed = |error| FsError::new("read", &target, error);
            let file = std::fs::File::open(&target).map_err(failed)?;
            let (found, bytes) = ContentHash::of_reader(file).map_err(failed)?;
            check(name, hash, found).map(|()| bytes)
        })
        .await?;
        self.repeat("store a blob", Some(hash), || async {
            let file = tokio::fs::File::open(path).await;
            let file = file.map_err(|error| StorageError::from(FsError::new("read", path, error)))?;
            self.send(hash, bytes, file).await
        })
        .await
    }

    async fn put_bytes(&self, hash: ContentHash, bytes: Bytes) -> Result<(), StorageError> {
        check("bytes to be stored".into(), hash, ContentHash::of(&bytes))?;
        if self.is_there(hash).await? {
            return Ok(());
        }
        self.repeat("store a blob", Some(hash), || {
            self.send(hash, bytes.len() as u64, &bytes[..])
        })
        .await
    }

    async fn get_to_file(&self, hash: ContentHash, path: &Path) -> Result<u64, StorageError> {
        // Kept from try to try: after a break only the rest is fetched.
        let partial: Mutex<Option<Partial>> = Mutex::new(None);
        self.repeat("fetch a blob", Some(hash), || async {
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
                file = blocking(move || match begin_again(&mut file) {
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
                    let written = file.as_file_mut().write_all(&data);
                    written
                        .map(|()| file)
                        .map_err(|error| FsError::new("write", target, error).into())
                })
                .await?;
            }
            if received != header.bytes {
                // More than announced is not the beginning of anything.
                if received < header.bytes {
                    *partial.lock().await = Some(Partial { file, received });
                }
                return Err(Failure::Status(Status::unavailable("the download was cut short")));
            }
            let (target, name) = (path.to_owned(), format!("blob {hash}"));
            blocking(move || {
                let failed = |error| FsError::new("write", &target, error);
                file.as_file().sync_all().map_err(failed)?;
                let again = file.reopen().map_err(failed)?;
                let (found, _) = ContentHash::of_reader(again).map_err(failed)?;
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
            .repeat("fetch a blob", Some(hash), || async {
                let (v1::BlobHeader { bytes, .. }, mut parts) = self.open(hash, 0).await?;
                if bytes > limit {
                    return Err(Failure::Final(StorageError::TooLarge { hash, bytes, limit }));
                }
                let mut all = Vec::new();
                while let Some(data) = next_data(&mut parts).await? {
                    // What is more than announced is not kept; the hash would not be right either.
                    let room = usize::try_from(bytes - all.len() as u64).unwrap_or(usize::MAX);
                    all.extend_from_slice(&data[..data.len().min(room)]);
                }
                if all.len() as u64 != bytes {
                    return Err(Failure::Status(Status::unavailable("the download was cut short")));
                }
                Ok(all)
            })
            .await?;
        check(format!("blob {hash}"), hash, ContentHash::of(&all))?;
        Ok(all.into())
    }

    async fn delete(&self, _: ContentHash) -> Result<(), StorageError> {
        // Only the coordinator knows what is still needed.
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
