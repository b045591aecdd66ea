//! Reads the small files of models on Hugging Face: the list of files, JSON configs, and the headers of weights files.
//! Workers download whole models, with the same [`client`];
//! [`push`] uploads results.

mod environment;
mod file_url;
pub mod push;
mod retry_after;

pub use environment::HubEnvironment;
pub use file_url::file_url;
pub use retry_after::{MAX_RETRY_AFTER, retry_after};

use crate::gguf;
use crate::model_files::{Inventory, SMALL_FILE_BYTES, TensorShapes, Unreadable, small_files};
use reqwest::header::RANGE;
use reqwest::{Client, RequestBuilder, Response, StatusCode, Url, redirect};
use serde::Deserialize;
use std::time::Duration;

/// The default hub, used when `HF_ENDPOINT` is unset.
pub const ENDPOINT: &str = "https://huggingface.co";
/// The size limit of the list of a repository's files: some thousand entries.
const MAX_LIST_BYTES: u64 = 16 << 20;
/// Bytes of a weights file that the first request asks for. Most headers are shorter.
const HEADER_GUESS_BYTES: u64 = 512 << 10;
/// How often a request is sent to a hub that is busy, and how long it may ask to wait each time: a command waits for the answer.
const MAX_BUSY_TRIES: u32 = 4;
const MAX_BUSY_WAIT: Duration = Duration::from_secs(20);
/// The size limit of a header. Longer ones are only read after the file is downloaded.
const MAX_HEADER_BYTES: u64 = 16 << 20;

/// Why the small files of a repository could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HubError {
    /// The repository does not exist or is private.
    #[error("{repo} was not found at {endpoint}, or it is private")]
    NotFound {
        /// The repository's name.
        repo: String,
        /// The hub's URL.
        endpoint: String,
    },
    /// The repository's files are only for users who accepted its terms.
    #[error("{}", gated_message(repo, endpoint, *has_token))]
    Gated {
        /// The repository's name.
        repo: String,
        /// The hub's URL.
        endpoint: String,
        /// Whether there was a token.
        has_token: bool,
    },
    /// The hub cannot be reached, or its response is invalid.
    #[error("{0}")]
    Unavailable(String),
}

fn gated_message(repo: &str, endpoint: &str, has_token: bool) -> String {
    let reason = match has_token {
        true => "the account of the token has no access to it",
        false => "there is no token",
    };
    format!(
        "{repo} is gated, and {reason}: accept its terms at {endpoint}/{repo}, create a token with the right to read gated repositories \
         at {endpoint}/settings/tokens, and set HF_TOKEN (or write it to .env, or run `hf auth login`)"
    )
}

/// Creates a client for the hub at `endpoint`. It follows redirects only with TLS, except within a hub without it, and times out after a
/// minute without data.
///
/// # Errors
/// When TLS cannot be set up.
pub fn client(endpoint: &str) -> reqwest::Result<Client> {
    install_tls();
    let hub = Url::parse(endpoint).ok();
    let follow = redirect::Policy::custom(move |attempt| {
        if attempt.previous().len() > 5 {
            attempt.error("too many redirections")
        } else if may_follow(hub.as_ref(), attempt.url()) {
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

/// Whether a redirect may be followed. On a hub with TLS the same host and port without it may not: the request would have the token.
fn may_follow(hub: Option<&Url>, to: &Url) -> bool {
    to.scheme() == "https" || hub.is_some_and(|hub| hub.origin() == to.origin())
}

/// Chooses the provider of TLS.
fn install_tls() {
    // Fails if a provider is installed already, which is fine.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// Reads the small files of repositories.
#[derive(Clone, Debug)]
pub struct HubReader {
    endpoint: String,
    token: Option<String>,
}

/// The hub's description of a repository.
#[derive(Deserialize)]
struct RepositoryInfo {
    sha: String,
    /// `false`, or how access is granted: `"auto"`, `"manual"`.
    #[serde(default)]
    gated: serde_json::Value,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
}

impl HubReader {
    /// Creates a reader for the hub at `endpoint` (default: Hugging Face) that authenticates with `token`.
    #[must_use]
    pub fn new(endpoint: Option<String>, token: Option<String>) -> Self {
        let endpoint = endpoint.unwrap_or_else(|| ENDPOINT.to_owned());
        Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token,
        }
    }

    /// The hub's URL.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Reads the commit of a repository's `main` branch and the inventory of its files. Downloads a few kilobytes of JSON, or
    /// the headers of single weights files; nothing is cached.
    ///
    /// # Errors
    /// [`HubError`]. A file that cannot be read is not an error; the inventory lacks it.
    pub async fn inventory(&self, repo: &str) -> Result<(String, Inventory), HubError> {
        let client = client(&self.endpoint).map_err(|error| unavailable(&self.endpoint, &error))?;
        let url = format!("{}/api/models/{repo}/revision/main?blobs=true", self.endpoint);
        let text = self.read(&client, repo, &url, None, MAX_LIST_BYTES).await?;
        let listed: RepositoryInfo = serde_json::from_slice(&text)
            .map_err(|error| HubError::Unavailable(format!("the hub's description of {repo} is invalid: {error}")))?;
        if listed.sha.is_empty() || !listed.sha.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(HubError::Unavailable(format!(
                "the hub's description of {repo} has no commit"
            )));
        }
        // Everybody may list the files of a gated repository.
        let is_gated = !matches!(listed.gated, serde_json::Value::Null | serde_json::Value::Bool(false));
        let files = self
            .small_files(&client, repo, &listed)
            .await
            .map_err(|error| match error {
                HubError::NotFound { repo, endpoint } if is_gated => HubError::Gated {
                    repo,
                    endpoint,
                    has_token: self.token.is_some(),
                },
                other => other,
            })?;
        Ok((listed.sha, files))
    }

    /// Reads the small files of a listed repository.
    async fn small_files(&self, client: &Client, repo: &str, listed: &RepositoryInfo) -> Result<Inventory, HubError> {
        let names: Vec<String> = listed.siblings.iter().map(|file| file.rfilename.clone()).collect();
        let mut files = Inventory::of_names(names.clone());
        let (configs, headers) = small_files(&names);
        let file = |name: &str| file_url(&self.endpoint, repo, &listed.sha, name);
        for name in configs {
            let bytes = self.read(client, repo, &file(name), Some(0), SMALL_FILE_BYTES).await?;
            files.add_config(name, &bytes);
        }
        for name in headers {
            let size = listed
                .siblings
                .iter()
                .find(|file| file.rfilename == name)
                .and_then(|file| file.size);
            match self.header(client, repo, &file(name), size.unwrap_or(0)).await? {
                Ok(weights) => {
                    files.weights.insert(name.to_owned(), weights);
                }
                Err(Unreadable::Pickle(why)) => files.pickle = Some(format!("{name}: {why}")),
                Err(Unreadable::Other(why)) => files.problem = Some(format!("{name}: {why}")),
            }
        }
        Ok(files)
    }

    async fn header(
        &self,
        client: &Client,
        repo: &str,
        url: &str,
        size: u64,
    ) -> Result<Result<TensorShapes, Unreadable>, HubError> {
        let mut bytes = self.read(client, repo, url, Some(0), HEADER_GUESS_BYTES).await?;
        if bytes.starts_with(gguf::MAGIC) {
            return Ok(TensorShapes::of_gguf(bytes.as_slice(), size));
        }
        let length = match TensorShapes::safetensors_header_bytes(&bytes) {
            Ok(length) => length,
            Err(error) => return Ok(Err(error)),
        };
        let end = length + 8;
        if end > MAX_HEADER_BYTES {
            return Ok(Err(Unreadable::Other(format!("its header has {length} bytes"))));
        }
        let have = bytes.len() as u64;
        if have < end {
            bytes.extend(self.read(client, repo, url, Some(have), end - have).await?);
        }
        let header = usize::try_from(end).ok().and_then(|end| bytes.get(8..end));
        Ok(TensorShapes::of_safetensors(header.unwrap_or_default()))
    }

    /// Reads at most `limit` bytes, from offset `from` if given.
    async fn read(
        &self,
        client: &Client,
        repo: &str,
        url: &str,
        from: Option<u64>,
        limit: u64,
    ) -> Result<Vec<u8>, HubError> {
        let mut request = client.get(url);
        if let Some(token) = &self.token {
            request = request.bearer_auth(token);
        }
        if let Some(from) = from {
            request = request.header(RANGE, format!("bytes={from}-{}", from + limit.saturating_sub(1)));
        }
        let failed = |error: reqwest::Error| unavailable(url, &error);
        let mut response = send(request).await.map_err(failed)?;
        let status = response.status();
        match status {
            // The response for an empty file.
            StatusCode::RANGE_NOT_SATISFIABLE => return Ok(Vec::new()),
            // The hub also responds 401 for repositories that do not exist.
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
        // A server without support for ranges sends the file from its beginning.
        let skip = match status {
            StatusCode::PARTIAL_CONTENT => 0,
            _ => from.unwrap_or(0),
        };
        let (mut skip, limit) = (
            usize::try_from(skip).unwrap_or(usize::MAX),
            usize::try_from(limit).unwrap_or(usize::MAX),
        );
        let mut bytes = Vec::new();
        while bytes.len() < limit {
            let Some(chunk) = response.chunk().await.map_err(failed)? else {
                break;
            };
            let begin = skip.min(chunk.len());
            skip -= begin;
            bytes.extend_from_slice(&chunk[begin..]);
        }
        bytes.truncate(limit);
        Ok(bytes)
    }
}

/// Sends a request, again while the hub asks to wait for a time that a user waits too.
async fn send(request: RequestBuilder) -> reqwest::Result<Response> {
    for _ in 1..MAX_BUSY_TRIES {
        let Some(request) = request.try_clone() else { break };
        let response = request.send().await?;
        let status = response.status();
        let is_busy = status == StatusCode::TOO_MANY_REQUESTS || status.is_server_error();
        match retry_after(response.headers()).filter(|wait| is_busy && *wait <= MAX_BUSY_WAIT) {
            Some(wait) => tokio::time::sleep(wait).await,
            None => return Ok(response),
        }
    }
    request.send().await
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
