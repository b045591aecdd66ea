//! The worker's side of the session: what it holds, what it was told, what it still has to say.
//!
//! One task owns all of it and never waits for anything slow: attempts run in tasks of their own and talk to it
//! through bounded channels, the connection is kept by [`link`]. A broken connection changes nothing for an attempt;
//! what it says waits in the [`Outbox`].

mod link;
mod refusal;
mod reporter;

use crate::attempt;
use crate::context::Context;
use crate::outbox::{Outbox, Request};
use crate::resend;
use crate::runner::Wanted;
use aitk_common::capability::Device;
use aitk_common::confinement::Confinement;
use aitk_common::control::{
    Assignment, HeldAttempt, OfferedCheckpoint, PROTOCOL_VERSION, Registration, ToCoordinator, ToWorker, Verdict,
};
use aitk_common::id::{AttemptId, Epoch, WorkerId};
use aitk_proto::client::Clients;
use link::LinkEvent;
pub(crate) use link::Target;
pub use refusal::Refusal;
use reporter::FromAttempt;
pub(crate) use reporter::{Answer, Reporter};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

/// Messages from attempts that wait for the session's task. It handles one in microseconds; this covers a burst.
const FROM_ATTEMPTS: usize = 256;
/// Bytes in a second that an upload is trusted to make while this worker leaves.
const SLOWEST_UPLOAD: u64 = 1 << 20;
/// Messages from the coordinator that wait for the session's task.
const FROM_LINK: usize = 64;

/// How the session stands, for screens and tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// Not connected; the last problem in words, once there was one.
    Connecting(Option<String>),
    /// The coordinator does not let us in, in words; attempts go on to their next checkpoint, and it is asked again.
    Refused(String),
    /// Registered.
    Connected(WorkerId),
    /// Over.
    Ended,
}

/// Who we are.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) worker: Option<WorkerId>,
    pub(crate) name: String,
    pub(crate) host: String,
    pub(crate) devices: Vec<Device>,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) confinement: Option<Confinement>,
}

struct Attempt {
    epoch: Epoch,
    wanted: watch::Sender<Wanted>,
    fence: CancellationToken,
    /// The request that says how it ended.
    finish: Option<u64>,
    /// The coordinator knows how it ended; what is left is to put things away.
    is_over: bool,
}

pub(crate) struct Session {
    context: Arc<Context>,
    identity: Identity,
    outbox: Outbox,
    attempts: BTreeMap<AttemptId, Attempt>,
    tasks: JoinSet<AttemptId>,
    /// Who waits for the answer to a request, and for which attempt.
    waiting: HashMap<u64, (AttemptId, oneshot::Sender<Answer>)>,
    to_session: mpsc::Sender<FromAttempt>,
    from_attempts: mpsc::Receiver<FromAttempt>,
    /// Kept checkpoints that are being sent.
    sending: HashMap<AttemptId, AbortHandle>,
    connection: Option<(mpsc::Sender<ToCoordinator>, Clients)>,
    /// The coordinator has said which of our attempts go on: now it may hear of them.
    welcomed: bool,
    beat_due: bool,
    farewell_due: bool,
    leaving: bool,
    status: watch::Sender<Status>,
}

impl Session {
    pub(crate) fn new(context: Arc<Context>, identity: Identity, status: watch::Sender<Status>) -> Self {
        let (to_session, from_attempts) = mpsc::channel(FROM_ATTEMPTS);
        Self {
            context,
            identity,
            outbox: Outbox::default(),
            attempts: BTreeMap::new(),
            tasks: JoinSet::new(),
            waiting: HashMap::new(),
            to_session,
            from_attempts,
            sending: HashMap::new(),
            connection: None,
            welcomed: false,
            beat_due: false,
            farewell_due: false,
            leaving: false,
            status,
        }
    }

    /// Runs until `leave` is cancelled and every attempt has ended or `patience` is over, or until it is refused.
    pub(crate) async fn run(
        mut self,
        target: Target,
        leave: CancellationToken,
        patience: Duration,
        upload_patience: Duration,
    ) -> Result<(), Refusal> {
        let (to_us, mut events) = mpsc::channel(FROM_LINK);
        let mut link = tokio::spawn(link::keep(target, to_us));
        let mut beats = tokio::time::interval(Duration::from_secs(5));
        let mut deadline: Option<Instant> = None;
        let mut more_patience = upload_patience;
        let ended = loop {
            let done = self.leaving && self.attempts.is_empty() && !self.outbox.has_unsent();
            if done && !(self.welcomed && self.farewell_due) {
                break Ok(());
            }
            let sender = self.connection.as_ref().map(|(sender, _)| sender.clone());
            let has_something = self.beat_due || self.farewell_due || self.outbox.has_unsent();
            tokio::select! {
                event = events.recv() => match event {
                    Some(LinkEvent::Refused(refusal)) => {
                        if !self.can_wait(&refusal) {
                            break Err(refusal);
                        }
                        self.refused(&refusal);
                    }
                    Some(event) => if let Some(interval) = self.on_link(event) {
                        beats = tokio::time::interval(interval);
                        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
                    },
                    None => break Ok(()),
                },
                Some(message) = self.from_attempts.recv() => self.on_attempt(message),
                Some(ended) = self.tasks.join_next() => match ended {
                    Ok(attempt) => self.forget(&attempt),
                    Err(error) if error.is_cancelled() => {}
                    Err(error) => tracing::error!(%error, "the task of an attempt was lost"),
                },
                _ = beats.tick(), if self.welcomed => self.beat_due = true,
                room = room(sender.as_ref()), if self.welcomed && has_something => {
                    if let Some(message) = self.next_message() {
                        room.send(message);
                    }
                }
                () = leave.cancelled(), if !self.leaving => {
                    self.leave();
                    deadline = Some(Instant::now() + patience);
                }
                () = until(deadline) => {
                    // What is being sent gets time by its size, once.
                    let more = std::mem::take(&mut more_patience).min(sending_time(self.context.kept.pending_bytes()));
                    if self.welcomed && !more.is_zero() {
                        tracing::info!(seconds = more.as_secs(), "leaving takes longer: checkpoints are being sent");
                        deadline = Some(Instant::now() + more);
                        continue;
                    }
                    tracing::warn!("attempts did not end in time; their children are killed");
                    break Ok(());
                }
            }
        };
        // Whatever still runs is killed: dropping an attempt's task drops its child's group.
        self.tasks.shutdown().await;
        if self.connection.take().is_none() {
            // There is nobody to say goodbye to.
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
        self.leaving = true;
        self.farewell_due = true;
        for attempt in self.attempts.values() {
            want(attempt, Wanted::Stop);
        }
    }

    fn held(&self) -> Vec<HeldAttempt> {
        let ours = self
            .attempts
            .iter()
            .filter(|(_, attempt)| !attempt.fence.is_cancelled() && !attempt.is_over);
        ours.map(|(id, attempt)| HeldAttempt {
            attempt: id.clone(),
            epoch: attempt.epoch,
        })
        .collect()
    }

    /// Returns the beat interval when the coordinator has just said it.
    fn on_link(&mut self, event: LinkEvent) -> Option<Duration> {
        match event {
            LinkEvent::Opening { reply, certified } => {
                // Whoever joined again beside this worker may have got another place for it.
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
                    running: self.held(),
                    confinement: self.identity.confinement.clone(),
                    offers: self.context.kept.offers(),
                });
            }
            LinkEvent::Open {
                to_coordinator,
                clients,
            } => self.connection = Some((to_coordinator, *clients)),
            LinkEvent::Down { problem } => {
                tracing::warn!(%problem, "no connection to the coordinator; attempts go on, trying again");
                self.connection = None;
                self.welcomed = false;
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
                beat_interval,
                storage_url,
                keep,
                wanted,
                ..
            } => {
                self.welcome(worker, storage_url.as_deref(), &keep, &wanted);
                // Never a busy loop, whatever the coordinator says.
                return Some(beat_interval.max(Duration::from_millis(20)));
            }
            ToWorker::BeatReply { events } => {
                for (attempt, seq) in events {
                    self.outbox.arrived(&attempt, seq);
                }
            }
            ToWorker::Assign(assignment) => self.assign(*assignment),
            ToWorker::Stop { held, save } => {
                if let Some(attempt) = self
                    .attempts
                    .get(&held.attempt)
                    .filter(|attempt| attempt.epoch == held.epoch)
                {
                    want(attempt, if save { Wanted::Stop } else { Wanted::Kill });
                }
            }
            // The attempt is over; what it saved and the coordinator asked for is not.
            ToWorker::Fence { held, .. }
                if self.sending.contains_key(&held.attempt) && !self.attempts.contains_key(&held.attempt) => {}
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

    /// Whether a refusal can be waited out, because attempts or their checkpoints would be lost with this worker. One that was
    /// sent away has lost its place to another worker.
    fn can_wait(&self, refusal: &Refusal) -> bool {
        let holds = self.attempts.values().any(|attempt| !attempt.is_over) || !self.context.kept.is_empty();
        holds && !matches!(refusal, Refusal::SentAway(_))
    }

    fn refused(&mut self, refusal: &Refusal) {
        let (attempts, folder) = (self.attempts.len(), self.context.kept.folder().display());
        tracing::error!(
            "{refusal}. {attempts} attempts go on to their next checkpoint, which is kept here ({folder}) and offered when this \
             worker is let in again. It asks again by itself: put a new token into its token file, run `aitk-worker join` \
             beside it, or update it"
        );
        self.connection = None;
        self.welcomed = false;
        self.context.storage.connection_lost();
        let words = refusal.to_string();
        self.context.refused.send_replace(Some(words.clone()));
        self.status.send_replace(Status::Refused(words));
    }

    fn welcome(&mut self, worker: WorkerId, storage_url: Option<&str>, keep: &[AttemptId], wanted: &[AttemptId]) {
        self.context.refused.send_replace(None);
        tracing::info!(%worker, "registered with the coordinator");
        if self.identity.worker.as_ref() != Some(&worker) {
            if let Err(error) = self.context.folders.keep_worker_id(&worker) {
                tracing::warn!(%error, "the worker's id could not be kept; after a restart it gets a new one");
            }
            self.identity.worker = Some(worker.clone());
        }
        if let Some((_, clients)) = &self.connection {
            self.context.storage.connected(clients, storage_url);
        }
        let lost: Vec<AttemptId> = self.attempts.keys().filter(|id| !keep.contains(id)).cloned().collect();
        for attempt in lost {
            self.fence(&attempt, "the coordinator gave it up while there was no connection");
        }
        let running: Vec<AttemptId> = self.attempts.keys().cloned().collect();
        for (_, task) in self.sending.drain() {
            task.abort();
        }
        for checkpoint in self.context.kept.answer(wanted, &running) {
            self.send_kept(checkpoint);
        }
        self.outbox.resend();
        self.welcomed = true;
        self.farewell_due = self.leaving;
        self.status.send_replace(Status::Connected(worker));
    }

    /// Sends a checkpoint of an attempt that has ended.
    fn send_kept(&mut self, checkpoint: OfferedCheckpoint) {
        let attempt = checkpoint.held.attempt.clone();
        self.outbox.close(&attempt);
        self.outbox.open(&checkpoint.held);
        let reporter = Reporter::new(checkpoint.held.clone(), self.to_session.clone());
        let (context, id) = (Arc::clone(&self.context), attempt.clone());
        let task = self.tasks.spawn(async move {
            resend::send_kept(&context, &reporter, &checkpoint).await;
            id
        });
        self.sending.insert(attempt, task);
    }

    fn assign(&mut self, assignment: Assignment) {
        let held = HeldAttempt {
            attempt: assignment.attempt.clone(),
            epoch: assignment.epoch,
        };
        if self.attempts.contains_key(&held.attempt) {
            return;
        }
        tracing::info!(attempt = %held.attempt, job = %assignment.job, "attempt assigned");
        self.outbox.open(&held);
        let first = if self.leaving { Wanted::Stop } else { Wanted::Run };
        let (wanted, wishes) = watch::channel(first);
        let fence = CancellationToken::new();
        let reporter = Reporter::new(held.clone(), self.to_session.clone());
        let context = Arc::clone(&self.context);
        let fenced = fence.clone();
        let id = held.attempt.clone();
        self.tasks.spawn(async move {
            attempt::run(context, assignment, reporter, wishes, fenced).await;
            id
        });
        self.attempts.insert(
            held.attempt,
            Attempt {
                epoch: held.epoch,
                wanted,
                fence,
                finish: None,
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
                        held.finish = Some(id);
                    }
                    self.waiting.insert(id, (attempt, reply));
                }
            }
        }
    }

    fn on_answer(&mut self, request: u64, verdict: Verdict, message: String) {
        self.outbox.answered(request);
        let Some((attempt, reply)) = self.waiting.remove(&request) else {
            return;
        };
        if verdict == Verdict::Fenced {
            self.fence(&attempt, &message);
        } else {
            if let Some(held) = self
                .attempts
                .get_mut(&attempt)
                .filter(|held| held.finish == Some(request))
            {
                held.is_over = true;
            }
            let _ = reply.send(Answer {
                accepted: verdict == Verdict::Accepted,
                message,
            });
        }
    }

    /// The attempt belongs to somebody else: its child ends at once, and nothing more is said about it.
    fn fence(&mut self, attempt: &AttemptId, reason: &str) {
        if let Some(held) = self.attempts.get(attempt).filter(|held| !held.is_over) {
            tracing::warn!(%attempt, %reason, "attempt fenced; its child is killed and its work discarded");
            held.fence.cancel();
        }
        if let Some(task) = self.sending.remove(attempt) {
            tracing::warn!(%attempt, %reason, "a checkpoint that was kept is not wanted any more; it is removed");
            task.abort();
            self.context.kept.forget(attempt);
        }
        self.drop_words(attempt);
    }

    fn forget(&mut self, attempt: &AttemptId) {
        let ran = self.attempts.remove(attempt).is_some();
        self.sending.remove(attempt);
        self.drop_words(attempt);
        if ran && let Some(checkpoint) = self.context.kept.ended_and_wanted(attempt) {
            self.send_kept(checkpoint);
        }
    }

    fn drop_words(&mut self, attempt: &AttemptId) {
        self.outbox.close(attempt);
        self.waiting.retain(|_, (of, _)| of != attempt);
    }

    fn next_message(&mut self) -> Option<ToCoordinator> {
        if std::mem::take(&mut self.farewell_due) {
            return Some(ToCoordinator::GoingAway {
                reason: "the worker is shutting down".to_owned(),
            });
        }
        if std::mem::take(&mut self.beat_due) {
            return Some(ToCoordinator::Beat { running: self.held() });
        }
        self.outbox.next()
    }
}

/// How long it may take to send so many bytes.
fn sending_time(bytes: u64) -> Duration {
    Duration::from_secs(bytes.div_ceil(SLOWEST_UPLOAD))
}

fn want(attempt: &Attempt, wanted: Wanted) {
    attempt.wanted.send_if_modified(|now| {
        let further = wanted > *now;
        *now = (*now).max(wanted);
        further
    });
}

/// Room for one message to the coordinator; never, without a connection. A link that has gone says so itself.
async fn room(sender: Option<&mpsc::Sender<ToCoordinator>>) -> mpsc::Permit<'_, ToCoordinator> {
    if let Some(sender) = sender
        && let Ok(room) = sender.reserve().await
    {
        return room;
    }
    std::future::pending().await
}

async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
