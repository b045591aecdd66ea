//! Sessions of workers.

use super::auth::protocol_mismatch;
use super::{Shared, stopped};
use crate::core::{Event, SessionId};
use crate::runner::full;
use aitk_common::control::{HeldAttempt, PROTOCOL_VERSION, ToCoordinator, ToWorker, Verdict};
use aitk_common::hash::ContentHash;
use aitk_common::id::WorkerId;
use aitk_proto::v1;
use aitk_proto::v1::workers_server::Workers;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

/// How long a fresh connection may take to register.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a worker may take to make room for one message.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// Messages between us and the socket: a few, what waits longer waits in the core's outbox.
const WIRE_BUFFER: usize = 16;
/// How long storage may take to say whether a blob is there.
const LOOK_TIMEOUT: Duration = Duration::from_secs(30);

type Wire = mpsc::Sender<Result<v1::CoordinatorMessage, Status>>;

#[derive(Debug)]
pub(super) struct WorkersApi(pub(super) Shared);

#[tonic::async_trait]
impl Workers for WorkersApi {
    type SessionStream = ReceiverStream<Result<v1::CoordinatorMessage, Status>>;

    async fn session(
        &self,
        request: Request<Streaming<v1::WorkerMessage>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let same_machine = request
            .remote_addr()
            .is_some_and(|peer| peer.ip().to_canonical().is_loopback());
        let (wire, receiver) = mpsc::channel(WIRE_BUFFER);
        let shared = self.0.clone();
        let messages = request.into_inner();
        tokio::spawn(async move {
            if let Err(status) = Session::run(shared, messages, &wire, same_machine).await {
                tracing::info!(status = %status.message(), "a worker's session ended");
                let _ = tokio::time::timeout(SEND_TIMEOUT, wire.send(Err(status))).await;
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

struct Session<'a> {
    shared: Shared,
    id: SessionId,
    wire: &'a Wire,
}

impl Session<'_> {
    /// From the first message to the end of the stream.
    async fn run(
        shared: Shared,
        mut messages: Streaming<v1::WorkerMessage>,
        wire: &Wire,
        same_machine: bool,
    ) -> Result<(), Status> {
        let first = tokio::time::timeout(REGISTER_TIMEOUT.min(shared.lease), messages.message())
            .await
            .map_err(|_| Status::deadline_exceeded("the worker opened a session but did not register"))??;
        let Some(first) = first else { return Ok(()) };
        let ToCoordinator::Register(registration) = ToCoordinator::try_from(first)? else {
            return Err(Status::invalid_argument(
                "the first message of a session must be `register`",
            ));
        };
        if registration.protocol != PROTOCOL_VERSION {
            return Err(protocol_mismatch(&registration.protocol.to_string()));
        }
        let (id, mut outbox) = shared.core.open_session().await?;
        let fresh_id = WorkerId::new(format!("w{}", uuid::Uuid::new_v4().simple()));
        tracing::info!(name = %registration.name, host = %registration.host, session = id.0, "a worker registers");
        let session = Session { shared, id, wire };
        let registered = Event::WorkerRegistered {
            session: id,
            fresh_id,
            same_machine,
            registration,
        };
        session.shared.core.event(registered).await?;
        let result = session.serve(&mut messages, &mut outbox).await;
        // Whatever ended it, the core hears of it, once.
        session.shared.core.event(Event::WorkerLost { session: id }).await?;
        result
    }

    async fn serve(
        &self,
        messages: &mut Streaming<v1::WorkerMessage>,
        outbox: &mut mpsc::Receiver<ToWorker>,
    ) -> Result<(), Status> {
        let mut stopping = self.shared.stopping.clone();
        loop {
            tokio::select! {
                message = tokio::time::timeout(self.shared.lease, messages.message()) => match message {
                    Err(_) => return Err(Status::deadline_exceeded("the worker was silent for a whole lease")),
                    Ok(Err(status)) => return Err(status),
                    Ok(Ok(None)) => return Ok(()),
                    Ok(Ok(Some(message))) => self.take(message).await?,
                },
                message = outbox.recv() => match message {
                    None => return Ok(()),
                    Some(message) => self.give(message).await?,
                },
                () = stopped(&mut stopping) => {
                    return self.give(ToWorker::GoingAway { reason: "the coordinator shuts down".into(), retry: true }).await;
                }
            }
        }
    }

    async fn give(&self, message: ToWorker) -> Result<(), Status> {
        match tokio::time::timeout(SEND_TIMEOUT, self.wire.send(Ok(message.into()))).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(Status::cancelled("the worker closed the session")),
            Err(_) => Err(Status::resource_exhausted("the worker does not read its messages")),
        }
    }

    async fn take(&self, message: v1::WorkerMessage) -> Result<(), Status> {
        let session = self.id;
        let event = match ToCoordinator::try_from(message)? {
            ToCoordinator::Register(_) => {
                return Err(Status::invalid_argument(
                    "a session registers once, in its first message",
                ));
            }
            ToCoordinator::Beat { running } => Event::WorkerBeat { session, running },
            ToCoordinator::Event {
                held,
                seq,
                time,
                report,
            } => Event::AttemptEvent {
                session,
                held,
                seq,
                time,
                report,
            },
            ToCoordinator::ArtifactReady {
                request,
                held,
                artifact,
            } => {
                if let Some(hash) = artifact.hash
                    && let Some(refusal) = self.missing(request, &held, hash).await
                {
                    return self.give(refusal).await;
                }
                Event::ArtifactReady {
                    session,
                    request,
                    held,
                    artifact,
                }
            }
            ToCoordinator::ArtifactRemoved { request, held, name } => Event::ArtifactRemoved {
                session,
                request,
                held,
                name,
            },
            ToCoordinator::Commit {
                request,
                held,
                manifest,
                step,
            } => {
                if let Some(refusal) = self.missing(request, &held, manifest).await {
                    return self.give(refusal).await;
                }
                Event::CommitCheckpoint {
                    session,
                    request,
                    held,
                    manifest,
                    step,
                }
            }
            ToCoordinator::Finished { request, held, outcome } => Event::Finished {
                session,
                request,
                held,
                outcome,
            },
            ToCoordinator::GoingAway { reason } => Event::WorkerLeaving { session, reason },
        };
        Ok(self.shared.core.event(event).await?)
    }

    /// A refusal when the blob is not in storage: no pointer ever leads to nothing.
    async fn missing(&self, request: u64, held: &HeldAttempt, hash: ContentHash) -> Option<ToWorker> {
        let looked = tokio::time::timeout(LOOK_TIMEOUT, self.shared.blobs.has(&[hash])).await;
        let message = match looked {
            Ok(Ok(present)) if present.first() == Some(&true) => return None,
            Ok(Ok(_)) => format!("blob {hash} is not in storage; upload it first"),
            Ok(Err(error)) => format!("storage does not say whether blob {hash} is there: {}", full(&error)),
            Err(_) => format!("storage took too long to say whether blob {hash} is there"),
        };
        tracing::warn!(attempt = %held.attempt, message, "refused");
        Some(ToWorker::Answer {
            request,
            verdict: Verdict::Refused,
            message,
        })
    }
}
