//! Models on Hugging Face, as far as their small files tell: which files a repository has, its JSON files, and the headers of
//! its weights files. Whole models are fetched by workers, with the same [`client`].

use crate::gguf;
use crate::model_files::{Inventory, SMALL_FILE_BYTES, Unreadable, Weights, small_files};
use reqwest::header::RANGE;
use reqwest::{Client, StatusCode, Url, redirect};
use serde::Deserialize;
use std::time::Duration;

/// The hub when `HF_ENDPOINT` says nothing.
pub const ENDPOINT: &str = "https://huggingface.co";
/// The list of a repository's files: some thousand entries.
const LIST_BYTES: u64 = 16 << 20;
/// Bytes of a weights file that are asked for first: the whole header, mostly.
const FIRST_BYTES: u64 = 512 << 10;
/// A longer header is not read here: whoever fetches the file reads it.
const MOST_BYTES: u64 = 16 << 20;

/// Why the small files of a repository could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HubError {
    /// There is no such repository, or it is private.
    #[error("{repo} was not found at {endpoint}, or is private")]
    NotFound {
        /// Its name.
        repo: String,
        /// The hub's address.
        endpoint: String,
    },
    /// The hub cannot be reached, or answers what cannot be understood.
    #[error("{0}")]
    Unavailable(String),
}

/// A client for the hub at this address: it follows redirections to other hosts only with TLS, and waits at most a minute for
/// the next bytes.
///
/// # Errors
/// When TLS cannot be set up.
pub fn client(endpoint: &str) -> reqwest::Result<Client> {
    // A second installation is refused, which is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let home = Url::parse(endpoint)
        .ok()
        .map(|url| (url.host_str().map(str::to_owned), url.port()));
    let follow = redirect::Policy::custom(move |attempt| {
        let to = attempt.url();
        let at_home = home == Some((to.host_str().map(str::to_owned), to.port()));
        if attempt.previous().len() > 5 {
            attempt.error("too many redirections")
        } else if to.scheme() == "https" || at_home {
            attempt.follow()
        } else {
            attempt.error("redirected to an address without TLS")
        }
    });
    Client::builder()
        .user_agent(concat!("aitk/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(Duration::from_secs(15))
        .read_timeout(Duration::from_secs(60))
        .redirect(follow)
        .build()
}

/// Reads small files of repositories.
#[derive(Clone, Debug)]
pub struct HubReader {
    endpoint: String,
    token: Option<String>,
}

/// The hub's answer about a repository.
#[derive(Deserialize)]
struct Listed {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
}

impl HubReader {
    /// Of the hub at `endpoint` (that of Hugging Face when none is given), with this token.
    #[must_use]
    pub fn new(endpoint: Option<String>, token: Option<String>) -> Self {
        let endpoint = endpoint.unwrap_or_else(|| ENDPOINT.to_owned());
        Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token,
        }
    }

    /// Its address.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// What a repository consists of and what its small files say, and the commit at which that is so. A few kilobytes of
    /// JSON, or the headers of single weights files; nothing is kept.
    ///
    /// # Errors
    /// [`HubError`]. A file that cannot be read is no error: it is not in the inventory.
    pub async fn inventory(&self, repo: &str) -> Result<(String, Inventory), HubError> {
        let client = client(&self.endpoint).map_err(|error| unavailable(&self.endpoint, &error))?;
        let url = format!("{}/api/models/{repo}/revision/main?blobs=true", self.endpoint);
        let text = self.read(&client, repo, &url, None, LIST_BYTES).await?;
        let listed: Listed = serde_json::from_slice(&text).map_err(|error| {
            HubError::Unavailable(format!("the hub's answer about {repo} is not understood: {error}"))
        })?;
        if listed.sha.is_empty() || !listed.sha.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(HubError::Unavailable(format!("the hub names no commit of {repo}")));
        }
        let names: Vec<String> = listed.siblings.iter().map(|file| file.rfilename.clone()).collect();
        let mut files = Inventory::of_names(names.clone());
        let (configs, headers) = small_files(&names);
        let file = |name: &str| format!("{}/{repo}/resolve/{}/{name}", self.endpoint, listed.sha);
        for name in configs {
            let bytes = self.read(&client, repo, &file(name), Some(0), SMALL_FILE_BYTES).await?;
            files.add_config(name, &bytes);
        }
        for name in headers {
            let size = listed
                .siblings
                .iter()
                .find(|file| file.rfilename == name)
                .and_then(|file| file.size);
            match self.header(&client, repo, &file(name), size.unwrap_or(0)).await? {
                Ok(weights) => {
                    files.weights.insert(name.to_owned(), weights);
                }
                Err(Unreadable::Pickle(why)) => files.pickle = Some(format!("{name}: {why}")),
                Err(Unreadable::Other(why)) => files.problem = Some(format!("{name}: {why}")),
            }
        }
        Ok((listed.sha, files))
    }

    async fn header(
        &self,
        client: &Client,
        repo: &str,
        url: &str,
        size: u64,
    ) -> Result<Result<Weights, Unreadable>, HubError> {
        let mut bytes = self.read(client, repo, url, Some(0), FIRST_BYTES).await?;
        if bytes.starts_with(gguf::MAGIC) {
            return Ok(Weights::of_gguf(bytes.as_slice(), size));
        }
        let length = match Weights::safetensors_header_bytes(&bytes) {
            Ok(length) => length,
            Err(error) => return Ok(Err(error)),
        };
        let end = length + 8;
        if end > MOST_BYTES {
            return Ok(Err(Unreadable::Other(format!("its header has {length} bytes"))));
        }
        let have = bytes.len() as u64;
        if have < end {
            bytes.extend(self.read(client, repo, url, Some(have), end - have).await?);
        }
        let header = usize::try_from(end).ok().and_then(|end| bytes.get(8..end));
        Ok(Weights::of_safetensors(header.unwrap_or_default()))
    }

    /// At most `most` bytes, from byte `from` where one is given.
    async fn read(
        &self,
        client: &Client,
        repo: &str,
        url: &str,
        from: Option<u64>,
        most: u64,
    ) -> Result<Vec<u8>, HubError> {
        let mut request = client.get(url);
        if let Some(token) = &self.token {
            request = request.bearer_auth(token);
        }
        if let Some(from) = from {
            request = request.header(RANGE, format!("bytes={from}-{}", from + most.saturating_sub(1)));
        }
        let failed = |error: reqwest::Error| unavailable(url, &error);
        let mut answer = request.send().await.map_err(failed)?;
        let status = answer.status();
        match status {
            // An empty file has no such range.
            StatusCode::RANGE_NOT_SATISFIABLE => return Ok(Vec::new()),
            // The hub says 401 of what it does not have, too.
            StatusCode::NOT_FOUND | StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                return Err(HubError::NotFound {
                    repo: repo.to_owned(),
                    endpoint: self.endpoint.clone(),
                });
            }
            status if !status.is_success() => {
                return Err(HubError::Unavailable(format!("{} answered {status}", self.endpoint)));
            }
            _ => {}
        }
        // A server that knows no ranges sends the file from its beginning.
        let skip = match status {
            StatusCode::PARTIAL_CONTENT => 0,
            _ => from.unwrap_or(0),
        };
        let (mut skip, most) = (
            usize::try_from(skip).unwrap_or(usize::MAX),
            usize::try_from(most).unwrap_or(usize::MAX),
        );
        let mut bytes = Vec::new();
        while bytes.len() < most {
            let Some(part) = answer.chunk().await.map_err(failed)? else {
                break;
            };
            let begin = skip.min(part.len());
            skip -= begin;
            bytes.extend_from_slice(&part[begin..]);
        }
        bytes.truncate(most);
        Ok(bytes)
    }
}

fn unavailable(what: &str, error: &reqwest::Error) -> HubError {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    HubError::Unavailable(format!("{what}: {cause}"))
}

#[cfg(test)]
mod tests;
