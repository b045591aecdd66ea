//! What attempts have to say to the coordinator, kept until it has arrived.
//!
//! Pure bookkeeping without tasks or clocks. Events are numbered and forgotten when a beat's answer says that they
//! arrived; requests are forgotten when they are answered. After a broken connection everything that is left is sent
//! again, in order; the coordinator drops what it has seen. While it is away the memory this takes is bounded:
//! progress is kept only once, metrics are thinned, old log lines are replaced by their number. Requests are never
//! dropped; their number is bounded by their senders, each of which waits for its answer.

use aitk_common::attempt::Outcome;
use aitk_common::control::{Artifact, HeldAttempt, Report, ToCoordinator, UnixMillis};
use aitk_common::hash::ContentHash;
use aitk_common::id::{AttemptId, Epoch};
use std::collections::{BTreeMap, VecDeque};

/// Log lines kept per attempt: a screenful of history, many times over.
const MAX_LOGS: usize = 1000;
/// Metrics kept per attempt before every second one goes.
const MAX_METRICS: usize = 4000;
/// Phases kept per attempt.
const MAX_PHASES: usize = 200;

/// What is answered: it happened for good only then.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Request {
    /// A file is in storage, or in place.
    ArtifactReady(Artifact),
    /// A file is gone.
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
enum Body {
    Event {
        seq: u64,
        time: UnixMillis,
        report: Report,
        left_out: u64,
    },
    Request {
        id: u64,
        request: Request,
    },
}

#[derive(Debug)]
struct Queue {
    epoch: Epoch,
    last_seq: u64,
    entries: VecDeque<Body>,
    /// How many entries at the front were sent on this connection.
    sent: usize,
}

/// All that waits to be sent or acknowledged.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    last_request: u64,
    queues: BTreeMap<AttemptId, Queue>,
}

impl Outbox {
    /// Begins to keep what an attempt says.
    pub(crate) fn open(&mut self, held: &HeldAttempt) {
        self.queues.entry(held.attempt.clone()).or_insert_with(|| Queue {
            epoch: held.epoch,
            last_seq: 0,
            entries: VecDeque::new(),
            sent: 0,
        });
    }

    /// Forgets an attempt and all that it had to say.
    pub(crate) fn close(&mut self, attempt: &AttemptId) {
        self.queues.remove(attempt);
    }

    /// Adds a report; makes room where there is too much of its kind.
    pub(crate) fn report(&mut self, attempt: &AttemptId, time: UnixMillis, report: Report) {
        let Some(queue) = self.queues.get_mut(attempt) else {
            return;
        };
        queue.make_room(&report);
        queue.last_seq += 1;
        queue.entries.push_back(Body::Event {
            seq: queue.last_seq,
            time,
            report,
            left_out: 0,
        });
    }

    /// Adds a request. The answer carries the number that comes back; none for an attempt that is not known.
    pub(crate) fn request(&mut self, attempt: &AttemptId, request: Request) -> Option<u64> {
        let queue = self.queues.get_mut(attempt)?;
        self.last_request += 1;
        queue.entries.push_back(Body::Request {
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
        let held = HeldAttempt {
            attempt: attempt.clone(),
            epoch: queue.epoch,
        };
        let message = match queue.entries.get(queue.sent)?.clone() {
            Body::Event { seq, time, report, .. } => ToCoordinator::Event {
                held,
                seq,
                time,
                report,
            },
            Body::Request {
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

    /// Whether [`Self::next`] has something.
    pub(crate) fn has_unsent(&self) -> bool {
        self.queues.values().any(|queue| queue.sent < queue.entries.len())
    }

    /// A new connection: everything that is left is sent again.
    pub(crate) fn resend(&mut self) {
        for queue in self.queues.values_mut() {
            queue.sent = 0;
        }
    }

    /// Every event of `attempt` up to this number has arrived.
    pub(crate) fn arrived(&mut self, attempt: &AttemptId, up_to: u64) {
        if let Some(queue) = self.queues.get_mut(attempt) {
            queue.remove(|body| matches!(body, Body::Event { seq, .. } if *seq <= up_to));
        }
    }

    /// A request was answered. Says whose it was, if it is known.
    pub(crate) fn answered(&mut self, request: u64) -> Option<AttemptId> {
        let of = |body: &Body| matches!(body, Body::Request { id, .. } if *id == request);
        let (attempt, queue) = self.queues.iter_mut().find(|(_, queue)| queue.entries.iter().any(of))?;
        queue.remove(of);
        Some(attempt.clone())
    }
}

impl Queue {
    fn remove(&mut self, gone: impl Fn(&Body) -> bool) {
        let sent = self.entries.iter().take(self.sent).filter(|body| !gone(body)).count();
        self.entries.retain(|body| !gone(body));
        self.sent = sent;
    }

    fn count(&self, of: impl Fn(&Report) -> bool) -> usize {
        self.entries
            .iter()
            .filter(|body| matches!(body, Body::Event { report, .. } if of(report)))
            .count()
    }

    fn make_room(&mut self, coming: &Report) {
        match coming {
            Report::Progress(_) => self.remove(|body| {
                matches!(
                    body,
                    Body::Event {
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
                    self.thin_metrics();
                }
            }
            // One for each model.
            Report::Pinned { .. } => {}
            Report::Log { .. } => {
                if self.count(|report| matches!(report, Report::Log { .. })) >= MAX_LOGS {
                    self.drop_oldest_log();
                }
            }
        }
    }

    fn remove_first(&mut self, of: impl Fn(&Report) -> bool) -> bool {
        let Some(at) = self
            .entries
            .iter()
            .position(|body| matches!(body, Body::Event { report, .. } if of(report)))
        else {
            return false;
        };
        self.entries.remove(at);
        if at < self.sent {
            self.sent -= 1;
        }
        true
    }

    /// Takes out every second one: the curve keeps its shape.
    fn thin_metrics(&mut self) {
        let odd = std::cell::Cell::new(false);
        let mut gone = Vec::new();
        for body in &self.entries {
            if let Body::Event {
                seq,
                report: Report::Metrics { .. },
                ..
            } = body
            {
                odd.set(!odd.get());
                if odd.get() {
                    gone.push(*seq);
                }
            }
        }
        self.remove(|body| matches!(body, Body::Event { seq, .. } if gone.binary_search(seq).is_ok()));
    }

    /// The two oldest lines become one that says how many are missing.
    fn drop_oldest_log(&mut self) {
        let is_log = |body: &Body| {
            matches!(
                body,
                Body::Event {
                    report: Report::Log { .. },
                    ..
                }
            )
        };
        let Some(at) = self.entries.iter().position(is_log) else {
            return;
        };
        let earlier = match self.entries.get(at) {
            Some(Body::Event { left_out, .. }) => *left_out,
            _ => 0,
        };
        self.entries.remove(at);
        if at < self.sent {
            self.sent -= 1;
        }
        let Some(Body::Event { report, left_out, .. }) = self.entries.iter_mut().find(|body| is_log(body)) else {
            return;
        };
        // The line that makes room and, the first time, the line that it turns into.
        *left_out = if earlier == 0 { 2 } else { earlier + 1 };
        let message = format!("({left_out} log lines were left out here)");
        *report = Report::Log {
            level: "warn".to_owned(),
            message,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aitk_common::control::Progress;
    use proptest::prelude::*;

    fn held() -> HeldAttempt {
        HeldAttempt {
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

    fn drain(outbox: &mut Outbox) -> Vec<ToCoordinator> {
        std::iter::from_fn(|| outbox.next()).collect()
    }

    #[test]
    fn floods_are_bounded_and_say_what_is_missing() {
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
        let sent = drain(&mut outbox);
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
    fn what_is_unknown_is_ignored() {
        let mut outbox = Outbox::default();
        outbox.report(&held().attempt, UnixMillis(0), progress(1));
        assert_eq!(
            outbox.request(&held().attempt, Request::ArtifactRemoved("x".into())),
            None
        );
        outbox.arrived(&held().attempt, 7);
        assert_eq!(outbox.answered(7), None);
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
        Beat,
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
            1 => Just(Step::Beat),
            1 => Just(Step::Break),
        ]
    }

    /// The far side, as the protocol describes it.
    #[derive(Default)]
    struct Coordinator {
        seen: u64,
        logs: Vec<String>,
        progress: u64,
        removed: Vec<String>,
    }

    impl Coordinator {
        fn take(&mut self, message: ToCoordinator, outbox: &mut Outbox) {
            match message {
                ToCoordinator::Event { seq, report, .. } if seq > self.seen => {
                    self.seen = seq;
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
                    outbox.answered(request);
                }
                _ => {}
            }
        }
    }

    proptest! {
        #[test]
        fn whatever_breaks_all_arrives_once_and_in_order(steps in prop::collection::vec(step(), 0..300)) {
            let (mut outbox, mut far, mut wire) = (Outbox::default(), Coordinator::default(), VecDeque::new());
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
                        if let Some(message) = wire.pop_front() { far.take(message, &mut outbox); }
                    },
                    Step::Beat => outbox.arrived(&id, far.seen),
                    Step::Break => { wire.clear(); outbox.resend(); }
                }
            }
            wire.clear();
            outbox.resend();
            for message in drain(&mut outbox) { far.take(message, &mut outbox); }
            outbox.arrived(&id, far.seen);
            outbox.resend();
            prop_assert!(!outbox.has_unsent());
            prop_assert_eq!(far.logs, logs);
            prop_assert_eq!(far.progress, done);
            prop_assert_eq!(far.removed, requests);
        }
    }
}
