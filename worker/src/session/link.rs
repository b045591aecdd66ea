//! The connection to the coordinator: opens it, reopens it after errors, and passes messages both ways.
//!
//! One task. It makes no decisions about attempts; it only reports what happens to the connection.

use super::refusal::Refusal;
use crate::identity::{CertificateRenewer, WorkerIdentity};
use aitk_common::control_plane::{Registration, ToCoordinator, ToWorker};
use aitk_common::id::WorkerId;
use aitk_common::security::token::Token;
use aitk_proto::client::{self, Clients, ConnectError, Credentials};
use aitk_proto::v1;
use std::hash::{BuildHasher, Hasher};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

/// The first and the longest delay between two tries.
const FIRST_DELAY: Duration = Duration::from_millis(250);
const MAX_DELAY: Duration = Duration::from_secs(15);
/// The first and the longest delay after a refusal: a person has to fix it, and the coordinator logs each refusal.
const FIRST_REFUSED_DELAY: Duration = Duration::from_secs(1);
const MAX_REFUSED_DELAY: Duration = Duration::from_secs(60);
/// The longest delay when there are several coordinators.
const MAX_CLUSTER_DELAY: Duration = Duration::from_secs(2);
/// After a connection that lasted this long, the delay starts from the beginning.
const STABLE_AFTER: Duration = Duration::from_secs(30);
/// How long the coordinator may take to answer the registration.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(20);
/// How long the coordinator may take to close a connection that we end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Capacity of the channel of outgoing messages. The outbox keeps the rest, so this only has to cover one poll of the
/// stream.
const OUTGOING_CAPACITY: usize = 64;

/// The coordinator's addresses and our credentials.
#[derive(Clone)]
pub(crate) struct ConnectionTarget {
    pub(crate) server: String,
    pub(crate) token: String,
    pub(crate) token_file: Option<PathBuf>,
    pub(crate) ca_file: Option<PathBuf>,
    /// The certificate of a worker that joined, used instead of the token.
    pub(crate) renewer: Option<Arc<CertificateRenewer>>,
}

impl ConnectionTarget {
    /// Returns the credentials, and a receiver of newer certificates.
    fn credentials(&self) -> Result<(Credentials, Option<watch::Receiver<WorkerIdentity>>), ConnectionError> {
        let Some(renewer) = &self.renewer else {
            // The file is read each time, because a refused worker may get a new token.
            let read = self.token_file.as_deref().map(Token::read);
            let token = match &read {
                Some(Ok(token)) => token.secret(),
                Some(Err(error)) => {
                    tracing::warn!(%error, "the token file cannot be read; using the previous token");
                    self.token.as_str()
                }
                None => self.token.as_str(),
            };
            return Ok((Credentials::new(token)?, None));
        };
        renewer.reload();
        let mut identity = renewer.subscribe();
        let joined = identity.borrow_and_update().clone();
        if joined.expired_at().is_some() {
            return Err(ConnectionError::Refused(Refusal::Config(joined.rejoin_message())));
        }
        Ok((joined.credentials(), Some(identity)))
    }
}

/// Waits for a newer certificate; forever without a receiver.
async fn wait_for_newer(identity: Option<&mut watch::Receiver<WorkerIdentity>>) {
    if let Some(identity) = identity
        && identity.changed().await.is_ok()
    {
        return;
    }
    std::future::pending().await
}

/// An event of the connection.
pub(crate) enum LinkEvent {
    /// A connection is about to open and needs a registration. `certified` is the worker id of a worker that joined.
    Opening {
        reply: oneshot::Sender<Registration>,
        certified: Option<WorkerId>,
    },
    /// The connection is open; the first message is the coordinator's Welcome.
    Open {
        to_coordinator: mpsc::Sender<ToCoordinator>,
        clients: Box<Clients>,
    },
    /// A message from the coordinator.
    Message(Box<ToWorker>),
    /// The connection broke, or could not be opened; it will be tried again.
    Down { problem: String },
    /// The coordinator refuses this worker. The connection is tried again, less often.
    Refused(Refusal),
}

enum ConnectionError {
    Retry(String),
    Refused(Refusal),
}

impl From<ConnectError> for ConnectionError {
    fn from(error: ConnectError) -> Self {
        match error {
            // Another server may answer for a while, for example in a hotel's network. Nothing was sent to it.
            ConnectError::Unreachable { .. } | ConnectError::Untrusted { .. } => Self::Retry(error.to_string()),
            other => Self::Refused(Refusal::Config(other.to_string())),
        }
    }
}

impl From<tonic::Status> for ConnectionError {
    fn from(status: tonic::Status) -> Self {
        let message = status.message().to_owned();
        match status.code() {
            Code::Unauthenticated | Code::PermissionDenied => Self::Refused(Refusal::Token(message)),
            Code::FailedPrecondition | Code::Unimplemented | Code::InvalidArgument => {
                Self::Refused(Refusal::Protocol(message))
            }
            code => Self::Retry(format!("{code:?}: {message}")),
        }
    }
}

/// Keeps a connection open until the receiver of `events` is dropped.
pub(crate) async fn keep_connected(target: ConnectionTarget, events: mpsc::Sender<LinkEvent>) {
    let servers = client::addresses(&target.server);
    // Of several coordinators one is the leader, and a new leader takes over within seconds: try often.
    let longest = if servers.len() > 1 {
        MAX_CLUSTER_DELAY
    } else {
        MAX_DELAY
    };
    let mut delay = FIRST_DELAY;
    let mut refused_delay = FIRST_REFUSED_DELAY;
    let mut at = 0;
    loop {
        let started_at = Instant::now();
        let problem = match run_connection(servers[at % servers.len()], &target, &events).await {
            Ok(()) => return,
            Err(ConnectionError::Refused(refusal)) => {
                if events.send(LinkEvent::Refused(refusal)).await.is_err() {
                    return;
                }
                tokio::select! {
                    () = sleep(with_jitter(refused_delay)) => {}
                    () = events.closed() => return,
                }
                refused_delay = (refused_delay * 2).min(MAX_REFUSED_DELAY);
                at += 1;
                continue;
            }
            Err(ConnectionError::Retry(problem)) => problem,
        };
        refused_delay = FIRST_REFUSED_DELAY;
        if events.send(LinkEvent::Down { problem }).await.is_err() {
            return;
        }
        if started_at.elapsed() >= STABLE_AFTER {
            delay = FIRST_DELAY;
        }
        at += 1;
        // Try the next one at once, until all were tried.
        let round = at.is_multiple_of(servers.len());
        tokio::select! {
            () = sleep(with_jitter(if round { delay } else { FIRST_DELAY })) => {}
            () = events.closed() => return,
        }
        if round {
            delay = (delay * 2).min(longest);
        }
    }
}

/// Runs one connection until it ends. `Ok` when the receiver of `events` was dropped.
async fn run_connection(
    server: &str,
    target: &ConnectionTarget,
    events: &mpsc::Sender<LinkEvent>,
) -> Result<(), ConnectionError> {
    let (credentials, mut identity) = target.credentials()?;
    let mut clients = client::connect_with(server, credentials, target.ca_file.as_deref()).await?;
    let (reply, registration) = oneshot::channel();
    let certified = identity.as_ref().map(|identity| identity.borrow().worker.clone());
    if events.send(LinkEvent::Opening { reply, certified }).await.is_err() {
        return Ok(());
    }
    let Ok(registration) = registration.await else {
        return Ok(());
    };
    let (wire, outgoing) = mpsc::channel::<v1::WorkerMessage>(OUTGOING_CAPACITY);
    let full = |_| ConnectionError::Retry("the connection closed while it opened".to_owned());
    wire.try_send(ToCoordinator::Register(Box::new(registration)).into())
        .map_err(full)?;
    let opening = clients.workers.session(ReceiverStream::new(outgoing));
    let timed_out = |_| ConnectionError::Retry("the coordinator did not answer the registration in time".to_owned());
    let mut incoming = timeout(WELCOME_TIMEOUT, opening)
        .await
        .map_err(timed_out)??
        .into_inner();
    let first = timeout(WELCOME_TIMEOUT, incoming.message())
        .await
        .map_err(timed_out)??;

    let (to_coordinator, mut messages) = mpsc::channel::<ToCoordinator>(1);
    if events
        .send(LinkEvent::Open {
            to_coordinator,
            clients: Box::new(clients),
        })
        .await
        .is_err()
    {
        return Ok(());
    }
    let mut next = first;
    // Outgoing messages wait here for capacity, so that a slow network does not stop us from receiving.
    let mut waiting: Option<v1::WorkerMessage> = None;
    'session: loop {
        let Some(message) = next.take() else {
            return Err(ConnectionError::Retry(
                "the coordinator closed the connection".to_owned(),
            ));
        };
        let message = ToWorker::try_from(message)
            .map_err(|error| ConnectionError::Retry(format!("the coordinator sent an invalid message: {error}")))?;
        if let ToWorker::GoingAway { reason, retry: false } = message {
            return Err(ConnectionError::Refused(Refusal::SessionEnded(reason)));
        }
        if events.send(LinkEvent::Message(Box::new(message))).await.is_err() {
            return Ok(());
        }
        while next.is_none() {
            tokio::select! {
                message = incoming.message() => {
                    next = message?;
                    if next.is_none() {
                        break;
                    }
                }
                room = wire.reserve(), if waiting.is_some() => match (room, waiting.take()) {
                    (Ok(room), Some(message)) => room.send(message),
                    _ => return Err(ConnectionError::Retry("the connection broke".to_owned())),
                },
                message = messages.recv(), if waiting.is_none() => match message {
                    Some(message) => waiting = Some(message.into()),
                    None => break 'session,
                },
                () = wait_for_newer(identity.as_mut()) => {
                    return Err(ConnectionError::Retry("the certificate was renewed; connecting again with the new one".to_owned()));
                }
                () = events.closed() => return Ok(()),
            }
        }
    }
    // Close our half of the stream, and let the coordinator close its half after it has read everything.
    drop(wire);
    let rest = async { while let Ok(Some(_)) = incoming.message().await {} };
    let _ = timeout(CLOSE_TIMEOUT, rest).await;
    Ok(())
}

/// A random delay between half of `delay` and `delay`, so that the workers of a cluster do not reconnect at the same
/// moment.
fn with_jitter(delay: Duration) -> Duration {
    let random = std::collections::hash_map::RandomState::new().build_hasher().finish() % 1000;
    delay.mul_f64(0.5 + random as f64 / 2000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_stays_within_its_bounds() {
        for _ in 0..100 {
            let delay = with_jitter(MAX_DELAY);
            assert!(delay >= MAX_DELAY / 2 && delay <= MAX_DELAY, "{delay:?}");
        }
    }

    #[test]
    fn permanent_errors_are_refusals() {
        let is_refused = |code| {
            matches!(
                ConnectionError::from(tonic::Status::new(code, "")),
                ConnectionError::Refused(_)
            )
        };
        assert!(is_refused(Code::Unauthenticated) && is_refused(Code::FailedPrecondition));
        assert!(!is_refused(Code::Unavailable) && !is_refused(Code::Cancelled) && !is_refused(Code::Internal));
        assert!(matches!(
            ConnectionError::from(ConnectError::BadToken),
            ConnectionError::Refused(Refusal::Config(_))
        ));
    }
}
