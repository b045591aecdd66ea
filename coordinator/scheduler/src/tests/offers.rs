//! Tests of checkpoints that a worker saved while it was refused or disconnected.

use super::*;
use aitk_common::control_plane::OfferedCheckpoint;

fn offer(job: &str, epoch: u64, step: u64) -> OfferedCheckpoint {
    OfferedCheckpoint {
        held: held(job, epoch),
        step,
        bytes: 100 << 20,
    }
}

/// Registers a worker with offers. Returns its session and the wanted attempts.
fn register_with_offers(world: &mut World, name: &str, offers: Vec<OfferedCheckpoint>) -> (SessionId, Vec<AttemptId>) {
    world.sessions += 1;
    let session = SessionId(world.sessions);
    let registration = Registration {
        offers,
        ..registration(name, vec![device(DeviceKind::Cpu, 0)], Vec::new())
    };
    world.step(Event::WorkerRegistered {
        session,
        fresh_id: WorkerId::new("fresh"),
        same_machine: true,
        registration: Box::new(registration),
    });
    let wanted = world.last.iter().find_map(|effect| match effect {
        Effect::Send(_, ToWorker::Welcome { wanted, .. }) => Some(wanted.clone()),
        _ => None,
    });
    (session, wanted.expect("no welcome"))
}

/// A job with a checkpoint at step 3 whose worker was lost.
fn with_lost_worker() -> World {
    let mut world = World::new();
    world.submit("ja", retries(3));
    let session = world.cpu("w1");
    world.heartbeat(session, &[held("ja", 1)]);
    world.commit(session, &held("ja", 1), 3);
    world.step(Event::SessionClosed { session });
    world.pass(4);
    assert_eq!(world.view("ja").attempts[0].state, AttemptState::Lost);
    world
}

#[test]
fn a_job_waits_for_an_offered_checkpoint_and_resumes_from_it() {
    let mut world = with_lost_worker();
    let (session, wanted) = register_with_offers(&mut world, "w1", vec![offer("ja", 1, 9)]);
    assert_eq!(wanted, [AttemptId::new("ja-1")]);
    assert!(world.assigned().is_empty(), "not from step 3");
    assert_eq!(
        world.view("ja").reason,
        "waits up to 160 s for its checkpoint of step 9, which w1 saved and now sends"
    );
    assert!(
        world.state.is_current(session, &held("ja", 1)),
        "the storage is open for it"
    );
    assert_eq!(world.state.running_on(&[WorkerId::new("w1")]).len(), 1);
    assert_eq!(world.commit(session, &held("ja", 1), 9), Verdict::Accepted);
    assert_eq!(world.assigned(), [(session, held("ja", 2))]);
    assert_eq!(world.view("ja").checkpoint_step, Some(9));
    // Committed again, it is stale.
    assert_eq!(world.commit(session, &held("ja", 1), 10), Verdict::Fenced);
}

#[test]
fn files_of_an_offered_checkpoint_are_accepted() {
    let mut world = with_lost_worker();
    let (session, _) = register_with_offers(&mut world, "w1", vec![offer("ja", 1, 9)]);
    let file = |name: &str| Artifact {
        name: name.into(),
        kind: "lora".into(),
        hash: Some(manifest(name)),
        bytes: 1,
        step: Some(8),
        index: None,
        local_path: None,
    };
    let ready = |held: AttemptRef| Event::ArtifactReady {
        session,
        request: 5,
        held,
        artifact: file("a.safetensors"),
    };
    let verdict = |effects: &[Effect]| {
        effects.iter().find_map(|effect| match effect {
            Effect::Send(
                _,
                ToWorker::Answer {
                    request: 5, verdict, ..
                },
            ) => Some(*verdict),
            _ => None,
        })
    };
    let stored = |effects: &[Effect]| {
        let changes = |effect: &&Effect| {
            matches!(
                effect,
                Effect::Persist(Record::Artifact(..) | Record::ArtifactRemoved(..))
            )
        };
        effects.iter().filter(changes).count()
    };
    let effects = world.step(ready(held("ja", 1))).to_vec();
    assert_eq!((verdict(&effects), stored(&effects)), (Some(Verdict::Accepted), 1));
    let removed = Event::ArtifactRemoved {
        session,
        request: 5,
        held: held("ja", 1),
        name: "old.safetensors".into(),
    };
    let effects = world.step(removed).to_vec();
    assert_eq!((verdict(&effects), stored(&effects)), (Some(Verdict::Accepted), 1));
    assert_eq!(world.commit(session, &held("ja", 1), 9), Verdict::Accepted);
    // From here on the next attempt holds the lease.
    let effects = world.step(ready(held("ja", 1))).to_vec();
    assert_eq!((verdict(&effects), stored(&effects)), (Some(Verdict::Fenced), 0));
}

#[test]
fn a_job_stops_waiting_for_an_offered_checkpoint_after_a_while() {
    let mut world = with_lost_worker();
    let (session, _) = register_with_offers(&mut world, "w1", vec![offer("ja", 1, 9)]);
    for _ in 0..160 {
        world.pass(1);
        world.heartbeat(session, &[]);
    }
    assert_eq!(world.view("ja").state, JobState::Running);
    assert_eq!(world.commit(session, &held("ja", 1), 9), Verdict::Fenced);
    assert_eq!(world.view("ja").checkpoint_step, Some(3));
}

#[test]
fn superseded_checkpoints_are_not_wanted() {
    // Not newer than the committed one; of an unknown job; of another epoch; of another worker.
    let mut world = with_lost_worker();
    let offers = vec![
        offer("ja", 1, 3),
        offer("jb", 1, 9),
        OfferedCheckpoint {
            held: AttemptRef {
                attempt: AttemptId::new("ja-1"),
                epoch: Epoch(2),
            },
            step: 9,
            bytes: 0,
        },
    ];
    let (session, wanted) = register_with_offers(&mut world, "w1", offers);
    assert_eq!(wanted, []);
    // It waits no longer than after any other lost attempt.
    world.pass(1);
    assert_eq!(world.assigned(), [(session, held("ja", 2))]);
    let (_, wanted) = register_with_offers(&mut with_lost_worker(), "w2", vec![offer("ja", 1, 9)]);
    assert_eq!(wanted, []);
    // Another attempt has started on another worker.
    let mut world = with_lost_worker();
    world.cpu("w2");
    world.pass(2);
    let (session, wanted) = register_with_offers(&mut world, "w1", vec![offer("ja", 1, 9)]);
    assert_eq!(wanted, []);
    assert_eq!(world.commit(session, &held("ja", 1), 9), Verdict::Fenced);
}

#[test]
fn a_restarted_worker_uploads_its_checkpoint_even_for_a_stopped_job() {
    let mut world = World::new();
    world.submit("ja", retries(3));
    let session = world.cpu("w1");
    world.heartbeat(session, &[held("ja", 1)]);
    // The attempt is still live when the worker returns.
    let (session, wanted) = register_with_offers(&mut world, "w1", vec![offer("ja", 1, 9)]);
    assert_eq!(wanted, [AttemptId::new("ja-1")]);
    assert!(world.assigned().is_empty());
    world.stop("ja", false).unwrap();
    assert_eq!(world.commit(session, &held("ja", 1), 9), Verdict::Accepted);
    let view = world.view("ja");
    assert_eq!((view.state, view.checkpoint_step), (JobState::Stopped, Some(9)));
    assert!(world.assigned().is_empty());
}

/// Before, a job that was resumed meanwhile started at once from the older checkpoint, or said that it waits and did not.
#[test]
fn a_resumed_job_waits_for_a_checkpoint_that_is_on_its_way() {
    for paused in [false, true] {
        let mut world = with_lost_worker();
        if paused {
            let (ticket, job) = (Ticket(5), "ja".to_owned());
            world.step(Event::PauseRequested { ticket, job });
        } else {
            world.stop("ja", false).unwrap();
        }
        let (session, wanted) = register_with_offers(&mut world, "w1", vec![offer("ja", 1, 9)]);
        assert_eq!(wanted, [AttemptId::new("ja-1")]);
        world.resume("ja").unwrap();
        assert!(world.assigned().is_empty(), "not from step 3");
        assert_eq!(world.commit(session, &held("ja", 1), 9), Verdict::Accepted);
        assert_eq!(world.assigned(), [(session, held("ja", 2))]);
    }
}
