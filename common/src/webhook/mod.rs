//! Posts short JSON messages to a URL that a user configured.
//!
//! A user must not reach services through it that only this machine can reach (SSRF). The host name is resolved once, every
//! address is checked, and the connection goes to a checked address. Redirects are not followed and no proxy is used, because
//! both lead to unchecked addresses. Only the status of the response is read.

mod address;
#[cfg(test)]
mod tests;

pub use address::is_public;

use reqwest::{Client, StatusCode, Url, redirect};
use std::net::SocketAddr;
use std::time::Duration;

/// The length limit of a URL. Those of chat services have some 200 characters.
const MAX_URL_BYTES: usize = 2048;
/// The time limit of the DNS lookup, and of connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The time limit of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// The size limit of a message.
const MAX_BODY_BYTES: usize = 64 << 10;
/// Delays before the retries.
const RETRY_DELAYS: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(3)];

/// Why a message was not posted. Errors contain only the host of the URL, because the path is often a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WebhookError {
    /// The URL cannot be used, or the message is too large.
    #[error("{0}")]
    BadUrl(String),
    /// The host has an address of a private network.
    #[error(
        "{host} resolves to {address}, an address of a private network; webhooks to private networks are not allowed here"
    )]
    Private {
        /// The host in the URL.
        host: String,
        /// Its private address.
        address: String,
    },
    /// The host cannot be reached.
    #[error("{host} cannot be reached: {problem}")]
    Unreachable {
        /// The host in the URL.
        host: String,
        /// The cause.
        problem: String,
    },
    /// The server refused the message.
    #[error("{host} answered {status}{}", if *.redirect { ", a redirect, and redirects are not followed; configure the URL that it leads to" } else { "" })]
    Refused {
        /// The host in the URL.
        host: String,
        /// The HTTP status.
        status: String,
        /// Whether the response is a redirect.
        redirect: bool,
        /// Whether a later request may succeed (429 or a server error).
        busy: bool,
    },
}

impl WebhookError {
    fn is_retryable(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Refused { busy, .. } => *busy,
            Self::BadUrl(_) | Self::Private { .. } => false,
        }
    }
}

/// A URL that a user configured.
#[derive(Clone, PartialEq, Eq)]
pub struct Webhook {
    url: Url,
    allow_private: bool,
    retry_delays: [Duration; 2],
}

impl std::fmt::Debug for Webhook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Webhook({})", self.host())
    }
}

impl Webhook {
    /// Parses an `https://` URL. `allow_private`, a decision of the administrator, also allows `http://` and private networks.
    ///
    /// # Errors
    /// [`WebhookError::BadUrl`]
    pub fn new(text: &str, allow_private: bool) -> Result<Self, WebhookError> {
        let bad = |problem: String| Err(WebhookError::BadUrl(problem));
        if text.len() > MAX_URL_BYTES {
            return bad(format!(
                "the URL has {} bytes; at most {MAX_URL_BYTES} are allowed",
                text.len()
            ));
        }
        let url = match Url::parse(text.trim()) {
            Ok(url) => url,
            Err(error) => return bad(format!("this is not a URL ({error}); expected https://HOST/PATH")),
        };
        match url.scheme() {
            "https" => {}
            "http" if allow_private => {}
            "http" => return bad("the URL has no TLS; expected https://HOST/PATH".into()),
            other => {
                let shown: String = other.chars().take(16).collect();
                return bad(format!("the URL has the scheme {shown}; expected https://HOST/PATH"));
            }
        }
        if url.host_str().is_none_or(str::is_empty) {
            return bad("the URL has no host; expected https://HOST/PATH".into());
        }
        if !url.username().is_empty() || url.password().is_some() {
            return bad("the URL contains a user name or a password; expected https://HOST/PATH".into());
        }
        Ok(Self {
            url,
            allow_private,
            retry_delays: RETRY_DELAYS,
        })
    }

    /// The host and, if the URL has one, the port. Safe to display, unlike the path.
    #[must_use]
    pub fn host(&self) -> String {
        let host = self.url.host_str().unwrap_or_default();
        match self.url.port() {
            Some(port) => format!("{host}:{port}"),
            None => host.to_owned(),
        }
    }

    /// Posts JSON. Retryable failures are tried three times in total; this takes less than a minute.
    ///
    /// # Errors
    /// [`WebhookError`]
    pub async fn post(&self, body: &serde_json::Value) -> Result<(), WebhookError> {
        let body = body.to_string();
        if body.len() > MAX_BODY_BYTES {
            return Err(WebhookError::BadUrl(format!(
                "the message has {} bytes; at most {MAX_BODY_BYTES} are allowed",
                body.len()
            )));
        }
        let mut delays = self.retry_delays.iter();
        loop {
            match self.try_post(&body).await {
                Err(error) if error.is_retryable() => match delays.next() {
                    Some(delay) => tokio::time::sleep(*delay).await,
                    None => return Err(error),
                },
                result => return result,
            }
        }
    }

    async fn try_post(&self, body: &str) -> Result<(), WebhookError> {
        let unreachable = |problem: String| WebhookError::Unreachable {
            host: self.host(),
            problem,
        };
        let addresses = self.resolve().await?;
        // Fails if a provider is installed already, which is fine.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::builder()
            .user_agent(concat!("aitk/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(REQUEST_TIMEOUT)
            .redirect(redirect::Policy::none())
            .no_proxy()
            .resolve_to_addrs(self.url.host_str().unwrap_or_default(), &addresses)
            .build()
            .map_err(|error| unreachable(root_cause(error)))?;
        let request = client
            .post(self.url.clone())
            .header(reqwest::header::CONTENT_TYPE, "application/json")
            .body(body.to_owned());
        let response = request.send().await.map_err(|error| unreachable(root_cause(error)))?;
        let status = response.status();
        if status.is_success() {
            return Ok(());
        }
        Err(WebhookError::Refused {
            host: self.host(),
            status: status.to_string(),
            redirect: status.is_redirection(),
            busy: status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS,
        })
    }

    /// Resolves the host and checks all of its addresses.
    async fn resolve(&self) -> Result<Vec<SocketAddr>, WebhookError> {
        let unreachable = |problem: String| WebhookError::Unreachable {
            host: self.host(),
            problem,
        };
        let port = self.url.port_or_known_default().unwrap_or(443);
        // Brackets enclose an IPv6 address. The parser normalises all forms of IPv4 addresses.
        let host = self.url.host_str().unwrap_or_default();
        let name = host.trim_start_matches('[').trim_end_matches(']');
        let lookup = tokio::time::timeout(CONNECT_TIMEOUT, tokio::net::lookup_host((name, port))).await;
        let found: Vec<SocketAddr> = match lookup {
            Err(_) => return Err(unreachable("the DNS lookup timed out".into())),
            Ok(Err(error)) => return Err(unreachable(error.to_string())),
            Ok(Ok(found)) => found.collect(),
        };
        if found.is_empty() {
            return Err(unreachable("the host has no address".into()));
        }
        // One private address is enough to refuse, because the client may connect to any of them.
        let private = found.iter().find(|address| !is_public(address.ip()));
        match private.filter(|_| !self.allow_private) {
            Some(address) => Err(WebhookError::Private {
                host: self.host(),
                address: address.ip().to_string(),
            }),
            None => Ok(found),
        }
    }
}

/// The innermost cause, without the URL that reqwest adds to its messages.
fn root_cause(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut cause: &dyn std::error::Error = &error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}
