//! Models from Hugging Face: the diffusers folder of a repository (or a single part, a VAE), in the cache of this machine.
//!
//! Only what our engine reads is fetched: safetensors, json and txt files in the folders that `model_index.json`
//! names. A download that broke goes on where it stopped. What is there was complete, of the right size, and, where
//! the hub says a hash, of that hash.

mod allow;
mod client;
mod secrets;
mod select;
mod transfer;

pub(crate) use allow::AllowList;
pub(crate) use client::HubError;
use client::{HubClient, Source};
pub(crate) use secrets::Secrets;

use aitk_common::fsutil::{self, FsError, names};
use aitk_common::hash::ContentHash;
use aitk_common::hub::ENDPOINT;
use aitk_common::id::UserName;
use aitk_common::job::repository::is_commit;
use reqwest::StatusCode;
use serde::de::IgnoredAny;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The list of a repository's files: some thousand entries.
const LIST_BYTES: usize = 16 << 20;
/// How often a file is begun or continued before it is given up.
const TRIES: u32 = 6;

/// Where models lie that were fetched with the worker's token: no other job may have them.
const PRIVATE_FOLDER: &str = "private";
/// Where models lie that were fetched with a user's token, a folder for each: only their jobs may have them.
const USERS_FOLDER: &str = "users";

/// A model that a job names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    /// `ORG/NAME`.
    pub(crate) repo: &'a str,
    /// The commit that was recorded when the job was submitted; the newest when none was.
    pub(crate) revision: Option<&'a str>,
    /// Whether the job runs in place, for the user whose token the worker has.
    pub(crate) in_place: bool,
}

/// Fetches models. One at a time: the line is the bottleneck.
#[derive(Debug)]
pub(crate) struct Hub {
    folder: PathBuf,
    token: Option<String>,
    /// For which repositories jobs of others may use the token.
    allow: AllowList,
    client: HubClient,
    busy: tokio::sync::Mutex<()>,
    first_wait: Duration,
}

impl Hub {
    /// Fetches into `folder`, from `HF_ENDPOINT`; with `HF_TOKEN` what is not public and may be had with it.
    pub(crate) fn from_environment(folder: PathBuf, allow: AllowList) -> Self {
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        Self::new(
            folder,
            set("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned()),
            set("HF_TOKEN"),
            allow,
        )
    }

    fn new(folder: PathBuf, endpoint: String, token: Option<String>, allow: AllowList) -> Self {
        Self {
            folder,
            token,
            allow,
            client: HubClient::new(&endpoint),
            busy: tokio::sync::Mutex::default(),
            first_wait: Duration::from_millis(500),
        }
    }

    /// Where the model lies on this machine; it is fetched if it is not here. `say` is told what happens.
    ///
    /// Everybody may have what the hub gives to everybody. The worker's token is only shown where that is not enough, and
    /// only for a job that runs in place or a repository of the list; what it opened lies apart.
    ///
    /// # Errors
    /// [`HubError`]. A hub that cannot be reached is no error when the model is here: the commit of the job, or, where the
    /// job names none, the version that was fetched last.
    pub(crate) async fn fetch(&self, wanted: &Wanted<'_>, say: &(dyn Fn(String) + Sync)) -> Result<PathBuf, HubError> {
        let _one = self.busy.lock().await;
        let may_use_token = wanted.in_place || self.allow.has(wanted.repo);
        match (self.fetch_as(wanted, None, &self.folder, say).await, &self.token) {
            (Err(denied @ (HubError::NotFound { .. } | HubError::Denied { .. })), Some(token)) if may_use_token => {
                let private = self.folder.join(PRIVATE_FOLDER);
                let fetched = self.fetch_as(wanted, Some(token), &private, say).await;
                // Without a connection the first answer says more.
                match fetched {
                    Err(HubError::NotFound { .. }) => Err(denied),
                    other => other,
                }
            }
            (Err(HubError::Unavailable { what, problem }), Some(_)) if may_use_token => {
                let private = self.folder.join(PRIVATE_FOLDER);
                self.kept(wanted, &private, say, what, problem)
            }
            (fetched, _) => fetched,
        }
    }

    /// [`Hub::fetch`] with a token of the user whose job it is, of what is not public.
    ///
    /// # Errors
    /// [`HubError`]
    pub(crate) async fn fetch_for(
        &self,
        owner: &UserName,
        token: &str,
        wanted: &Wanted<'_>,
        say: &(dyn Fn(String) + Sync),
    ) -> Result<PathBuf, HubError> {
        let _one = self.busy.lock().await;
        // A hash, because on some disks two names are one folder that differ in upper and lower case only.
        let name = ContentHash::of(owner.as_str().as_bytes()).to_hex();
        let folder = self.folder.join(USERS_FOLDER).join(name);
        self.fetch_as(wanted, Some(token), &folder, say).await
    }

    /// [`Hub::fetch`] for everybody, or with a token, into a folder that only holds such models.
    async fn fetch_as(
        &self,
        wanted: &Wanted<'_>,
        token: Option<&str>,
        folder: &Path,
        say: &(dyn Fn(String) + Sync),
    ) -> Result<PathBuf, HubError> {
        let repo = wanted.repo;
        // With a token, what is public has to be asked for: earlier versions kept everything in one place.
        if let Some(commit) = wanted.revision.filter(|_| self.token.is_none() || token.is_some()) {
            let target = folder.join(format!("{}@{commit}", folder_name(repo)));
            if target.is_dir() {
                return Ok(target);
            }
        }
        let listed = match self.list(wanted, token).await {
            Ok(listed) => listed,
            Err(HubError::Unavailable { what, problem }) => return self.kept(wanted, folder, say, what, problem),
            Err(error) => return Err(error),
        };
        if listed.is_gated && token.is_none() {
            return Err(self.client.status(repo, repo, StatusCode::UNAUTHORIZED));
        }
        let target = folder.join(format!("{}@{}", folder_name(repo), listed.revision));
        if target.is_dir() {
            return Ok(target);
        }
        // Not a temporary name: it stays, so that a broken download can go on after a restart.
        let partial = folder.join(format!("partial-{}@{}", folder_name(repo), listed.revision));
        fsutil::create_dir_all(&partial)?;
        let layout = |problem| HubError::Layout {
            repo: repo.to_owned(),
            problem,
        };
        let source = Source {
            repo,
            revision: &listed.revision,
            token,
        };
        let files = match select::index_of(&listed) {
            Some(index) => {
                select::refuse_large_text(index).map_err(layout)?;
                let path = self.file(&source, index, &partial).await?;
                let text = std::fs::read(&path).map_err(|error| FsError::new("read", &path, error))?;
                select::files(&listed, &text).map_err(layout)?
            }
            None => select::single_part(&listed).map_err(layout)?,
        };
        let bytes: u64 = files.iter().map(|file| file.bytes).sum();
        say(format!(
            "fetching {repo} at commit {}: {} files, {:.2} GiB",
            listed.revision,
            files.len(),
            bytes as f64 / f64::from(1 << 30)
        ));
        for file in files {
            self.file(&source, file, &partial).await?;
            say(format!("fetched {}", file.name));
        }
        std::fs::rename(&partial, &target).map_err(|error| FsError::new("publish", &target, error))?;
        fsutil::sync_dir(folder)?;
        Ok(target)
    }

    /// What is here of a model whose hub cannot be reached: the commit of the job and no other; where it names none, the
    /// version that was fetched last.
    fn kept(
        &self,
        wanted: &Wanted<'_>,
        folder: &Path,
        say: &(dyn Fn(String) + Sync),
        what: String,
        problem: String,
    ) -> Result<PathBuf, HubError> {
        let repo = wanted.repo;
        let here = match wanted.revision {
            Some(commit) => Some(folder.join(format!("{}@{commit}", folder_name(repo)))).filter(|path| path.is_dir()),
            None => newest(folder, repo),
        };
        let Some(here) = here else {
            return Err(HubError::Unavailable { what, problem });
        };
        say(format!(
            "the hub cannot be reached ({problem}); using the version of {repo} that is here"
        ));
        Ok(here)
    }

    async fn list(&self, wanted: &Wanted<'_>, token: Option<&str>) -> Result<select::Listed, HubError> {
        let (repo, revision) = (wanted.repo, wanted.revision.unwrap_or("main"));
        let url = format!(
            "{}/api/models/{repo}/revision/{revision}?blobs=true",
            self.client.endpoint()
        );
        let answer = self
            .client
            .get(&url, token)?
            .send()
            .await
            .map_err(|error| self.client.unavailable(&url, &error))?;
        if !answer.status().is_success() {
            return Err(self.client.status(repo, &url, answer.status()));
        }
        let mut answer = answer;
        let mut text = Vec::new();
        while let Some(part) = answer
            .chunk()
            .await
            .map_err(|error| self.client.unavailable(&url, &error))?
        {
            if text.len() + part.len() > LIST_BYTES {
                let problem = "its list of files is too long".to_owned();
                return Err(HubError::Layout {
                    repo: repo.to_owned(),
                    problem,
                });
            }
            text.extend_from_slice(&part);
        }
        let layout = |problem| HubError::Layout {
            repo: repo.to_owned(),
            problem,
        };
        let listed =
            select::Listed::parse(&text).map_err(|problem| match serde_json::from_slice::<IgnoredAny>(&text) {
                Ok(_) => layout(problem),
                // A page of a proxy, or an answer that was cut off.
                Err(_) => HubError::Unavailable {
                    what: repo.to_owned(),
                    problem: format!("{url} answered with something that is no JSON"),
                },
            })?;
        match wanted.revision {
            Some(commit) if listed.revision != commit => Err(layout(format!(
                "the hub answered with commit {} instead of {commit}",
                listed.revision
            ))),
            _ => Ok(listed),
        }
    }

    /// Brings one file, unless it is there, and checks it.
    async fn file(&self, source: &Source<'_>, file: &select::Remote, folder: &Path) -> Result<PathBuf, HubError> {
        let Source { repo, revision, .. } = *source;
        let bad_name = |error: names::BadName| HubError::Layout {
            repo: repo.to_owned(),
            problem: error.to_string(),
        };
        let path = names::below(folder, &file.name).map_err(bad_name)?;
        if path.is_file() {
            return Ok(path);
        }
        fsutil::create_dir_all(fsutil::folder_of(&path))?;
        let url = format!("{}/{repo}/resolve/{revision}/{}", self.client.endpoint(), file.name);
        let mut wait = self.first_wait;
        let mut tries = 0;
        loop {
            tries += 1;
            match transfer::once(&self.client, source, &url, file, &path).await {
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

/// The version of a model that was fetched last.
fn newest(folder: &Path, repo: &str) -> Option<PathBuf> {
    let prefix = format!("{}@", folder_name(repo));
    let entries = std::fs::read_dir(folder).ok()?.flatten();
    let ours = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
    ours.max_by_key(|entry| entry.metadata().and_then(|data| data.modified()).ok())
        .map(|entry| entry.path())
}

/// The commit of a model that lies here.
pub(crate) fn commit_of(folder: &Path) -> Option<&str> {
    let (_, commit) = folder.file_name()?.to_str()?.rsplit_once('@')?;
    is_commit(commit).then_some(commit)
}

fn folder_name(repo: &str) -> String {
    repo.replacen('/', "--", 1)
}

#[cfg(test)]
mod tests;
