//! The client with which workers and the command line connect to a coordinator.

pub use crate::failover::FailoverChannel;
use crate::pin::{CaPinVerifier, VerificationProblem};
use crate::v1::admin_client::AdminClient;
use crate::v1::blobs_client::BlobsClient;
use crate::v1::jobs_client::JobsClient;
use crate::v1::workers_client::WorkersClient;
use crate::{MAX_MESSAGE_BYTES, PROTOCOL_HEADER};
use aitk_common::control_plane::PROTOCOL_VERSION;
use aitk_common::hash::ContentHash;
use aitk_common::security::join;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Request, Status};
use url::Url;

/// The default port of a coordinator.
pub const DEFAULT_PORT: u16 = 7420;

/// Long enough for slow connections, short enough for interactive use.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A ping is sent on a connection without traffic for `KEEP_ALIVE`; without a response within `KEEP_ALIVE_TIMEOUT` the connection
/// is closed. This detects connections that broke without a reset, well within a lease. On a slow line the ping or its response waits
/// behind what is in the socket's buffer: 10 seconds for an upload at 512 kbit/s.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// A channel that adds the token and the protocol version to every call.
pub type AuthChannel = InterceptedService<FailoverChannel, Credentials>;

/// Clients of all services over one connection. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Clients {
    /// Worker sessions, joining and certificate renewal.
    pub workers: WorkersClient<AuthChannel>,
    /// Jobs with their events and artifacts, workers, and information about the coordinator.
    pub jobs: JobsClient<AuthChannel>,
    /// Administration.
    pub admin: AdminClient<AuthChannel>,
    /// The coordinator's object storage.
    pub blobs: BlobsClient<AuthChannel>,
}

/// A failed connection attempt. Each message says what to do.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The address is invalid.
    #[error(
        "{server:?} is not the address of a coordinator: {problem}; expected https://HOST[:PORT], or http://127.0.0.1:{DEFAULT_PORT} on this machine"
    )]
    BadAddress {
        /// The address as given.
        server: String,
        /// The problem.
        problem: String,
    },
    /// The token would be sent without encryption.
    #[error(
        "{server} is on another machine and has no TLS, so the token would be sent unencrypted; use https:// (with --ca-file for a private certificate authority), or an ssh tunnel to 127.0.0.1"
    )]
    Plaintext {
        /// The address as given.
        server: String,
    },
    /// The token has characters that are not allowed in a header.
    #[error(
        "the token contains a character that is not printable ASCII; copy it again from the coordinator's token file"
    )]
    BadToken,
    /// The file of the certificate authority cannot be read.
    #[error("cannot read the certificate file {}: {source}", path.display())]
    CaFile {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// TLS could not be set up.
    #[error("cannot set up TLS for {server}: {problem}")]
    Tls {
        /// The server.
        server: String,
        /// The cause.
        problem: String,
    },
    /// The server's certificate is not from the pinned authority, or is invalid.
    #[error("{server} is not trusted: {problem}")]
    Untrusted {
        /// The server.
        server: String,
        /// The cause, and what to do.
        problem: String,
    },
    /// No coordinator answers at the address.
    #[error(
        "no coordinator answers at {server} ({problem}); check that it is running. `aitk up` starts one on this machine"
    )]
    Unreachable {
        /// The server.
        server: String,
        /// The cause.
        problem: String,
    },
}

/// Which TLS servers are trusted if no `ca_file` is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trust {
    /// No server with TLS.
    None,
    /// Servers whose chain ends in the authority with this hash (SHA-256 of the certificate, DER).
    Authority(ContentHash),
    /// Servers whose chain ends in an authority of this PEM text.
    Pem(String),
}

/// The token and protocol version to add to calls, and the trusted authority and client certificate of the connection.
#[derive(Clone)]
pub struct Credentials {
    bearer: Option<MetadataValue<Ascii>>,
    protocol: MetadataValue<Ascii>,
    trust: Trust,
    /// Client certificate and key in PEM.
    certificate: Option<(String, String)>,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Credentials(..)")
    }
}

impl Credentials {
    /// Credentials with this token and this program's protocol version. If the token contains the hash of an authority
    /// (`aitk_common::security::join`), that authority is trusted.
    ///
    /// # Errors
    /// [`ConnectError::BadToken`]
    pub fn new(token: &str) -> Result<Self, ConnectError> {
        Self::with_protocol(token, PROTOCOL_VERSION)
    }

    /// [`Self::new`] with another protocol version, for tests.
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
            trust: ca.map_or(Trust::None, Trust::Authority),
            certificate: None,
        })
    }

    /// Credentials of a worker that has joined: its certificate and its key in PEM.
    #[must_use]
    pub fn with_certificate(certificate: impl Into<String>, key: impl Into<String>, trust: Trust) -> Self {
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
/// machine and `https` elsewhere. Several coordinators of one cluster are separated by commas (see [`addresses`]): the first that
/// answers is used, with failover to the others. `ca_file` is a PEM file with the certificate authority (or the self-signed
/// certificate) to trust. The channel reconnects by itself.
///
/// # Errors
/// [`ConnectError`]; the first call reports wrong tokens and other protocol versions.
pub async fn connect(server: &str, token: &str, ca_file: Option<&Path>) -> Result<Clients, ConnectError> {
    connect_with(server, Credentials::new(token)?, ca_file).await
}

/// [`connect`] with these credentials.
///
/// # Errors
/// [`ConnectError`]
pub fn connect_with<'a>(
    server: &'a str,
    credentials: Credentials,
    ca_file: Option<&'a Path>,
) -> Pin<Box<dyn Future<Output = Result<Clients, ConnectError>> + Send + 'a>> {
    // Boxed: the transport is compiled once, in this crate; an `async fn` is compiled by each crate that awaits it.
    Box::pin(connect_to_first(server, credentials, ca_file))
}

async fn connect_to_first(
    server: &str,
    credentials: Credentials,
    ca_file: Option<&Path>,
) -> Result<Clients, ConnectError> {
    let untrusted = VerificationProblem::default();
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
                return Ok(clients(FailoverChannel::new(channels, first), credentials));
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

/// Splits `one:7420,two:7420` into the addresses of several coordinators. Never empty.
#[must_use]
pub fn addresses(server: &str) -> Vec<&str> {
    let all: Vec<&str> = server
        .split(',')
        .map(str::trim)
        .filter(|text| !text.is_empty())
        .collect();
    if all.is_empty() { vec![server] } else { all }
}

/// Creates a channel to another coordinator. It connects on first use.
///
/// # Errors
/// [`ConnectError`] for an invalid address or certificate file.
pub fn connect_lazily(server: &str, ca_file: Option<&Path>) -> Result<Channel, ConnectError> {
    Ok(endpoint(server, &Trust::None, None, ca_file, &VerificationProblem::default())?.connect_lazy())
}

fn clients(channel: FailoverChannel, credentials: Credentials) -> Clients {
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
    problem: &VerificationProblem,
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
            .tls_config_with_verifier(config, CaPinVerifier::new(*ca, problem.clone()))
            .map_err(|error| tls_error(server, &error));
    }
    endpoint.tls_config(config).map_err(|error| tls_error(server, &error))
}

fn tls_error(server: &str, error: &tonic::transport::Error) -> ConnectError {
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
        // `set_scheme` cannot fail between http and https.
        let _ = url.set_scheme("http");
    }
    if url.scheme() == "http" && !loopback {
        return Err(ConnectError::Plaintext {
            server: server.to_owned(),
        });
    }
    // The parser drops an explicit `:443` or `:80`, the scheme's default. An explicit port must not become 7420.
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

/// The innermost cause. "connection refused" is more useful than "transport error".
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
    fn several_addresses_are_separated_by_commas() {
        assert_eq!(addresses("a:1, b:2,"), ["a:1", "b:2"]);
        assert_eq!(addresses("a:1"), ["a:1"]);
        assert_eq!(addresses(" , "), [" , "]);
    }

    #[test]
    fn tokens_are_not_sent_unencrypted() {
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
    async fn an_unreachable_coordinator_is_an_error() {
        let port = {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            listener.local_addr().unwrap().port()
        };
        let error = connect(&format!("127.0.0.1:{port}"), "t", None).await.unwrap_err();
        assert!(matches!(error, ConnectError::Unreachable { .. }), "{error}");
        assert!(matches!(Credentials::new("a\nb"), Err(ConnectError::BadToken)));
    }
}
