//! The core, step by step.

use super::model::job_of;
use super::{Effect, Event, NewJob, Payload, Record, Refusal, Reply, SessionId, Settings, State, Ticket, Wants, check};
use aitk_common::attempt::{FailureCause, Outcome};
use aitk_common::capability::{Device, DeviceKind, DeviceRef};
use aitk_common::control::{Artifact, AttemptState, HeldAttempt, JobState, JobView, Progress, Registration, Report};
use aitk_common::control::{ToWorker, UnixMillis, Verdict};
use aitk_common::hash::ContentHash;
use aitk_common::id::{AttemptId, Epoch, JobId, WorkerId};
use aitk_common::plan::profile::MemoryProfile;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

pub(super) fn settings() -> Settings {
    Settings {
        lease: Duration::from_millis(6000),
        beat_interval: Duration::from_millis(1000),
        disconnect_grace: Duration::from_millis(3000),
        backoff: Duration::from_millis(1000),
        backoff_limit: Duration::from_millis(8000),
    }
}

pub(super) fn device(kind: DeviceKind, index: u32) -> Device {
    let profile = if kind == DeviceKind::Cpu {
        MemoryProfile::CpuOnly
    } else {
        MemoryProfile::FullGpu
    };
    Device {
        device: DeviceRef { kind, index },
        name: kind.name().into(),
        architecture: "x".into(),
        memory_total: 24 << 30,
        memory_budget: 20 << 30,
        dtypes: vec!["f32".into()],
        attention: vec!["eager".into()],
        profile,
    }
}

pub(super) fn registration(worker: &str, devices: Vec<Device>, running: Vec<HeldAttempt>) -> Registration {
    Registration {
        protocol: 1,
        worker: Some(WorkerId::new(worker)),
        name: worker.into(),
        version: "0".into(),
        host: "h".into(),
        devices,
        labels: BTreeMap::new(),
        running,
    }
}

pub(super) fn new_job(id: &str, wants: Wants) -> NewJob {
    NewJob {
        id: JobId::new(id),
        seed: 7,
        name: id.into(),
        kind: "extension".into(),
        wants,
        local: false,
        idempotency_key: None,
        payload: Arc::new(Payload::default()),
    }
}

pub(super) fn manifest(text: &str) -> ContentHash {
    ContentHash::of(text.as_bytes())
}

/// A core with a clock that a test moves.
struct World {
    state: State,
    now: UnixMillis,
    last: Vec<Effect>,
    sessions: u64,
}

impl World {
    fn new() -> Self {
        Self {
            state: State::new(settings()),
            now: UnixMillis(1_000_000),
            last: Vec::new(),
            sessions: 0,
        }
    }

    fn step(&mut self, event: Event) -> &[Effect] {
        self.last = self.state.handle(self.now, event);
        check(&self.state).unwrap();
        &self.last
    }

    fn pass(&mut self, seconds: u64) {
        self.now = self.now.after(Duration::from_secs(seconds));
        self.step(Event::Tick);
    }

    fn submit(&mut self, id: &str, wants: Wants) {
        self.step(Event::JobSubmitted {
            ticket: Ticket(1),
            job: Box::new(new_job(id, wants)),
        });
    }

    fn worker(&mut self, name: &str, devices: Vec<Device>, running: Vec<HeldAttempt>) -> SessionId {
        self.sessions += 1;
        let session = SessionId(self.sessions);
        let registration = Box::new(registration(name, devices, running));
        self.step(Event::WorkerRegistered {
            session,
            fresh_id: WorkerId::new("fresh"),
            same_machine: true,
            registration,
        });
        session
    }

    fn cpu(&mut self, name: &str) -> SessionId {
        self.worker(name, vec![device(DeviceKind::Cpu, 0)], Vec::new())
    }

    fn beat(&mut self, session: SessionId, running: &[HeldAttempt]) {
        self.step(Event::WorkerBeat {
            session,
            running: running.to_vec(),
        });
    }

    fn commit(&mut self, session: SessionId, held: &HeldAttempt, step: u64) -> Verdict {
        let manifest = manifest(&step.to_string());
        self.step(Event::CommitCheckpoint {
            session,
            request: 5,
            held: held.clone(),
            manifest,
            step,
        });
        self.verdict()
    }

    fn finish(&mut self, session: SessionId, held: &HeldAttempt, outcome: Outcome) -> Verdict {
        self.step(Event::Finished {
            session,
            request: 5,
            held: held.clone(),
            outcome,
        });
        self.verdict()
    }

    fn stop(&mut self, job: &str, now: bool) -> Result<JobView, Refusal> {
        self.step(Event::StopRequested {
            ticket: Ticket(3),
            job: job.into(),
            now,
        });
        self.reply()
    }

    fn resume(&mut self, job: &str) -> Result<JobView, Refusal> {
        self.step(Event::ResumeRequested {
            ticket: Ticket(4),
            job: job.into(),
        });
        self.reply()
    }

    fn reply(&self) -> Result<JobView, Refusal> {
        let reply = self.last.iter().find_map(|effect| match effect {
            Effect::Reply(_, reply) => Some(reply.clone()),
            _ => None,
        });
        reply.expect("no reply").map(|reply| match reply {
            Reply::Job(view) => *view,
            Reply::Submitted(other) => panic!("{other:?}"),
        })
    }

    fn verdict(&self) -> Verdict {
        let verdict = self.last.iter().find_map(|effect| match effect {
            Effect::Send(
                _,
                ToWorker::Answer {
                    request: 5, verdict, ..
                },
            ) => Some(*verdict),
            _ => None,
        });
        verdict.expect("no answer")
    }

    fn assigned(&self) -> Vec<(SessionId, HeldAttempt)> {
        let assigned = self.last.iter().filter_map(|effect| match effect {
            Effect::Assign(session, placed) => Some((*session, placed.held.clone())),
            _ => None,
        });
        assigned.collect()
    }

    fn sent(&self, wanted: impl Fn(&ToWorker) -> bool) -> bool {
        self.last
            .iter()
            .any(|effect| matches!(effect, Effect::Send(_, message) if wanted(message)))
    }

    fn view(&self, job: &str) -> JobView {
        self.state.job_view(self.now, &JobId::new(job)).unwrap()
    }
}

fn held(job: &str, epoch: u64) -> HeldAttempt {
    HeldAttempt {
        attempt: AttemptId::new(format!("{job}-{epoch}")),
        epoch: Epoch(epoch),
    }
}

fn failed(cause: FailureCause) -> Outcome {
    Outcome::Failed {
        cause,
        message: "boom".into(),
    }
}

fn retries(retries: u32) -> Wants {
    Wants {
        retries,
        ..Wants::default()
    }
}

#[test]
fn a_job_runs_to_its_end() {
    let mut world = World::new();
    world.submit("ja", retries(3));
    assert!(
        world.view("ja").reason.contains("no worker"),
        "{}",
        world.view("ja").reason
    );
    let session = world.cpu("w1");
    assert_eq!(world.assigned(), [(session, held("ja", 1))]);
    // Welcome goes out before the work.
    let order: Vec<bool> = world
        .last
        .iter()
        .filter_map(|effect| match effect {
            Effect::Send(_, ToWorker::Welcome { .. }) => Some(true),
            Effect::Assign(..) => Some(false),
            _ => None,
        })
        .collect();
    assert_eq!(order, [true, false]);
    world.beat(session, &[held("ja", 1)]);
    assert_eq!(world.view("ja").attempts[0].state, AttemptState::Running);
    assert_eq!(world.commit(session, &held("ja", 1), 10), Verdict::Accepted);
    assert_eq!(
        world.commit(session, &held("ja", 1), 10),
        Verdict::Accepted,
        "again, after a lost answer"
    );
    assert_eq!(
        world.commit(session, &held("ja", 1), 9),
        Verdict::Refused,
        "no checkpoint regresses"
    );
    assert_eq!(
        world.finish(session, &held("ja", 1), Outcome::Completed),
        Verdict::Accepted
    );
    assert_eq!(
        world.finish(session, &held("ja", 1), Outcome::Completed),
        Verdict::Accepted,
        "again"
    );
    assert_eq!(
        world.finish(session, &held("ja", 1), Outcome::Stopped),
        Verdict::Fenced,
        "it said something else before"
    );
    assert_eq!(world.view("ja").state, JobState::Completed);
    assert!(matches!(world.resume("ja"), Err(Refusal::Conflict(_))));
    assert!(matches!(world.stop("ja", false), Err(Refusal::Conflict(_))));
}

#[test]
fn a_silent_worker_loses_its_attempt_and_is_fenced_when_it_comes_back() {
    let mut world = World::new();
    world.submit("ja", retries(3));
    let one = world.cpu("w1");
    world.beat(one, &[held("ja", 1)]);
    world.commit(one, &held("ja", 1), 10);
    world.pass(5);
    assert_eq!(world.view("ja").state, JobState::Running, "patience");
    let two = world.cpu("w2");
    world.pass(2);
    assert_eq!(world.view("ja").attempts[0].state, AttemptState::Lost);
    world.pass(1);
    assert_eq!(world.assigned(), [(two, held("ja", 2))], "elsewhere, one epoch on");
    let resume = world.last.iter().find_map(|effect| match effect {
        Effect::Assign(_, placed) => placed.resume,
        _ => None,
    });
    assert_eq!(resume, Some(manifest("10")));
    // The old worker was only asleep.
    assert_eq!(world.commit(one, &held("ja", 1), 20), Verdict::Fenced);
    assert_eq!(world.finish(one, &held("ja", 1), Outcome::Completed), Verdict::Fenced);
    world.beat(one, &[held("ja", 1)]);
    assert!(world.sent(|message| matches!(message, ToWorker::Fence { held: gone, .. } if *gone == held("ja", 1))));
    // A wrong epoch on the right attempt, the right attempt on a wrong worker: fenced as well.
    assert_eq!(
        world.commit(
            two,
            &HeldAttempt {
                epoch: Epoch(1),
                ..held("ja", 2)
            },
            20
        ),
        Verdict::Fenced
    );
    assert_eq!(world.commit(one, &held("ja", 2), 20), Verdict::Fenced);
    assert_eq!(world.view("ja").checkpoint_step, Some(10));
    assert_eq!(world.commit(two, &held("ja", 2), 20), Verdict::Accepted);
}

#[test]
fn a_closed_session_is_waited_for_and_reconciled() {
    let mut world = World::new();
    world.submit("ja", retries(3));
    world.submit("jb", retries(3));
    let devices = || vec![device(DeviceKind::Cuda, 0), device(DeviceKind::Cuda, 1)];
    let one = world.worker("w1", devices(), Vec::new());
    world.beat(one, &[held("ja", 1), held("jb", 1)]);
    world.step(Event::WorkerLost { session: one });
    world.pass(2);
    assert_eq!(world.view("ja").state, JobState::Running);
    assert!(
        world.view("ja").reason.contains("not connected"),
        "{}",
        world.view("ja").reason
    );
    // It comes back, and holds only one of the two, and one that never was.
    let two = world.worker("w1", devices(), vec![held("ja", 1), held("jz", 4)]);
    let keep = world.last.iter().find_map(|effect| match effect {
        Effect::Send(session, ToWorker::Welcome { keep, .. }) if *session == two => Some(keep.clone()),
        _ => None,
    });
    assert_eq!(keep, Some(vec![AttemptId::new("ja-1")]));
    assert_eq!(world.view("jb").attempts[0].state, AttemptState::Lost);
    assert_eq!(world.view("jb").failures, 1);
    world.pass(4);
    world.beat(two, &[held("ja", 1), held("jb", 2)]);
    assert_eq!(world.view("ja").attempts.len(), 1, "goes on where it was");
    // Gone for longer than the grace, but not for a lease.
    world.step(Event::WorkerLost { session: two });
    world.pass(4);
    assert_eq!(world.view("ja").attempts[0].state, AttemptState::Lost);
}

#[test]
fn an_assignment_that_never_arrived_is_nobodys_fault() {
    let mut world = World::new();
    world.submit("ja", retries(0));
    world.cpu("w1");
    let again = world.cpu("w1");
    let closed = world.last.iter().any(|effect| {
        matches!(
            effect,
            Effect::Close {
                session: SessionId(1),
                retry: false,
                ..
            }
        )
    });
    assert!(closed, "the older session ends");
    assert_eq!(world.view("ja").failures, 0);
    world.pass(2);
    assert_eq!(world.assigned(), [(again, held("ja", 2))]);
}

#[test]
fn retries_back_off_and_end() {
    let mut world = World::new();
    world.submit("ja", retries(2));
    let session = world.cpu("w1");
    let mut waits = Vec::new();
    for epoch in 1..=3 {
        world.beat(session, &[held("ja", epoch)]);
        world.finish(session, &held("ja", epoch), failed(FailureCause::Machine));
        if epoch == 1 {
            assert!(
                world
                    .view("ja")
                    .reason
                    .starts_with("try 2 of 3 in 1 s; before: the machine failed: boom")
            );
        }
        let mut wait = 0;
        while world.view("ja").state == JobState::Queued && wait < 60 {
            world.pass(1);
            wait += 1;
        }
        waits.push(wait);
    }
    assert_eq!(waits, [1, 2, 0]);
    assert_eq!(world.view("ja").state, JobState::Failed);
    assert!(
        world.view("ja").reason.contains("gave up after 3 tries"),
        "{}",
        world.view("ja").reason
    );
    // A person may know better; and progress makes earlier failures count no more.
    assert_eq!(world.resume("ja").unwrap().failures, 0);
    world.beat(session, &[held("ja", 4)]);
    world.finish(session, &held("ja", 4), failed(FailureCause::Storage));
    world.pass(10);
    world.commit(session, &held("ja", 5), 3);
    assert_eq!(world.view("ja").failures, 0);
}

#[test]
fn bad_input_and_our_faults_are_not_tried_again() {
    for cause in [FailureCause::BadInput, FailureCause::Internal] {
        let mut world = World::new();
        world.submit("ja", retries(3));
        let session = world.cpu("w1");
        world.finish(session, &held("ja", 1), failed(cause));
        assert_eq!(world.view("ja").state, JobState::Failed);
        assert_eq!(world.view("ja").reason, "boom");
    }
}

#[test]
fn stop_and_resume() {
    let mut world = World::new();
    world.submit("ja", retries(3));
    assert_eq!(
        world.stop("ja", false).unwrap().state,
        JobState::Stopped,
        "waiting: at once"
    );
    assert_eq!(
        world.stop("ja", false).unwrap().state,
        JobState::Stopped,
        "again: no harm"
    );
    assert_eq!(world.resume("ja").unwrap().state, JobState::Queued);
    assert!(matches!(world.resume("ja"), Err(Refusal::Conflict(_))));
    let one = world.cpu("w1");
    world.beat(one, &[held("ja", 1)]);
    assert_eq!(world.stop("ja", false).unwrap().state, JobState::Stopping);
    assert!(world.sent(|message| matches!(message, ToWorker::Stop { save: true, .. })));
    assert!(matches!(world.resume("ja"), Err(Refusal::Conflict(_))));
    // The connection breaks: told again when it is back.
    world.step(Event::WorkerLost { session: one });
    let two = world.worker("w1", vec![device(DeviceKind::Cpu, 0)], vec![held("ja", 1)]);
    assert!(world.sent(|message| matches!(message, ToWorker::Stop { save: true, .. })));
    assert_eq!(world.stop("ja", true).unwrap().state, JobState::Stopping);
    assert!(
        world.sent(|message| matches!(message, ToWorker::Stop { save: false, .. })),
        "impatient now"
    );
    world.commit(two, &held("ja", 1), 12);
    world.finish(two, &held("ja", 1), Outcome::Stopped);
    assert_eq!(world.view("ja").state, JobState::Stopped);
    world.resume("ja").unwrap();
    assert_eq!(world.assigned(), [(two, held("ja", 2))]);
    // Stopping, and the machine dies: stopped, not tried again.
    world.stop("ja", false).unwrap();
    world.pass(7);
    assert_eq!(world.view("ja").state, JobState::Stopped);
    assert!(matches!(world.stop("nope", false), Err(Refusal::NotFound(_))));
}

#[test]
fn a_leaving_worker_hands_its_work_on() {
    let mut world = World::new();
    world.submit("ja", retries(0));
    let one = world.cpu("w1");
    world.beat(one, &[held("ja", 1)]);
    let two = world.cpu("w2");
    world.step(Event::WorkerLeaving {
        session: one,
        reason: "shutdown".into(),
    });
    world.finish(one, &held("ja", 1), Outcome::Stopped);
    assert_eq!(world.assigned(), [(two, held("ja", 2))]);
    assert_eq!(world.view("ja").failures, 0);
}

#[test]
fn priority_first_then_first_in_first_out() {
    let mut world = World::new();
    for (id, priority) in [("ja", 0), ("jb", 5), ("jc", 5), ("jd", -1)] {
        world.submit(id, Wants { priority, ..retries(3) });
    }
    let session = world.cpu("w1");
    let mut order = Vec::new();
    for _ in 0..4 {
        let (_, held) = world.assigned().remove(0);
        order.push(job_of(&held.attempt).unwrap().to_string());
        world.finish(session, &held, Outcome::Completed);
    }
    assert_eq!(order, ["jb", "jc", "ja", "jd"]);
}

#[test]
fn placement_fits_and_says_why_not() {
    let mut world = World::new();
    world.submit(
        "jcuda",
        Wants {
            device: Some(DeviceKind::Cuda),
            ..retries(3)
        },
    );
    world.submit(
        "jlabel",
        Wants {
            labels: BTreeMap::from([("zone".into(), "b".into())]),
            ..retries(3)
        },
    );
    world.submit(
        "jmem",
        Wants {
            memory: Some(40 << 30),
            ..retries(3)
        },
    );
    world.submit(
        "jprof",
        Wants {
            profile: Some(MemoryProfile::Balanced),
            ..retries(3)
        },
    );
    world.submit("jany", retries(3));
    let session = world.cpu("w1");
    assert_eq!(
        world.assigned(),
        [(session, held("jany", 1))],
        "one that fits nothing holds up nobody"
    );
    for (job, words) in [
        ("jcuda", "no connected device is of kind cuda"),
        ("jlabel", "missing is zone: b"),
        (
            "jmem",
            "asks for 40.0 GiB of device memory; the most that fits otherwise has 20.0 GiB",
        ),
        (
            "jprof",
            "asks for the profile balanced, and no connected device is a GPU",
        ),
    ] {
        assert!(
            world.view(job).reason.contains(words),
            "{job}: {}",
            world.view(job).reason
        );
    }
    world.worker(
        "w2",
        vec![device(DeviceKind::Cuda, 0), device(DeviceKind::Cpu, 0)],
        Vec::new(),
    );
    let started: Vec<_> = world
        .assigned()
        .into_iter()
        .map(|(_, held)| held.attempt.to_string())
        .collect();
    assert_eq!(started, ["jcuda-1"]);
    assert!(world.view("jprof").reason.contains("next in line") || world.view("jprof").reason.contains("ahead"));
    // With a GPU in the pool, whoever asks for nothing waits for it rather than for days on a CPU.
    world.submit("jslow", retries(3));
    assert_eq!(world.view("jslow").state, JobState::Queued);
    world.submit(
        "jcpu",
        Wants {
            device: Some(DeviceKind::Cpu),
            ..retries(3)
        },
    );
    assert_eq!(world.view("jcpu").state, JobState::Running);
}

#[test]
fn jobs_in_place_stay_on_this_machine() {
    let mut world = World::new();
    let job = NewJob {
        local: true,
        ..new_job("ja", retries(3))
    };
    world.step(Event::JobSubmitted {
        ticket: Ticket(1),
        job: Box::new(job),
    });
    let registration = Box::new(registration("far", vec![device(DeviceKind::Cpu, 0)], Vec::new()));
    let (session, fresh_id) = (SessionId(77), WorkerId::new("f"));
    world.step(Event::WorkerRegistered {
        session,
        fresh_id,
        same_machine: false,
        registration,
    });
    assert!(world.assigned().is_empty());
    assert!(
        world.view("ja").reason.contains("no worker of this machine"),
        "{}",
        world.view("ja").reason
    );
    world.cpu("near");
    assert_eq!(world.assigned().len(), 1);
}

#[test]
fn events_are_numbered_once_and_progress_takes_no_number() {
    let mut world = World::new();
    world.submit("ja", retries(3));
    let session = world.cpu("w1");
    let mut report = |seq, report| {
        let event = Event::AttemptEvent {
            session,
            held: held("ja", 1),
            seq,
            time: UnixMillis(1),
            report,
        };
        let effects = world.step(event);
        let persisted = effects
            .iter()
            .filter(|e| matches!(e, Effect::Persist(Record::Event { .. })))
            .count();
        let cursors: Vec<u64> = effects
            .iter()
            .filter_map(|e| {
                if let Effect::Publish(_, event) = e {
                    Some(event.cursor)
                } else {
                    None
                }
            })
            .collect();
        (persisted, cursors)
    };
    let log = |text: &str| Report::Log {
        level: "info".into(),
        message: text.into(),
    };
    let (stored, first) = report(1, log("a"));
    assert_eq!((stored, first.len()), (1, 1));
    assert_eq!(report(1, log("a")), (0, Vec::new()), "the same number again");
    let progress = Report::Progress(Progress {
        done: 1,
        total: 2,
        seconds_per_step: None,
    });
    assert_eq!(report(2, progress), (0, first.clone()));
    assert_eq!(report(3, log("b")), (1, vec![first[0] + 1]));
    let (_, long) = report(4, log(&"é".repeat(9000)));
    assert_eq!(long.len(), 1);
    world.beat(session, &[held("ja", 1)]);
    assert!(world.sent(|m| matches!(m, ToWorker::BeatReply { events } if events[0].1 == 4)));
}

#[test]
fn artifacts_need_their_bytes_in_storage() {
    let mut world = World::new();
    world.submit("ja", retries(3));
    let session = world.cpu("w1");
    let mut artifact = Artifact {
        name: "a/b.safetensors".into(),
        kind: "lora".into(),
        hash: None,
        bytes: 3,
        step: None,
        index: None,
        local_path: Some("/x".into()),
    };
    let ready = |artifact: &Artifact| Event::ArtifactReady {
        session,
        request: 5,
        held: held("ja", 1),
        artifact: artifact.clone(),
    };
    world.step(ready(&artifact));
    assert_eq!(world.verdict(), Verdict::Refused);
    artifact.hash = Some(manifest("x"));
    world.step(ready(&artifact));
    assert_eq!(world.verdict(), Verdict::Accepted);
    assert!(
        world
            .last
            .iter()
            .any(|effect| matches!(effect, Effect::Persist(Record::Artifact(..))))
    );
}

#[test]
fn a_submission_with_a_key_is_one_job() {
    let mut world = World::new();
    let with_key = |id: &str| {
        let job = NewJob {
            idempotency_key: Some("k".into()),
            ..new_job(id, retries(3))
        };
        Event::JobSubmitted {
            ticket: Ticket(1),
            job: Box::new(job),
        }
    };
    world.step(with_key("ja"));
    let effects = world.step(with_key("jb"));
    let [Effect::Reply(_, Ok(Reply::Submitted(again)))] = effects else {
        panic!("{effects:?}")
    };
    assert_eq!((again.job.as_str(), again.existed), ("ja", true));
}

#[test]
fn a_unique_beginning_is_enough() {
    let mut world = World::new();
    for id in ["jabc1", "jabd2", "jx"] {
        world.submit(id, retries(3));
    }
    assert_eq!(world.state.find("jabc").unwrap().as_str(), "jabc1");
    assert_eq!(world.state.find("jx").unwrap().as_str(), "jx");
    let Err(Refusal::Ambiguous { matches, .. }) = world.state.find("jab") else {
        panic!()
    };
    assert_eq!(matches, ["jabc1", "jabd2"]);
    for bad in ["", "jz", "../x", "j abc"] {
        assert!(matches!(world.state.find(bad), Err(Refusal::NotFound(_))), "{bad}");
    }
}
