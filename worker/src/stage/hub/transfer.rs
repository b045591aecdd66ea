//! One file over the line: begun or continued, checked, put in place.

use super::client::{HubClient, HubError, Source};
use super::select::Remote;
use aitk_common::fsutil::{self, FsError};
use aitk_common::hash::ContentHash;
use reqwest::StatusCode;
use reqwest::header::{CONTENT_RANGE, RANGE};
use std::fs::File;
use std::path::Path;
use tokio::io::AsyncWriteExt;

/// Fetches what is missing of `file`; when all of it is there, checks it and gives it its name.
pub(super) async fn once(
    hub: &HubClient,
    source: &Source<'_>,
    url: &str,
    file: &Remote,
    path: &Path,
) -> Result<(), HubError> {
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    let part = Path::new(&part);
    let have = std::fs::metadata(part).map_or(0, |data| data.len());
    if have > file.bytes {
        fsutil::remove(part)?;
        return Box::pin(once(hub, source, url, file, path)).await;
    }
    if have < file.bytes || file.bytes == 0 {
        receive(hub, source, url, file, part, have).await?;
    }
    let (check, wanted) = (part.to_owned(), file.clone());
    let checked = tokio::task::spawn_blocking(move || verify(&check, &wanted)).await;
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
    file: &Remote,
    part: &Path,
    have: u64,
) -> Result<(), HubError> {
    let mut request = hub.get(url, source.token)?;
    if have > 0 {
        request = request.header(RANGE, format!("bytes={have}-"));
    }
    let mut answer = request
        .send()
        .await
        .map_err(|error| hub.unavailable(&file.name, &error))?;
    let continues = answer.status() == StatusCode::PARTIAL_CONTENT
        && answer
            .headers()
            .get(CONTENT_RANGE)
            .and_then(|range| range.to_str().ok())
            .is_some_and(|range| {
                range
                    .strip_prefix("bytes ")
                    .and_then(|range| range.split_once('-'))
                    .map(|(from, _)| from.parse())
                    == Some(Ok(have))
            });
    if !continues && answer.status() != StatusCode::OK {
        return Err(hub.status(source.repo, &file.name, answer.status()));
    }
    let failed = |error| FsError::new("write", part, error);
    let mut options = tokio::fs::OpenOptions::new();
    options.create(true).write(true).append(continues).truncate(!continues);
    let mut out = options.open(part).await.map_err(failed)?;
    let mut length = if continues { have } else { 0 };
    while let Some(bytes) = answer
        .chunk()
        .await
        .map_err(|error| hub.unavailable(&file.name, &error))?
    {
        length += bytes.len() as u64;
        if length > file.bytes {
            // Whoever sends more than it announced has another file in mind.
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
    out.sync_all().await.map_err(failed)?;
    if length < file.bytes {
        let problem = format!("it broke off after {length} of {} bytes", file.bytes);
        return Err(HubError::Unavailable {
            what: file.name.clone(),
            problem,
        });
    }
    Ok(())
}

/// What is wrong with the file, if anything.
fn verify(path: &Path, wanted: &Remote) -> Result<Option<String>, FsError> {
    let read = File::open(path).and_then(ContentHash::of_reader);
    let (found, bytes) = read.map_err(|error| FsError::new("read", path, error))?;
    if bytes != wanted.bytes {
        return Ok(Some(format!("{bytes} bytes instead of {}", wanted.bytes)));
    }
    match wanted.hash {
        Some(hash) if hash != found => Ok(Some(format!("its SHA-256 is {found} instead of {hash}"))),
        _ => Ok(None),
    }
}
