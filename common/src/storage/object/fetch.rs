//! Downloads.

use super::{ObjectBlobs, retry};
use crate::fsutil::{self, FsError};
use crate::hash::ContentHash;
use crate::storage::{StorageError, blocking};
use bytes::{Bytes, BytesMut};
use futures::stream::{self, StreamExt};
use object_store::{GetOptions, GetRange, GetResultPayload, ObjectStore};
use sha2::{Digest, Sha256};
use std::io::Write;
use std::ops::Range;
use std::path::Path;

const WHAT: &str = "fetch a blob";

impl ObjectBlobs {
    pub(super) async fn fetch_to_file(&self, hash: ContentHash, path: &Path) -> Result<u64, StorageError> {
        let length = self.length(hash).await?.ok_or(StorageError::NotFound { hash })?;
        let target = path.to_owned();
        let create = move || {
            fsutil::temporary_file(fsutil::folder_of(&target), 0o666)
                .map_err(|error| FsError::new("write", target, error))
        };
        let mut sink = (blocking(WHAT, create).await?, Sha256::new());
        let mut parts = stream::iter(self.ranges(length))
            .map(|range| self.fetch_range(hash, range))
            .buffered(self.in_flight);
        while let Some(part) = parts.next().await {
            let bytes = part?;
            let target = path.to_owned();
            sink = blocking(WHAT, move || {
                let (file, mut hasher) = sink;
                hasher.update(&bytes);
                let written = file
                    .as_file()
                    .write_all(&bytes)
                    .map_err(|error| FsError::new("write", target, error));
                written.map(|()| (file, hasher))
            })
            .await?;
        }
        let (file, hasher) = sink;
        self.check(hash, ContentHash::from_digest(hasher.finalize().into()))?;
        let target = path.to_owned();
        blocking(WHAT, move || {
            file.as_file()
                .sync_all()
                .map_err(|error| FsError::new("write", &target, error))?;
            fsutil::publish(file, &target)
        })
        .await?;
        Ok(length)
    }

    pub(super) async fn fetch_bytes(&self, hash: ContentHash, limit: u64) -> Result<Bytes, StorageError> {
        let length = self.length(hash).await?.ok_or(StorageError::NotFound { hash })?;
        if length > limit {
            return Err(StorageError::TooLarge {
                hash,
                bytes: length,
                limit,
            });
        }
        let mut parts = stream::iter(self.ranges(length))
            .map(|range| self.fetch_range(hash, range))
            .buffered(self.in_flight);
        let mut all = BytesMut::new();
        while let Some(part) = parts.next().await {
            all.extend_from_slice(&part?);
        }
        let all = all.freeze();
        self.check(hash, ContentHash::of(&all))?;
        Ok(all)
    }

    fn ranges(&self, length: u64) -> impl Iterator<Item = Range<u64>> + use<> {
        let part = self.part_bytes as u64;
        (0..length.div_ceil(part)).map(move |index| index * part..((index + 1) * part).min(length))
    }

    pub(super) async fn fetch_range(&self, hash: ContentHash, range: Range<u64>) -> Result<Bytes, StorageError> {
        let key = self.key(hash);
        let limit = self.body_timeout(usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(usize::MAX));
        // Acquired before the timeouts start, because waiting for a permit is not a storage problem.
        let _permit = self.transfers.acquire().await;
        let attempt = || async {
            let options = GetOptions {
                range: Some(GetRange::Bounded(range.clone())),
                ..GetOptions::default()
            };
            let answer = tokio::time::timeout(self.quick_timeout, self.store.get_opts(&key, options));
            let result = answer.await.map_err(|_| retry::stalled("no answer in time"))??;
            let bytes = if matches!(result.payload, GetResultPayload::File(..)) {
                result.bytes().await?
            } else {
                let mut body = result.into_stream();
                let mut all = BytesMut::new();
                loop {
                    let next = tokio::time::timeout(self.quick_timeout, body.next()).await;
                    match next.map_err(|_| retry::stalled("the download stalled"))? {
                        None => break all.freeze(),
                        Some(chunk) => all.extend_from_slice(&chunk?),
                    }
                }
            };
            if bytes.len() as u64 != range.end - range.start {
                return Err(retry::stalled("the answer was cut short"));
            }
            Ok(bytes)
        };
        self.retry
            .run(WHAT, limit, attempt)
            .await?
            .ok_or(StorageError::NotFound { hash })
    }

    fn check(&self, expected: ContentHash, found: ContentHash) -> Result<(), StorageError> {
        if expected == found {
            return Ok(());
        }
        Err(StorageError::Corrupt {
            what: format!("the blob in {}", self.address),
            expected,
            found,
        })
    }
}
