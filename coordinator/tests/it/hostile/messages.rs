//! A malicious worker with a valid token: every kind of message, in any order, with invalid content.

use super::{Random, TestServer};
use crate::support::{FakeWorker, input, job_json, submission, within};
use aitk_common::control_plane::{EventBody, JobEvent, UnixMillis};
use aitk_common::hash::ContentHash;
use aitk_proto::client::Clients;
use aitk_proto::v1;
use aitk_proto::v1::worker_message::Message;
use aitk_tests::long_tests::skips_long_tests;
use std::time::{Duration, SystemTime};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

const SESSIONS: usize = 250;
const MESSAGES: u64 = 60;
const GROWTH: u64 = 96 << 20;

const NUMBERS: [u64; 8] = [0, 1, 2, 7, 1 << 32, (1 << 63) - 1, 1 << 63, u64::MAX];
const FLOATS: [f64; 8] = [
    0.0,
    -1.0,
    1e-300,
    1e308,
    f64::NAN,
    f64::INFINITY,
    f64::NEG_INFINITY,
    0.5,
];

/// An attempt that the worker was assigned, or claims to run.
#[derive(Clone, Debug, Default)]
struct Claim {
    attempt: String,
    epoch: u64,
}

struct MaliciousWorker {
    random: Random,
    assigned: Vec<Claim>,
    hashes: Vec<String>,
    /// How many attempts it was assigned.
    assignments: usize,
}

impl MaliciousWorker {
    /// A valid text, or one that the coordinator must refuse or escape.
    fn text(&mut self) -> String {
        match self.random.below(12) {
            0 => String::new(),
            1 => "x".repeat(1 << self.random.below(18)),
            2 => "../../../etc/passwd".into(),
            3 => "a\0b\u{1b}[31m\u{202e}".into(),
            4 => "ü\u{1F600}".repeat(40),
            _ => format!("t{}", self.random.below(20)),
        }
    }

    fn number(&mut self) -> u64 {
        if self.random.below(3) == 0 {
            self.random.below(100)
        } else {
            self.random.pick(&NUMBERS)
        }
    }

    fn float(&mut self) -> f64 {
        self.random.pick(&FLOATS)
    }

    fn claim(&mut self) -> Claim {
        let mut known = self.assigned.clone();
        if known.is_empty() {
            known.push(Claim {
                attempt: "jnobody-1".into(),
                epoch: 1,
            });
        }
        let mut claim = if self.random.below(30) == 0 {
            Claim {
                attempt: self.text(),
                epoch: self.number(),
            }
        } else {
            self.random.pick(&known)
        };
        if self.random.below(6) == 0 {
            claim.epoch = self.number();
        }
        claim
    }

    fn hash(&mut self) -> String {
        let known = self.hashes.clone();
        match self.random.below(8) {
            0 => self.text(),
            1 => ContentHash::of(&self.random.next().to_be_bytes()).to_hex(),
            _ => self.random.pick(&known),
        }
    }

    fn report(&mut self) -> Option<v1::attempt_event::Report> {
        use v1::attempt_event::Report;
        Some(match self.random.below(5) {
            0 => Report::Phase(v1::Phase { name: self.text() }),
            1 => Report::Log(v1::LogLine {
                level: "info".into(),
                message: self.text(),
                repository: self.text(),
                commit: "0a".repeat(20),
            }),
            2 => Report::Metrics(v1::Metrics {
                step: self.number(),
                values: (0..self.random.below(5)).map(|_| (self.text(), self.float())).collect(),
            }),
            3 if self.random.below(10) == 0 => return None,
            _ => Report::Progress(v1::Progress {
                done: self.number(),
                total: self.number(),
                seconds_per_step: Some(self.float()),
            }),
        })
    }

    fn artifact(&mut self) -> v1::Artifact {
        v1::Artifact {
            name: self.text(),
            kind: "lora".into(),
            sha256: self.hash(),
            bytes: self.number(),
            step: Some(self.number()),
            index: Some(self.number()),
            local_path: String::new(),
        }
    }

    fn outcome(&mut self) -> Option<v1::Outcome> {
        use v1::outcome::{Completed, Failed, Outcome, Stopped};
        let outcome = match self.random.below(4) {
            0 => Outcome::Completed(Completed {}),
            1 => Outcome::Stopped(Stopped::default()),
            _ => Outcome::Failed(Failed {
                cause: self.random.below(14) as i32,
                message: self.text(),
            }),
        };
        Some(v1::Outcome { outcome: Some(outcome) })
    }

    fn message(&mut self) -> v1::WorkerMessage {
        let Claim { attempt, epoch } = self.claim();
        let attempt_id = attempt;
        let message = match self.random.below(40) {
            0 => None,
            1 => Some(Message::Register(
                FakeWorker::registration("again", None, Vec::new()).into(),
            )),
            2 => Some(Message::GoingAway(v1::WorkerGoingAway { reason: self.text() })),
            3..=8 => {
                let mut running: Vec<_> = (0..self.random.below(5))
                    .map(|_| self.claim())
                    .map(|claim| v1::HeldAttempt {
                        attempt_id: claim.attempt,
                        epoch: claim.epoch,
                    })
                    .collect();
                if self.random.below(40) == 0 {
                    running = vec![v1::HeldAttempt { attempt_id, epoch }; 5000];
                }
                Some(Message::Beat(v1::Beat { running }))
            }
            9..=12 => Some(Message::Finished(v1::Finished {
                attempt_id,
                epoch,
                outcome: self.outcome(),
            })),
            13..=16 => Some(Message::Commit(v1::CommitCheckpoint {
                attempt_id,
                epoch,
                manifest_sha256: self.hash(),
                step: self.number(),
            })),
            17..=20 => Some(Message::ArtifactReady(v1::ArtifactReady {
                attempt_id,
                epoch,
                artifact: Some(self.artifact()),
            })),
            21..=22 => Some(Message::ArtifactRemoved(v1::ArtifactRemoved {
                attempt_id,
                epoch,
                name: self.text(),
            })),
            _ => Some(Message::Event(v1::AttemptEvent {
                attempt_id,
                epoch,
                seq: if self.random.below(3) == 0 {
                    self.number()
                } else {
                    self.random.below(1000)
                },
                time_ms: self.number(),
                report: self.report(),
            })),
        };
        v1::WorkerMessage {
            // Few values, so that request ids repeat.
            request_id: self.random.below(4),
            message,
        }
    }
}

async fn submit(clients: &Clients, name: &str) -> String {
    let request = v1::SubmitRequest {
        job_json: job_json(name, r#""retries":1000"#),
        ..v1::SubmitRequest::from(submission(name))
    };
    let reply = within(clients.jobs.clone().submit(request)).await.unwrap();
    reply.into_inner().job_id
}

/// Runs one session until the coordinator closes it or all messages are sent.
async fn run_session(clients: &Clients, worker: &mut MaliciousWorker, worker_id: &mut String) {
    let (sender, receiver) = mpsc::channel(64);
    let mut register = v1::Register::from(FakeWorker::registration("malicious", None, Vec::new()));
    register.worker_id.clone_from(worker_id);
    register.running = (0..worker.random.below(3))
        .map(|_| worker.claim())
        .filter(|claim| claim.attempt.starts_with('j'))
        .map(|claim| v1::HeldAttempt {
            attempt_id: claim.attempt,
            epoch: claim.epoch,
        })
        .collect();
    let first = v1::WorkerMessage {
        request_id: 0,
        message: Some(Message::Register(register)),
    };
    sender.send(first).await.unwrap();
    let Ok(answer) = within(clients.workers.clone().session(ReceiverStream::new(receiver))).await else {
        return;
    };
    let mut answers = answer.into_inner();
    let mut messages_left = MESSAGES;
    // It first waits a little for an assignment, so that later messages can refer to it.
    let mut wait = Duration::from_millis(300);
    while messages_left > 0 {
        match tokio::time::timeout(wait, answers.message()).await {
            Ok(Ok(Some(v1::CoordinatorMessage { message: Some(message) }))) => {
                if let v1::coordinator_message::Message::Welcome(welcome) = message {
                    *worker_id = welcome.worker_id;
                } else if let v1::coordinator_message::Message::Assign(work) = message {
                    worker.assigned.push(Claim {
                        attempt: work.attempt_id,
                        epoch: work.epoch,
                    });
                    // It keeps sending messages for attempts that have ended.
                    if worker.assigned.len() > 6 {
                        worker.assigned.remove(0);
                    }
                    worker.assignments += 1;
                    wait = Duration::from_millis(2);
                }
                continue;
            }
            Ok(_) => return,
            Err(_) => wait = Duration::from_millis(2),
        }
        if sender.send(worker.message()).await.is_err() {
            return;
        }
        messages_left -= 1;
    }
    // Then it closes its side, and waits a moment for the coordinator to close the other one.
    drop(sender);
    let _ = tokio::time::timeout(Duration::from_secs(1), async {
        while let Ok(Some(_)) = answers.message().await {}
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_malicious_worker_affects_only_its_own_attempts() {
    let server = TestServer::start().await;
    let clients = server.daemon.clients().await;
    let own = ContentHash::of(b"own");
    within(aitk_common::storage::BlobStore::put_bytes(
        &aitk_proto::remote_blobs::RemoteBlobs::new(&clients),
        own,
        b"own".to_vec().into(),
    ))
    .await
    .unwrap();
    let manifest = crate::support::put_checkpoint(&aitk_proto::remote_blobs::RemoteBlobs::new(&clients), 3).await;
    let mut worker = MaliciousWorker {
        random: Random(11),
        assigned: Vec::new(),
        hashes: [own, manifest, input().id()].map(|hash| hash.to_hex()).to_vec(),
        assignments: 0,
    };
    let mut worker_id = String::new();
    let mut jobs = Vec::new();
    let mut memory = None;
    let sessions = if skips_long_tests() { SESSIONS / 3 } else { SESSIONS };
    for number in 0..sessions {
        if number % 5 == 0 {
            jobs.push(submit(&clients, &format!("job{number}")).await);
        }
        if number == sessions / 5 {
            server.assert_works().await;
            memory = server.resident_memory();
        }
        let assignments = worker.assignments;
        within(run_session(&clients, &mut worker, &mut worker_id)).await;
        // A worker that reported a stuck device gets no work for an hour, so it registers as another worker.
        if worker.assignments == assignments {
            worker_id.clear();
        }
    }
    // Without assignments, little of this would have been tested.
    assert!(worker.assignments > 20, "{}", worker.assignments);
    server.assert_memory_growth(memory, GROWTH);
    server.assert_works().await;
    // The jobs' owners can read everything that it reported, and each line is bounded.
    for job in &jobs {
        let request = v1::EventsRequest {
            job_id: job.clone(),
            cursor: 0,
            follow: false,
        };
        let mut events = within(clients.jobs.clone().events(request)).await.unwrap().into_inner();
        while let Some(event) = within(events.message()).await.unwrap() {
            let event = JobEvent::try_from(event).unwrap();
            if let EventBody::Log { message, .. } = &event.body {
                assert!(message.len() < 9 << 10, "{}", message.len());
            }
        }
        super::view(&clients, job).await;
    }
    let list = v1::ListJobsRequest {
        all: true,
        ..Default::default()
    };
    within(clients.jobs.clone().list(list)).await.unwrap();
    within(clients.jobs.clone().list_workers(v1::ListWorkersRequest::default()))
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_clock_that_is_an_hour_off_has_no_effect() {
    let server = TestServer::start().await;
    let clients = server.daemon.clients().await;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let hour = Duration::from_secs(3600);
    let times = [now - hour, now + hour, Duration::ZERO, Duration::from_millis(u64::MAX)];
    let job = submit(&clients, "clocks").await;
    let mut worker = FakeWorker::register(&clients, FakeWorker::registration("w", None, Vec::new())).await;
    let work = worker.next_assignment().await;
    for (number, time) in times.iter().enumerate() {
        worker
            .send(aitk_common::control_plane::ToCoordinator::Event {
                held: crate::support::held_attempt(&work),
                seq: number as u64 + 1,
                time: UnixMillis(time.as_millis() as u64),
                report: aitk_common::control_plane::Report::Log {
                    level: "info".into(),
                    message: format!("line {number}"),
                },
            })
            .await;
    }
    let held = crate::support::held_attempt(&work);
    let verdict = worker.finish(&held, aitk_common::attempt::Outcome::Completed).await;
    assert_eq!(verdict, aitk_common::control_plane::Verdict::Accepted);
    let request = v1::EventsRequest {
        job_id: job.clone(),
        cursor: 0,
        follow: true,
    };
    let mut events = within(clients.jobs.clone().events(request)).await.unwrap().into_inner();
    let mut all: Vec<JobEvent> = Vec::new();
    while let Some(event) = within(events.message()).await.unwrap() {
        all.push(event.try_into().unwrap());
    }
    // Lines are in the order of arrival and have the coordinator's time, not the worker's.
    let lines = crate::support::logs(&all);
    assert_eq!(lines, ["line 0", "line 1", "line 2", "line 3"]);
    let (begin, end) = (now.as_millis() as u64, (now + hour).as_millis() as u64);
    for event in all.iter().filter(|event| matches!(event.body, EventBody::Log { .. })) {
        assert!((begin..end).contains(&event.time.0), "{event:?}");
    }
    assert_eq!(super::view(&clients, &job).await.attempts.len(), 1);
    server.assert_works().await;
}
