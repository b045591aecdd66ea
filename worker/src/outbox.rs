//! Messages of attempts to the coordinator, kept until it has acknowledged them.
//!
//! A data structure without tasks or clocks. Events are numbered, and removed when a heartbeat reply acknowledges
//! them; requests are removed when they are answered. After a broken connection all remaining messages are sent
//! again, in order; the coordinator drops duplicates. While it is away the memory is bounded: only the newest
//! progress is kept, metrics are thinned out, old log lines are replaced by their count. Requests are never dropped;
//! their number is bounded, because each sender waits for its answer.

use aitk_common::attempt::Outcome;
use aitk_common::control_plane::{Artifact, AttemptRef, Report, ToCoordinator, UnixMillis};
use aitk_common::hash::ContentHash;
use aitk_common::id::{AttemptId, Epoch};
use std::collections::{BTreeMap, VecDeque};

/// The most log lines kept per attempt: many screens.
const MAX_LOGS: usize = 1000;
/// The most metrics kept per attempt; then every second one is removed.
const MAX_METRICS: usize = 4000;
/// The most phases kept per attempt.
const MAX_PHASES: usize = 200;

/// A message that the coordinator answers. It has taken effect only after the answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Request {
    /// A file is in storage, or in its place for a local job.
    ArtifactReady(Artifact),
    /// A file was removed.
    ArtifactRemoved(String),
    /// A checkpoint is in storage.
    Commit {
        /// Its manifest.
        manifest: ContentHash,
        /// Its step.
        step: u64,
    },
    /// The attempt ended.
    Finished(Outcome),
}

#[derive(Clone, Debug)]
enum Message {
    Event {
        seq: u64,
        time: UnixMillis,
        report: Report,
        dropped: u64,
    },
    Request {
        id: u64,
        request: Request,
    },
}

#[derive(Debug)]
struct AttemptQueue {
    epoch: Epoch,
    last_seq: u64,
    entries: VecDeque<Message>,
    /// How many entries at the front were sent on this connection.
    sent: usize,
}

/// All messages that are not sent or not acknowledged.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    last_request: u64,
    queues: BTreeMap<AttemptId, AttemptQueue>,
}

impl Outbox {
    /// Creates the queue of an attempt.
    pub(crate) fn open(&mut self, held: &AttemptRef) {
        self.queues.entry(held.attempt.clone()).or_insert_with(|| AttemptQueue {
            epoch: held.epoch,
            last_seq: 0,
            entries: VecDeque::new(),
            sent: 0,
        });
    }

    /// Removes the queue of an attempt with all its messages.
    pub(crate) fn close(&mut self, attempt: &AttemptId) {
        self.queues.remove(attempt);
    }

    /// Adds a report, and drops older ones if there are too many of its kind.
    pub(crate) fn report(&mut self, attempt: &AttemptId, time: UnixMillis, report: Report) {
        let Some(queue) = self.queues.get_mut(attempt) else {
            return;
        };
        queue.drop_excess(&report);
        queue.last_seq += 1;
        queue.entries.push_back(Message::Event {
            seq: queue.last_seq,
            time,
            report,
            dropped: 0,
        });
    }

    /// Adds a request and returns its number, which the answer will carry; `None` for an unknown attempt.
    pub(crate) fn request(&mut self, attempt: &AttemptId, request: Request) -> Option<u64> {
        let queue = self.queues.get_mut(attempt)?;
        self.last_request += 1;
        queue.entries.push_back(Message::Request {
            id: self.last_request,
            request,
        });
        Some(self.last_request)
    }

    /// The next message to send, if any.
    pub(crate) fn next(&mut self) -> Option<ToCoordinator> {
        let (attempt, queue) = self
            .queues
            .iter_mut()
            .find(|(_, queue)| queue.sent < queue.entries.len())?;
        let held = AttemptRef {
            attempt: attempt.clone(),
            epoch: queue.epoch,
        };
        let message = match queue.entries.get(queue.sent)?.clone() {
            Message::Event { seq, time, report, .. } => ToCoordinator::Event {
                held,
                seq,
                time,
                report,
            },
            Message::Request {
                id: request,
                request: body,
            } => match body {
                Request::ArtifactReady(artifact) => ToCoordinator::ArtifactReady {
                    request,
                    held,
                    artifact,
                },
                Request::ArtifactRemoved(name) => ToCoordinator::ArtifactRemoved { request, held, name },
                Request::Commit { manifest, step } => ToCoordinator::Commit {
                    request,
                    held,
                    manifest,
                    step,
                },
                Request::Finished(outcome) => ToCoordinator::Finished { request, held, outcome },
            },
        };
        queue.sent += 1;
        Some(message)
    }

    /// Returns whether [`Self::next`] has a message.
    pub(crate) fn has_unsent(&self) -> bool {
        self.queues.values().any(|queue| queue.sent < queue.entries.len())
    }

    /// Marks all messages as unsent, for a new connection.
    pub(crate) fn resend(&mut self) {
        for queue in self.queues.values_mut() {
            queue.sent = 0;
        }
    }

    /// Removes the events of `attempt` up to this number: the coordinator has them.
    pub(crate) fn acknowledge(&mut self, attempt: &AttemptId, up_to: u64) {
        if let Some(queue) = self.queues.get_mut(attempt) {
            queue.remove(|body| matches!(body, Message::Event { seq, .. } if *seq <= up_to));
        }
    }

    /// Removes an answered request. Returns its attempt, if the request is known.
    pub(crate) fn remove_request(&mut self, request: u64) -> Option<AttemptId> {
        let of = |body: &Message| matches!(body, Message::Request { id, .. } if *id == request);
        let (attempt, queue) = self.queues.iter_mut().find(|(_, queue)| queue.entries.iter().any(of))?;
        queue.remove(of);
        Some(attempt.clone())
    }
}

impl AttemptQueue {
    fn remove(&mut self, is_removed: impl Fn(&Message) -> bool) {
        let sent = self
            .entries
            .iter()
            .take(self.sent)
            .filter(|body| !is_removed(body))
            .count();
        self.entries.retain(|body| !is_removed(body));
        self.sent = sent;
    }

    fn count(&self, of: impl Fn(&Report) -> bool) -> usize {
        self.entries
            .iter()
            .filter(|body| matches!(body, Message::Event { report, .. } if of(report)))
            .count()
    }

    fn drop_excess(&mut self, coming: &Report) {
        match coming {
            Report::Progress(_) => self.remove(|body| {
                matches!(
                    body,
                    Message::Event {
                        report: Report::Progress(_),
                        ..
                    }
                )
            }),
            Report::Phase { .. } => {
                if self.count(|report| matches!(report, Report::Phase { .. })) >= MAX_PHASES {
                    self.remove_first(|report| matches!(report, Report::Phase { .. }));
                }
            }
            Report::Metrics { .. } => {
                if self.count(|report| matches!(report, Report::Metrics { .. })) >= MAX_METRICS {
                    self.drop_every_second_metric();
                }
            }
            // At most one for each model.
            Report::Pinned { .. } => {}
            Report::Log { .. } => {
                if self.count(|report| matches!(report, Report::Log { .. })) >= MAX_LOGS {
                    self.merge_oldest_logs();
                }
            }
        }
    }

    fn remove_first(&mut self, of: impl Fn(&Report) -> bool) -> bool {
        let Some(at) = self
            .entries
            .iter()
            .position(|body| matches!(body, Message::Event { report, .. } if of(report)))
        else {
            return false;
        };
        self.entries.remove(at);
        if at < self.sent {
            self.sent -= 1;
        }
        true
    }

    /// Removes every second metrics report, so that the curve keeps its shape.
    fn drop_every_second_metric(&mut self) {
        let odd = std::cell::Cell::new(false);
        let mut removed = Vec::new();
        for body in &self.entries {
            if let Message::Event {
                seq,
                report: Report::Metrics { .. },
                ..
            } = body
            {
                odd.set(!odd.get());
                if odd.get() {
                    removed.push(*seq);
                }
            }
        }
        self.remove(|body| matches!(body, Message::Event { seq, .. } if removed.binary_search(seq).is_ok()));
    }

    /// Replaces the two oldest log lines by one that says how many are missing.
    fn merge_oldest_logs(&mut self) {
        let is_log = |body: &Message| {
            matches!(
                body,
                Message::Event {
                    report: Report::Log { .. },
                    ..
                }
            )
        };
        let Some(at) = self.entries.iter().position(is_log) else {
            return;
        };
        let earlier = match self.entries.get(at) {
            Some(Message::Event { dropped, .. }) => *dropped,
            _ => 0,
        };
        self.entries.remove(at);
        if at < self.sent {
            self.sent -= 1;
        }
        let Some(Message::Event { report, dropped, .. }) = self.entries.iter_mut().find(|body| is_log(body)) else {
            return;
        };
        // Counts the removed line and, the first time, the line that becomes the notice.
        *dropped = if earlier == 0 { 2 } else { earlier + 1 };
        let message = format!("({dropped} log lines were left out here)");
        *report = Report::Log {
            level: "warn".to_owned(),
            message,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aitk_common::control_plane::Progress;
    use proptest::prelude::*;

    fn held() -> AttemptRef {
        AttemptRef {
            attempt: AttemptId::new("a"),
            epoch: Epoch(3),
        }
    }

    fn log(text: usize) -> Report {
        Report::Log {
            level: "info".into(),
            message: text.to_string(),
        }
    }

    fn progress(done: u64) -> Report {
        Report::Progress(Progress {
            done,
            total: 1000,
            seconds_per_step: None,
        })
    }

    fn send_all(outbox: &mut Outbox) -> Vec<ToCoordinator> {
        std::iter::from_fn(|| outbox.next()).collect()
    }

    #[test]
    fn floods_are_bounded_and_the_number_of_dropped_lines_is_logged() {
        let mut outbox = Outbox::default();
        outbox.open(&held());
        for at in 0..50_000_usize {
            outbox.report(&held().attempt, UnixMillis(0), progress(at as u64));
            outbox.report(
                &held().attempt,
                UnixMillis(0),
                Report::Metrics {
                    step: at as u64,
                    values: BTreeMap::new(),
                },
            );
            if at % 10 == 0 {
                outbox.report(&held().attempt, UnixMillis(0), log(at / 10));
            }
        }
        let sent = send_all(&mut outbox);
        assert!(sent.len() <= MAX_LOGS + MAX_METRICS + 1, "{}", sent.len());
        let logs: Vec<String> = sent
            .iter()
            .filter_map(|message| match message {
                ToCoordinator::Event {
                    report: Report::Log { message, .. },
                    ..
                } => Some(message.clone()),
                _ => None,
            })
            .collect();
        assert_eq!(logs.len(), MAX_LOGS);
        assert_eq!(
            logs[0],
            format!("({} log lines were left out here)", 5000 - MAX_LOGS + 1)
        );
        assert_eq!(logs[1], (5000 - MAX_LOGS + 1).to_string());
        assert_eq!(logs.last().unwrap(), "4999");
    }

    #[test]
    fn unknown_attempts_and_requests_are_ignored() {
        let mut outbox = Outbox::default();
        outbox.report(&held().attempt, UnixMillis(0), progress(1));
        assert_eq!(
            outbox.request(&held().attempt, Request::ArtifactRemoved("x".into())),
            None
        );
        outbox.acknowledge(&held().attempt, 7);
        assert_eq!(outbox.remove_request(7), None);
        assert!(!outbox.has_unsent());
    }

    #[derive(Clone, Debug)]
    enum Step {
        Progress,
        Log,
        Metrics,
        Request,
        Send(usize),
        Deliver(usize),
        Heartbeat,
        Break,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => Just(Step::Progress),
            2 => Just(Step::Log),
            2 => Just(Step::Metrics),
            2 => Just(Step::Request),
            4 => (1..6_usize).prop_map(Step::Send),
            4 => (1..6_usize).prop_map(Step::Deliver),
            1 => Just(Step::Heartbeat),
            1 => Just(Step::Break),
        ]
    }

    /// A model of the coordinator, as the protocol describes it.
    #[derive(Default)]
    struct Coordinator {
        last_seq: u64,
        logs: Vec<String>,
        progress: u64,
        removed: Vec<String>,
    }

    impl Coordinator {
        fn receive(&mut self, message: ToCoordinator, outbox: &mut Outbox) {
            match message {
                ToCoordinator::Event { seq, report, .. } if seq > self.last_seq => {
                    self.last_seq = seq;
                    match report {
                        Report::Log { message, .. } => self.logs.push(message),
                        Report::Progress(progress) => self.progress = progress.done,
                        _ => {}
                    }
                }
                ToCoordinator::ArtifactRemoved { request, name, .. } => {
                    if self.removed.last() != Some(&name) {
                        self.removed.push(name);
                    }
                    outbox.remove_request(request);
                }
                _ => {}
            }
        }
    }

    proptest! {
        #[test]
        fn after_broken_connections_all_messages_arrive_once_and_in_order(steps in prop::collection::vec(step(), 0..300)) {
            let (mut outbox, mut coordinator, mut wire) = (Outbox::default(), Coordinator::default(), VecDeque::new());
            let (mut logs, mut done, mut requests) = (Vec::new(), 0_u64, Vec::new());
            let id = held().attempt;
            outbox.open(&held());
            for step in steps {
                match step {
                    Step::Progress => { done += 1; outbox.report(&id, UnixMillis(0), progress(done)); }
                    Step::Log => { outbox.report(&id, UnixMillis(0), log(logs.len())); logs.push(logs.len().to_string()); }
                    Step::Metrics => outbox.report(&id, UnixMillis(0), Report::Metrics { step: 1, values: BTreeMap::new() }),
                    Step::Request => {
                        let name = requests.len().to_string();
                        prop_assert!(outbox.request(&id, Request::ArtifactRemoved(name.clone())).is_some());
                        requests.push(name);
                    }
                    Step::Send(count) => wire.extend((0..count).map_while(|_| outbox.next())),
                    Step::Deliver(count) => for _ in 0..count {
                        if let Some(message) = wire.pop_front() { coordinator.receive(message, &mut outbox); }
                    },
                    Step::Heartbeat => outbox.acknowledge(&id, coordinator.last_seq),
                    Step::Break => { wire.clear(); outbox.resend(); }
                }
            }
            wire.clear();
            outbox.resend();
            for message in send_all(&mut outbox) { coordinator.receive(message, &mut outbox); }
            outbox.acknowledge(&id, coordinator.last_seq);
            outbox.resend();
            prop_assert!(!outbox.has_unsent());
            prop_assert_eq!(coordinator.logs, logs);
            prop_assert_eq!(coordinator.progress, done);
            prop_assert_eq!(coordinator.removed, requests);
        }
    }
}
