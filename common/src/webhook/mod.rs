//! Posting a few words to an address that a user chose.
//!
//! Whoever chooses the address may not thereby reach what only this machine reaches: the address is looked up once, every
//! answer is checked, and the connection goes to what was checked. No redirection is followed and no proxy is used, because
//! either would go where nobody looked. What comes back is not read beyond its status.

mod address;
#[cfg(test)]
mod tests;

pub use address::is_public;

use reqwest::{Client, StatusCode, Url, redirect};
use std::net::SocketAddr;
use std::time::Duration;

/// The longest address: those of chat services have some 200 characters.
const MAX_URL_BYTES: usize = 2048;
/// Looking up the name, and connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// One try, with everything.
const TIMEOUT: Duration = Duration::from_secs(10);
/// What is posted is a few lines.
const MAX_BODY_BYTES: usize = 64 << 10;
/// Pauses after tries that may work the next time.
const PAUSES: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(3)];

/// Why nothing was posted. No message holds the address beyond its host: the rest is often a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WebhookError {
    /// It is no address that anything is posted to.
    #[error("{0}")]
    BadUrl(String),
    /// It leads into a network of one's own.
    #[error(
        "{host} leads to {address}: an address of a private network, to which nothing is posted unless that is allowed"
    )]
    Private {
        /// As it was named.
        host: String,
        /// What it means.
        address: String,
    },
    /// It cannot be reached.
    #[error("{host} cannot be reached: {problem}")]
    Unreachable {
        /// As it was named.
        host: String,
        /// Why.
        problem: String,
    },
    /// It does not take it.
    #[error("{host} answered {status}{}", if *.redirect { ", a redirection, which is not followed: give the address that it leads to" } else { "" })]
    Refused {
        /// As it was named.
        host: String,
        /// The status.
        status: String,
        /// It names another address.
        redirect: bool,
        /// It may take it later.
        busy: bool,
    },
}

impl WebhookError {
    fn may_pass(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Refused { busy, .. } => *busy,
            Self::BadUrl(_) | Self::Private { .. } => false,
        }
    }
}

/// An address that a user chose.
#[derive(Clone, PartialEq, Eq)]
pub struct Webhook {
    url: Url,
    private: bool,
    pauses: [Duration; 2],
}

impl std::fmt::Debug for Webhook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Webhook({})", self.host())
    }
}

impl Webhook {
    /// An `https://` address. With `private` also `http://`, and addresses of networks of one's own: whoever runs this machine
    /// said so.
    ///
    /// # Errors
    /// [`WebhookError::BadUrl`]
    pub fn new(text: &str, private: bool) -> Result<Self, WebhookError> {
        let bad = |problem: String| Err(WebhookError::BadUrl(problem));
        if text.len() > MAX_URL_BYTES {
            return bad(format!("the address has {} bytes; at most {MAX_URL_BYTES}", text.len()));
        }
        let url = match Url::parse(text.trim()) {
            Ok(url) => url,
            Err(error) => return bad(format!("this is no address ({error}); expected https://HOST/PATH")),
        };
        match url.scheme() {
            "https" => {}
            "http" if private => {}
            "http" => return bad("the address has no TLS: expected https://HOST/PATH".into()),
            other => {
                let shown: String = other.chars().take(16).collect();
                return bad(format!(
                    "nothing is posted to {shown}: addresses; expected https://HOST/PATH"
                ));
            }
        }
        if url.host_str().is_none_or(str::is_empty) {
            return bad("the address has no host; expected https://HOST/PATH".into());
        }
        if !url.username().is_empty() || url.password().is_some() {
            return bad("the address holds a user name or a password; expected https://HOST/PATH".into());
        }
        Ok(Self {
            url,
            private,
            pauses: PAUSES,
        })
    }

    /// The host and, if it is named, the port: what may be shown of it.
    #[must_use]
    pub fn host(&self) -> String {
        let host = self.url.host_str().unwrap_or_default();
        match self.url.port() {
            Some(port) => format!("{host}:{port}"),
            None => host.to_owned(),
        }
    }

    /// Posts JSON. What may work the next time is tried three times; it never takes longer than a minute.
    ///
    /// # Errors
    /// [`WebhookError`]
    pub async fn post(&self, body: &serde_json::Value) -> Result<(), WebhookError> {
        let body = body.to_string();
        if body.len() > MAX_BODY_BYTES {
            return Err(WebhookError::BadUrl(format!(
                "{} bytes are too many to post; at most {MAX_BODY_BYTES}",
                body.len()
            )));
        }
        let mut pauses = self.pauses.iter();
        loop {
            match self.try_post(&body).await {
                Err(error) if error.may_pass() => match pauses.next() {
                    Some(pause) => tokio::time::sleep(*pause).await,
                    None => return Err(error),
                },
                done => return done,
            }
        }
    }

    async fn try_post(&self, body: &str) -> Result<(), WebhookError> {
        let unreachable = |problem: String| WebhookError::Unreachable {
            host: self.host(),
            problem,
        };
        let addresses = self.addresses().await?;
        // A second installation is refused, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::builder()
            .user_agent(concat!("aitk/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(TIMEOUT)
            .redirect(redirect::Policy::none())
            .no_proxy()
            .resolve_to_addrs(self.url.host_str().unwrap_or_default(), &addresses)
            .build()
            .map_err(|error| unreachable(innermost(error)))?;
        let request = client
            .post(self.url.clone())
            .header(reqwest::header::CONTENT_TYPE, "application/json")
            .body(body.to_owned());
        let answer = request.send().await.map_err(|error| unreachable(innermost(error)))?;
        let status = answer.status();
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

    /// Where the connection may go.
    async fn addresses(&self) -> Result<Vec<SocketAddr>, WebhookError> {
        let unreachable = |problem: String| WebhookError::Unreachable {
            host: self.host(),
            problem,
        };
        let port = self.url.port_or_known_default().unwrap_or(443);
        // An address in brackets is one of IPv6; the parser wrote every other form of one as digits and dots.
        let host = self.url.host_str().unwrap_or_default();
        let name = host.trim_start_matches('[').trim_end_matches(']');
        let looked = tokio::time::timeout(CONNECT_TIMEOUT, tokio::net::lookup_host((name, port))).await;
        let found: Vec<SocketAddr> = match looked {
            Err(_) => return Err(unreachable("its address could not be looked up in time".into())),
            Ok(Err(error)) => return Err(unreachable(error.to_string())),
            Ok(Ok(found)) => found.collect(),
        };
        if found.is_empty() {
            return Err(unreachable("it has no address".into()));
        }
        // One of several would be enough to lead there.
        let own = found.iter().find(|address| !is_public(address.ip()));
        match own.filter(|_| !self.private) {
            Some(address) => Err(WebhookError::Private {
                host: self.host(),
                address: address.ip().to_string(),
            }),
            None => Ok(found),
        }
    }
}

/// The cause, without the address that the library puts before it.
fn innermost(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut cause: &dyn std::error::Error = &error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}
