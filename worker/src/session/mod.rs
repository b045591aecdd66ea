//! The worker's side of the session with the coordinator: running attempts, incoming commands, outgoing messages.
//!
//! One task owns the state and never waits for anything slow: attempts run in tasks of their own and talk to it
//! through bounded channels; [`link`] keeps the connection. A broken connection does not affect an attempt; its
//! messages wait in the [`Outbox`].

mod link;
mod refusal;
mod reporter;

use crate::attempt;
use crate::context::Context;
use crate::outbox::{Outbox, Request};
use crate::resend;
use crate::runner::{DesiredState, PendingOutputs};
use aitk_common::capability::Device;
use aitk_common::confinement::Confinement;
use aitk_common::control_plane::{
    Assignment, AttemptRef, OfferedCheckpoint, PROTOCOL_VERSION, Registration, ToCoordinator, ToWorker, Verdict,
};
use aitk_common::id::{AttemptId, Epoch, WorkerId};
use aitk_proto::client::Clients;
pub(crate) use link::ConnectionTarget;
use link::LinkEvent;
pub use refusal::Refusal;
pub(crate) use reporter::{Answer, FromAttempt, Reporter};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

/// Capacity of the channel from attempts to the session's task. It handles a message in microseconds; this covers a
/// burst.
const ATTEMPT_CHANNEL_CAPACITY: usize = 256;
/// Upload rate that is assumed at shutdown, in bytes per second.
const MIN_UPLOAD_RATE: u64 = 1 << 20;
/// Capacity of the channel from the connection to the session's task.
const LINK_CHANNEL_CAPACITY: usize = 64;

/// The state of the session, for display and tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// Not connected. Holds the last error, once there was one.
    Connecting(Option<String>),
    /// The coordinator refuses this worker, with its reason. Attempts go on to their next checkpoint, and the worker
    /// tries again.
    Refused(String),
    /// Registered.
    Connected(WorkerId),
    /// The session is over.
    Ended,
}

/// What this worker registers with.
#[derive(Clone, Debug)]
pub(crate) struct RegistrationInfo {
    pub(crate) worker: Option<WorkerId>,
    pub(crate) name: String,
    pub(crate) host: String,
    pub(crate) devices: Vec<Device>,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) confinement: Option<Confinement>,
}

struct AttemptHandle {
    epoch: Epoch,
    desired: watch::Sender<DesiredState>,
    outputs: PendingOutputs,
    fence: CancellationToken,
    /// The number of the request that reports its outcome.
    finish_request: Option<u64>,
    /// The coordinator knows the outcome; only the cleanup is left.
    is_over: bool,
}

pub(crate) struct Session {
    context: Arc<Context>,
    identity: RegistrationInfo,
    outbox: Outbox,
    attempts: BTreeMap<AttemptId, AttemptHandle>,
    tasks: JoinSet<AttemptId>,
    /// The sender for the answer to each request, with its attempt.
    reply_senders: HashMap<u64, (AttemptId, oneshot::Sender<Answer>)>,
    to_session: mpsc::Sender<FromAttempt>,
    from_attempts: mpsc::Receiver<FromAttempt>,
    /// Checkpoints of ended attempts that are being sent.
    resending: HashMap<AttemptId, AbortHandle>,
    connection: Option<(mpsc::Sender<ToCoordinator>, Clients)>,
    /// The coordinator has answered which of our attempts go on: only now it may get messages about them.
    is_registered: bool,
    heartbeat_due: bool,
    goodbye_due: bool,
    is_leaving: bool,
    status: watch::Sender<Status>,
}

impl Session {
    pub(crate) fn new(context: Arc<Context>, identity: RegistrationInfo, status: watch::Sender<Status>) -> Self {
        let (to_session, from_attempts) = mpsc::channel(ATTEMPT_CHANNEL_CAPACITY);
        Self {
            context,
            identity,
            outbox: Outbox::default(),
            attempts: BTreeMap::new(),
            tasks: JoinSet::new(),
            reply_senders: HashMap::new(),
            to_session,
            from_attempts,
            resending: HashMap::new(),
            connection: None,
            is_registered: false,
            heartbeat_due: false,
            goodbye_due: false,
            is_leaving: false,
            status,
        }
    }

    /// Runs until `leave` is cancelled and every attempt has ended or `shutdown_timeout` is over, or until the coordinator
    /// refuses the worker.
    pub(crate) async fn run(
        mut self,
        target: ConnectionTarget,
        leave: CancellationToken,
        shutdown_timeout: Duration,
        upload_timeout: Duration,
    ) -> Result<(), Refusal> {
        let (link_events, mut events) = mpsc::channel(LINK_CHANNEL_CAPACITY);
        let mut link = tokio::spawn(link::keep_connected(target, link_events));
        let mut heartbeats = tokio::time::interval(Duration::from_secs(5));
        let mut deadline: Option<Instant> = None;
        let mut upload_extension = upload_timeout;
        let ended = loop {
            let is_done = self.is_leaving && self.attempts.is_empty() && !self.outbox.has_unsent();
            if is_done && !(self.is_registered && self.goodbye_due) {
                break Ok(());
            }
            let sender = self.connection.as_ref().map(|(sender, _)| sender.clone());
            let has_message = self.heartbeat_due || self.goodbye_due || self.outbox.has_unsent();
            tokio::select! {
                event = events.recv() => match event {
                    Some(LinkEvent::Refused(refusal)) => {
                        if !self.should_retry(&refusal) {
                            break Err(refusal);
                        }
                        self.on_refused(&refusal);
                    }
                    Some(event) => if let Some(interval) = self.on_link(event) {
                        heartbeats = tokio::time::interval(interval);
                        heartbeats.set_missed_tick_behavior(MissedTickBehavior::Delay);
                    },
                    None => break Ok(()),
                },
                Some(message) = self.from_attempts.recv() => self.on_attempt(message),
                Some(ended) = self.tasks.join_next() => match ended {
                    Ok(attempt) => self.remove_attempt(&attempt),
                    Err(error) if error.is_cancelled() => {}
                    Err(error) => tracing::error!(%error, "the task of an attempt panicked"),
                },
                _ = heartbeats.tick(), if self.is_registered => self.heartbeat_due = true,
                slot = reserve_slot(sender.as_ref()), if self.is_registered && has_message => {
                    if let Some(message) = self.next_message() {
                        slot.send(message);
                    }
                }
                () = leave.cancelled(), if !self.is_leaving => {
                    self.leave();
                    deadline = Some(Instant::now() + shutdown_timeout);
                }
                () = sleep_until_deadline(deadline) => {
                    // Checkpoints that are being sent extend the deadline once, by their size.
                    let extension = std::mem::take(&mut upload_extension).min(upload_time(self.context.uncommitted.pending_bytes()));
                    if self.is_registered && !extension.is_zero() {
                        tracing::info!(seconds = extension.as_secs(), "the shutdown takes longer: checkpoints are being sent");
                        deadline = Some(Instant::now() + extension);
                        continue;
                    }
                    tracing::warn!("attempts did not end in time; their children are killed");
                    break Ok(());
                }
            }
        };
        // Attempts that still run are killed: dropping an attempt's task kills its child's process group.
        self.tasks.shutdown().await;
        if self.connection.take().is_none() {
            // Without a connection there is nothing to close.
            link.abort();
        }
        let goodbye = async {
            tokio::select! {
                _ = &mut link => {}
                () = async { while events.recv().await.is_some() {} } => {}
            }
        };
        let _ = tokio::time::timeout(Duration::from_secs(3), goodbye).await;
        link.abort();
        self.status.send_replace(Status::Ended);
        ended
    }

    fn leave(&mut self) {
        self.is_leaving = true;
        self.goodbye_due = true;
        for attempt in self.attempts.values() {
            set_desired_state(attempt, DesiredState::Stop);
        }
    }

    fn running_attempts(&self) -> Vec<AttemptRef> {
        let running = self
            .attempts
            .iter()
            .filter(|(_, attempt)| !attempt.fence.is_cancelled() && !attempt.is_over);
        running
            .map(|(id, attempt)| AttemptRef {
                attempt: id.clone(),
                epoch: attempt.epoch,
            })
            .collect()
    }

    /// Handles an event of the connection. Returns the heartbeat interval when the coordinator sent one.
    fn on_link(&mut self, event: LinkEvent) -> Option<Duration> {
        match event {
            LinkEvent::Opening { reply, certified } => {
                // A `join` on this machine may have registered the worker under another id.
                if certified.is_some() {
                    self.identity.worker = certified;
                }
                let _ = reply.send(Registration {
                    protocol: PROTOCOL_VERSION,
                    worker: self.identity.worker.clone(),
                    name: self.identity.name.clone(),
                    version: env!("CARGO_PKG_VERSION").to_owned(),
                    host: self.identity.host.clone(),
                    devices: self.identity.devices.clone(),
                    labels: self.identity.labels.clone(),
                    running: self.running_attempts(),
                    confinement: self.identity.confinement.clone(),
                    offers: self.context.uncommitted.offers(),
                    outputs_on_request: true,
                });
            }
            LinkEvent::Open {
                to_coordinator,
                clients,
            } => self.connection = Some((to_coordinator, *clients)),
            LinkEvent::Down { problem } => {
                tracing::warn!(%problem, "no connection to the coordinator; attempts go on; reconnecting");
                self.connection = None;
                self.is_registered = false;
                self.context.storage.connection_lost();
                self.status.send_replace(Status::Connecting(Some(problem)));
            }
            LinkEvent::Message(message) => return self.on_message(*message),
            LinkEvent::Refused(_) => {}
        }
        None
    }

    fn on_message(&mut self, message: ToWorker) -> Option<Duration> {
        match message {
            ToWorker::Welcome {
                worker,
                heartbeat_interval,
                storage_url,
                keep,
                wanted,
                ..
            } => {
                self.welcome(worker, storage_url.as_deref(), &keep, &wanted);
                // A lower bound, so that no value from the coordinator causes a busy loop.
                return Some(heartbeat_interval.max(Duration::from_millis(20)));
            }
            ToWorker::HeartbeatReply { events } => {
                for (attempt, seq) in events {
                    self.outbox.acknowledge(&attempt, seq);
                }
            }
            ToWorker::Assign(assignment) => self.assign(*assignment),
            ToWorker::Stop { held, save } => {
                if let Some(attempt) = self
                    .attempts
                    .get(&held.attempt)
                    .filter(|attempt| attempt.epoch == held.epoch)
                {
                    set_desired_state(attempt, if save { DesiredState::Stop } else { DesiredState::Kill });
                }
            }
            ToWorker::RequestOutputs { held, outputs } => {
                // The attempt may have ended while the request was on its way.
                if let Some(attempt) = self
                    .attempts
                    .get(&held.attempt)
                    .filter(|attempt| attempt.epoch == held.epoch)
                {
                    tracing::info!(attempt = %held.attempt, %outputs, "outputs are requested");
                    attempt.outputs.request(outputs);
                }
            }
            // The attempt is over, but the checkpoint that the coordinator asked for is still being sent.
            ToWorker::Fence { held, .. }
                if self.resending.contains_key(&held.attempt) && !self.attempts.contains_key(&held.attempt) => {}
            ToWorker::Fence { held, reason } => self.fence(&held.attempt, &reason),
            ToWorker::Answer {
                request,
                verdict,
                message,
            } => self.on_answer(request, verdict, message),
            ToWorker::GoingAway { reason, .. } => tracing::info!(%reason, "the coordinator closes the session"),
        }
        None
    }

    /// Returns whether to keep trying after a refusal, because attempts or their checkpoints would be lost with this
    /// worker. A worker whose session was ended for good has been replaced by another one.
    fn should_retry(&self, refusal: &Refusal) -> bool {
        let would_lose_work =
            self.attempts.values().any(|attempt| !attempt.is_over) || !self.context.uncommitted.is_empty();
        would_lose_work && !matches!(refusal, Refusal::SessionEnded(_))
    }

    fn on_refused(&mut self, refusal: &Refusal) {
        let (attempts, folder) = (self.attempts.len(), self.context.uncommitted.folder().display());
        tracing::error!(
            "{refusal}. {attempts} attempts go on to their next checkpoint, which is kept here ({folder}) and offered when this \
             worker is accepted again. It retries by itself: put a new token into its token file, run `aitk-worker join` \
             on this machine, or update it"
        );
        self.connection = None;
        self.is_registered = false;
        self.context.storage.connection_lost();
        let reason = refusal.to_string();
        self.context.refusal.send_replace(Some(reason.clone()));
        self.status.send_replace(Status::Refused(reason));
    }

    fn welcome(&mut self, worker: WorkerId, storage_url: Option<&str>, keep: &[AttemptId], wanted: &[AttemptId]) {
        self.context.refusal.send_replace(None);
        tracing::info!(%worker, "registered with the coordinator");
        if self.identity.worker.as_ref() != Some(&worker) {
            if let Err(error) = self.context.data_folder.save_worker_id(&worker) {
                tracing::warn!(%error, "the worker's id could not be saved; after a restart the worker gets a new one");
            }
            self.identity.worker = Some(worker.clone());
        }
        if let Some((_, clients)) = &self.connection {
            self.context.storage.connected(clients, storage_url);
        }
        let lost: Vec<AttemptId> = self.attempts.keys().filter(|id| !keep.contains(id)).cloned().collect();
        for attempt in lost {
            self.fence(
                &attempt,
                "the coordinator gave the attempt up while there was no connection",
            );
        }
        let running: Vec<AttemptId> = self.attempts.keys().cloned().collect();
        for (_, task) in self.resending.drain() {
            task.abort();
        }
        for checkpoint in self.context.uncommitted.apply_answer(wanted, &running) {
            self.send_checkpoint(checkpoint);
        }
        self.outbox.resend();
        self.is_registered = true;
        self.goodbye_due = self.is_leaving;
        self.status.send_replace(Status::Connected(worker));
    }

    /// Starts to send the checkpoint of an ended attempt.
    fn send_checkpoint(&mut self, checkpoint: OfferedCheckpoint) {
        let attempt = checkpoint.held.attempt.clone();
        self.outbox.close(&attempt);
        self.outbox.open(&checkpoint.held);
        let reporter = Reporter::new(checkpoint.held.clone(), self.to_session.clone());
        let (context, id) = (Arc::clone(&self.context), attempt.clone());
        let task = self.tasks.spawn(async move {
            resend::send_checkpoint(&context, &reporter, &checkpoint).await;
            id
        });
        self.resending.insert(attempt, task);
    }

    fn assign(&mut self, assignment: Assignment) {
        let held = AttemptRef {
            attempt: assignment.attempt.clone(),
            epoch: assignment.epoch,
        };
        if self.attempts.contains_key(&held.attempt) {
            return;
        }
        tracing::info!(attempt = %held.attempt, job = %assignment.job, "attempt assigned");
        self.outbox.open(&held);
        let initial = if self.is_leaving {
            DesiredState::Stop
        } else {
            DesiredState::Run
        };
        let (desired, desired_rx) = watch::channel(initial);
        let outputs = PendingOutputs::new();
        let fence = CancellationToken::new();
        let reporter = Reporter::new(held.clone(), self.to_session.clone());
        let context = Arc::clone(&self.context);
        let fenced = fence.clone();
        let pending = outputs.clone();
        let id = held.attempt.clone();
        self.tasks.spawn(async move {
            attempt::run(context, assignment, reporter, desired_rx, pending, fenced).await;
            id
        });
        self.attempts.insert(
            held.attempt,
            AttemptHandle {
                epoch: held.epoch,
                desired,
                outputs,
                fence,
                finish_request: None,
                is_over: false,
            },
        );
    }

    fn on_attempt(&mut self, message: FromAttempt) {
        match message {
            FromAttempt::Report { attempt, time, report } => self.outbox.report(&attempt, time, report),
            FromAttempt::Request {
                attempt,
                request,
                reply,
            } => {
                let is_finish = matches!(request, Request::Finished(_));
                if let Some(id) = self.outbox.request(&attempt, request) {
                    if let Some(held) = self.attempts.get_mut(&attempt).filter(|_| is_finish) {
                        held.finish_request = Some(id);
                    }
                    self.reply_senders.insert(id, (attempt, reply));
                }
            }
        }
    }

    fn on_answer(&mut self, request: u64, verdict: Verdict, message: String) {
        self.outbox.remove_request(request);
        let Some((attempt, reply)) = self.reply_senders.remove(&request) else {
            return;
        };
        if verdict == Verdict::Fenced {
            self.fence(&attempt, &message);
        } else {
            if let Some(held) = self
                .attempts
                .get_mut(&attempt)
                .filter(|held| held.finish_request == Some(request))
            {
                held.is_over = true;
            }
            let _ = reply.send(Answer {
                accepted: verdict == Verdict::Accepted,
                is_temporary: verdict == Verdict::Unavailable,
                message,
            });
        }
    }

    /// Ends an attempt that the coordinator gave to another worker: kills its child and drops its messages.
    fn fence(&mut self, attempt: &AttemptId, reason: &str) {
        if let Some(held) = self.attempts.get(attempt).filter(|held| !held.is_over) {
            tracing::warn!(%attempt, %reason, "attempt fenced; its child is killed and its work discarded");
            held.fence.cancel();
        }
        if let Some(task) = self.resending.remove(attempt) {
            tracing::warn!(%attempt, %reason, "a kept checkpoint is no longer wanted; it is removed");
            task.abort();
            self.context.uncommitted.discard(attempt);
        }
        self.drop_messages(attempt);
    }

    fn remove_attempt(&mut self, attempt: &AttemptId) {
        let had_run = self.attempts.remove(attempt).is_some();
        self.resending.remove(attempt);
        self.drop_messages(attempt);
        if had_run && let Some(checkpoint) = self.context.uncommitted.take_requested(attempt) {
            self.send_checkpoint(checkpoint);
        }
    }

    fn drop_messages(&mut self, attempt: &AttemptId) {
        self.outbox.close(attempt);
        self.reply_senders.retain(|_, (of, _)| of != attempt);
    }

    fn next_message(&mut self) -> Option<ToCoordinator> {
        if std::mem::take(&mut self.goodbye_due) {
            return Some(ToCoordinator::GoingAway {
                reason: "the worker is shutting down".to_owned(),
            });
        }
        if std::mem::take(&mut self.heartbeat_due) {
            return Some(ToCoordinator::Heartbeat {
                running: self.running_attempts(),
            });
        }
        self.outbox.next()
    }
}

/// The time that uploading this many bytes may take.
fn upload_time(bytes: u64) -> Duration {
    Duration::from_secs(bytes.div_ceil(MIN_UPLOAD_RATE))
}

fn set_desired_state(attempt: &AttemptHandle, desired: DesiredState) {
    attempt.desired.send_if_modified(|now| {
        let is_further = desired > *now;
        *now = (*now).max(desired);
        is_further
    });
}

/// Waits for capacity to send one message to the coordinator; forever without a connection. The link reports a lost
/// connection itself.
async fn reserve_slot(sender: Option<&mpsc::Sender<ToCoordinator>>) -> mpsc::Permit<'_, ToCoordinator> {
    if let Some(sender) = sender
        && let Ok(slot) = sender.reserve().await
    {
        return slot;
    }
    std::future::pending().await
}

async fn sleep_until_deadline(deadline: Option<Instant>) {
    match deadline {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
