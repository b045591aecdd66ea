//! The connection to the coordinator: opens it, keeps it, opens it again, and passes messages both ways.
//!
//! One task. It decides nothing about attempts; it only says what happened to the connection.

use super::refusal::Refusal;
use crate::identity::{Keeper, Membership};
use aitk_common::control::{Registration, ToCoordinator, ToWorker};
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

/// The first and the longest wait between two tries.
const FIRST_WAIT: Duration = Duration::from_millis(250);
const LONGEST_WAIT: Duration = Duration::from_secs(15);
/// The first and the longest wait after a refusal: people have to mend it, and refusals are written down there.
const FIRST_REFUSED_WAIT: Duration = Duration::from_secs(1);
const LONGEST_REFUSED_WAIT: Duration = Duration::from_secs(60);
/// The longest wait when there are several coordinators.
const LONGEST_WAIT_FOR_ONE: Duration = Duration::from_secs(2);
/// A connection that lived this long was a good one: the next try comes at once.
const GOOD: Duration = Duration::from_secs(30);
/// How long the coordinator may take to answer the registration.
const WELCOME: Duration = Duration::from_secs(20);
/// How long the coordinator may take to end a connection that we leave.
const FAREWELL: Duration = Duration::from_secs(2);
/// Messages on their way out. The outbox keeps the rest, so this only has to cover one round of the scheduler.
const OUTGOING: usize = 64;

/// Where the coordinator is and how to prove who we are.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) server: String,
    pub(crate) token: String,
    pub(crate) token_file: Option<PathBuf>,
    pub(crate) ca_file: Option<PathBuf>,
    /// The certificate of a worker that joined, shown instead of the token.
    pub(crate) keeper: Option<Arc<Keeper>>,
}

impl Target {
    /// What to show, and word of something newer.
    fn credentials(&self) -> Result<(Credentials, Option<watch::Receiver<Membership>>), Broken> {
        let Some(keeper) = &self.keeper else {
            // Read each time: whoever is refused may have been given another one meanwhile.
            let read = self.token_file.as_deref().map(Token::read);
            let token = match &read {
                Some(Ok(token)) => token.secret(),
                Some(Err(error)) => {
                    tracing::warn!(%error, "the token file cannot be read again; trying with the token of before");
                    self.token.as_str()
                }
                None => self.token.as_str(),
            };
            return Ok((Credentials::new(token)?, None));
        };
        keeper.reload();
        let mut newest = keeper.newest();
        let joined = newest.borrow_and_update().clone();
        if joined.ended().is_some() {
            return Err(Broken::Never(Refusal::Config(joined.join_again())));
        }
        Ok((joined.credentials(), Some(newest)))
    }
}

/// Waits for a newer certificate.
async fn newer(newest: Option<&mut watch::Receiver<Membership>>) {
    if let Some(newest) = newest
        && newest.changed().await.is_ok()
    {
        return;
    }
    std::future::pending().await
}

/// What happens to the connection.
pub(crate) enum LinkEvent {
    /// It is about to open and wants to know what to register; a worker that joined is who its certificate says.
    Opening {
        reply: oneshot::Sender<Registration>,
        certified: Option<WorkerId>,
    },
    /// It is open; the first message is the coordinator's Welcome.
    Open {
        to_coordinator: mpsc::Sender<ToCoordinator>,
        clients: Box<Clients>,
    },
    /// The coordinator says this.
    Message(Box<ToWorker>),
    /// It broke, or could not be opened; it will be tried again.
    Down { problem: String },
    /// The coordinator does not let us in. It will be tried again, more rarely; whoever has nothing to lose need not wait.
    Refused(Refusal),
}

enum Broken {
    Retry(String),
    Never(Refusal),
}

impl From<ConnectError> for Broken {
    fn from(error: ConnectError) -> Self {
        match error {
            // Somebody else may stand there for a while: in a hotel's network, say. Nothing was sent to them.
            ConnectError::Unreachable { .. } | ConnectError::Untrusted { .. } => Self::Retry(error.to_string()),
            other => Self::Never(Refusal::Config(other.to_string())),
        }
    }
}

impl From<tonic::Status> for Broken {
    fn from(status: tonic::Status) -> Self {
        let message = status.message().to_owned();
        match status.code() {
            Code::Unauthenticated | Code::PermissionDenied => Self::Never(Refusal::Token(message)),
            Code::FailedPrecondition | Code::Unimplemented | Code::InvalidArgument => {
                Self::Never(Refusal::Protocol(message))
            }
            code => Self::Retry(format!("{code:?}: {message}")),
        }
    }
}

/// Keeps a connection until nobody listens to `events`.
pub(crate) async fn keep(target: Target, events: mpsc::Sender<LinkEvent>) {
    let servers = client::addresses(&target.server);
    // Of several coordinators one leads, and another one does within seconds when it is gone: look often.
    let longest = if servers.len() > 1 {
        LONGEST_WAIT_FOR_ONE
    } else {
        LONGEST_WAIT
    };
    let mut wait = FIRST_WAIT;
    let mut refused_wait = FIRST_REFUSED_WAIT;
    let mut at = 0;
    loop {
        let began = Instant::now();
        let problem = match once(servers[at % servers.len()], &target, &events).await {
            Ok(()) => return,
            Err(Broken::Never(refusal)) => {
                if events.send(LinkEvent::Refused(refusal)).await.is_err() {
                    return;
                }
                tokio::select! {
                    () = sleep(jittered(refused_wait)) => {}
                    () = events.closed() => return,
                }
                refused_wait = (refused_wait * 2).min(LONGEST_REFUSED_WAIT);
                at += 1;
                continue;
            }
            Err(Broken::Retry(problem)) => problem,
        };
        refused_wait = FIRST_REFUSED_WAIT;
        if events.send(LinkEvent::Down { problem }).await.is_err() {
            return;
        }
        if began.elapsed() >= GOOD {
            wait = FIRST_WAIT;
        }
        at += 1;
        // The next one at once, until all were tried.
        let round = at.is_multiple_of(servers.len());
        tokio::select! {
            () = sleep(jittered(if round { wait } else { FIRST_WAIT })) => {}
            () = events.closed() => return,
        }
        if round {
            wait = (wait * 2).min(longest);
        }
    }
}

/// One connection from its beginning to its end. `Ok` when nobody listens any more.
async fn once(server: &str, target: &Target, events: &mpsc::Sender<LinkEvent>) -> Result<(), Broken> {
    let (credentials, mut newest) = target.credentials()?;
    let mut clients = client::connect_with(server, credentials, target.ca_file.as_deref()).await?;
    let (reply, registration) = oneshot::channel();
    let certified = newest.as_ref().map(|newest| newest.borrow().worker.clone());
    if events.send(LinkEvent::Opening { reply, certified }).await.is_err() {
        return Ok(());
    }
    let Ok(registration) = registration.await else {
        return Ok(());
    };
    let (wire, outgoing) = mpsc::channel::<v1::WorkerMessage>(OUTGOING);
    let full = |_| Broken::Retry("the connection closed while it opened".to_owned());
    wire.try_send(ToCoordinator::Register(Box::new(registration)).into())
        .map_err(full)?;
    let opening = clients.workers.session(ReceiverStream::new(outgoing));
    let silent = |_| Broken::Retry("the coordinator did not answer the registration in time".to_owned());
    let mut incoming = timeout(WELCOME, opening).await.map_err(silent)??.into_inner();
    let first = timeout(WELCOME, incoming.message()).await.map_err(silent)??;

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
    // A slow network must not keep us from listening, so what goes out waits here for room.
    let mut waiting: Option<v1::WorkerMessage> = None;
    'talk: loop {
        let Some(message) = next.take() else {
            return Err(Broken::Retry("the coordinator closed the connection".to_owned()));
        };
        let message = ToWorker::try_from(message)
            .map_err(|error| Broken::Retry(format!("the coordinator sent a message that makes no sense: {error}")))?;
        if let ToWorker::GoingAway { reason, retry: false } = message {
            return Err(Broken::Never(Refusal::SentAway(reason)));
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
                    _ => return Err(Broken::Retry("the connection broke".to_owned())),
                },
                message = messages.recv(), if waiting.is_none() => match message {
                    Some(message) => waiting = Some(message.into()),
                    None => break 'talk,
                },
                () = newer(newest.as_mut()) => {
                    return Err(Broken::Retry("the certificate was renewed; connecting again with the new one".to_owned()));
                }
                () = events.closed() => return Ok(()),
            }
        }
    }
    // We leave: end our half, and let the other side end its own after it has read all.
    drop(wire);
    let rest = async { while let Ok(Some(_)) = incoming.message().await {} };
    let _ = timeout(FAREWELL, rest).await;
    Ok(())
}

/// Between half and all of `wait`, so that a pool of workers does not come back in one moment.
fn jittered(wait: Duration) -> Duration {
    let random = std::collections::hash_map::RandomState::new().build_hasher().finish() % 1000;
    wait.mul_f64(0.5 + random as f64 / 2000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_stays_within_its_bounds() {
        for _ in 0..100 {
            let wait = jittered(LONGEST_WAIT);
            assert!(wait >= LONGEST_WAIT / 2 && wait <= LONGEST_WAIT, "{wait:?}");
        }
    }

    #[test]
    fn what_cannot_get_better_is_not_tried_again() {
        let never = |code| matches!(Broken::from(tonic::Status::new(code, "")), Broken::Never(_));
        assert!(never(Code::Unauthenticated) && never(Code::FailedPrecondition));
        assert!(!never(Code::Unavailable) && !never(Code::Cancelled) && !never(Code::Internal));
        assert!(matches!(
            Broken::from(ConnectError::BadToken),
            Broken::Never(Refusal::Config(_))
        ));
    }
}
