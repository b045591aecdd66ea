//! A model hub like that of Hugging Face, over folders, that injects faults on demand, see [`crate::faulty_server`].
//!
//! The repository `ORG/NAME` is the folder `ORG/NAME` below its root. Each request for the revision `main` returns a new commit,
//! and every commit has the same files. So every client has to fetch the model, even if it is in a cache.

use crate::faulty_server::{self, BoxError};
use hyper::header::{CONTENT_RANGE, RANGE};
use hyper::{Request, Response, StatusCode};
use serde_json::json;
use std::net::SocketAddr;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::net::TcpListener;

/// How the server is set up.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The address to listen on.
    pub address: SocketAddr,
    /// The file with the current fault; `None` for no faults.
    pub fault_file: Option<PathBuf>,
    /// The folder with a folder for each organisation.
    pub root: PathBuf,
    /// The number of the first commit. A restarted server gets a higher one, so that its commits are new.
    pub first_commit: u64,
}

/// Serves until the process ends.
///
/// # Errors
/// When the address cannot be used.
pub async fn serve(settings: Settings) -> anyhow::Result<()> {
    let listener = TcpListener::bind(settings.address).await?;
    let (root, commits) = (settings.root, Arc::new(AtomicU64::new(settings.first_commit)));
    let service: faulty_server::Service = Arc::new(move |request| {
        let (root, commits) = (root.clone(), commits.clone());
        Box::pin(async move { answer(&root, &commits, &request).await })
    });
    faulty_server::serve(listener, settings.fault_file, service).await
}

/// The name of a commit.
fn commit(number: u64) -> String {
    format!("{number:040x}")
}

async fn answer(
    root: &Path,
    commits: &AtomicU64,
    request: &Request<s3s::Body>,
) -> Result<Response<s3s::Body>, BoxError> {
    let parts: Vec<&str> = request.uri().path().trim_start_matches('/').split('/').collect();
    match parts.as_slice() {
        ["api", "models", org, name, "revision", revision] => {
            let sha = match *revision {
                "main" => commit(commits.fetch_add(1, Ordering::Relaxed)),
                commit => commit.to_owned(),
            };
            list(&root.join(org).join(name), &sha)
        }
        [org, name, "resolve", _commit, path @ ..] => {
            let path = root.join(org).join(name).join(path.join("/"));
            file(
                &path,
                request.headers().get(RANGE).and_then(|range| range.to_str().ok()),
            )
            .await
        }
        _ => Ok(not_found()),
    }
}

fn not_found() -> Response<s3s::Body> {
    let mut answer = Response::new(s3s::Body::empty());
    *answer.status_mut() = StatusCode::NOT_FOUND;
    answer
}

fn list(folder: &Path, sha: &str) -> Result<Response<s3s::Body>, BoxError> {
    let mut siblings = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(next)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                folders.push(entry.path());
            } else {
                let name = entry.path();
                let name = name.strip_prefix(folder)?;
                siblings.push(json!({"rfilename": name.to_string_lossy(), "size": entry.metadata()?.len()}));
            }
        }
    }
    let text = json!({"sha": sha, "siblings": siblings}).to_string();
    Ok(Response::new(s3s::Body::from(text)))
}

/// A file, or the part of it that the range `bytes=FROM-` or `bytes=FROM-TO` asks for.
async fn file(path: &Path, range: Option<&str>) -> Result<Response<s3s::Body>, BoxError> {
    let is_inside = path.components().all(|part| !matches!(part, Component::ParentDir));
    let bytes = match tokio::fs::read(path).await {
        Ok(bytes) if is_inside => bytes,
        _ => return Ok(not_found()),
    };
    let Some((from, to)) = range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-')) else {
        return Ok(Response::new(s3s::Body::from(hyper::body::Bytes::from(bytes))));
    };
    let (from, size): (usize, usize) = (from.parse()?, bytes.len());
    let mut answer = Response::new(s3s::Body::empty());
    if from >= size {
        *answer.status_mut() = StatusCode::RANGE_NOT_SATISFIABLE;
        return Ok(answer);
    }
    let to = to
        .parse()
        .map_or(size, |last: usize| (last.saturating_add(1)).min(size));
    let content_range = format!("bytes {from}-{}/{size}", to - 1);
    *answer.status_mut() = StatusCode::PARTIAL_CONTENT;
    answer.headers_mut().insert(CONTENT_RANGE, content_range.parse()?);
    let part = hyper::body::Bytes::from(bytes).slice(from..to.max(from));
    Ok(answer.map(|_| s3s::Body::from(part)))
}
