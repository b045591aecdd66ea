//! TLS handshakes: many run concurrently, each with a timeout, and a refused certificate is reported.

use crate::connection_limiter::{Connection, ConnectionLimiter};
use rustls::{CertificateError, ServerConfig};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;

/// Concurrent handshakes: enough for a cluster of workers that reconnects at once. More connections wait in the listen
/// backlog.
const MAX_HANDSHAKES: usize = 1024;
/// A handshake that takes longer is cancelled.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Connections buffered for the server's task.
const READY_QUEUE: usize = 16;

/// Connections after their handshake.
pub(super) type Incoming = ReceiverStream<io::Result<TlsStream<Connection>>>;

/// Accepts connections until the receiver is dropped.
pub(super) fn accept(
    limiter: ConnectionLimiter,
    listener: TcpListener,
    config: Arc<ServerConfig>,
    refused: impl Fn(SocketAddr, &str) + Send + Sync + 'static,
) -> Incoming {
    let (sender, receiver) = mpsc::channel(READY_QUEUE);
    let (acceptor, refused) = (TlsAcceptor::from(config), Arc::new(refused));
    let permits = Arc::new(Semaphore::new(MAX_HANDSHAKES));
    tokio::spawn(async move {
        loop {
            let next = async {
                let permit = permits.clone().acquire_owned().await;
                (permit, limiter.accept(&listener).await)
            };
            let (permit, (tcp, from)) = tokio::select! {
                next = next => next,
                () = sender.closed() => return,
            };
            let (acceptor, refused, sender) = (acceptor.clone(), refused.clone(), sender.clone());
            tokio::spawn(async move {
                let _permit = permit;
                match tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(tcp)).await {
                    // A dropped receiver means shutdown.
                    Ok(Ok(stream)) => drop(sender.send(Ok(stream)).await),
                    Ok(Err(error)) => {
                        tracing::debug!(%error, %from, "the TLS handshake failed");
                        if let Some(problem) = certificate_problem(&error) {
                            refused(from, &problem);
                        }
                    }
                    Err(_) => tracing::debug!(%from, "the TLS handshake timed out"),
                }
            });
        }
    });
    ReceiverStream::new(receiver)
}

/// Returns the problem with the client's certificate, if that was the cause.
fn certificate_problem(error: &io::Error) -> Option<String> {
    let rustls::Error::InvalidCertificate(problem) = error.get_ref()?.downcast_ref::<rustls::Error>()? else {
        return None;
    };
    Some(match problem {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => "a certificate that has expired".into(),
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "a certificate that another authority has signed".into()
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "a certificate that is not a worker's".into()
        }
        other => format!("a certificate that is not accepted: {other}"),
    })
}
