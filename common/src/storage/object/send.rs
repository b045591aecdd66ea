//! Uploads.

use super::ObjectBlobs;
use crate::fsutil::{self, FsError};
use crate::hash::ContentHash;
use crate::storage::{StorageError, blocking};
use bytes::Bytes;
use futures::stream::{FuturesUnordered, StreamExt};
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path as Key;
use object_store::{ObjectStoreExt, PutPayload};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const WHAT: &str = "store a blob";
/// S3 accepts 10,000 parts. Larger files get larger parts.
const MAX_PARTS: u64 = 9_000;
/// The timeout for completing a multipart upload: the server puts its parts together.
const COMPLETION_TIMEOUT: Duration = Duration::from_secs(180);
/// The timeout for aborting a multipart upload.
const ABORT_TIMEOUT: Duration = Duration::from_secs(10);

impl ObjectBlobs {
    pub(super) async fn send_file(&self, hash: ContentHash, path: &Path) -> Result<(), StorageError> {
        let from = path.to_owned();
        if let Some(folder) = &self.folder {
            let target = Self::file(folder, hash);
            return blocking(WHAT, move || {
                let source = File::open(&from).map_err(|error| FsError::new("read", &from, error))?;
                write_blob(&target, hash, &from.display().to_string(), source)
            })
            .await;
        }
        let (file, length) = blocking(WHAT, move || open(&from)).await?;
        match &self.multipart {
            Some(multipart) if length > self.part_bytes as u64 => {
                self.send_parts(multipart, hash, path, file, length).await
            }
            _ => {
                let (_, bytes) = read_part(path, file, length).await?;
                self.send_bytes(hash, bytes).await
            }
        }
    }

    pub(super) async fn send_bytes(&self, hash: ContentHash, bytes: Bytes) -> Result<(), StorageError> {
        check_hash(hash, ContentHash::of(&bytes), "the bytes to be stored")?;
        if let Some(folder) = &self.folder {
            let target = Self::file(folder, hash);
            return blocking(WHAT, move || {
                write_blob(&target, hash, "the bytes to be stored", bytes.as_ref())
            })
            .await;
        }
        let key = self.key(hash);
        let limit = self.body_timeout(bytes.len());
        let payload = PutPayload::from(bytes);
        // Acquired before the timeouts start, because waiting for a permit is not a storage problem.
        let _permit = self.transfers.acquire().await;
        let attempt = || self.store.put(&key, payload.clone());
        self.retry
            .run(WHAT, limit, attempt)
            .await?
            .ok_or_else(|| missing_bucket(&self.address))?;
        Ok(())
    }

    /// Uploads a large file in parts. The object appears when all parts are uploaded and the hash is correct.
    async fn send_parts(
        &self,
        multipart: &Arc<dyn MultipartStore>,
        hash: ContentHash,
        path: &Path,
        mut file: File,
        length: u64,
    ) -> Result<(), StorageError> {
        let key = self.key(hash);
        let create = || multipart.create_multipart(&key);
        let id = self
            .retry
            .run(WHAT, self.quick_timeout, create)
            .await?
            .ok_or_else(|| missing_bucket(&self.address))?;
        let upload = Upload {
            store: Arc::clone(multipart),
            key: key.clone(),
            id: Some(id.clone()),
        };

        let part_bytes = (self.part_bytes as u64).max(length.div_ceil(MAX_PARTS));
        let mut hasher = Sha256::new();
        let mut parts: Vec<Option<PartId>> = Vec::new();
        let mut under_way = FuturesUnordered::new();
        let mut left = length;
        while left > 0 || !under_way.is_empty() {
            if left > 0 && under_way.len() < self.in_flight {
                let (returned, bytes) = read_part(path, file, part_bytes.min(left)).await?;
                file = returned;
                if bytes.is_empty() {
                    // The file became shorter while it was read; the hash check will fail.
                    left = 0;
                    continue;
                }
                left -= bytes.len() as u64;
                hasher.update(&bytes);
                let index = parts.len();
                parts.push(None);
                under_way.push(self.send_part(multipart, &key, &id, index, PutPayload::from(bytes)));
            } else if let Some(done) = under_way.next().await {
                let (index, part) = done?;
                parts[index] = Some(part);
            }
        }
        drop(under_way);
        check_hash(
            hash,
            ContentHash::from_digest(hasher.finalize().into()),
            &path.display().to_string(),
        )?;
        self.complete(upload, hash, parts.into_iter().flatten().collect(), length)
            .await
    }

    async fn send_part(
        &self,
        multipart: &Arc<dyn MultipartStore>,
        key: &Key,
        id: &String,
        index: usize,
        payload: PutPayload,
    ) -> Result<(usize, PartId), StorageError> {
        let limit = self.body_timeout(payload.content_length());
        let _permit = self.transfers.acquire().await;
        let attempt = || multipart.put_part(key, id, index, payload.clone());
        let part = self.retry.run(WHAT, limit, attempt).await?;
        let part = part.ok_or_else(|| StorageError::Failed {
            what: WHAT,
            message: "the multipart upload no longer exists; another program removed it. Try again".to_owned(),
        })?;
        Ok((index, part))
    }

    /// Completes the upload, which makes the object visible. If the response was lost but the object exists, that is a success.
    async fn complete(
        &self,
        mut upload: Upload,
        hash: ContentHash,
        parts: Vec<PartId>,
        length: u64,
    ) -> Result<(), StorageError> {
        let Some(id) = upload.id.clone() else { return Ok(()) };
        let (store, key) = (Arc::clone(&upload.store), upload.key.clone());
        let attempt = || store.complete_multipart(&key, &id, parts.clone());
        let limit = COMPLETION_TIMEOUT.min(self.transfer_timeout);
        let result = self.retry.run(WHAT, limit, attempt).await;
        let is_done = match &result {
            Ok(Some(_)) => true,
            Ok(None) => self.length(hash).await? == Some(length),
            // If this question fails too, the first error says more.
            Err(StorageError::Failed { .. }) => self.length(hash).await.is_ok_and(|found| found == Some(length)),
            Err(_) => false,
        };
        if is_done {
            upload.id = None;
            return Ok(());
        }
        result?;
        Err(StorageError::Failed {
            what: WHAT,
            message: "the multipart upload disappeared before it was completed; try again".to_owned(),
        })
    }
}

/// A multipart upload. It is aborted if it is dropped before it is completed.
struct Upload {
    store: Arc<dyn MultipartStore>,
    key: Key,
    id: Option<String>,
}

impl Drop for Upload {
    fn drop(&mut self) {
        let (Some(id), Ok(runtime)) = (self.id.take(), tokio::runtime::Handle::try_current()) else {
            return;
        };
        let (store, key) = (Arc::clone(&self.store), self.key.clone());
        // Best effort; the parts are invisible.
        runtime.spawn(async move {
            let _ = tokio::time::timeout(ABORT_TIMEOUT, store.abort_multipart(&key, &id)).await;
        });
    }
}

fn open(path: &Path) -> Result<(File, u64), FsError> {
    let fail = |error| FsError::new("read", path, error);
    let file = File::open(path).map_err(fail)?;
    let length = file.metadata().map_err(fail)?.len();
    Ok((file, length))
}

/// Reads up to `length` bytes. Returns the file too.
async fn read_part(path: &Path, mut file: File, length: u64) -> Result<(File, Bytes), StorageError> {
    let path = path.to_owned();
    blocking(WHAT, move || {
        let mut buffer = Vec::with_capacity(usize::try_from(length).unwrap_or(0));
        io::Read::by_ref(&mut file)
            .take(length)
            .read_to_end(&mut buffer)
            .map_err(|error| FsError::new("read", &path, error))?;
        Ok::<_, FsError>((file, Bytes::from(buffer)))
    })
    .await
}

/// Writes a blob file of a `file://` store: checked, synced, then renamed.
fn write_blob(target: &PathBuf, hash: ContentHash, what: &str, mut source: impl Read) -> Result<(), StorageError> {
    let folder = fsutil::folder_of(target);
    fsutil::create_dir_all(folder)?;
    let fail = |error| FsError::new("write", target, error);
    let temporary = fsutil::temporary_file(folder, 0o666).map_err(fail)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0_u8; 1 << 18];
    loop {
        let read = source
            .read(&mut buffer)
            .map_err(|error| FsError::new("read", what, error))?;
        if read == 0 {
            break;
        }
        hasher.update(&buffer[..read]);
        temporary.as_file().write_all(&buffer[..read]).map_err(fail)?;
    }
    check_hash(hash, ContentHash::from_digest(hasher.finalize().into()), what)?;
    temporary.as_file().sync_all().map_err(fail)?;
    Ok(fsutil::publish(temporary, target)?)
}

fn check_hash(expected: ContentHash, found: ContentHash, what: &str) -> Result<(), StorageError> {
    if expected == found {
        return Ok(());
    }
    Err(StorageError::Corrupt {
        what: what.to_owned(),
        expected,
        found,
    })
}

fn missing_bucket(address: &str) -> StorageError {
    StorageError::Denied {
        what: WHAT,
        message: format!("there is no bucket or container at {address}; create it first"),
    }
}
