//! Models from Hugging Face: the diffusers folder of a repository (or a single part, a VAE), in the cache of this machine.
//!
//! Only what our engine reads is fetched: safetensors, json and txt files in the folders that `model_index.json`
//! names. A download that broke goes on where it stopped. What is there was complete, of the right size, and, where
//! the hub says a hash, of that hash.

mod select;
mod transfer;

use aitk_common::fsutil::{self, FsError, names};
use aitk_common::hub::ENDPOINT;
use reqwest::{Client, StatusCode};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

/// The list of a repository's files: some thousand entries.
const LIST_BYTES: usize = 16 << 20;
/// How often a file is begun or continued before it is given up.
const TRIES: u32 = 6;

/// A model that could not be fetched.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HubError {
    /// There is no such repository, or it is private.
    #[error(
        "{repo} was not found at {endpoint}; check the name. For a private model set HF_TOKEN where the worker runs"
    )]
    NotFound { repo: String, endpoint: String },
    /// It wants a token, or an accepted licence.
    #[error("{endpoint} does not let us read {repo}: accept its licence there, and set HF_TOKEN where the worker runs")]
    Denied { repo: String, endpoint: String },
    /// It is no diffusers folder.
    #[error("{repo} is no model in diffusers layout with safetensors: {problem}")]
    Layout { repo: String, problem: String },
    /// The hub cannot be reached, or breaks off, again and again.
    #[error("could not fetch {what}: {problem}; check the network of the machine, or HF_ENDPOINT")]
    Unavailable { what: String, problem: String },
    /// The bytes are not those that the hub announced.
    #[error("{file} arrived damaged: {problem}; it was removed")]
    Damaged { file: String, problem: String },
    /// The disk.
    #[error(transparent)]
    Files(#[from] FsError),
}

/// Fetches models. One at a time: the line is the bottleneck.
#[derive(Debug)]
pub(crate) struct Hub {
    folder: PathBuf,
    endpoint: String,
    token: Option<String>,
    client: OnceLock<Client>,
    busy: tokio::sync::Mutex<()>,
    first_wait: Duration,
}

/// Whether a model path of a config can be a repository: `org/name`, and nothing of that name lies here.
pub(crate) fn is_repository(path: &str) -> bool {
    let part = |part: &str| {
        !part.starts_with(['.', '-'])
            && !part.is_empty()
            && part.len() <= 96
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
    };
    let looks_so = path.split_once('/').is_some_and(|(org, name)| part(org) && part(name));
    let file = [".safetensors", ".gguf", ".ckpt", ".json", ".txt"]
        .iter()
        .any(|ending| path.ends_with(ending));
    looks_so && !file && !Path::new(path).exists()
}

impl Hub {
    /// Fetches into `folder`, from `HF_ENDPOINT`, with `HF_TOKEN`.
    pub(crate) fn from_environment(folder: PathBuf) -> Self {
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        Self::new(
            folder,
            set("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned()),
            set("HF_TOKEN"),
        )
    }

    fn new(folder: PathBuf, endpoint: String, token: Option<String>) -> Self {
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        let (client, busy) = (OnceLock::new(), tokio::sync::Mutex::default());
        Self {
            folder,
            endpoint,
            token,
            client,
            busy,
            first_wait: Duration::from_millis(500),
        }
    }

    /// Where the model lies on this machine; it is fetched if it is not here. `say` is told what happens.
    ///
    /// # Errors
    /// [`HubError`]. A hub that cannot be reached is no error when a version of the model is here.
    pub(crate) async fn fetch(&self, repo: &str, say: &(dyn Fn(String) + Sync)) -> Result<PathBuf, HubError> {
        let _one = self.busy.lock().await;
        let listed = match self.list(repo).await {
            Ok(listed) => listed,
            Err(HubError::Unavailable { what, problem }) => {
                let here = self.newest(repo).ok_or(HubError::Unavailable {
                    what,
                    problem: problem.clone(),
                })?;
                say(format!(
                    "the hub cannot be reached ({problem}); using the version of {repo} that is here"
                ));
                return Ok(here);
            }
            Err(error) => return Err(error),
        };
        let target = self.folder.join(format!("{}@{}", folder_name(repo), listed.revision));
        if target.is_dir() {
            return Ok(target);
        }
        // Not a temporary name: it stays, so that a broken download can go on after a restart.
        let partial = self
            .folder
            .join(format!("partial-{}@{}", folder_name(repo), listed.revision));
        fsutil::create_dir_all(&partial)?;
        let layout = |problem| HubError::Layout {
            repo: repo.to_owned(),
            problem,
        };
        let files = match select::index_of(&listed) {
            Some(index) => {
                let path = self.file(repo, &listed.revision, index, &partial).await?;
                let text = std::fs::read(&path).map_err(|error| FsError::new("read", &path, error))?;
                select::files(&listed, &text).map_err(layout)?
            }
            None => select::single_part(&listed).map_err(layout)?,
        };
        let bytes: u64 = files.iter().map(|file| file.bytes).sum();
        say(format!(
            "fetching {repo}: {} files, {:.2} GiB",
            files.len(),
            bytes as f64 / f64::from(1 << 30)
        ));
        for file in files {
            self.file(repo, &listed.revision, file, &partial).await?;
            say(format!("fetched {}", file.name));
        }
        std::fs::rename(&partial, &target).map_err(|error| FsError::new("publish", &target, error))?;
        fsutil::sync_dir(&self.folder)?;
        Ok(target)
    }

    /// The version of a model that was fetched last.
    fn newest(&self, repo: &str) -> Option<PathBuf> {
        let prefix = format!("{}@", folder_name(repo));
        let entries = std::fs::read_dir(&self.folder).ok()?.flatten();
        let ours = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
        ours.max_by_key(|entry| entry.metadata().and_then(|data| data.modified()).ok())
            .map(|entry| entry.path())
    }

    fn client(&self) -> Result<&Client, HubError> {
        if let Some(client) = self.client.get() {
            return Ok(client);
        }
        let built = aitk_common::hub::client(&self.endpoint);
        let client = built.map_err(|error| self.unavailable(&self.endpoint, &error))?;
        Ok(self.client.get_or_init(|| client))
    }

    fn get(&self, url: &str) -> Result<reqwest::RequestBuilder, HubError> {
        let request = self.client()?.get(url);
        Ok(match &self.token {
            Some(token) => request.bearer_auth(token),
            None => request,
        })
    }

    fn unavailable(&self, what: &str, error: &reqwest::Error) -> HubError {
        let mut cause: &dyn std::error::Error = error;
        while let Some(inner) = cause.source() {
            cause = inner;
        }
        HubError::Unavailable {
            what: what.to_owned(),
            problem: cause.to_string(),
        }
    }

    /// What an answer without content means.
    fn status(&self, repo: &str, what: &str, status: StatusCode) -> HubError {
        let (repo, endpoint) = (repo.to_owned(), self.endpoint.clone());
        match status {
            StatusCode::NOT_FOUND => HubError::NotFound { repo, endpoint },
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => HubError::Denied { repo, endpoint },
            other => HubError::Unavailable {
                what: what.to_owned(),
                problem: format!("the hub answered {other}"),
            },
        }
    }

    async fn list(&self, repo: &str) -> Result<select::Listed, HubError> {
        let url = format!("{}/api/models/{repo}/revision/main?blobs=true", self.endpoint);
        let answer = self
            .get(&url)?
            .send()
            .await
            .map_err(|error| self.unavailable(&url, &error))?;
        if !answer.status().is_success() {
            return Err(self.status(repo, &url, answer.status()));
        }
        let mut answer = answer;
        let mut text = Vec::new();
        while let Some(part) = answer.chunk().await.map_err(|error| self.unavailable(&url, &error))? {
            if text.len() + part.len() > LIST_BYTES {
                let problem = "its list of files is too long".to_owned();
                return Err(HubError::Layout {
                    repo: repo.to_owned(),
                    problem,
                });
            }
            text.extend_from_slice(&part);
        }
        select::Listed::parse(&text).map_err(|problem| HubError::Layout {
            repo: repo.to_owned(),
            problem,
        })
    }

    /// Brings one file, unless it is there, and checks it.
    async fn file(
        &self,
        repo: &str,
        revision: &str,
        file: &select::Remote,
        folder: &Path,
    ) -> Result<PathBuf, HubError> {
        let bad_name = |error: names::BadName| HubError::Layout {
            repo: repo.to_owned(),
            problem: error.to_string(),
        };
        let path = names::below(folder, &file.name).map_err(bad_name)?;
        if path.is_file() {
            return Ok(path);
        }
        fsutil::create_dir_all(fsutil::folder_of(&path))?;
        let url = format!("{}/{repo}/resolve/{revision}/{}", self.endpoint, file.name);
        let mut wait = self.first_wait;
        let mut tries = 0;
        loop {
            tries += 1;
            match transfer::once(self, repo, &url, file, &path).await {
                Err(HubError::Unavailable { what, problem }) if tries < TRIES => {
                    tracing::warn!(%what, %problem, "trying again");
                    tokio::time::sleep(wait).await;
                    wait *= 2;
                }
                Err(error) => return Err(error),
                Ok(()) => return Ok(path),
            }
        }
    }
}

fn folder_name(repo: &str) -> String {
    repo.replacen('/', "--", 1)
}

#[cfg(test)]
mod tests;
