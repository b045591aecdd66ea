//! Sessions of workers.

use super::auth::{caller, protocol_mismatch, same_machine};
use super::enrol;
use super::shared::{Shared, stopped};
use super::status::{access_failed, token_ended};
use crate::access::Identity;
use crate::assign::{Outgoing, Unsendable, Work};
use crate::error_chain::error_chain;
use crate::garbage::{Held, Unfit, present};
use crate::scope::BlobReference;
use crate::scope::ScopeError;
use aitk_common::control::{HeldAttempt, PROTOCOL_VERSION, ToCoordinator, ToWorker, Verdict};
use aitk_common::id::{AttemptId, WorkerId};
use aitk_common::security::role::Role;
use aitk_common::storage::StorageError;
use aitk_proto::v1;
use aitk_proto::v1::workers_server::Workers;
use aitk_scheduler::{Event, SessionId, State};
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
/// How long storage may take to say whether a blob is there. Longer than its own trouble usually lasts: a checkpoint is
/// rather committed late than not at all.
const LOOK_TIMEOUT: Duration = Duration::from_secs(300);
/// Requests that wait for storage: a few per device of a big machine. Beats do not wait behind them; a worker that sends
/// more at once is read more slowly.
const REQUESTS: usize = 256;

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
        let who = caller(&request)?;
        let same_machine = same_machine(&request);
        let (wire, receiver) = mpsc::channel(WIRE_BUFFER);
        let shared = self.0.clone();
        let messages = request.into_inner();
        tokio::spawn(async move {
            if let Err(status) = Session::run(shared, messages, &wire, same_machine, who).await {
                tracing::info!(status = %status.message(), "a worker's session ended");
                let _ = tokio::time::timeout(SEND_TIMEOUT, wire.send(Err(status))).await;
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn join(&self, request: Request<v1::JoinRequest>) -> Result<Response<v1::JoinReply>, Status> {
        enrol::join(&self.0, request).await
    }

    async fn renew(&self, request: Request<v1::RenewRequest>) -> Result<Response<v1::RenewReply>, Status> {
        enrol::renew(&self.0, request).await
    }
}

/// A worker that is here with an administrator's token is nobody's yet. While it is, or has work that has not ended, no worker's
/// token takes its place: with it would come the inputs and the checkpoints of that work.
async fn not_in_use(shared: &Shared, who: &Identity, worker: &WorkerId) -> Result<(), Status> {
    if who.role != Role::Worker || shared.access.owner_of(worker).await.is_some() {
        return Ok(());
    }
    let wanted = worker.clone();
    if !shared.core.query(move |state, _| state.is_in_use(&wanted)).await? {
        return Ok(());
    }
    let mut line = who.line(shared.clock.now(), "worker.join", worker.as_str());
    (line.done, line.detail) = (false, "it is at work with an administrator's token".into());
    shared.access.note(line);
    Err(Status::unavailable(format!(
        "worker {worker} is connected with an administrator's token, or was and has work that has not ended; end that first, then \
         this one gets its place, or give it a data folder of its own"
    )))
}

/// A request on its way to the core.
struct Pending {
    event: Event,
    /// What must be in storage first.
    needs: Option<Need>,
}

/// What must be in storage before a request is looked at.
struct Need {
    named: BlobReference,
    /// Refused when it is not.
    request: u64,
    held: HeldAttempt,
}

struct Session<'a> {
    shared: Shared,
    who: Identity,
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
        who: Identity,
    ) -> Result<(), Status> {
        let first = tokio::time::timeout(REGISTER_TIMEOUT.min(shared.lease), messages.message())
            .await
            .map_err(|_| Status::deadline_exceeded("the worker opened a session but did not register"))??;
        let Some(first) = first else { return Ok(()) };
        let ToCoordinator::Register(mut registration) = ToCoordinator::try_from(first)? else {
            return Err(Status::invalid_argument(
                "the first message of a session must be `register`",
            ));
        };
        if registration.protocol != PROTOCOL_VERSION {
            return Err(protocol_mismatch(&registration.protocol.to_string()));
        }
        if registration.name.trim().is_empty() {
            return Err(Status::invalid_argument("name: a worker needs one"));
        }
        let fresh_id = WorkerId::new(format!("w{}", uuid::Uuid::new_v4().simple()));
        enrol::takes_its_place(&shared, &who, &mut registration)?;
        let worker = registration.worker.as_ref().unwrap_or(&fresh_id);
        not_in_use(&shared, &who, worker).await?;
        shared
            .access
            .claim(&who, worker)
            .await
            .map_err(|error| access_failed(&error))?;
        let (id, mut outbox) = shared.core.open_session().await?;
        tracing::info!(name = %registration.name, host = %registration.host, session = id.0, "a worker registers");
        let session = Session { shared, who, id, wire };
        let registered = Event::WorkerRegistered {
            session: id,
            fresh_id,
            // Jobs that run in place are for whoever has the server's own token.
            same_machine: same_machine && session.who.role == Role::Admin,
            registration,
        };
        session.shared.core.event(registered).await?;
        let (requests, mut waiting) = mpsc::channel(REQUESTS);
        // Side by side: storage that hangs must not cost the worker its leases.
        let result = tokio::select! {
            result = session.serve(&mut messages, &mut outbox, &requests) => result,
            result = session.judge(&mut waiting) => result,
            () = session.shared.access.ended(&session.who) => Err(token_ended()),
        };
        // Whatever ended it, the core hears of it, once.
        session.shared.core.event(Event::SessionClosed { session: id }).await?;
        result
    }

    async fn serve(
        &self,
        messages: &mut Streaming<v1::WorkerMessage>,
        outbox: &mut mpsc::Receiver<Outgoing>,
        requests: &mpsc::Sender<Pending>,
    ) -> Result<(), Status> {
        let mut stopping = self.shared.stopping.clone();
        loop {
            tokio::select! {
                message = tokio::time::timeout(self.shared.lease, messages.message()) => match message {
                    Err(_) => return Err(Status::deadline_exceeded("the worker was silent for a whole lease")),
                    Ok(Err(status)) => return Err(status),
                    Ok(Ok(None)) => return Ok(()),
                    Ok(Ok(Some(message))) => self.take(message, requests).await?,
                },
                message = outbox.recv() => match message {
                    None => return Ok(()),
                    Some(Outgoing::Message(message)) => self.give(message).await?,
                    Some(Outgoing::Work(work)) => self.assign(*work).await?,
                    Some(Outgoing::ForeignReport(attempt)) => self.audit_foreign_report(attempt),
                },
                () = stopped(&mut stopping) => {
                    return self.give(ToWorker::GoingAway { reason: "the coordinator shuts down".into(), retry: true }).await;
                }
            }
        }
    }

    async fn give(&self, mut message: ToWorker) -> Result<(), Status> {
        if let ToWorker::Welcome { storage_url, .. } = &mut message
            && self.shared.scope.keeps_bucket_from(&self.who)
        {
            *storage_url = None;
        }
        self.send(message.into()).await
    }

    /// Writes to the audit log that the worker reported on an attempt of another worker.
    fn audit_foreign_report(&self, attempt: Option<AttemptId>) {
        let mut line = self.who.line(self.shared.clock.now(), "worker.report", "");
        (line.done, line.detail) = (false, "on the attempt of another worker".into());
        if let Some(attempt) = attempt {
            line.object = attempt.to_string();
        }
        self.shared.access.note(line);
    }

    /// Gives work to the worker; or tells the core why that cannot be done. The session goes on either way.
    async fn assign(&self, work: Work) -> Result<(), Status> {
        let (job, held) = (work.placed.job.clone(), work.placed.held.clone());
        match self.shared.assigner.message(work).await {
            Ok(message) => self.send(message).await,
            Err(Unsendable { reason, transient }) => {
                tracing::error!(%job, reason, transient, "an assignment cannot be sent");
                let failed = Event::AssignmentFailed {
                    session: self.id,
                    held,
                    reason,
                    transient,
                };
                Ok(self.shared.core.event(failed).await?)
            }
        }
    }

    async fn send(&self, message: v1::CoordinatorMessage) -> Result<(), Status> {
        match tokio::time::timeout(SEND_TIMEOUT, self.wire.send(Ok(message))).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(Status::cancelled("the worker closed the session")),
            Err(_) => Err(Status::resource_exhausted("the worker does not read its messages")),
        }
    }

    async fn take(&self, message: v1::WorkerMessage, requests: &mpsc::Sender<Pending>) -> Result<(), Status> {
        let session = self.id;
        let (event, needs) = match ToCoordinator::try_from(message)? {
            ToCoordinator::Register(_) => {
                return Err(Status::invalid_argument(
                    "a session registers once, in its first message",
                ));
            }
            ToCoordinator::Beat { running } => {
                return Ok(self.shared.core.event(Event::Heartbeat { session, running }).await?);
            }
            ToCoordinator::Event {
                held,
                seq,
                time,
                report,
            } => {
                let event = Event::AttemptEvent {
                    session,
                    held,
                    seq,
                    time,
                    report,
                };
                return Ok(self.shared.core.event(event).await?);
            }
            ToCoordinator::GoingAway { reason } => {
                return Ok(self.shared.core.event(Event::WorkerLeaving { session, reason }).await?);
            }
            ToCoordinator::ArtifactReady {
                request,
                held,
                artifact,
            } => {
                let needs = artifact.hash.map(|hash| Need {
                    named: BlobReference::Blob(hash),
                    request,
                    held: held.clone(),
                });
                (
                    Event::ArtifactReady {
                        session,
                        request,
                        held,
                        artifact,
                    },
                    needs,
                )
            }
            ToCoordinator::ArtifactRemoved { request, held, name } => (
                Event::ArtifactRemoved {
                    session,
                    request,
                    held,
                    name,
                },
                None,
            ),
            ToCoordinator::Commit {
                request,
                held,
                manifest,
                step,
            } => {
                let needs = Need {
                    named: BlobReference::Checkpoint(manifest),
                    request,
                    held: held.clone(),
                };
                (
                    Event::CommitCheckpoint {
                        session,
                        request,
                        held,
                        manifest,
                        step,
                    },
                    Some(needs),
                )
            }
            ToCoordinator::Finished { request, held, outcome } => (
                Event::Finished {
                    session,
                    request,
                    held,
                    outcome,
                },
                None,
            ),
        };
        requests
            .send(Pending { event, needs })
            .await
            .map_err(|_| Status::internal("the session does not take requests any more"))
    }

    /// Requests one after another, in the order they came: a file announced before the end counts.
    async fn judge(&self, waiting: &mut mpsc::Receiver<Pending>) -> Result<(), Status> {
        while let Some(Pending { event, needs }) = waiting.recv().await {
            let Some(Need { named, request, held }) = needs else {
                self.shared.core.event(event).await?;
                continue;
            };
            match self.present(named).await {
                // Of an attempt that ended the core says so. Once it has, it never runs again.
                Err(_) if !self.is_current(held).await? => self.shared.core.event(event).await?,
                Err(message) => {
                    let verdict = Verdict::Refused;
                    self.give(ToWorker::Answer {
                        request,
                        verdict,
                        message,
                    })
                    .await?;
                }
                Ok(_held) => {
                    self.shared.core.event(event).await?;
                    // Held until the pointer is stored: from then on it is what keeps the blobs.
                    self.shared.core.stored().await?;
                    self.shared.scope.named(&self.who);
                }
            }
        }
        Ok(())
    }

    async fn is_current(&self, held: HeldAttempt) -> Result<bool, Status> {
        let session = self.id;
        let look = move |state: &State, _| state.is_current(session, &held);
        Ok(self.shared.core.query(look).await?)
    }

    /// Makes sure that something is in storage, so that no pointer ever leads to nothing; or says why it is refused.
    async fn present(&self, named: BlobReference) -> Result<Vec<Held>, String> {
        let look = async {
            let reach = self.shared.scope.may_name(&self.who).await?;
            let (pins, blobs) = (&self.shared.pins, self.shared.blobs.as_ref());
            Ok::<_, ScopeError>(present(pins, blobs, named, &reach).await)
        };
        let looked = tokio::time::timeout(LOOK_TIMEOUT, look).await;
        let absent = |hash| format!("blob {hash} is not in storage; upload it first");
        let message = match looked {
            Ok(Ok(Ok(held))) => return Ok(held),
            Ok(Ok(Err(Unfit::Storage(StorageError::NotFound { hash })))) => absent(hash),
            Ok(Ok(Err(Unfit::Foreign(hash)))) => {
                let mut line = self.who.line(self.shared.clock.now(), "blob.name", &hash.to_hex());
                (line.done, line.detail) = (false, "this worker neither sent it nor needs it".into());
                self.shared.access.note(line);
                absent(hash)
            }
            Ok(Ok(Err(Unfit::Storage(error)))) => {
                format!("storage does not say whether {named} is there: {}", error_chain(&error))
            }
            Ok(Err(error)) => format!("it is not known whether {named} is there: {}", error_chain(&error)),
            Err(_) => format!("storage took too long to say whether {named} is there"),
        };
        tracing::warn!(session = self.id.0, message, "refused a request");
        Err(message)
    }
}
