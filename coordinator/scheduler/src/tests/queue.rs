//! Tests of submission, look-up, reasons and event logs.

use super::super::model::Job;
use super::super::{Dependency, DependencyCondition};
use super::*;
use aitk_common::control_plane::EventBody;

#[test]
fn a_stopped_job_can_be_resumed() {
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
    world.heartbeat(one, &[held("ja", 1)]);
    assert_eq!(world.stop("ja", false).unwrap().state, JobState::Stopping);
    assert!(world.sent(|message| matches!(message, ToWorker::Stop { save: true, .. })));
    assert!(matches!(world.resume("ja"), Err(Refusal::Conflict(_))));
    // The connection breaks: the worker is asked again when it is back.
    world.step(Event::SessionClosed { session: one });
    let two = world.worker("w1", vec![device(DeviceKind::Cpu, 0)], vec![held("ja", 1)]);
    assert!(world.sent(|message| matches!(message, ToWorker::Stop { save: true, .. })));
    assert_eq!(world.stop("ja", true).unwrap().state, JobState::Stopping);
    assert!(
        world.sent(|message| matches!(message, ToWorker::Stop { save: false, .. })),
        "impatient now"
    );
    world.commit(two, &held("ja", 1), 12);
    world.finish(two, &held("ja", 1), Outcome::stopped());
    assert_eq!(world.view("ja").state, JobState::Stopped);
    world.resume("ja").unwrap();
    assert_eq!(world.assigned(), [(two, held("ja", 2))]);
    // A stopping job whose machine dies is stopped, not retried.
    world.stop("ja", false).unwrap();
    world.pass(7);
    assert_eq!(world.view("ja").state, JobState::Stopped);
    assert!(matches!(world.stop("nope", false), Err(Refusal::NotFound(_))));
}

#[test]
fn priority_first_then_first_in_first_out() {
    let mut world = World::new();
    for (id, priority) in [("ja", 0), ("jb", 5), ("jc", 5), ("jd", -1)] {
        world.submit(id, Requirements { priority, ..retries(3) });
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
fn a_reason_says_why_no_device_fits() {
    let mut world = World::new();
    world.submit(
        "jcuda",
        Requirements {
            device: Some(DeviceKind::Cuda),
            ..retries(3)
        },
    );
    world.submit(
        "jlabel",
        Requirements {
            labels: BTreeMap::from([("zone".into(), "b".into())]),
            ..retries(3)
        },
    );
    world.submit(
        "jmem",
        Requirements {
            memory: Some(40 << 30),
            ..retries(3)
        },
    );
    world.submit(
        "jprof",
        Requirements {
            profile: Some(MemoryProfile::FullGpu),
            ..retries(3)
        },
    );
    world.submit("jany", retries(3));
    let session = world.cpu("w1");
    assert_eq!(
        world.assigned(),
        [(session, held("jany", 1))],
        "a job that fits nowhere does not delay the others"
    );
    for (job, text) in [
        ("jcuda", "no connected device is of kind cuda"),
        ("jlabel", "not found: zone: b"),
        (
            "jmem",
            "asks for 40.0 GiB of device memory; the largest device that fits otherwise has 20.0 GiB",
        ),
        (
            "jprof",
            "asks for the profile full_gpu, and no connected device is a GPU",
        ),
    ] {
        assert!(
            world.view(job).reason.contains(text),
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
    // With a GPU in the cluster, a job without a device preference waits for it instead of running for days on a CPU.
    world.submit("jslow", retries(3));
    assert_eq!(world.view("jslow").state, JobState::Queued);
    world.submit(
        "jcpu",
        Requirements {
            device: Some(DeviceKind::Cpu),
            ..retries(3)
        },
    );
    assert_eq!(world.view("jcpu").state, JobState::Running);
}

#[test]
fn jobs_in_place_run_only_on_the_coordinators_machine() {
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
fn events_are_numbered_and_progress_does_not_advance_the_cursor() {
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
    world.heartbeat(session, &[held("ja", 1)]);
    assert!(world.sent(|m| matches!(m, ToWorker::HeartbeatReply { events } if events[0].1 == 4)));
}

#[test]
fn an_artifact_without_a_hash_is_refused() {
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
fn a_repeated_submission_with_the_same_key_gives_the_same_job() {
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
fn a_unique_id_prefix_names_a_job() {
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

impl World {
    fn reply_of_submission(&self) -> Result<(), Refusal> {
        let reply = self.last.iter().find_map(|effect| match effect {
            Effect::Reply(_, reply) => Some(reply.clone()),
            _ => None,
        });
        reply.expect("no reply").map(drop)
    }

    fn named(&mut self, id: &str, name: &str, requirements: Requirements) {
        let mut job = new_job(id, requirements);
        name.clone_into(&mut job.name);
        self.step(Event::JobSubmitted {
            ticket: Ticket(1),
            job: Box::new(job),
        });
    }
}

#[test]
fn a_name_that_two_active_jobs_share_is_refused() {
    let mut world = World::new();
    world.named("j1", "ada", retries(3));
    world.named("j2", "ada", retries(3));
    world.named("j3", "bob", retries(3));
    let refused = world.stop("ada", false).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "2 jobs that have not ended are called \"ada\"; give the id: j1, j2"
    );
    for id in ["j1", "j2"] {
        assert_eq!(world.view(id).state, JobState::Queued);
    }
    // If one of them has ended, the name means the other; if both have, the newest.
    world.stop("j2", false).unwrap();
    assert_eq!(world.stop("ada", false).unwrap().id.as_str(), "j1");
    assert_eq!(world.state.find("ada").unwrap().as_str(), "j2");
    assert_eq!(world.state.find("bob").unwrap().as_str(), "j3");
    // Jobs of other users with that name do not matter, and an id takes precedence over a name.
    world.named("j4", "j3", retries(3));
    assert_eq!(world.state.find("j3").unwrap().as_str(), "j3");
    world.named("j5", "bob", retries(3));
    let not_j5 = |job: &Job| job.id.as_str() != "j5";
    assert_eq!(world.state.find_among("bob", not_j5).unwrap().as_str(), "j3");
    assert!(matches!(
        world.state.find("bob"),
        Err(Refusal::DuplicateName { count: 2, .. })
    ));
    assert!(matches!(world.state.find("j"), Err(Refusal::Ambiguous { .. })));
    assert!(matches!(world.state.find("no such job"), Err(Refusal::NotFound(_))));
}

#[test]
fn a_running_job_is_not_busy_with_itself() {
    let mut world = World::new();
    world.submit("ja", retries(3));
    let session = world.cpu("w1");
    world.heartbeat(session, &[held("ja", 1)]);
    world.pass(1);
    world.heartbeat(session, &[held("ja", 1)]);
    let forecast = world.state.explain_job(world.now, &JobId::new("ja")).unwrap();
    assert_eq!(forecast.summary, "running for 1 s on w1 cpu");
    assert_eq!(forecast.devices.len(), 1);
    let text = &forecast.devices[0].description;
    assert!(text.ends_with("; runs here") && !text.contains("busy"), "{text}");
}

#[test]
fn a_paused_job_has_its_own_status() {
    let mut world = World::new();
    world.submit("ja", retries(3));
    let session = world.cpu("w1");
    world.heartbeat(session, &[held("ja", 1)]);
    assert_eq!(world.view("ja").status(), "running");
    world.step(Event::PauseRequested {
        ticket: Ticket(4),
        job: "ja".into(),
    });
    let statuses = |world: &World| {
        world.last.iter().rev().find_map(|effect| match effect {
            Effect::Publish(_, event) => match &event.body {
                EventBody::State { state, paused, .. } => Some(state.status(*paused)),
                _ => None,
            },
            _ => None,
        })
    };
    assert_eq!(
        (world.view("ja").status(), statuses(&world)),
        ("pausing", Some("pausing"))
    );
    world.finish(session, &held("ja", 1), Outcome::stopped());
    assert_eq!(
        (world.view("ja").status(), statuses(&world)),
        ("paused", Some("paused"))
    );
    assert_eq!(world.view("ja").state, JobState::Queued);
    world.resume("ja").unwrap();
    assert_ne!(world.view("ja").status(), "paused");
}

#[test]
fn a_job_can_start_after_another_ends_or_fails() {
    let after = |world: &mut World, id: &str, before: &str, condition| {
        let job = NewJob {
            after: vec![Dependency {
                job: before.to_owned(),
                condition,
            }],
            ..new_job(id, retries(0))
        };
        world.step(Event::JobSubmitted {
            ticket: Ticket(1),
            job: Box::new(job),
        });
    };
    for outcome in [Outcome::Completed, failed(FailureCause::BadInput), Outcome::stopped()] {
        let mut world = World::new();
        let session = world.cpu("w1");
        world.submit("ja", retries(0));
        world.heartbeat(session, &[held("ja", 1)]);
        after(&mut world, "jany", "ja", DependencyCondition::Ended);
        after(&mut world, "jfailed", "ja", DependencyCondition::Failed);
        after(&mut world, "jdone", "ja", DependencyCondition::Completed);
        assert!(world.view("jany").reason.contains("waits for ja (ja) to end"));
        assert!(world.view("jfailed").reason.contains("waits for ja (ja) to fail"));
        if matches!(outcome, Outcome::Stopped { .. }) {
            world.stop("ja", false).unwrap();
        }
        world.finish(session, &held("ja", 1), outcome.clone());
        // There is one device: the first job that may start gets it, and the others wait in the queue.
        let may_start = |world: &World, id: &str| {
            let view = world.view(id);
            view.state == JobState::Running || view.reason.contains("in line")
        };
        assert!(may_start(&world, "jany"), "{outcome:?}");
        assert_eq!(
            may_start(&world, "jfailed"),
            matches!(outcome, Outcome::Failed { .. }),
            "{outcome:?}"
        );
        assert_eq!(may_start(&world, "jdone"), outcome == Outcome::Completed, "{outcome:?}");
        if outcome == Outcome::Completed {
            let view = world.view("jfailed");
            assert_eq!(
                (view.state, view.reason.starts_with("not needed")),
                (JobState::Stopped, true)
            );
            assert!(matches!(world.resume("jfailed"), Err(Refusal::Conflict(_))));
            after(&mut world, "jlate", "ja", DependencyCondition::Failed);
            let refused = world.reply_of_submission().unwrap_err().to_string();
            assert!(refused.contains("will not fail"), "{refused}");
        }
    }
}
