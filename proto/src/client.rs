//! How worker and command line reach a coordinator.

use crate::pin::{Pinned, Problem};
pub use crate::switch::Switch;
use crate::v1::admin_client::AdminClient;
use crate::v1::blobs_client::BlobsClient;
use crate::v1::jobs_client::JobsClient;
use crate::v1::workers_client::WorkersClient;
use crate::{MAX_MESSAGE_BYTES, PROTOCOL_HEADER};
use aitk_common::control::PROTOCOL_VERSION;
use aitk_common::hash::ContentHash;
use aitk_common::security::join;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Request, Status};
use url::Url;

/// The port of a coordinator that was not told another one.
pub const DEFAULT_PORT: u16 = 7420;

/// Long enough for a slow line; short enough that a person still waits.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A connection that is silent for `KEEP_ALIVE` is asked, and given up after `KEEP_ALIVE_TIMEOUT` without an answer:
/// a cable that was pulled out does not say so.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// A channel whose every call carries the token and the protocol version.
pub type AuthChannel = InterceptedService<Switch, Credentials>;

/// One client per service, over one connection. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Clients {
    /// Worker sessions.
    pub workers: WorkersClient<AuthChannel>,
    /// Jobs, their events and artifacts, workers, and what the coordinator says about itself.
    pub jobs: JobsClient<AuthChannel>,
    /// For whoever runs the coordinator.
    pub admin: AdminClient<AuthChannel>,
    /// The coordinator's object storage.
    pub blobs: BlobsClient<AuthChannel>,
}

/// Why no connection could be made. Each says what to do.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The address is no address.
    #[error(
        "{server:?} is not the address of a coordinator: {problem}; expected https://HOST[:PORT], or http://127.0.0.1:{DEFAULT_PORT} on this machine"
    )]
    BadAddress {
        /// As given.
        server: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The token would travel in clear.
    #[error(
        "{server} is on another machine and has no TLS, so the token would travel in clear; use https:// (with --ca-file for a certificate of your own), or an ssh tunnel to 127.0.0.1"
    )]
    Plaintext {
        /// As given.
        server: String,
    },
    /// The token has characters that no header can carry.
    #[error(
        "the token contains a character that is not printable ASCII; copy it again from the coordinator's token file"
    )]
    BadToken,
    /// The file with the certificate authority cannot be read.
    #[error("cannot read the certificate file {}: {source}", path.display())]
    CaFile {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// TLS could not be set up.
    #[error("cannot set up TLS for {server}: {problem}")]
    Tls {
        /// The server.
        server: String,
        /// Why.
        problem: String,
    },
    /// Whoever answers there is not the one that the token was made by.
    #[error("{server} is not trusted: {problem}")]
    Untrusted {
        /// The server.
        server: String,
        /// Why, and what to do.
        problem: String,
    },
    /// Nobody answers there.
    #[error("no coordinator answers at {server} ({problem}); is it running? `aitk up` starts one on this machine")]
    Unreachable {
        /// The server.
        server: String,
        /// Why.
        problem: String,
    },
}

/// Which server is trusted when no `ca_file` says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trust {
    /// None with TLS.
    Nobody,
    /// One whose chain ends in the authority with this hash (SHA-256 of the certificate, DER).
    Authority(ContentHash),
    /// One whose chain ends in an authority of this PEM text.
    Pem(String),
}

/// Puts token and protocol version into a call; and whom to trust, and which certificate to show, into a connection.
#[derive(Clone)]
pub struct Credentials {
    bearer: Option<MetadataValue<Ascii>>,
    protocol: MetadataValue<Ascii>,
    trust: Trust,
    /// Certificate and key, PEM.
    certificate: Option<(String, String)>,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Credentials(..)")
    }
}

impl Credentials {
    /// Credentials with this token and this program's protocol version. If the token names an authority
    /// (`aitk_common::security::join`), that one is trusted.
    ///
    /// # Errors
    /// [`ConnectError::BadToken`]
    pub fn new(token: &str) -> Result<Self, ConnectError> {
        Self::with_protocol(token, PROTOCOL_VERSION)
    }

    /// The same with another protocol version, to see what a coordinator says to it.
    ///
    /// # Errors
    /// [`ConnectError::BadToken`]
    pub fn with_protocol(token: &str, protocol: u32) -> Result<Self, ConnectError> {
        let (secret, ca) = join::split(token.trim());
        let mut bearer: MetadataValue<Ascii> =
            format!("Bearer {secret}").parse().map_err(|_| ConnectError::BadToken)?;
        bearer.set_sensitive(true);
        Ok(Self {
            bearer: Some(bearer),
            protocol: MetadataValue::from(protocol),
            trust: ca.map_or(Trust::Nobody, Trust::Authority),
            certificate: None,
        })
    }

    /// Credentials of a worker that joined: its certificate and its key, PEM.
    #[must_use]
    pub fn certified(certificate: impl Into<String>, key: impl Into<String>, trust: Trust) -> Self {
        Self {
            bearer: None,
            protocol: MetadataValue::from(PROTOCOL_VERSION),
            trust,
            certificate: Some((certificate.into(), key.into())),
        }
    }
}

impl Interceptor for Credentials {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(bearer) = &self.bearer {
            request.metadata_mut().insert("authorization", bearer.clone());
        }
        request.metadata_mut().insert(PROTOCOL_HEADER, self.protocol.clone());
        Ok(request)
    }
}

/// Connects to a coordinator: `https://host:7420`, `http://127.0.0.1:7420`, or `host[:port]`, which means `http` on this
/// machine and `https` elsewhere; or to one of several that share their work, with commas between (see [`addresses`]):
/// the first that answers, and another one when it does not any more. `ca_file` is a PEM file with the certificate authority (or the self-signed
/// certificate) to trust. Later losses of the connection are healed by the channel itself, call by call.
///
/// # Errors
/// [`ConnectError`]; wrong tokens and other protocol versions show up in the first call.
pub async fn connect(server: &str, token: &str, ca_file: Option<&Path>) -> Result<Clients, ConnectError> {
    connect_with(server, Credentials::new(token)?, ca_file).await
}

/// [`connect`] with given credentials.
///
/// # Errors
/// [`ConnectError`]
pub async fn connect_with(
    server: &str,
    credentials: Credentials,
    ca_file: Option<&Path>,
) -> Result<Clients, ConnectError> {
    let untrusted = Problem::default();
    let endpoints = addresses(server)
        .into_iter()
        .map(|address| {
            endpoint(
                address,
                &credentials.trust,
                credentials.certificate.as_ref(),
                ca_file,
                &untrusted,
            )
        })
        .collect::<Result<Vec<_>, _>>()?;
    let mut problem = String::new();
    for (first, endpoint) in endpoints.iter().enumerate() {
        match endpoint.connect().await {
            Ok(channel) => {
                let mut channels: Vec<_> = endpoints.iter().map(Endpoint::connect_lazy).collect();
                channels[first] = channel;
                return Ok(clients(Switch::new(channels, first), credentials));
            }
            Err(error) => problem = root_cause(&error),
        }
    }
    let server = server.to_owned();
    Err(match untrusted.take() {
        Some(problem) => ConnectError::Untrusted { server, problem },
        None => ConnectError::Unreachable { server, problem },
    })
}

/// The addresses in `one:7420,two:7420`: several coordinators that share their work. Never empty.
#[must_use]
pub fn addresses(server: &str) -> Vec<&str> {
    let all: Vec<&str> = server
        .split(',')
        .map(str::trim)
        .filter(|text| !text.is_empty())
        .collect();
    if all.is_empty() { vec![server] } else { all }
}

/// A connection to another coordinator, which is only made when it is used.
///
/// # Errors
/// [`ConnectError`], but nobody is asked yet.
pub fn lazily(server: &str, ca_file: Option<&Path>) -> Result<Channel, ConnectError> {
    Ok(endpoint(server, &Trust::Nobody, None, ca_file, &Problem::default())?.connect_lazy())
}

fn clients(channel: Switch, credentials: Credentials) -> Clients {
    let channel = InterceptedService::new(channel, credentials);
    Clients {
        workers: WorkersClient::new(channel.clone())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES),
        jobs: JobsClient::new(channel.clone())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES),
        admin: AdminClient::new(channel.clone())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES),
        blobs: BlobsClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES),
    }
}

fn endpoint(
    server: &str,
    trust: &Trust,
    certificate: Option<&(String, String)>,
    ca_file: Option<&Path>,
    problem: &Problem,
) -> Result<Endpoint, ConnectError> {
    let url = parse_address(server)?;
    let tls = url.scheme() == "https";
    let bad = |problem: String| ConnectError::BadAddress {
        server: server.to_owned(),
        problem,
    };
    let endpoint = Endpoint::from_shared(url.to_string())
        .map_err(|error| bad(error.to_string()))?
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .tcp_nodelay(true)
        .user_agent(concat!("aitk/", env!("CARGO_PKG_VERSION")))
        .map_err(|error| bad(error.to_string()))?;
    if !tls {
        return Ok(endpoint);
    }
    let mut config = ClientTlsConfig::new();
    if let Some((certificate, key)) = certificate {
        config = config.identity(Identity::from_pem(certificate, key));
    }
    if let Some(path) = ca_file {
        let pem = std::fs::read(path).map_err(|source| ConnectError::CaFile {
            path: path.to_owned(),
            source,
        })?;
        config = config.ca_certificate(Certificate::from_pem(pem));
    } else if let Trust::Pem(pem) = trust {
        config = config.ca_certificate(Certificate::from_pem(pem));
    } else if let Trust::Authority(ca) = trust {
        return endpoint
            .tls_config_with_verifier(config, Pinned::new(*ca, problem.clone()))
            .map_err(|error| no_tls(server, &error));
    }
    endpoint.tls_config(config).map_err(|error| no_tls(server, &error))
}

fn no_tls(server: &str, error: &tonic::transport::Error) -> ConnectError {
    ConnectError::Tls {
        server: server.to_owned(),
        problem: root_cause(error),
    }
}

fn parse_address(server: &str) -> Result<Url, ConnectError> {
    let bad = |problem: String| ConnectError::BadAddress {
        server: server.to_owned(),
        problem,
    };
    let text = server.trim();
    let explicit = text.contains("://");
    let mut url = if explicit {
        Url::parse(text)
    } else {
        Url::parse(&format!("https://{text}"))
    }
    .map_err(|error| bad(error.to_string()))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(bad(format!("the scheme {:?} is neither http nor https", url.scheme())));
    }
    let loopback = match url.host() {
        Some(url::Host::Domain(name)) => name == "localhost",
        Some(url::Host::Ipv4(ip)) => IpAddr::V4(ip).is_loopback(),
        Some(url::Host::Ipv6(ip)) => IpAddr::V6(ip).is_loopback(),
        None => return Err(bad("it has no host".into())),
    };
    if !explicit && loopback {
        // `set_scheme` refuses nothing between these two.
        let _ = url.set_scheme("http");
    }
    if url.scheme() == "http" && !loopback {
        return Err(ConnectError::Plaintext {
            server: server.to_owned(),
        });
    }
    // An explicit `:443` or `:80` is dropped by the parser as the scheme's default; written out, it stays.
    if url.port().is_none()
        && !text
            .trim_end_matches('/')
            .ends_with(if url.scheme() == "http" { ":80" } else { ":443" })
    {
        url.set_port(Some(DEFAULT_PORT))
            .map_err(|()| bad("no port can be set".into()))?;
    }
    Ok(url)
}

/// The innermost cause: "connection refused" says more than "transport error".
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut inner = error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    inner.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> String {
        parse_address(text).unwrap().to_string()
    }

    #[test]
    fn addresses_get_scheme_and_port() {
        assert_eq!(address("127.0.0.1"), "http://127.0.0.1:7420/");
        assert_eq!(address("localhost:99"), "http://localhost:99/");
        assert_eq!(address("[::1]:99"), "http://[::1]:99/");
        assert_eq!(address("gpu.lab"), "https://gpu.lab:7420/");
        assert_eq!(address("https://gpu.lab:443"), "https://gpu.lab/");
        assert_eq!(address("https://gpu.lab"), "https://gpu.lab:7420/");
    }

    #[test]
    fn several_addresses_have_commas_between() {
        assert_eq!(addresses("a:1, b:2,"), ["a:1", "b:2"]);
        assert_eq!(addresses("a:1"), ["a:1"]);
        assert_eq!(addresses(" , "), [" , "]);
    }

    #[test]
    fn tokens_do_not_travel_in_clear() {
        let error = parse_address("http://gpu.lab:7420").unwrap_err();
        assert!(matches!(error, ConnectError::Plaintext { .. }), "{error}");
        for bad in ["", "ftp://x", "http://", "https://a b"] {
            assert!(
                matches!(parse_address(bad), Err(ConnectError::BadAddress { .. })),
                "{bad:?}"
            );
        }
    }

    #[tokio::test]
    async fn nobody_there_is_said_so() {
        let port = {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            listener.local_addr().unwrap().port()
        };
        let error = connect(&format!("127.0.0.1:{port}"), "t", None).await.unwrap_err();
        assert!(matches!(error, ConnectError::Unreachable { .. }), "{error}");
        assert!(matches!(Credentials::new("a\nb"), Err(ConnectError::BadToken)));
    }
}
