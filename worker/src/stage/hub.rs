//! Fetches models from Hugging Face into this machine's cache: the diffusers folder of a repository, or a single
//! component such as a VAE.
//!
//! Only files that our engine reads are fetched: safetensors, json and txt files in the folders that
//! `model_index.json` names. An interrupted download is resumed. A file appears under its name only when it is
//! complete, has the right size and, if the hub gives a hash, that hash.

mod allow_list;
mod client;
mod download;
mod limits;
mod parts;
mod select;
mod shared_cache;
mod user_tokens;

pub(crate) use allow_list::AllowList;
pub(crate) use client::HubError;
use client::{HubClient, Source};
pub(crate) use limits::DEFAULT_LARGEST_MODEL;
use limits::DiskSpace;
pub(crate) use parts::RepositoryParts;
use shared_cache::SharedCache;
pub(crate) use user_tokens::UserTokens;

use aitk_common::fsutil::{self, FsError, names};
use aitk_common::hash::ContentHash;
use aitk_common::hub::{HubEnvironment, MAX_RETRY_AFTER, file_url, retry_after};
use aitk_common::id::UserName;
use aitk_common::job::repository::is_commit;
use reqwest::StatusCode;
use serde::de::IgnoredAny;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The largest list of files that is read: some thousand entries.
const MAX_LIST_BYTES: usize = 16 << 20;
/// How often the download of a file is started or resumed without getting further before it fails.
const MAX_TRIES: u32 = 6;

/// The file that a program locks while it fetches into a folder.
const LOCK_FILE: &str = "fetch.lock";
/// How often a program checks whether another one has ended its download.
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// The beginning of the names of folders with interrupted downloads.
const PARTIAL_PREFIX: &str = "partial-";
/// How long an interrupted download is kept, so that a later job resumes it.
const PARTIAL_AGE: Duration = Duration::from_secs(7 * 24 * 3600);

/// The folder for models that were fetched with the worker's token: other jobs may not use them.
const PRIVATE_FOLDER: &str = "private";
/// The folder for models that were fetched with a user's token, with a subfolder per user: only their jobs may use
/// them.
const USERS_FOLDER: &str = "users";

/// The folder for repositories of which only some parts were fetched.
const EXTRAS_FOLDER: &str = "extras";

/// A model that a job needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModelRequest<'a> {
    /// `ORG/NAME`.
    pub(crate) repo: &'a str,
    /// The commit that was recorded when the job was submitted; `None`: the newest.
    pub(crate) revision: Option<&'a str>,
    pub(crate) parts: RepositoryParts,
    /// Whether the job runs in place, for the user who owns the worker's token.
    pub(crate) in_place: bool,
}

/// Fetches models, one at a time: the network is the bottleneck.
#[derive(Debug)]
pub(crate) struct Hub {
    folder: PathBuf,
    token: Option<String>,
    /// Repositories for which jobs of other users may use the token.
    allow_list: AllowList,
    /// The most bytes of a model that is fetched for a job of another user.
    largest_model: u64,
    /// Measures the space of the disk on which a folder is.
    disk_space: fn(&Path) -> Option<DiskSpace>,
    /// What other programs of this user have downloaded, for jobs that run in place.
    shared_cache: Option<SharedCache>,
    /// `HF_HUB_OFFLINE`: no request goes to the hub.
    offline: bool,
    client: HubClient,
    /// Held during a download, not while it is found out whether the model is here already.
    download_lock: tokio::sync::Mutex<()>,
    first_delay: Duration,
}

impl Hub {
    /// Fetches into `folder`, from the hub of the environment. Its token is used for models that are not public, where that is
    /// allowed. For jobs of other users a model may have `largest_model` bytes.
    pub(crate) fn from_environment(folder: PathBuf, allow_list: AllowList, largest_model: u64) -> Self {
        let environment = HubEnvironment::from_env(&|name| std::env::var(name).ok());
        Self {
            largest_model,
            shared_cache: environment.cache.map(SharedCache::new),
            offline: environment.offline,
            ..Self::new(folder, environment.endpoint, environment.token, allow_list)
        }
    }

    fn new(folder: PathBuf, endpoint: String, token: Option<String>, allow_list: AllowList) -> Self {
        Self {
            folder,
            token,
            allow_list,
            largest_model: DEFAULT_LARGEST_MODEL,
            disk_space: DiskSpace::of_folder,
            shared_cache: None,
            offline: false,
            client: HubClient::new(&endpoint),
            download_lock: tokio::sync::Mutex::default(),
            first_delay: Duration::from_millis(500),
        }
    }

    /// Returns the local folder of a model, and fetches it if it is missing. `log` gets progress messages.
    ///
    /// Public models are for everybody. The worker's token is used only if that is not enough, and only for a job
    /// that runs in place or a repository of the list; models fetched with it are stored separately.
    ///
    /// # Errors
    /// [`HubError`]. An unreachable hub, or one that may not be asked, is not an error if the model is cached: at the commit of the job or, if
    /// the job names none, the version that was fetched last.
    pub(crate) async fn fetch(
        &self,
        request: &ModelRequest<'_>,
        log: &(dyn Fn(String) + Sync),
    ) -> Result<PathBuf, HubError> {
        let may_use_token = request.in_place || self.allow_list.contains(request.repo);
        match (self.fetch_as(request, None, &self.folder, log).await, &self.token) {
            (Err(denied @ (HubError::NotFound { .. } | HubError::Denied { .. })), Some(token)) if may_use_token => {
                let private = self.folder.join(PRIVATE_FOLDER);
                let fetched = self.fetch_as(request, Some(token), &private, log).await;
                // `NotFound` with a token says less than the first error.
                match fetched {
                    Err(HubError::NotFound { .. }) => Err(denied),
                    other => other,
                }
            }
            (Err(error @ (HubError::Unavailable { .. } | HubError::Offline { .. })), Some(_)) if may_use_token => {
                let private = self.folder.join(PRIVATE_FOLDER);
                self.cached(request, &private, log, error)
            }
            (fetched, _) => fetched,
        }
    }

    /// Like [`Hub::fetch`], with a token of the job's owner, for models that are not public.
    ///
    /// # Errors
    /// [`HubError`]
    pub(crate) async fn fetch_for(
        &self,
        owner: &UserName,
        token: &str,
        request: &ModelRequest<'_>,
        log: &(dyn Fn(String) + Sync),
    ) -> Result<PathBuf, HubError> {
        // A hash, because some file systems ignore case, so that two names could be one folder.
        let name = ContentHash::of(owner.as_str().as_bytes()).to_hex();
        let folder = self.folder.join(USERS_FOLDER).join(name);
        self.fetch_as(request, Some(token), &folder, log).await
    }

    /// Fetches without a token, or with a token into a folder that holds only such models.
    async fn fetch_as(
        &self,
        request: &ModelRequest<'_>,
        token: Option<&str>,
        folder: &Path,
        log: &(dyn Fn(String) + Sync),
    ) -> Result<PathBuf, HubError> {
        let repo = request.repo;
        // If the worker has a token, check that a cached model is public: earlier versions kept all models in one
        // folder.
        if let Some(commit) = request.revision.filter(|_| self.token.is_none() || token.is_some())
            && let Some(found) = find_fetched(folder, request.parts, &version_name(repo, commit))
        {
            return Ok(found);
        }
        let mut tries = 1;
        let listing = loop {
            let error = match self.list(request, token).await {
                Ok(listing) => break listing,
                Err(error @ (HubError::Unavailable { .. } | HubError::Offline { .. })) => error,
                Err(error) => return Err(error),
            };
            let asked = match &error {
                HubError::Unavailable { retry_after, .. } => retry_after.filter(|wait| *wait <= MAX_RETRY_AFTER),
                _ => None,
            };
            match (self.cached(request, folder, log, error), asked) {
                (Err(_), Some(wait)) if tries < MAX_TRIES => {
                    log(format!("the hub is busy and asks to wait {} s", wait.as_secs()));
                    tokio::time::sleep(wait).await;
                    tries += 1;
                }
                (found, _) => return found,
            }
        };
        if listing.is_gated && token.is_none() {
            return Err(self.client.status_error(repo, repo, StatusCode::UNAUTHORIZED, None));
        }
        let version = version_name(repo, &listing.revision);
        if let Some(found) = find_fetched(folder, request.parts, &version) {
            return Ok(found);
        }
        let _downloading = match self.download_lock.try_lock() {
            Ok(guard) => guard,
            Err(_) => {
                log(format!(
                    "waiting to fetch {repo}: this worker is fetching a model for another job"
                ));
                self.download_lock.lock().await
            }
        };
        let (parts, all) = (request.parts, folder);
        let folder = &folder_for(folder, parts);
        fsutil::create_dir_all(folder)?;
        let _lock = lock_folder(folder, log).await?;
        if let Some(found) = find_fetched(all, parts, &version) {
            return Ok(found);
        }
        let target = folder.join(&version);
        // A fixed name, so that an interrupted download can be resumed after a restart.
        let partial = folder.join(format!("{PARTIAL_PREFIX}{version}"));
        remove_stale_downloads(folder, Some(&partial));
        fsutil::create_dir_all(&partial)?;
        let layout = |problem| HubError::Layout {
            repo: repo.to_owned(),
            problem,
        };
        let source = Source {
            repo,
            revision: &listing.revision,
            token,
        };
        let shared = self.shared_cache.as_ref().filter(|_| request.in_place);
        let files = match select::index_file(&listing) {
            Some(index) => {
                select::check_text_size(index).map_err(layout)?;
                let (path, _) = self.fetch_file(&source, index, &partial, shared).await?;
                let text = std::fs::read(&path).map_err(|error| FsError::new("read", &path, error))?;
                select::pipeline_files(&listing, &text, request.parts).map_err(layout)?
            }
            None => select::component_files(&listing).map_err(layout)?,
        };
        let bytes = total(files.iter().map(|file| file.bytes));
        // The user of a job in place owns the machine.
        limits::check_size(repo, bytes, (!request.in_place).then_some(self.largest_model))?;
        let missing = total(files.iter().map(|file| missing_bytes(&source, file, &partial, shared)));
        if let Some(space) = (self.disk_space)(&partial) {
            space.check(repo, missing, folder)?;
        }
        log(format!(
            "fetching {repo} at commit {}: {} files, {:.2} GiB",
            listing.revision,
            files.len(),
            bytes as f64 / f64::from(1 << 30)
        ));
        for file in files {
            let (_, origin) = self.fetch_file(&source, file, &partial, shared).await?;
            log(format!("{origin} {}", file.name));
        }
        std::fs::rename(&partial, &target).map_err(|error| FsError::new("publish", &target, error))?;
        fsutil::sync_dir(folder)?;
        Ok(target)
    }

    /// Removes interrupted downloads that nothing has continued for [`PARTIAL_AGE`]. They could keep the disk full. A folder in which
    /// another program fetches is left to that program.
    pub(crate) fn clean_up(&self) {
        let users = std::fs::read_dir(self.folder.join(USERS_FOLDER));
        let users = users.into_iter().flatten().flatten().map(|entry| entry.path());
        for all in [self.folder.clone(), self.folder.join(PRIVATE_FOLDER)]
            .into_iter()
            .chain(users)
        {
            for folder in [folder_for(&all, RepositoryParts::Extras), all] {
                let Ok(lock) = File::options().write(true).open(folder.join(LOCK_FILE)) else {
                    continue;
                };
                if lock.try_lock().is_ok() {
                    remove_stale_downloads(&folder, None);
                }
            }
        }
    }

    /// Finds a cached model after this error of the hub: the commit of the job; if it names none, the version that was fetched last.
    fn cached(
        &self,
        request: &ModelRequest<'_>,
        folder: &Path,
        log: &(dyn Fn(String) + Sync),
        error: HubError,
    ) -> Result<PathBuf, HubError> {
        let repo = request.repo;
        let found = match request.revision {
            Some(commit) => find_fetched(folder, request.parts, &version_name(repo, commit)),
            None => newest_version(folder, repo).or_else(|| newest_version(&folder_for(folder, request.parts), repo)),
        };
        let Some(cached) = found else {
            return Err(error);
        };
        let reason = match error {
            HubError::Unavailable { problem, .. } => format!("the hub cannot be reached ({problem})"),
            _ => "HF_HUB_OFFLINE is set".to_owned(),
        };
        log(format!("{reason}; using the cached version of {repo}"));
        Ok(cached)
    }

    async fn list(&self, request: &ModelRequest<'_>, token: Option<&str>) -> Result<select::Listing, HubError> {
        let (repo, revision) = (request.repo, request.revision.unwrap_or("main"));
        if self.offline {
            return Err(HubError::Offline { repo: repo.to_owned() });
        }
        let url = format!(
            "{}/api/models/{repo}/revision/{revision}?blobs=true",
            self.client.endpoint()
        );
        let answer = self
            .client
            .get(&url, token)?
            .send()
            .await
            .map_err(|error| self.client.connection_error(&url, &error))?;
        if !answer.status().is_success() {
            let asked = retry_after(answer.headers());
            return Err(self.client.status_error(repo, &url, answer.status(), asked));
        }
        let mut answer = answer;
        let mut text = Vec::new();
        while let Some(part) = answer
            .chunk()
            .await
            .map_err(|error| self.client.connection_error(&url, &error))?
        {
            if text.len() + part.len() > MAX_LIST_BYTES {
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
        let listing =
            select::Listing::parse(&text).map_err(|problem| match serde_json::from_slice::<IgnoredAny>(&text) {
                Ok(_) => layout(problem),
                // A proxy's page, or a truncated answer.
                Err(_) => HubError::Unavailable {
                    what: repo.to_owned(),
                    problem: format!("{url} answered with something that is not JSON"),
                    retry_after: None,
                },
            })?;
        match request.revision {
            Some(commit) if listing.revision != commit => Err(layout(format!(
                "the hub answered with commit {} instead of {commit}",
                listing.revision
            ))),
            _ => Ok(listing),
        }
    }

    /// Downloads one file, unless it exists or `shared` has it, and verifies it. Returns its path, and what was done for the log.
    async fn fetch_file(
        &self,
        source: &Source<'_>,
        file: &select::RemoteFile,
        folder: &Path,
        shared: Option<&SharedCache>,
    ) -> Result<(PathBuf, &'static str), HubError> {
        let Source { repo, revision, .. } = *source;
        let bad_name = |error: names::BadName| HubError::Layout {
            repo: repo.to_owned(),
            problem: error.to_string(),
        };
        let path = names::below(folder, &file.name).map_err(bad_name)?;
        if path.is_file() {
            return Ok((path, "has"));
        }
        fsutil::create_dir_all(fsutil::folder_of(&path))?;
        if let Some(shared) = shared
            && download::take_from(shared, source, file, &path).await?
        {
            return Ok((path, "took from Hugging Face's cache"));
        }
        let url = file_url(self.client.endpoint(), repo, revision, &file.name);
        let (mut tries, mut delay) = (0, self.first_delay);
        let mut furthest = download::received(&path);
        loop {
            tries += 1;
            let tried = download::download(&self.client, source, &url, file, &path).await;
            // A large file takes hours on a slow line, and its connection may break more than once.
            let received = download::received(&path);
            if received > furthest {
                furthest = received;
                (tries, delay) = (1, self.first_delay);
            }
            match tried {
                Err(HubError::Unavailable {
                    what,
                    problem,
                    retry_after,
                }) if tries < MAX_TRIES && retry_after.is_none_or(|wait| wait <= MAX_RETRY_AFTER) => {
                    tracing::warn!(%what, %problem, "a download failed; trying again");
                    tokio::time::sleep(delay.max(retry_after.unwrap_or_default())).await;
                    delay *= 2;
                }
                Err(error) => return Err(error),
                Ok(()) => return Ok((path, "fetched")),
            }
        }
    }
}

/// The sum, also of sizes that no disk has.
fn total(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.fold(0, u64::saturating_add)
}

/// How many bytes of a file an earlier download into `folder` has not written. A file of the shared cache on the same disk needs none: it is
/// linked.
fn missing_bytes(source: &Source<'_>, file: &select::RemoteFile, folder: &Path, shared: Option<&SharedCache>) -> u64 {
    let Ok(path) = names::below(folder, &file.name) else {
        // Fetching it fails.
        return 0;
    };
    let is_linked = || shared.is_some_and(|shared| shared.can_link(source.repo, source.revision, file, folder));
    if path.is_file() || is_linked() {
        return 0;
    }
    file.bytes.saturating_sub(download::received(&path))
}

/// Waits until no other program fetches into this folder: `aitk run` keeps models in one folder for all its runs.
async fn lock_folder(folder: &Path, log: &(dyn Fn(String) + Sync)) -> Result<File, FsError> {
    let path = folder.join(LOCK_FILE);
    let options = File::options().create(true).truncate(false).write(true).open(&path);
    let file = options.map_err(|error| FsError::new("open", &path, error))?;
    let mut is_waiting = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => {
                if !std::mem::replace(&mut is_waiting, true) {
                    log("waiting: another program on this machine is fetching a model".to_owned());
                }
                tokio::time::sleep(LOCK_RETRY_INTERVAL).await;
            }
            Err(TryLockError::Error(error)) => return Err(FsError::new("lock", &path, error)),
        }
    }
}

/// Removes the interrupted downloads in `folder`, except `kept`, that nothing has continued for [`PARTIAL_AGE`]. The caller has locked the
/// folder. Errors are logged.
fn remove_stale_downloads(folder: &Path, kept: Option<&Path>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let is_partial = entry.file_name().to_string_lossy().starts_with(PARTIAL_PREFIX);
        if !is_partial || kept == Some(path.as_path()) {
            continue;
        }
        // After the clock was set back, files may have a modification time in the future; they count as new.
        let age = newest_change(&path).and_then(|changed| changed.elapsed().ok());
        if age.is_some_and(|age| age >= PARTIAL_AGE) {
            match fsutil::remove(&path) {
                Ok(()) => {
                    tracing::info!(folder = %path.display(), "an interrupted download that no job resumed was removed")
                }
                Err(error) => {
                    tracing::warn!(%error, "an interrupted download that no job resumed could not be removed")
                }
            }
        }
    }
}

/// When a file or a folder with its contents was changed last; `None` if that cannot be found out.
fn newest_change(path: &Path) -> Option<SystemTime> {
    let data = std::fs::symlink_metadata(path).ok()?;
    let mut newest = data.modified().ok()?;
    if data.is_dir() {
        for entry in std::fs::read_dir(path).ok()? {
            newest = newest.max(newest_change(&entry.ok()?.path())?);
        }
    }
    Some(newest)
}

/// The version of a model that was fetched last.
fn newest_version(folder: &Path, repo: &str) -> Option<PathBuf> {
    let prefix = format!("{}@", folder_name(repo));
    let entries = std::fs::read_dir(folder).ok()?.flatten();
    let versions = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
    versions
        .max_by_key(|entry| entry.metadata().and_then(|data| data.modified()).ok())
        .map(|entry| entry.path())
}

/// The commit of a model in the cache.
pub(crate) fn commit_of(folder: &Path) -> Option<&str> {
    let (_, commit) = folder.file_name()?.to_str()?.rsplit_once('@')?;
    is_commit(commit).then_some(commit)
}

/// The name of a repository's folder in the cache.
fn folder_name(repo: &str) -> String {
    let name = repo.replacen('/', "--", 1);
    match name.starts_with(PARTIAL_PREFIX) {
        // An interrupted download has such a name, and is removed at some time.
        true => format!("model-{name}"),
        false => name,
    }
}

/// The name of the folder of a repository at a commit.
fn version_name(repo: &str, commit: &str) -> String {
    format!("{}@{commit}", folder_name(repo))
}

/// The folder for repositories of which these parts are fetched.
fn folder_for(folder: &Path, parts: RepositoryParts) -> PathBuf {
    match parts {
        RepositoryParts::All => folder.to_owned(),
        RepositoryParts::Extras => folder.join(EXTRAS_FOLDER),
    }
}

/// The folder of a repository at a commit that has these parts, if it was fetched.
fn find_fetched(folder: &Path, parts: RepositoryParts, version: &str) -> Option<PathBuf> {
    let whole = folder.join(version);
    let candidates = [whole, folder_for(folder, parts).join(version)];
    candidates.into_iter().find(|path| path.is_dir())
}

#[cfg(test)]
mod tests;
