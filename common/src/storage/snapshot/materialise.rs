//! A snapshot into a folder.

use super::{MAX_LIST_BYTES, Progress, Snapshot};
use crate::fsutil::{self, FsError, TemporaryFolder, names};
use crate::hash::ContentHash;
use crate::storage::{BlobStore, StorageError};
use futures::stream::{self, StreamExt};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// How many files are fetched at once.
const FILES_AT_ONCE: usize = 8;

/// Puts the files of snapshot `id` into the folder `target`, and returns the list. A `target` that exists is
/// complete, because it appears by one rename; it is left as it is.
///
/// Contents go through `cache`, a folder of blobs on this machine that many snapshots share, and are hard links
/// from there where the file system can. So `target` and all that is in it are read-only. Each cached blob is verified before it is used again.
///
/// Safe against others that do the same at the same time, in this process or another.
///
/// # Errors
/// As the store says; [`StorageError::Local`] when a disk is full. `target` does not exist then.
pub async fn materialise(
    store: &dyn BlobStore,
    id: ContentHash,
    cache: &Path,
    target: &Path,
    progress: &mut (dyn FnMut(Progress) + Send),
) -> Result<Snapshot, StorageError> {
    let snapshot = Snapshot::from_bytes(&store.get_bytes(id, MAX_LIST_BYTES).await?)?;
    if target.is_dir() {
        return Ok(snapshot);
    }
    let sizes: BTreeMap<ContentHash, u64> = snapshot.files.iter().map(|file| (file.sha256, file.bytes)).collect();
    let mut so_far = Progress {
        files_total: sizes.len() as u64,
        bytes_total: sizes.values().sum(),
        ..Progress::default()
    };
    progress(so_far);
    let mut fetched = stream::iter(sizes)
        .map(|(hash, bytes)| async move { into_cache(store, hash, bytes, cache).await.map(|()| bytes) })
        .buffer_unordered(FILES_AT_ONCE);
    while let Some(bytes) = fetched.next().await {
        so_far.files += 1;
        so_far.bytes += bytes?;
        progress(so_far);
    }
    drop(fetched);

    let (list, cache, target) = (snapshot.clone(), cache.to_owned(), target.to_owned());
    crate::storage::blocking("put the files in place", move || lay_out(&list, &cache, &target)).await?;
    Ok(snapshot)
}

/// Where a blob lies in a cache: directly in it, so that one [`fsutil::sweep`] finds what was left unfinished.
fn cached(cache: &Path, hash: ContentHash) -> PathBuf {
    cache.join(hash.to_hex())
}

async fn into_cache(store: &dyn BlobStore, hash: ContentHash, bytes: u64, cache: &Path) -> Result<(), StorageError> {
    let path = cached(cache, hash);
    let existing = path.clone();
    let is_there = crate::storage::blocking("read the cache", move || {
        fsutil::create_dir_all(fsutil::folder_of(&existing))?;
        let is_same_size = fs::metadata(&existing).is_ok_and(|meta| meta.is_file() && meta.len() == bytes);
        let hashed = || File::open(&existing).and_then(ContentHash::of_reader);
        Ok::<_, FsError>(is_same_size && hashed().is_ok_and(|(found, _)| found == hash))
    })
    .await?;
    if is_there {
        return Ok(());
    }
    let found = store.get_to_file(hash, &path).await?;
    if found != bytes {
        return Err(super::malformed(&format!(
            "the blob {hash} has {found} bytes instead of {bytes}"
        )));
    }
    Ok(())
}

fn lay_out(snapshot: &Snapshot, cache: &Path, target: &Path) -> Result<(), StorageError> {
    let parent = fsutil::folder_of(target);
    let staging = TemporaryFolder::new(parent, "snapshot")?;
    fill(snapshot, cache, staging.path())?;
    super::make_read_only(staging.path())?;
    match fs::rename(staging.path(), target) {
        Ok(()) => Ok(fsutil::sync_dir(parent)?),
        // Somebody else was faster, with the same files.
        Err(_) if target.is_dir() => Ok(()),
        Err(error) => Err(FsError::new("put in place", target, error).into()),
    }
}

fn fill(snapshot: &Snapshot, cache: &Path, staging: &Path) -> Result<(), StorageError> {
    let mut folders = BTreeSet::from([staging.to_owned()]);
    for file in &snapshot.files {
        let path = names::below(staging, &file.path)?;
        let folder = fsutil::folder_of(&path);
        fs::create_dir_all(folder).map_err(|error| FsError::new("create the folder", folder, error))?;
        folders.extend(
            folder
                .ancestors()
                .take_while(|inner| *inner != staging)
                .map(Path::to_owned),
        );
        let source = cached(cache, file.sha256);
        let fail = |error: io::Error| FsError::new("write", &path, error);
        if fs::hard_link(&source, &path).is_err() {
            // Another disk, too many links, or a file system without them.
            fs::copy(&source, &path).map_err(fail)?;
            File::open(&path).and_then(|copy| copy.sync_all()).map_err(fail)?;
        }
    }
    // A power cut must not leave a folder with its final name and without its files.
    for folder in &folders {
        fsutil::sync_dir(folder)?;
    }
    Ok(())
}
