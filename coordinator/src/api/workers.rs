//! The workers service: sessions, joining and renewal.

use super::auth::{caller, protocol_mismatch, same_machine};
use super::enrol;
use super::shared::{Shared, run_to_end, wait_for_shutdown};
use super::status::{access_status, token_ended_status};
use crate::access::Identity;
use crate::assign::{AssignmentError, Outgoing, PendingAssignment};
use crate::blob_access::BlobAccessError;
use crate::blob_access::BlobReference;
use crate::garbage::{PinGuard, UnusableReference, pin_and_check};
use aitk_common::control_plane::{AttemptRef, PROTOCOL_VERSION, ToCoordinator, ToWorker, Verdict};
use aitk_common::error_chain::error_chain;
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

/// How long a new session may take to register.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long sending one message to a worker may take.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// Messages buffered for the socket: a few; the rest waits in the scheduler's outbox.
const WIRE_BUFFER: usize = 16;
/// How long the storage may take to report whether a blob exists. Longer than a usual outage: a late commit of a
/// checkpoint is better than none.
const STORAGE_CHECK_TIMEOUT: Duration = Duration::from_secs(300);
/// Requests that wait for storage: a few per device of a big machine. Heartbeats do not wait behind them; a worker
/// that sends more at once is read more slowly.
const REQUEST_QUEUE: usize = 256;

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
        let shared = self.0.clone();
        run_to_end(async move { enrol::join(&shared, request).await }).await
    }

    async fn renew(&self, request: Request<v1::RenewRequest>) -> Result<Response<v1::RenewReply>, Status> {
        let shared = self.0.clone();
        run_to_end(async move { enrol::renew(&shared, request).await }).await
    }
}

/// Checks that a worker id without an owner is not in use. A worker connected with an administrator's token has no
/// owner; while it is connected or has unfinished work, another worker's token must not take over its id, because that
/// would give access to the inputs and checkpoints of that work.
async fn check_not_in_use(shared: &Shared, who: &Identity, worker: &WorkerId) -> Result<(), Status> {
    if who.role != Role::Worker || shared.access.owner_of(worker).await.is_some() {
        return Ok(());
    }
    let wanted = worker.clone();
    if !shared.scheduler.query(move |state, _| state.is_in_use(&wanted)).await? {
        return Ok(());
    }
    let mut line = who.audit_line(shared.clock.wall_time(), "worker.join", worker.as_str());
    (line.done, line.detail) = (false, "it is in use with an administrator's token".into());
    shared.access.record_audit(line);
    Err(Status::unavailable(format!(
        "worker {worker} is connected with an administrator's token, or was and has unfinished work; end that work first, or start \
         this worker with a data folder of its own"
    )))
}

/// A request that waits to be handed to the scheduler.
struct Pending {
    event: Event,
    /// A blob that must be in storage first.
    required: Option<RequiredBlob>,
}

/// A blob that must be in storage before a request is handled.
struct RequiredBlob {
    reference: BlobReference,
    /// Request to refuse when it is missing.
    request: u64,
    held: AttemptRef,
}

struct Session<'a> {
    shared: Shared,
    who: Identity,
    id: SessionId,
    wire: &'a Wire,
}

impl Session<'_> {
    /// Runs the session from the first message to the end of the stream.
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
            return Err(Status::invalid_argument("name: empty; a worker must have a name"));
        }
        let fresh_id = WorkerId::new(format!("w{}", uuid::Uuid::new_v4().simple()));
        enrol::apply_certificate_identity(&shared, &who, &mut registration)?;
        let worker = registration.worker.as_ref().unwrap_or(&fresh_id);
        check_not_in_use(&shared, &who, worker).await?;
        let claimed = shared.access.claim_worker(&who, worker).await;
        let registration_guard = claimed.map_err(|error| access_status(&error))?;
        let (id, mut outbox) = shared.scheduler.open_session().await?;
        tracing::info!(name = %registration.name, host = %registration.host, session = id.0, "a worker registers");
        let session = Session { shared, who, id, wire };
        let registered = Event::WorkerRegistered {
            session: id,
            fresh_id,
            // Jobs that run in place require an administrator's token.
            same_machine: same_machine && session.who.role == Role::Admin,
            registration,
        };
        session.shared.scheduler.event(registered).await?;
        drop(registration_guard);
        let (requests, mut waiting) = mpsc::channel(REQUEST_QUEUE);
        // Concurrently: slow storage must not cost the worker its leases.
        let result = tokio::select! {
            result = session.serve(&mut messages, &mut outbox, &requests) => result,
            result = session.handle_requests(&mut waiting) => result,
            () = session.shared.access.wait_until_invalid(&session.who) => Err(token_ended_status()),
        };
        // The scheduler is told once, whatever ended the session.
        session
            .shared
            .scheduler
            .event(Event::SessionClosed { session: id })
            .await?;
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
                    Ok(Ok(Some(message))) => self.handle_message(message, requests).await?,
                },
                message = outbox.recv() => match message {
                    None => return Ok(()),
                    Some(Outgoing::Message(message)) => self.send_to_worker(message).await?,
                    Some(Outgoing::Assignment(pending)) => self.assign(*pending).await?,
                    Some(Outgoing::ForeignReport(attempt)) => self.audit_foreign_report(attempt),
                },
                () = wait_for_shutdown(&mut stopping) => {
                    return self.send_to_worker(ToWorker::GoingAway { reason: "the coordinator shuts down".into(), retry: true }).await;
                }
            }
        }
    }

    async fn send_to_worker(&self, mut message: ToWorker) -> Result<(), Status> {
        if let ToWorker::Welcome { storage_url, .. } = &mut message
            && self.shared.blob_access.hides_storage_url_from(&self.who)
        {
            *storage_url = None;
        }
        self.send(message.into()).await
    }

    /// Writes to the audit log that the worker reported on an attempt of another worker.
    fn audit_foreign_report(&self, attempt: Option<AttemptId>) {
        let mut line = self.who.audit_line(self.shared.clock.wall_time(), "worker.report", "");
        (line.done, line.detail) = (false, "on the attempt of another worker".into());
        if let Some(attempt) = attempt {
            line.object = attempt.to_string();
        }
        self.shared.access.record_audit(line);
    }

    /// Sends an assignment to the worker, or reports to the scheduler why that is impossible. The session continues
    /// either way.
    async fn assign(&self, pending: PendingAssignment) -> Result<(), Status> {
        let (job, held) = (pending.placed.job.clone(), pending.placed.held.clone());
        match self.shared.assigner.message(pending).await {
            Ok(message) => self.send(message).await,
            Err(AssignmentError { reason, transient }) => {
                tracing::error!(%job, reason, transient, "an assignment cannot be sent");
                let failed = Event::AssignmentFailed {
                    session: self.id,
                    held,
                    reason,
                    transient,
                };
                Ok(self.shared.scheduler.event(failed).await?)
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

    async fn handle_message(&self, message: v1::WorkerMessage, requests: &mpsc::Sender<Pending>) -> Result<(), Status> {
        let session = self.id;
        let (event, required) = match ToCoordinator::try_from(message)? {
            ToCoordinator::Register(_) => {
                return Err(Status::invalid_argument(
                    "a session registers once, in its first message",
                ));
            }
            ToCoordinator::Heartbeat { running } => {
                return Ok(self
                    .shared
                    .scheduler
                    .event(Event::Heartbeat { session, running })
                    .await?);
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
                return Ok(self.shared.scheduler.event(event).await?);
            }
            ToCoordinator::GoingAway { reason } => {
                return Ok(self
                    .shared
                    .scheduler
                    .event(Event::WorkerLeaving { session, reason })
                    .await?);
            }
            ToCoordinator::ArtifactReady {
                request,
                held,
                artifact,
            } => {
                let required = artifact.hash.map(|hash| RequiredBlob {
                    reference: BlobReference::Blob(hash),
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
                    required,
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
                let required = RequiredBlob {
                    reference: BlobReference::Checkpoint(manifest),
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
                    Some(required),
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
            .send(Pending { event, required })
            .await
            .map_err(|_| Status::internal("the session does not take requests any more"))
    }

    /// Handles requests in order: a file announced before the end of the attempt counts.
    async fn handle_requests(&self, waiting: &mut mpsc::Receiver<Pending>) -> Result<(), Status> {
        while let Some(Pending { event, required }) = waiting.recv().await {
            let Some(RequiredBlob {
                reference,
                request,
                held,
            }) = required
            else {
                self.shared.scheduler.event(event).await?;
                continue;
            };
            match self.pin_reference(reference).await {
                // For an attempt that is not current, the scheduler answers. It never becomes current again.
                Err(_) if !self.is_current(held).await? => self.shared.scheduler.event(event).await?,
                Err((verdict, message)) => {
                    self.send_to_worker(ToWorker::Answer {
                        request,
                        verdict,
                        message,
                    })
                    .await?;
                }
                Ok(_pin_guard) => {
                    self.shared.scheduler.event(event).await?;
                    // Pinned until the pointer is stored; from then on, the pointer keeps the blobs.
                    self.shared.scheduler.wait_until_stored().await?;
                    self.shared.blob_access.reset_allowance(&self.who);
                }
            }
        }
        Ok(())
    }

    async fn is_current(&self, held: AttemptRef) -> Result<bool, Status> {
        let session = self.id;
        let query = move |state: &State, _| state.is_current(session, &held);
        Ok(self.shared.scheduler.query(query).await?)
    }

    /// Pins a reference and checks that all its blobs are in storage; otherwise returns the answer to the request.
    async fn pin_reference(&self, reference: BlobReference) -> Result<Vec<PinGuard>, (Verdict, String)> {
        let checking = async {
            let visible = self.shared.blob_access.referable_blobs(&self.who).await?;
            let (pins, blobs) = (&self.shared.pins, self.shared.blobs.as_ref());
            Ok::<_, BlobAccessError>(pin_and_check(pins, blobs, reference, &visible).await)
        };
        let checked = tokio::time::timeout(STORAGE_CHECK_TIMEOUT, checking).await;
        let absent = |hash| {
            let message = format!("blob {hash} is not in storage; upload it first");
            (Verdict::Refused, message)
        };
        let (verdict, message) = match checked {
            Ok(Ok(Ok(held))) => return Ok(held),
            Ok(Ok(Err(UnusableReference::Storage(StorageError::NotFound { hash })))) => absent(hash),
            Ok(Ok(Err(UnusableReference::NotVisible(hash)))) => {
                let mut line = self
                    .who
                    .audit_line(self.shared.clock.wall_time(), "blob.name", &hash.to_hex());
                (line.done, line.detail) = (false, "this worker neither sent it nor needs it".into());
                self.shared.access.record_audit(line);
                absent(hash)
            }
            Ok(Ok(Err(UnusableReference::Storage(error)))) => {
                let message = format!(
                    "cannot check whether {reference} is in storage: {}",
                    error_chain(&error)
                );
                (verdict_of(&error), message)
            }
            Ok(Err(error)) => {
                let message = format!(
                    "cannot find out whether this worker may use {reference}: {}",
                    error_chain(&error)
                );
                (Verdict::Unavailable, message)
            }
            Err(_) => (
                Verdict::Unavailable,
                format!("storage took too long to check {reference}"),
            ),
        };
        // The monitor has logged a refusal of the storage once. Each worker repeats its requests while it lasts.
        if self.shared.storage_monitor.refusal().is_some() {
            tracing::debug!(session = self.id.0, message, "did not accept a request");
        } else {
            tracing::warn!(session = self.id.0, message, "did not accept a request");
        }
        Err((verdict, message))
    }
}

/// The verdict on a request whose blobs could not be read: refused for good if a blob itself is wrong. For every other error the worker is not to
/// blame, whether it ends by itself or an operator has to mend the storage, so the worker keeps the result and asks again.
fn verdict_of(error: &StorageError) -> Verdict {
    match error {
        StorageError::NotFound { .. }
        | StorageError::Corrupt { .. }
        | StorageError::TooLarge { .. }
        | StorageError::Malformed { .. }
        | StorageError::Name(_) => Verdict::Refused,
        StorageError::Unavailable { .. }
        | StorageError::Denied { .. }
        | StorageError::CoordinatorRefused { .. }
        | StorageError::Unauthenticated { .. }
        | StorageError::Address { .. }
        | StorageError::Local(_)
        | StorageError::Unsupported { .. }
        | StorageError::Full { .. }
        | StorageError::Failed { .. } => Verdict::Unavailable,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_wrong_blob_is_refused_for_good() {
        let malformed = StorageError::Malformed {
            what: "a manifest".into(),
            message: "no JSON".into(),
        };
        assert_eq!(verdict_of(&malformed), Verdict::Refused);
        let unavailable = StorageError::Unavailable {
            what: "read a blob",
            after: Duration::from_secs(60),
            message: "connection refused".into(),
        };
        assert_eq!(verdict_of(&unavailable), Verdict::Unavailable);
    }
}
