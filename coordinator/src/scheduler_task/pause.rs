//! Pauses the coordinator while the database's disk is full. Reads are answered, changes are refused with a message,
//! workers keep their attempts and reconnect, and everything continues when there is room again.
//!
//! During the pause the scheduler is one batch ahead of the store: that batch is retried until it is stored, and no
//! other is begun. Messages of workers are dropped meanwhile; workers repeat them when they register, as after a
//! restart of the coordinator.

use super::handle::{Input, ReplySender};
use super::{STORE_RETRY_TIME, SchedulerTask};
use crate::assign::Outgoing;
use crate::store::{AuditLine, StoreError};
use aitk_common::control_plane::ToWorker;
use aitk_common::error_chain::error_chain;
use aitk_scheduler::{Effect, Event, Record, Refusal, SessionId, Ticket};
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};
use tokio::time::MissedTickBehavior;

/// Interval at which the batch is retried.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
const DISK_FULL: &str = "the disk of the coordinator's database is full";

/// What arrived while the database was full.
#[derive(Default)]
struct PauseState {
    /// Sessions that were open when the pause began.
    open: HashSet<SessionId>,
    /// Sessions of these that have ended since.
    lost: Vec<SessionId>,
    /// Last reported state of the disk space for blobs.
    space: Option<(u64, u64)>,
    /// Callers that wait until everything is stored.
    waiting: Vec<oneshot::Sender<()>>,
}

impl SchedulerTask {
    /// Retries the records of a batch until they are stored. Their callers are told that this takes a while.
    ///
    /// # Errors
    /// When the store fails in another way for too long, or all handles are dropped.
    pub(super) async fn wait_for_disk_space(
        &mut self,
        records: &[Record],
        audit: &[AuditLine],
        effects: &mut Vec<Effect>,
        callers: &mut HashMap<Ticket, ReplySender>,
        error: &StoreError,
    ) -> Result<(), StoreError> {
        tracing::error!(error = %error_chain(error), "{DISK_FULL}: nothing is changed until there is room");
        let (began, mut last_full) = (Instant::now(), Instant::now());
        let mut pause = PauseState {
            open: self.sessions.keys().copied().collect(),
            space: self.state.storage_full(),
            ..PauseState::default()
        };
        self.state.set_storage_full(self.state.storage_full().or(Some((0, 0))));
        answer_callers(effects, callers);
        for (_, sender) in self.sessions.drain() {
            ask_to_reconnect(&sender);
        }
        let mut tries = tokio::time::interval(RETRY_INTERVAL);
        tries.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let stored = loop {
            let all_senders_dropped = tokio::select! {
                input = self.inputs.recv() => match input {
                    Some(input) => {
                        self.handle_while_full(input, &mut pause);
                        continue;
                    }
                    None => true,
                },
                _ = tries.tick() => false,
            };
            match self.store.commit(records, audit).await {
                Ok(()) => break Ok(()),
                Err(error) if all_senders_dropped => break Err(error),
                Err(error) if error.is_full() => last_full = Instant::now(),
                Err(error) if error.is_transient() && last_full.elapsed() < STORE_RETRY_TIME => {
                    tracing::error!(error = %error_chain(&error), "the store failed; trying again");
                }
                Err(error) => break Err(error),
            }
        };
        self.state.set_storage_full(pause.space);
        if stored.is_ok() {
            let by = began.elapsed();
            tracing::warn!(?by, "the database has room again");
            let lost = pause.lost.into_iter();
            self.deferred
                .extend(lost.map(|session| Event::SessionClosed { session }));
            // No heartbeat was received, and workers need a while to reconnect.
            let by = by.max(self.state.settings().lease);
            self.deferred.push(Event::Stalled { by });
        }
        // Waiting callers are notified; after a failure, they see the closed channel.
        if stored.is_ok() {
            for waiting in pause.waiting {
                let _ = waiting.send(());
            }
        }
        stored
    }

    fn handle_while_full(&mut self, input: Input, pause: &mut PauseState) {
        match input {
            Input::Query(query) => query(&self.state, self.clock.now()),
            Input::WaitUntilStored(waiting) => pause.waiting.push(waiting),
            Input::Call(_, _, caller, _) => {
                let text = format!(
                    "{DISK_FULL}, so nothing can be changed now; nothing was done. Try again when there is room"
                );
                let _ = caller.send(Err(Refusal::DatabaseFull(text)));
            }
            Input::OpenSession(_, sender) => ask_to_reconnect(&sender),
            Input::Event(Event::StorageSpace { full }) => {
                pause.space = full;
                self.state.set_storage_full(Some(full.unwrap_or((0, 0))));
            }
            Input::Event(Event::SessionClosed { session }) if pause.open.remove(&session) => {
                pause.lost.push(session);
            }
            // Ticks continue after the pause; workers repeat the other events when they register.
            Input::Event(_) => {}
        }
    }
}

/// Ends a session and asks its worker to reconnect.
fn ask_to_reconnect(sender: &mpsc::Sender<Outgoing>) {
    let message = ToWorker::GoingAway {
        reason: DISK_FULL.to_owned(),
        retry: true,
    };
    // A worker that does not read notices the closed channel.
    let _ = sender.try_send(message.into());
}

/// Answers the callers of the batch now instead of after the pause.
fn answer_callers(effects: &mut Vec<Effect>, callers: &mut HashMap<Ticket, ReplySender>) {
    effects.retain(|effect| {
        let Effect::Reply(ticket, reply) = effect else {
            return true;
        };
        if let Some(caller) = callers.remove(ticket) {
            let text = format!(
                "{DISK_FULL}, so what you asked for is not stored yet. It is done when there is room, as long as the coordinator is not \
                 stopped before: look at `aitk ps` before you ask again"
            );
            let reply = reply.clone().and(Err(Refusal::DatabaseFull(text)));
            let _ = caller.send(reply);
        }
        false
    });
}
