//! Requests to the hub that change something: repeated when the hub is busy, and with its words when it refuses.

use super::upload::PushError;
use crate::hub::{MAX_RETRY_AFTER, install_tls, retry_after};
use reqwest::header::{ACCEPT, CONTENT_TYPE};
use reqwest::{Client, RequestBuilder, Response, StatusCode, redirect};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::time::Duration;

/// How often a request is sent, if no response comes.
pub(super) const MAX_ATTEMPTS: u32 = 5;
/// How often a request is sent to a hub that says that it is busy.
pub(super) const MAX_BUSY_ATTEMPTS: u32 = 8;
/// Besides the errors of servers: what a hub answers when it is busy, and when a body stalled on its way.
const BUSY: [StatusCode; 2] = [StatusCode::TOO_MANY_REQUESTS, StatusCode::REQUEST_TIMEOUT];
/// The first and the longest wait before a request is sent again.
const FIRST_DELAY: Duration = Duration::from_secs(1);
const MAX_DELAY: Duration = Duration::from_secs(30);
/// The size limit of a response.
const MAX_RESPONSE_BYTES: usize = 16 << 20;
/// The time limit of a request, without the time for its body.
const TIME_LIMIT: Duration = Duration::from_secs(120);
/// The lowest rate of an upload: slower ones count as stuck.
const MIN_BYTES_PER_SECOND: u64 = 10_000;
/// How much of the hub's explanation is shown.
const MAX_REASON_CHARS: usize = 300;
/// The media type of the Git LFS Batch API.
pub(super) const LFS_JSON: &str = "application/vnd.git-lfs+json";

/// Sends requests with the user's token, to the hub alone.
#[derive(Debug)]
pub(super) struct Requests {
    pub(super) client: Client,
    /// The hub's URL, without `/` at its end.
    pub(super) endpoint: String,
    token: String,
    repo: String,
}

impl Requests {
    /// The client follows no redirection, and has no limit on the time between two pieces of a response: none comes while a file is
    /// sent.
    pub(super) fn new(endpoint: String, token: &str, repo: &str) -> reqwest::Result<Self> {
        install_tls();
        let client = Client::builder()
            .user_agent(concat!("aitk/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(Duration::from_secs(15))
            .redirect(redirect::Policy::none())
            .build()?;
        Ok(Self {
            client,
            endpoint,
            token: token.to_owned(),
            repo: repo.to_owned(),
        })
    }

    /// A request to the hub.
    fn post(&self, url: &str) -> RequestBuilder {
        self.client.post(url).bearer_auth(&self.token).timeout(TIME_LIMIT)
    }

    /// Makes a repository. One that exists is not an error.
    pub(super) async fn create(&self, url: &str, body: &serde_json::Value) -> Result<(), PushError> {
        let request = || self.post(url).json(body);
        let answer = self.send(url, &request).await?;
        match answer.status() {
            StatusCode::CONFLICT => Ok(()),
            _ => self.check(answer).await.map(drop),
        }
    }

    /// Posts JSON and reads a JSON response.
    pub(super) async fn post_json<T: DeserializeOwned>(
        &self,
        url: &str,
        body: &serde_json::Value,
    ) -> Result<T, PushError> {
        let request = || self.post(url).json(body);
        self.read(url, &request).await
    }

    /// As [`Self::post_json`], in the media type of Git LFS.
    pub(super) async fn post_lfs<T: DeserializeOwned>(
        &self,
        url: &str,
        body: &serde_json::Value,
    ) -> Result<T, PushError> {
        let request = || {
            let request = self.post(url);
            request
                .header(ACCEPT, LFS_JSON)
                .header(CONTENT_TYPE, LFS_JSON)
                .body(body.to_string())
        };
        self.read(url, &request).await
    }

    /// Reads a JSON response.
    pub(super) async fn get_json<T: DeserializeOwned>(&self, url: &str) -> Result<T, PushError> {
        let request = || self.client.get(url).bearer_auth(&self.token).timeout(TIME_LIMIT);
        self.read(url, &request).await
    }

    /// Posts lines of JSON, and reads a JSON response.
    pub(super) async fn post_lines<T: DeserializeOwned>(&self, url: &str, lines: String) -> Result<T, PushError> {
        let lines = bytes::Bytes::from(lines);
        let request = || {
            let request = self.post(url);
            let request = request.timeout(time_limit(lines.len() as u64));
            request.header(CONTENT_TYPE, "application/x-ndjson").body(lines.clone())
        };
        self.read(url, &request).await
    }

    async fn read<T: DeserializeOwned>(
        &self,
        url: &str,
        request: &(dyn Fn() -> RequestBuilder + Sync),
    ) -> Result<T, PushError> {
        let answer = self.send(url, request).await?;
        let text = self.check(answer).await?;
        serde_json::from_slice(&text)
            .map_err(|error| PushError::Unavailable(format!("the response of {url} is invalid: {error}")))
    }

    /// Sends a request until its receiver is not busy. `url` is its name in errors.
    pub(super) async fn send(
        &self,
        url: &str,
        request: &(dyn Fn() -> RequestBuilder + Sync),
    ) -> Result<Response, PushError> {
        for attempt in 1.. {
            let answer = request().send().await;
            match wait(&answer, attempt) {
                Some(wait) => tokio::time::sleep(wait).await,
                None => return answer.map_err(|error| unavailable(url, &error)),
            }
        }
        Err(PushError::Unavailable(format!("{url}: no response")))
    }

    /// The error of a token that may not write.
    pub(super) fn not_allowed(&self, reason: String) -> PushError {
        PushError::NotAllowed {
            endpoint: self.endpoint.clone(),
            repo: self.repo.clone(),
            reason,
        }
    }

    /// The body of a response that is not a refusal.
    pub(super) async fn check(&self, answer: Response) -> Result<Vec<u8>, PushError> {
        let (status, url) = (answer.status(), answer.url().clone());
        let asked = retry_after(answer.headers());
        let body = read_body(answer).await?;
        if status.is_success() {
            return Ok(body);
        }
        let mut reason = reason(&body, status);
        if let Some(wait) = asked {
            reason += &format!("; it asks to wait {} s", wait.as_secs());
        }
        Err(match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => self.not_allowed(reason),
            _ => PushError::Refused(format!("{}{}: {reason}", self.endpoint, url.path())),
        })
    }
}

/// How long to wait before a request is sent again. `None`: its response is final, or it was sent often enough, or the hub asks to wait
/// for too long.
pub(super) fn wait(answer: &reqwest::Result<Response>, attempt: u32) -> Option<Duration> {
    match answer {
        Ok(answer) => wait_after(Some(answer.status()), retry_after(answer.headers()), attempt),
        Err(_) => wait_after(None, None, attempt),
    }
}

/// As [`wait`]: `status` is that of the response, if one came, and `asked` its `Retry-After`.
fn wait_after(status: Option<StatusCode>, asked: Option<Duration>, attempt: u32) -> Option<Duration> {
    let limit = match status {
        Some(status) if status.is_server_error() || BUSY.contains(&status) => MAX_BUSY_ATTEMPTS,
        Some(_) => return None,
        None => MAX_ATTEMPTS,
    };
    let doubled = FIRST_DELAY * 2u32.pow(attempt.saturating_sub(1).min(10));
    let wait = asked.unwrap_or(Duration::ZERO).max(doubled.min(MAX_DELAY));
    (attempt < limit && wait <= MAX_RETRY_AFTER).then_some(wait)
}

/// The time limit of a request with a body of this length.
pub(super) fn time_limit(body_bytes: u64) -> Duration {
    TIME_LIMIT + Duration::from_secs(body_bytes / MIN_BYTES_PER_SECOND)
}

/// Reads a response up to a size limit.
async fn read_body(mut answer: Response) -> Result<Vec<u8>, PushError> {
    let url = answer.url().path().to_owned();
    let mut body = Vec::new();
    while let Some(chunk) = answer.chunk().await.map_err(|error| unavailable(&url, &error))? {
        body.extend_from_slice(&chunk);
        if body.len() > MAX_RESPONSE_BYTES {
            return Err(PushError::Unavailable(format!("the response of {url} is too long")));
        }
    }
    Ok(body)
}

/// What the hub says about a refusal, in printable characters.
fn reason(body: &[u8], status: StatusCode) -> String {
    #[derive(Deserialize)]
    struct Refusal {
        #[serde(alias = "message")]
        error: String,
    }
    let text = match serde_json::from_slice::<Refusal>(body) {
        Ok(refusal) => refusal.error,
        Err(_) => String::new(),
    };
    let shown: String = text
        .chars()
        .filter(|c| !c.is_control())
        .take(MAX_REASON_CHARS)
        .collect();
    match shown.is_empty() {
        true => status.to_string(),
        false => format!("{shown} ({status})"),
    }
}

/// An error of a request. Addresses of storage hold signatures, so that the URL is not that of reqwest's message.
pub(super) fn unavailable(what: &str, error: &reqwest::Error) -> PushError {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    PushError::Unavailable(format!("{what}: {cause}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_hub_is_asked_again_when_it_says_so_unless_that_is_too_late() {
        let seconds = |status: u16, asked: Option<u64>, attempt| {
            let status = StatusCode::from_u16(status).ok();
            wait_after(status, asked.map(Duration::from_secs), attempt).map(|wait| wait.as_secs())
        };
        assert_eq!(seconds(503, None, 1), Some(1));
        assert_eq!(seconds(503, None, 4), Some(8));
        assert_eq!(seconds(500, None, 7), Some(30));
        assert_eq!(seconds(503, None, 8), None);
        assert_eq!(seconds(408, None, 1), Some(1));
        assert_eq!(seconds(429, Some(17), 1), Some(17));
        assert_eq!(seconds(429, Some(300), 1), Some(300));
        assert_eq!(seconds(429, Some(86_400), 1), None);
        assert_eq!(seconds(429, Some(0), 2), Some(2));
        // No response at all: status 0 is none.
        assert_eq!((seconds(0, None, 4), seconds(0, None, 5)), (Some(8), None));
        for (status, attempt) in [(200, 1), (404, 1), (401, 3)] {
            assert_eq!(seconds(status, Some(5), attempt), None);
        }
    }
}
