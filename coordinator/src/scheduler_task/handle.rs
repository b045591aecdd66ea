//! The handle by which services reach the scheduler's task, and the inputs that it sends.

use crate::assign::Outgoing;
use crate::store::AuditLine;
use aitk_common::control_plane::{JobEvent, UnixMillis};
use aitk_common::id::JobId;
use aitk_scheduler::{Event, Refusal, Reply, SessionId, State, Ticket};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{broadcast, mpsc, oneshot};

/// Messages that wait for one worker: several per device of a big machine. A worker that does not read loses its
/// session and registers again.
const OUTBOX: usize = 256;
/// Events that wait for one follower. A follower that lags further reads from the store.
const FOLLOWER_QUEUE: usize = 1024;

pub(super) type Query = Box<dyn FnOnce(&State, UnixMillis) + Send>;

pub(super) type ReplySender = oneshot::Sender<Result<Reply, Refusal>>;

pub(super) enum Input {
    Event(Event),
    Call(Event, Ticket, ReplySender, Box<AuditLine>),
    Query(Query),
    /// Answered when everything before it is durable.
    WaitUntilStored(oneshot::Sender<()>),
    OpenSession(SessionId, mpsc::Sender<Outgoing>),
}

/// The scheduler's task has ended: the coordinator shuts down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the coordinator is shutting down; try again in a moment")]
pub(crate) struct SchedulerStopped;

/// Handle to the scheduler's task. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct SchedulerHandle {
    inputs: mpsc::Sender<Input>,
    ids: Arc<AtomicU64>,
    broadcaster: Arc<EventBroadcaster>,
}

/// Broadcast channels of followed jobs.
#[derive(Debug, Default)]
pub(super) struct EventBroadcaster {
    followers: Mutex<HashMap<JobId, broadcast::Sender<Arc<JobEvent>>>>,
}

impl EventBroadcaster {
    fn subscribe(&self, job: &JobId) -> broadcast::Receiver<Arc<JobEvent>> {
        let mut followers = self.followers.lock().unwrap_or_else(PoisonError::into_inner);
        // A job that has ended publishes nothing that would remove its channel. Only before the map grows, so that this costs little.
        if followers.len() == followers.capacity() {
            followers.retain(|_, sender| sender.receiver_count() > 0);
        }
        followers
            .entry(job.clone())
            .or_insert_with(|| broadcast::channel(FOLLOWER_QUEUE).0)
            .subscribe()
    }

    pub(super) fn publish(&self, job: &JobId, event: Arc<JobEvent>) {
        let mut followers = self.followers.lock().unwrap_or_else(PoisonError::into_inner);
        let no_followers = followers.get(job).is_some_and(|sender| sender.send(event).is_err());
        if no_followers {
            followers.remove(job);
        }
    }
}

impl SchedulerHandle {
    pub(super) fn new(inputs: mpsc::Sender<Input>, broadcaster: Arc<EventBroadcaster>) -> Self {
        Self {
            inputs,
            ids: Arc::new(AtomicU64::new(1)),
            broadcaster,
        }
    }

    fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends an event; waits while the queue is full.
    pub(crate) async fn event(&self, event: Event) -> Result<(), SchedulerStopped> {
        self.inputs
            .send(Input::Event(event))
            .await
            .map_err(|_| SchedulerStopped)
    }

    /// Sends an event and waits for its reply. The reply comes when all its changes are durable, together with the
    /// audit line, which also records a refusal.
    pub(crate) async fn call(
        &self,
        event: impl FnOnce(Ticket) -> Event,
        line: Box<AuditLine>,
    ) -> Result<Result<Reply, Refusal>, SchedulerStopped> {
        let ticket = Ticket(self.next_id());
        let (sender, receiver) = oneshot::channel();
        self.inputs
            .send(Input::Call(event(ticket), ticket, sender, line))
            .await
            .map_err(|_| SchedulerStopped)?;
        receiver.await.map_err(|_| SchedulerStopped)
    }

    /// Runs a query on the scheduler's state; it sees only durable changes. (While the database is full, it also sees
    /// the last batch, which is not durable yet.)
    pub(crate) async fn query<T: Send + 'static>(
        &self,
        read_state: impl FnOnce(&State, UnixMillis) -> T + Send + 'static,
    ) -> Result<T, SchedulerStopped> {
        let (sender, receiver) = oneshot::channel();
        let query: Query = Box::new(move |state, now| {
            let _ = sender.send(read_state(state, now));
        });
        self.inputs
            .send(Input::Query(query))
            .await
            .map_err(|_| SchedulerStopped)?;
        receiver.await.map_err(|_| SchedulerStopped)
    }

    /// Waits until everything sent before is durable.
    pub(crate) async fn wait_until_stored(&self) -> Result<(), SchedulerStopped> {
        let (sender, receiver) = oneshot::channel();
        self.inputs
            .send(Input::WaitUntilStored(sender))
            .await
            .map_err(|_| SchedulerStopped)?;
        receiver.await.map_err(|_| SchedulerStopped)
    }

    /// Opens a session: its id and the messages for its worker. The receiver ends when the scheduler closes the
    /// session.
    pub(crate) async fn open_session(&self) -> Result<(SessionId, mpsc::Receiver<Outgoing>), SchedulerStopped> {
        let session = SessionId(self.next_id());
        let (sender, receiver) = mpsc::channel(OUTBOX);
        self.inputs
            .send(Input::OpenSession(session, sender))
            .await
            .map_err(|_| SchedulerStopped)?;
        Ok((session, receiver))
    }

    /// Subscribes to the events of a job from now on.
    pub(crate) fn follow(&self, job: &JobId) -> broadcast::Receiver<Arc<JobEvent>> {
        self.broadcaster.subscribe(job)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_without_followers_do_not_pile_up() {
        let broadcaster = EventBroadcaster::default();
        let followed = JobId::new("followed");
        let _receiver = broadcaster.subscribe(&followed);
        // `aitk logs` reads the log of a job that has ended.
        for number in 0..1000 {
            drop(broadcaster.subscribe(&JobId::new(format!("ended-{number}"))));
        }
        let followers = broadcaster.followers.lock().unwrap();
        assert!(followers.len() < 50, "{}", followers.len());
        assert!(followers.contains_key(&followed));
    }
}
