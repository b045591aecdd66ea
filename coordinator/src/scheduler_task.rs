//! The task that owns the scheduler: it handles events in batches, stores their changes in one transaction, and only
//! then sends effects.

mod handle;
mod pause;

pub(crate) use handle::{SchedulerHandle, SchedulerStopped};

use crate::assign::{Outgoing, PendingAssignment};
use crate::clock::Clock;
use crate::job_config_cache::JobConfigCache;
use crate::metrics::Metrics;
use crate::spans::Spans;
use crate::store::AuditLine;
use crate::store::{Store, StoreError};
use aitk_common::backoff::Backoff;
use aitk_common::control_plane::ToWorker;
use aitk_common::error_chain::error_chain;
use aitk_scheduler::{Effect, Event, PlacedAttempt, Record, Refusal, Reply, SessionId, State, Ticket};
use handle::{EventBroadcaster, Input, ReplySender};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Inputs that wait for the scheduler. When the queue is full, senders wait; each blocks only its own connection.
const INPUT_QUEUE: usize = 1024;
/// Maximum inputs of one transaction. More would delay the first of them.
const BATCH: usize = 256;
/// A tick this much later than scheduled means that the scheduler stalled and could not receive heartbeats.
const STALL_THRESHOLD: Duration = Duration::from_millis(100);
/// How long a failing store is retried. After that the process ends: its state is ahead of the store, and restarting
/// from the store is safe.
const STORE_RETRY_TIME: Duration = Duration::from_secs(30);

/// The scheduler's task.
pub(crate) struct SchedulerTask {
    state: State,
    clock: Clock,
    store: Arc<dyn Store>,
    storage_url: Option<String>,
    metrics: Metrics,
    spans: Spans,
    job_configs: JobConfigCache,
    inputs: mpsc::Receiver<Input>,
    broadcaster: Arc<EventBroadcaster>,
    sessions: HashMap<SessionId, mpsc::Sender<Outgoing>>,
    /// Events to handle after a period in which the database was full.
    deferred: Vec<Event>,
}

impl SchedulerTask {
    pub(crate) fn new(
        state: State,
        clock: Clock,
        store: Arc<dyn Store>,
        storage_url: Option<String>,
        metrics: Metrics,
        spans: Spans,
        job_configs: JobConfigCache,
    ) -> (Self, SchedulerHandle) {
        let (sender, inputs) = mpsc::channel(INPUT_QUEUE);
        let broadcaster = Arc::new(EventBroadcaster::default());
        let scheduler = SchedulerHandle::new(sender, broadcaster.clone());
        (
            Self {
                state,
                clock,
                store,
                storage_url,
                metrics,
                spans,
                job_configs,
                inputs,
                broadcaster,
                sessions: HashMap::new(),
                deferred: Vec::new(),
            },
            scheduler,
        )
    }

    /// Runs until every [`SchedulerHandle`] is dropped or the store fails permanently.
    pub(crate) async fn run(mut self) -> Result<(), StoreError> {
        let period = (self.state.settings().lease / 20).clamp(Duration::from_millis(10), Duration::from_millis(500));
        let mut ticks = tokio::time::interval(period);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut batch = Vec::with_capacity(BATCH);
        loop {
            tokio::select! {
                count = self.inputs.recv_many(&mut batch, BATCH) => {
                    if count == 0 {
                        return Ok(());
                    }
                }
                due = ticks.tick() => {
                    // Inputs that arrived while the scheduler was busy are handled before leases are checked.
                    while batch.len() < BATCH && let Ok(input) = self.inputs.try_recv() {
                        batch.push(input);
                    }
                    let by = due.elapsed();
                    if by > STALL_THRESHOLD {
                        if by > Duration::from_secs(1) {
                            tracing::warn!(by = ?by, "the coordinator stalled; leases are extended by that time");
                        }
                        batch.push(Input::Event(Event::Stalled { by }));
                    }
                    batch.push(Input::Event(Event::Tick));
                }
            }
            self.process_batch(&mut batch).await?;
            if !self.deferred.is_empty() {
                batch.extend(self.deferred.drain(..).map(Input::Event));
                // The delay is already among these events.
                ticks.reset();
                self.process_batch(&mut batch).await?;
            }
        }
    }

    async fn process_batch(&mut self, batch: &mut Vec<Input>) -> Result<(), StoreError> {
        let now = self.clock.now();
        self.state.set_wall_clock_ahead(self.clock.wall_time().since(now));
        let (mut records, mut audit, mut rest, mut queries) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut waiting = Vec::new();
        let mut callers = HashMap::new();
        for input in batch.drain(..) {
            let (event, mut line) = match input {
                Input::Event(event) => (event, None),
                Input::Call(event, ticket, caller, line) => {
                    callers.insert(ticket, caller);
                    (event, Some(line))
                }
                Input::Query(query) => {
                    queries.push(query);
                    continue;
                }
                Input::WaitUntilStored(sender) => {
                    waiting.push(sender);
                    continue;
                }
                Input::OpenSession(session, sender) => {
                    self.sessions.insert(session, sender);
                    continue;
                }
            };
            if let Event::SessionClosed { session } = &event {
                self.sessions.remove(session);
            }
            for effect in self.state.handle(now, event) {
                match effect {
                    Effect::Persist(record) => records.push(record),
                    other => {
                        if let (Effect::Reply(_, reply), Some(line)) = (&other, &mut line) {
                            complete_audit_line(line, reply);
                        }
                        rest.push(other);
                    }
                }
            }
            audit.extend(line.map(|line| *line));
            debug_assert_eq!(aitk_scheduler::check(&self.state), Ok(()));
        }
        let began = Instant::now();
        match self.persist(&records, &audit).await {
            Err(error) if error.is_full() => {
                for query in std::mem::take(&mut queries) {
                    query(&self.state, now);
                }
                self.wait_for_disk_space(&records, &audit, &mut rest, &mut callers, &error)
                    .await?;
            }
            persisted => persisted?,
        }
        self.metrics.record_commit(&records, audit.len(), began.elapsed());
        self.spans.record_commit(&records);
        for record in &records {
            if let Record::NewJob(job, payload) = record {
                self.job_configs.insert(&job.id, payload);
            }
        }
        for effect in rest {
            self.apply_effect(effect, &mut callers);
        }
        for query in queries {
            query(&self.state, now);
        }
        for waiting in waiting {
            let _ = waiting.send(());
        }
        Ok(())
    }

    async fn persist(&self, records: &[Record], audit: &[AuditLine]) -> Result<(), StoreError> {
        let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(5), STORE_RETRY_TIME);
        while let Err(error) = self.store.commit(records, audit).await {
            let retryable = error.is_transient() && !error.is_full();
            let Some(delay) = backoff.next_delay().filter(|_| retryable) else {
                return Err(error);
            };
            tracing::error!(error = %error_chain(&error), "the store failed; trying again");
            tokio::time::sleep(delay).await;
        }
        Ok(())
    }

    fn apply_effect(&mut self, effect: Effect, callers: &mut HashMap<Ticket, ReplySender>) {
        match effect {
            // Stored before; not reached.
            Effect::Persist(_) => {}
            Effect::Send(
                session,
                ToWorker::Welcome {
                    worker,
                    heartbeat_interval,
                    lease,
                    keep,
                    wanted,
                    ..
                },
            ) => {
                let storage_url = self.storage_url.clone();
                self.send(
                    session,
                    ToWorker::Welcome {
                        worker,
                        heartbeat_interval,
                        lease,
                        storage_url,
                        keep,
                        wanted,
                    }
                    .into(),
                );
            }
            Effect::Send(session, message) => self.send(session, message.into()),
            // The session knows the caller. This takes a place in its outbox beside the answer.
            Effect::ForeignReport { session, attempt } => self.send(session, Outgoing::ForeignReport(attempt)),
            Effect::Assign(session, placed) => {
                let assignment = self.pending_assignment(*placed);
                self.send(session, Outgoing::Assignment(Box::new(assignment)));
            }
            Effect::Close { session, reason, retry } => self.close(session, &reason, retry),
            Effect::Publish(job, event) => self.broadcaster.publish(&job, event),
            Effect::Reply(ticket, reply) => {
                if let Some(caller) = callers.remove(&ticket) {
                    // A caller that disconnected does not matter: its request was executed.
                    let _ = caller.send(reply);
                }
            }
        }
    }

    /// Creates the assignment for the session's task.
    fn pending_assignment(&self, placed: PlacedAttempt) -> PendingAssignment {
        let job = self.state.job(&placed.job);
        if let Some(job) = job.filter(|job| job.attempts.len() == 1) {
            self.metrics
                .record_first_assignment(job.created, self.clock.wall_time());
        }
        PendingAssignment {
            owner: job.map(|job| job.requirements.owner.clone()),
            trace: job.and_then(|job| self.spans.of_attempt(job, &placed.held.attempt)),
            // A job in place finds its images in its folder, and a training continues from its checkpoint.
            may_have_images: !placed.local && placed.resume.is_none() && job.is_some_and(|job| job.attempts.len() > 1),
            placed,
        }
    }

    /// Sends without waiting: a worker that does not read loses its session, which its task then reports as closed.
    fn send(&mut self, session: SessionId, message: Outgoing) {
        let Some(sender) = self.sessions.get(&session) else {
            return;
        };
        if sender.try_send(message).is_err() {
            tracing::warn!(
                session = session.0,
                "a worker does not read its messages; closing its session"
            );
            self.sessions.remove(&session);
        }
    }

    fn close(&mut self, session: SessionId, reason: &str, retry: bool) {
        if let Some(sender) = self.sessions.remove(&session) {
            let message = ToWorker::GoingAway {
                reason: reason.to_owned(),
                retry,
            };
            let _ = sender.try_send(message.into());
        }
    }
}

/// Completes an audit line with the outcome of its request.
fn complete_audit_line(line: &mut AuditLine, reply: &Result<Reply, Refusal>) {
    match reply {
        Err(refusal) => (line.done, line.detail) = (false, AuditLine::quote(&refusal.to_string())),
        // A repeated idempotency key returns the earlier job.
        Ok(Reply::Submitted(submitted)) => line.object = submitted.job.to_string(),
        Ok(_) => {}
    }
}
