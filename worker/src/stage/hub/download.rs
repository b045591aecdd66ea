//! Downloads one file: starts or resumes it, verifies it, and gives it its final name.

use super::client::{HubClient, HubError, Source};
use super::select::RemoteFile;
use super::shared_cache::SharedCache;
use aitk_common::fsutil::{self, FsError};
use aitk_common::hash::ContentHash;
use aitk_common::hub::retry_after;
use reqwest::StatusCode;
use reqwest::header::{CONTENT_RANGE, RANGE};
use std::fs::File;
use std::io::SeekFrom;
use std::path::{Path, PathBuf};
use tokio::io::{AsyncSeekExt, AsyncWriteExt};

/// Takes a file from the cache of Hugging Face's libraries. `false` if it is not there, or not what the hub announced.
pub(super) async fn take_from(
    shared: &SharedCache,
    source: &Source<'_>,
    file: &RemoteFile,
    path: &Path,
) -> Result<bool, HubError> {
    let (repo, commit) = (source.repo.to_owned(), source.revision.to_owned());
    let (shared, file, path) = (shared.clone(), file.clone(), path.to_owned());
    let taken = tokio::task::spawn_blocking(move || {
        let mut taken = path.as_os_str().to_owned();
        taken.push(".taken");
        let taken = Path::new(&taken);
        fsutil::remove(taken)?;
        if !shared.take(&repo, &commit, &file, taken) {
            return Ok(false);
        }
        if verify(taken, &file)?.is_some() {
            fsutil::remove(taken)?;
            return Ok(false);
        }
        std::fs::rename(taken, &path).map_err(|error| FsError::new("publish", &path, error))?;
        fsutil::sync_dir(fsutil::folder_of(&path))?;
        Ok::<_, FsError>(true)
    });
    match taken.await {
        Ok(taken) => Ok(taken?),
        // The task was cancelled: the file is downloaded.
        Err(_) => Ok(false),
    }
}

/// The file that an incomplete download of `path` is written to.
fn part_of(path: &Path) -> PathBuf {
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    part.into()
}

/// How many bytes an incomplete download of `path` has received.
pub(super) fn received(path: &Path) -> u64 {
    std::fs::metadata(part_of(path)).map_or(0, |data| data.len())
}

/// Fetches the missing part of `file`; when it is complete, verifies it and renames it.
pub(super) async fn download(
    hub: &HubClient,
    source: &Source<'_>,
    url: &str,
    file: &RemoteFile,
    path: &Path,
) -> Result<(), HubError> {
    let part = &part_of(path);
    let received = received(path);
    if received > file.bytes {
        fsutil::remove(part)?;
        return Box::pin(download(hub, source, url, file, path)).await;
    }
    if received < file.bytes || file.bytes == 0 {
        receive(hub, source, url, file, part, received).await?;
    }
    let (check, expected) = (part.to_owned(), file.clone());
    let checked = tokio::task::spawn_blocking(move || verify(&check, &expected)).await;
    let problem = match checked {
        Ok(Ok(problem)) => problem,
        Ok(Err(error)) => return Err(error.into()),
        Err(error) => Some(error.to_string()),
    };
    if let Some(problem) = problem {
        fsutil::remove(part)?;
        return Err(HubError::Damaged {
            file: file.name.clone(),
            problem,
        });
    }
    std::fs::rename(part, path).map_err(|error| FsError::new("publish", path, error))?;
    Ok(fsutil::sync_dir(fsutil::folder_of(path))?)
}

async fn receive(
    hub: &HubClient,
    source: &Source<'_>,
    url: &str,
    file: &RemoteFile,
    part: &Path,
    received: u64,
) -> Result<(), HubError> {
    let mut request = hub.get(url, source.token)?;
    if received > 0 {
        request = request.header(RANGE, format!("bytes={received}-"));
    }
    let mut response = request
        .send()
        .await
        .map_err(|error| hub.connection_error(&file.name, &error))?;
    let is_partial = response.status() == StatusCode::PARTIAL_CONTENT
        && response
            .headers()
            .get(CONTENT_RANGE)
            .and_then(|range| range.to_str().ok())
            .is_some_and(|range| {
                range
                    .strip_prefix("bytes ")
                    .and_then(|range| range.split_once('-'))
                    .map(|(from, _)| from.parse())
                    == Some(Ok(received))
            });
    if !is_partial && response.status() != StatusCode::OK {
        let asked = retry_after(response.headers());
        return Err(hub.status_error(source.repo, &file.name, response.status(), asked));
    }
    let failed = |error| FsError::new("write", part, error);
    let mut options = tokio::fs::OpenOptions::new();
    options.create(true).write(true).truncate(!is_partial);
    let mut out = options.open(part).await.map_err(failed)?;
    let mut length = if is_partial { received } else { 0 };
    // Not in append mode: the last write of a download that was dropped may still be under way on another thread, and must not move
    // what follows.
    out.seek(SeekFrom::Start(length)).await.map_err(failed)?;
    loop {
        let bytes = match response.chunk().await {
            Ok(Some(bytes)) => bytes,
            Ok(None) => break,
            Err(error) => {
                // The next try continues after what is written.
                out.flush().await.map_err(failed)?;
                return Err(hub.connection_error(&file.name, &error));
            }
        };
        length += bytes.len() as u64;
        if length > file.bytes {
            // More bytes than announced: this is another file.
            drop(out);
            fsutil::remove(part)?;
            let problem = format!("more than the announced {} bytes", file.bytes);
            return Err(HubError::Damaged {
                file: file.name.clone(),
                problem,
            });
        }
        out.write_all(&bytes).await.map_err(failed)?;
    }
    out.flush().await.map_err(failed)?;
    if length < file.bytes {
        let problem = format!("the connection broke after {length} of {} bytes", file.bytes);
        return Err(HubError::Unavailable {
            what: file.name.clone(),
            problem,
            retry_after: None,
        });
    }
    Ok(())
}

/// Returns what is wrong with the file. If nothing is, it survives a power cut from now on, also if another program wrote it.
fn verify(path: &Path, expected: &RemoteFile) -> Result<Option<String>, FsError> {
    let failed = |error| FsError::new("read", path, error);
    let file = File::open(path).map_err(failed)?;
    let (found, bytes) = ContentHash::of_reader(&file).map_err(failed)?;
    if bytes != expected.bytes {
        return Ok(Some(format!("{bytes} bytes instead of {}", expected.bytes)));
    }
    match expected.hash {
        Some(hash) if hash != found => Ok(Some(format!("its SHA-256 is {found} instead of {hash}"))),
        _ => {
            file.sync_all().map_err(|error| FsError::new("write", path, error))?;
            Ok(None)
        }
    }
}
