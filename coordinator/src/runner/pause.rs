//! The database has no room. What is there can be read, whoever wants a change is told why it is not made, workers keep what
//! they have and come back, and with room again everything goes on.
//!
//! The scheduler is one batch ahead of the store then: that batch is tried until it is stored, and no other is begun. What a
//! session said meanwhile is not heard; its worker says it again when it registers, as after a restart of the coordinator.

use super::{Input, Outgoing, ReplySender, Runner, STORE_RETRY_TIME};
use crate::error_chain::error_chain;
use crate::store::{AuditLine, StoreError};
use aitk_common::control::ToWorker;
use aitk_scheduler::{Effect, Event, Record, Refusal, SessionId, Ticket};
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};
use tokio::time::MissedTickBehavior;

/// How often the batch is tried again.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
const DISK_FULL: &str = "the disk of the coordinator's database is full";

/// What came while the database was full.
#[derive(Default)]
struct PauseState {
    /// Sessions that were open when it began.
    open: HashSet<SessionId>,
    /// Those of them that have ended since.
    lost: Vec<SessionId>,
    /// What was said last of the room for blobs.
    space: Option<(u64, u64)>,
    /// Waiting until everything is stored.
    stored: Vec<oneshot::Sender<()>>,
}

impl Runner {
    /// Tries the records of a batch until they are stored. Its callers are told that this takes a while.
    ///
    /// # Errors
    /// When the store fails in another way for too long, or everybody else has gone.
    pub(super) async fn wait_for_room(
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
            self.deferred.extend(lost.map(|session| Event::WorkerLost { session }));
            // Nobody could be heard, and whoever comes back needs a while.
            let by = by.max(self.state.settings().lease);
            self.deferred.push(Event::Stalled { by });
        }
        // Whoever waits for that hears that it is so, or by the end of the channel that it never will be.
        if stored.is_ok() {
            for waiting in pause.stored {
                let _ = waiting.send(());
            }
        }
        stored
    }

    fn handle_while_full(&mut self, input: Input, pause: &mut PauseState) {
        match input {
            Input::Query(query) => query(&self.state, self.clock.now()),
            Input::Stored(waiting) => pause.stored.push(waiting),
            Input::Call(_, _, caller, _) => {
                let text = format!(
                    "{DISK_FULL}, so nothing can be changed now; nothing was done. Try again when there is room"
                );
                let _ = caller.send(Err(Refusal::NoRoom(text)));
            }
            Input::OpenSession(_, sender) => ask_to_reconnect(&sender),
            Input::Event(Event::StorageSpace { full }) => {
                pause.space = full;
                self.state.set_storage_full(Some(full.unwrap_or((0, 0))));
            }
            Input::Event(Event::WorkerLost { session }) if pause.open.remove(&session) => {
                pause.lost.push(session);
            }
            // Time goes on when there is room; whoever has a session says the rest again.
            Input::Event(_) => {}
        }
    }
}

/// Ends a session whose worker is to come back.
fn ask_to_reconnect(sender: &mpsc::Sender<Outgoing>) {
    let message = ToWorker::GoingAway {
        reason: DISK_FULL.to_owned(),
        retry: true,
    };
    // One that does not read has no need to know; its session ends with the channel.
    let _ = sender.try_send(message.into());
}

/// The callers of the batch do not wait for room: they hear what is so.
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
            let reply = reply.clone().and(Err(Refusal::NoRoom(text)));
            let _ = caller.send(reply);
        }
        false
    });
}
