//! Checkpoints that a worker saved while it was refused or away.

use super::*;
use aitk_common::control::OfferedCheckpoint;

fn offer(job: &str, epoch: u64, step: u64) -> OfferedCheckpoint {
    OfferedCheckpoint {
        held: held(job, epoch),
        step,
        bytes: 100 << 20,
    }
}

/// Registers with offers; returns the session and what is wanted.
fn comes(world: &mut World, name: &str, offers: Vec<OfferedCheckpoint>) -> (SessionId, Vec<AttemptId>) {
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

/// A job at step 3 whose worker has gone, and was given up.
fn lost() -> World {
    let mut world = World::new();
    world.submit("ja", retries(3));
    let session = world.cpu("w1");
    world.beat(session, &[held("ja", 1)]);
    world.commit(session, &held("ja", 1), 3);
    world.step(Event::WorkerLost { session });
    world.pass(4);
    assert_eq!(world.view("ja").attempts[0].state, AttemptState::Lost);
    world
}

#[test]
fn a_job_waits_for_the_checkpoint_that_its_worker_saved_and_goes_on_from_there() {
    let mut world = lost();
    let (session, wanted) = comes(&mut world, "w1", vec![offer("ja", 1, 9)]);
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
    // Said again, it is stale.
    assert_eq!(world.commit(session, &held("ja", 1), 10), Verdict::Fenced);
}

#[test]
fn files_that_were_made_before_the_checkpoint_come_with_it() {
    let mut world = lost();
    let (session, _) = comes(&mut world, "w1", vec![offer("ja", 1, 9)]);
    let file = |name: &str| Artifact {
        name: name.into(),
        kind: "lora".into(),
        hash: Some(manifest(name)),
        bytes: 1,
        step: Some(8),
        index: None,
        local_path: None,
    };
    let ready = |held: HeldAttempt| Event::ArtifactReady {
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
        let changes =
            |effect: &&Effect| matches!(effect, Effect::Persist(Record::Artifact(..) | Record::ArtifactGone(..)));
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
    // From here on it is the next attempt's.
    let effects = world.step(ready(held("ja", 1))).to_vec();
    assert_eq!((verdict(&effects), stored(&effects)), (Some(Verdict::Fenced), 0));
}

#[test]
fn nobody_waits_for_ever_for_what_does_not_come() {
    let mut world = lost();
    let (session, _) = comes(&mut world, "w1", vec![offer("ja", 1, 9)]);
    for _ in 0..160 {
        world.pass(1);
        world.beat(session, &[]);
    }
    assert_eq!(world.view("ja").state, JobState::Running);
    assert_eq!(world.commit(session, &held("ja", 1), 9), Verdict::Fenced);
    assert_eq!(world.view("ja").checkpoint_step, Some(3));
}

#[test]
fn what_was_superseded_is_not_wanted() {
    // Nothing further than what was committed; of a job that is not known; of another epoch; of another worker.
    let mut world = lost();
    let offers = vec![
        offer("ja", 1, 3),
        offer("jb", 1, 9),
        OfferedCheckpoint {
            held: HeldAttempt {
                attempt: AttemptId::new("ja-1"),
                epoch: Epoch(2),
            },
            step: 9,
            bytes: 0,
        },
    ];
    let (session, wanted) = comes(&mut world, "w1", offers);
    assert_eq!(wanted, []);
    // It does not wait longer than after any loss.
    world.pass(1);
    assert_eq!(world.assigned(), [(session, held("ja", 2))]);
    let (_, wanted) = comes(&mut lost(), "w2", vec![offer("ja", 1, 9)]);
    assert_eq!(wanted, []);
    // Another attempt has begun elsewhere.
    let mut world = lost();
    world.cpu("w2");
    world.pass(2);
    let (session, wanted) = comes(&mut world, "w1", vec![offer("ja", 1, 9)]);
    assert_eq!(wanted, []);
    assert_eq!(world.commit(session, &held("ja", 1), 9), Verdict::Fenced);
}

#[test]
fn a_worker_that_restarted_with_a_checkpoint_brings_it_and_one_of_a_stopped_job_counts_as_well() {
    let mut world = World::new();
    world.submit("ja", retries(3));
    let session = world.cpu("w1");
    world.beat(session, &[held("ja", 1)]);
    // Still live when it comes back.
    let (session, wanted) = comes(&mut world, "w1", vec![offer("ja", 1, 9)]);
    assert_eq!(wanted, [AttemptId::new("ja-1")]);
    assert!(world.assigned().is_empty());
    world.stop("ja", false).unwrap();
    assert_eq!(world.commit(session, &held("ja", 1), 9), Verdict::Accepted);
    let view = world.view("ja");
    assert_eq!((view.state, view.checkpoint_step), (JobState::Stopped, Some(9)));
    assert!(world.assigned().is_empty());
}
