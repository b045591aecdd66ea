//! Uploads files to a model repository on Hugging Face, as commits on its branch `main`.
//!
//! The hub decides which files are stored with Git LFS: those are sent to the addresses that it names (`large_files`), the others
//! travel in the commit. Sources: the HTTP API as `huggingface_hub` 1.x uses it (`create_repo`, `preupload`, `commit`), and the
//! specification of the Git LFS Batch API. The official Rust client (`hf-hub` 1.0) sends large files by Xet only, and would bring 48
//! more packages with a second TLS provider, so that it is not used.

mod endpoint;
mod large_files;
mod request;
mod upload;

pub use endpoint::check_endpoint;
pub use upload::{PushError, Source, Upload};

use crate::fsutil::regular;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use large_files::LargeFile;
use request::Requests;
use serde::Deserialize;
use serde_json::json;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::Read;
use upload::file_error;

/// Bytes of each file that the hub sees before it decides how the file is stored.
const SAMPLE_BYTES: usize = 512;
/// Files in one request, and in one commit, at most.
const MAX_FILES_PER_COMMIT: usize = 256;
/// Bytes of files that travel in one commit, at most, unless a single one is larger.
const MAX_COMMIT_BYTES: u64 = 32 << 20;
/// The largest file that travels in a commit. The hub stores larger ones with Git LFS.
const MAX_REGULAR_BYTES: u64 = 32 << 20;

/// What was uploaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pushed {
    /// The page of the repository.
    pub page: String,
    /// Bytes that were sent to the storage of large files. Content that the hub had already is not sent.
    pub sent_bytes: u64,
}

/// Writes to one repository.
#[derive(Debug)]
pub struct HubWriter {
    requests: Requests,
    repo: String,
}

/// A file that was read once, for its hash and size.
struct Measured<'a> {
    upload: &'a Upload,
    sha256: String,
    size: u64,
    sample: Vec<u8>,
}

#[derive(Deserialize)]
struct Preupload {
    files: Vec<PreuploadedFile>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PreuploadedFile {
    path: String,
    upload_mode: String,
    #[serde(default)]
    should_ignore: bool,
}

/// What the hub answers to a commit.
#[derive(Deserialize)]
struct Committed {
    #[serde(rename = "commitOid")]
    oid: Option<String>,
    #[serde(rename = "commitUrl")]
    url: Option<String>,
}

/// Who a token belongs to (`whoami-v2`).
#[derive(Deserialize)]
struct Owner {
    #[serde(default)]
    auth: Option<Auth>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Auth {
    #[serde(default)]
    access_token: Option<AccessToken>,
}

#[derive(Deserialize)]
struct AccessToken {
    /// `read`, `write` or `fineGrained`.
    #[serde(default)]
    role: String,
}

impl HubWriter {
    /// A writer for `repo` (`ORG/NAME`) on the hub at `endpoint`, with a token that may write.
    ///
    /// # Errors
    /// When the endpoint may not get a token ([`check_endpoint`]), or TLS cannot be set up.
    pub fn new(endpoint: &str, token: &str, repo: &str) -> Result<Self, PushError> {
        check_endpoint(endpoint)?;
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        let requests = Requests::new(endpoint, token, repo)
            .map_err(|error| PushError::Unavailable(format!("the connection cannot be set up: {error}")))?;
        Ok(Self {
            requests,
            repo: repo.to_owned(),
        })
    }

    /// The page of the repository.
    #[must_use]
    pub fn page(&self) -> String {
        format!("{}/{}", self.requests.endpoint, self.repo)
    }

    /// Checks that the hub accepts the token, and that it may write something.
    ///
    /// # Errors
    /// [`PushError::NotAllowed`] if not; another error if the hub does not say.
    pub async fn check_token(&self) -> Result<(), PushError> {
        let owner: Owner = self
            .requests
            .get_json(&format!("{}/api/whoami-v2", self.requests.endpoint))
            .await?;
        let role = owner.auth.and_then(|auth| auth.access_token).map(|token| token.role);
        match role.as_deref() {
            Some("read") => Err(self.requests.not_allowed("the token may only read".to_owned())),
            _ => Ok(()),
        }
    }

    /// Makes the repository, unless it exists. `private` matters for a new one only.
    ///
    /// # Errors
    /// [`PushError`].
    pub async fn create(&self, private: bool) -> Result<(), PushError> {
        let (organization, name) = self.repo.split_once('/').unwrap_or(("", &self.repo));
        let body = json!({"name": name, "organization": organization, "private": private, "type": "model"});
        let url = format!("{}/api/repos/create", self.requests.endpoint);
        self.requests.create(&url, &body).await
    }

    /// Uploads the files. `sent` is called with the bytes of large files as they are sent, or found to be there.
    ///
    /// Each commit has at most 256 files and 32 MiB of small files. A push that is interrupted may be repeated: content that the hub
    /// has is not sent again.
    ///
    /// # Errors
    /// [`PushError`].
    pub async fn push(
        &self,
        files: &[Upload],
        message: &str,
        sent: &(dyn Fn(u64) + Sync),
    ) -> Result<Pushed, PushError> {
        let mut sent_bytes = 0;
        for chunk in files.chunks(MAX_FILES_PER_COMMIT) {
            let mut measured = Vec::new();
            for upload in chunk {
                let source = upload.source.clone();
                let read = tokio::task::spawn_blocking(move || measure(&source)).await;
                let (sha256, size, sample) = read.map_err(|error| PushError::Unavailable(error.to_string()))??;
                measured.push(Measured {
                    upload,
                    sha256,
                    size,
                    sample,
                });
            }
            let modes = self.upload_modes(&measured).await?;
            let mode_of = |file: &Measured<'_>| {
                modes
                    .get(&file.upload.name)
                    .map(|mode| (mode.upload_mode.as_str(), mode.should_ignore))
            };
            let large: Vec<LargeFile<'_>> = (measured.iter())
                .filter(|file| file.size > 0 && mode_of(file) == Some(("lfs", false)))
                .map(|file| LargeFile {
                    oid: &file.sha256,
                    size: file.size,
                    source: &file.upload.source,
                })
                .collect();
            sent_bytes += large_files::send(&self.requests, &self.repo, &large, sent).await?;
            let mut commit = Commit::new(message);
            for file in &measured {
                match mode_of(file) {
                    Some((_, true)) => {}
                    Some(("lfs", _)) if file.size > 0 => commit.add_large(file),
                    Some(("lfs" | "regular", _)) => {
                        if commit.small_bytes + file.size > MAX_COMMIT_BYTES && !commit.is_empty() {
                            self.commit(std::mem::replace(&mut commit, Commit::new(message)))
                                .await?;
                        }
                        commit.add_small(file)?;
                    }
                    _ => {
                        return Err(PushError::Unavailable(format!(
                            "{} does not say how to store {}",
                            self.requests.endpoint, file.upload.name
                        )));
                    }
                }
            }
            if !commit.is_empty() {
                self.commit(commit).await?;
            }
        }
        Ok(Pushed {
            page: self.page(),
            sent_bytes,
        })
    }

    /// Asks how each file is to be stored.
    async fn upload_modes(&self, files: &[Measured<'_>]) -> Result<BTreeMap<String, PreuploadedFile>, PushError> {
        let listed: Vec<_> = (files.iter())
            .map(|file| {
                json!({
                    "path": file.upload.name,
                    "size": file.size,
                    "sample": BASE64_STANDARD.encode(&file.sample),
                })
            })
            .collect();
        let url = format!("{}/api/models/{}/preupload/main", self.requests.endpoint, self.repo);
        let answer: Preupload = self.requests.post_json(&url, &json!({ "files": listed })).await?;
        Ok(answer.files.into_iter().map(|file| (file.path.clone(), file)).collect())
    }

    async fn commit(&self, commit: Commit) -> Result<(), PushError> {
        let url = format!("{}/api/models/{}/commit/main", self.requests.endpoint, self.repo);
        let answer: Committed = self.requests.post_lines(&url, commit.lines).await?;
        // A proxy's page, for example.
        match answer.oid.or(answer.url) {
            Some(_) => Ok(()),
            None => Err(PushError::Unavailable(format!("the response of {url} names no commit"))),
        }
    }
}

/// The body of a commit: a line of JSON for each file.
struct Commit {
    lines: String,
    files: usize,
    small_bytes: u64,
}

impl Commit {
    fn new(message: &str) -> Self {
        let header = json!({"key": "header", "value": {"summary": message, "description": ""}});
        Self {
            lines: format!("{header}\n"),
            files: 0,
            small_bytes: 0,
        }
    }

    fn is_empty(&self) -> bool {
        self.files == 0
    }

    fn add(&mut self, line: &serde_json::Value) {
        self.lines += &format!("{line}\n");
        self.files += 1;
    }

    fn add_large(&mut self, file: &Measured<'_>) {
        self.add(&json!({
            "key": "lfsFile",
            "value": {"path": file.upload.name, "algo": "sha256", "oid": file.sha256, "size": file.size},
        }));
    }

    fn add_small(&mut self, file: &Measured<'_>) -> Result<(), PushError> {
        let content = match &file.upload.source {
            Source::Text(text) => BASE64_STANDARD.encode(text),
            Source::File(path) => {
                BASE64_STANDARD.encode(regular::read(path, MAX_REGULAR_BYTES).map_err(|error| file_error(path, error))?)
            }
        };
        self.small_bytes += file.size;
        self.add(&json!({
            "key": "file",
            "value": {"path": file.upload.name, "encoding": "base64", "content": content},
        }));
        Ok(())
    }
}

/// Reads a file once. Returns its SHA-256, its size, and its first bytes.
fn measure(source: &Source) -> Result<(String, u64, Vec<u8>), PushError> {
    let mut hash = Sha256::new();
    let mut sample = Vec::new();
    let mut size = 0;
    let mut add = |bytes: &[u8]| {
        hash.update(bytes);
        sample.extend(bytes.iter().take(SAMPLE_BYTES - sample.len()));
        size += bytes.len() as u64;
    };
    match source {
        Source::Text(text) => add(text.as_bytes()),
        Source::File(path) => {
            let failed = |error| file_error(path, error);
            let (mut file, _) = regular::open(path).map_err(failed)?;
            let mut buffer = vec![0; 1 << 20];
            loop {
                match file.read(&mut buffer).map_err(failed)? {
                    0 => break,
                    length => add(&buffer[..length]),
                }
            }
        }
    }
    Ok((hex::encode(hash.finalize()), size, sample))
}
