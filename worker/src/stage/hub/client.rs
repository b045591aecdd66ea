//! The HTTP client for Hugging Face, and the errors of fetching a model.

use aitk_common::fsutil::FsError;
use reqwest::{Client, StatusCode};
use std::sync::OnceLock;
use std::time::Duration;

/// The hint for models that are not public.
const PRIVATE_MODEL_HINT: &str = "A private or gated model needs a token. A worker uses its own (HF_TOKEN, or that of `hf auth login`) for jobs that run in place \
                                  (`aitk run`), and for other jobs only if its owner lists the repository (--hub-allow, \
                                  AITK_HUB_ALLOW); otherwise the job names a token of its user that the worker keeps \
                                  (`cluster.hub_token`). You can also download the model and give its folder";

/// Why a model could not be fetched.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HubError {
    /// The repository does not exist, or is private.
    #[error("{repo} was not found at {endpoint}; check the name. {PRIVATE_MODEL_HINT}")]
    NotFound { repo: String, endpoint: String },
    /// The repository needs a token, or an accepted licence.
    #[error("{endpoint} does not let us read {repo}: accept its licence there. {PRIVATE_MODEL_HINT}")]
    Denied { repo: String, endpoint: String },
    /// The repository is not a diffusers folder.
    #[error("{repo} is not a model in diffusers layout with safetensors: {problem}")]
    Layout { repo: String, problem: String },
    /// The model has more bytes than the worker's owner allows.
    #[error(
        "{repo} is too large for this worker: {problem}. The worker's owner raises the limit with --largest-model-gib \
         (AITK_LARGEST_MODEL_GIB) of aitk-worker or `aitk up`; or download the model and give its folder"
    )]
    TooLarge { repo: String, problem: String },
    /// The disk for models has too little space.
    #[error(
        "disk full: {repo} was not downloaded: {problem}; free some space there, for example by removing models that no \
         job needs"
    )]
    DiskFull { repo: String, problem: String },
    /// The hub cannot be reached, or downloads fail repeatedly. `retry_after` is how long it asks to wait.
    #[error("could not fetch {what}: {problem}; check the network of the machine, or HF_ENDPOINT")]
    Unavailable {
        what: String,
        problem: String,
        retry_after: Option<Duration>,
    },
    /// The model is not here, and the machine's owner wants no requests to the hub.
    #[error(
        "{repo} is not in the cache of this worker, and is not downloaded because HF_HUB_OFFLINE is set in the worker's environment; unset \
         it, or give the model's folder"
    )]
    Offline { repo: String },
    /// The bytes differ from what the hub announced.
    #[error("{file} arrived damaged: {problem}; it was removed")]
    Damaged { file: String, problem: String },
    /// A file cannot be read or written.
    #[error(transparent)]
    Files(#[from] FsError),
}

/// A repository at a commit, and the token for it.
pub(super) struct Source<'a> {
    pub(super) repo: &'a str,
    pub(super) revision: &'a str,
    pub(super) token: Option<&'a str>,
}

/// Sends requests to one hub.
#[derive(Debug)]
pub(super) struct HubClient {
    endpoint: String,
    client: OnceLock<Client>,
}

impl HubClient {
    pub(super) fn new(endpoint: &str) -> Self {
        Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            client: OnceLock::new(),
        }
    }

    /// The address of the hub, without a slash at its end.
    pub(super) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    fn client(&self) -> Result<&Client, HubError> {
        if let Some(client) = self.client.get() {
            return Ok(client);
        }
        let built = aitk_common::hub::client(&self.endpoint);
        let client = built.map_err(|error| self.connection_error(&self.endpoint, &error))?;
        Ok(self.client.get_or_init(|| client))
    }

    pub(super) fn get(&self, url: &str, token: Option<&str>) -> Result<reqwest::RequestBuilder, HubError> {
        let request = self.client()?.get(url);
        Ok(match token {
            Some(token) => request.bearer_auth(token),
            None => request,
        })
    }

    pub(super) fn connection_error(&self, what: &str, error: &reqwest::Error) -> HubError {
        let mut cause: &dyn std::error::Error = error;
        while let Some(inner) = cause.source() {
            cause = inner;
        }
        HubError::Unavailable {
            what: what.to_owned(),
            problem: cause.to_string(),
            retry_after: None,
        }
    }

    /// The error for an HTTP status. `asked` is the wait that the response asks for.
    pub(super) fn status_error(&self, repo: &str, what: &str, status: StatusCode, asked: Option<Duration>) -> HubError {
        let (repo, endpoint) = (repo.to_owned(), self.endpoint.clone());
        match status {
            StatusCode::NOT_FOUND => HubError::NotFound { repo, endpoint },
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => HubError::Denied { repo, endpoint },
            other => HubError::Unavailable {
                what: what.to_owned(),
                problem: match asked {
                    Some(wait) => format!("the hub answered {other} and asks to wait {} s", wait.as_secs()),
                    None => format!("the hub answered {other}"),
                },
                retry_after: asked,
            },
        }
    }
}
