//! The HTTP client for Hugging Face, and what can go wrong with a model.

use aitk_common::fsutil::FsError;
use reqwest::{Client, StatusCode};
use std::sync::OnceLock;

/// Who may have a model that is not public.
const PRIVATE: &str = "A private or gated model takes HF_TOKEN where it is fetched; a worker uses its own for jobs that run in place \
                       (`aitk run`), and for other jobs only where its owner lists the repository (--hub-allow, \
                       AITK_HUB_ALLOW), or with a token of the job's user that the worker keeps (`cluster.hub_token`). You can \
                       also download the model and give its folder";

/// A model that could not be fetched.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HubError {
    /// There is no such repository, or it is private.
    #[error("{repo} was not found at {endpoint}; check the name. {PRIVATE}")]
    NotFound { repo: String, endpoint: String },
    /// It wants a token, or an accepted licence.
    #[error("{endpoint} does not let us read {repo}: accept its licence there. {PRIVATE}")]
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

/// A repository at a commit, and what opens it.
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
        let client = built.map_err(|error| self.unavailable(&self.endpoint, &error))?;
        Ok(self.client.get_or_init(|| client))
    }

    pub(super) fn get(&self, url: &str, token: Option<&str>) -> Result<reqwest::RequestBuilder, HubError> {
        let request = self.client()?.get(url);
        Ok(match token {
            Some(token) => request.bearer_auth(token),
            None => request,
        })
    }

    pub(super) fn unavailable(&self, what: &str, error: &reqwest::Error) -> HubError {
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
    pub(super) fn status(&self, repo: &str, what: &str, status: StatusCode) -> HubError {
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
}
