//! Tests of leases, fencing and retries.

use super::*;

#[test]
fn an_attempt_runs_commits_and_completes() {
    let mut world = World::new();
    world.submit("ja", retries(3));
    assert!(
        world.view("ja").reason.contains("no worker"),
        "{}",
        world.view("ja").reason
    );
    let session = world.cpu("w1");
    assert_eq!(world.assigned(), [(session, held("ja", 1))]);
    // The worker is welcomed before it gets work.
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
    world.heartbeat(session, &[held("ja", 1)]);
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
        world.finish(session, &held("ja", 1), Outcome::stopped()),
        Verdict::Fenced,
        "it said something else before"
    );
    assert_eq!(world.view("ja").state, JobState::Completed);
    assert!(matches!(world.resume("ja"), Err(Refusal::Conflict(_))));
    assert!(matches!(world.stop("ja", false), Err(Refusal::Conflict(_))));
}

#[test]
fn a_silent_worker_loses_its_lease_and_is_fenced_when_it_returns() {
    let mut world = World::new();
    world.submit("ja", retries(3));
    let one = world.cpu("w1");
    world.heartbeat(one, &[held("ja", 1)]);
    world.commit(one, &held("ja", 1), 10);
    world.pass(5);
    assert_eq!(
        world.view("ja").state,
        JobState::Running,
        "the lease has not expired yet"
    );
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
    // The old worker was only suspended.
    assert_eq!(world.commit(one, &held("ja", 1), 20), Verdict::Fenced);
    assert_eq!(world.finish(one, &held("ja", 1), Outcome::Completed), Verdict::Fenced);
    world.heartbeat(one, &[held("ja", 1)]);
    assert!(world.sent(|message| matches!(message, ToWorker::Fence { held: gone, .. } if *gone == held("ja", 1))));
    // The right attempt with a wrong epoch, or from another worker, is fenced as well.
    assert_eq!(
        world.commit(
            two,
            &AttemptRef {
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
fn attempts_of_a_closed_session_are_reconciled_when_the_worker_returns() {
    let mut world = World::new();
    world.submit("ja", retries(3));
    world.submit("jb", retries(3));
    let devices = || vec![device(DeviceKind::Cuda, 0), device(DeviceKind::Cuda, 1)];
    let one = world.worker("w1", devices(), Vec::new());
    world.heartbeat(one, &[held("ja", 1), held("jb", 1)]);
    world.step(Event::SessionClosed { session: one });
    world.pass(2);
    assert_eq!(world.view("ja").state, JobState::Running);
    assert!(
        world.view("ja").reason.contains("not connected"),
        "{}",
        world.view("ja").reason
    );
    // It returns with only one of its two attempts, and with one that never existed.
    let two = world.worker("w1", devices(), vec![held("ja", 1), held("jz", 4)]);
    let keep = world.last.iter().find_map(|effect| match effect {
        Effect::Send(session, ToWorker::Welcome { keep, .. }) if *session == two => Some(keep.clone()),
        _ => None,
    });
    assert_eq!(keep, Some(vec![AttemptId::new("ja-1")]));
    assert_eq!(world.view("jb").attempts[0].state, AttemptState::Lost);
    assert_eq!(world.view("jb").failures, 1);
    world.pass(4);
    world.heartbeat(two, &[held("ja", 1), held("jb", 2)]);
    assert_eq!(world.view("ja").attempts.len(), 1, "goes on where it was");
    // Disconnected for longer than the grace period, but not for a whole lease.
    world.step(Event::SessionClosed { session: two });
    world.pass(4);
    assert_eq!(world.view("ja").attempts[0].state, AttemptState::Lost);
}

#[test]
fn an_assignment_that_did_not_arrive_counts_as_no_failure() {
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
fn retries_back_off_and_are_limited() {
    let mut world = World::new();
    world.submit("ja", retries(2));
    let session = world.cpu("w1");
    let mut waits = Vec::new();
    for epoch in 1..=3 {
        world.heartbeat(session, &[held("ja", epoch)]);
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
    // The user may resume the job; and a new checkpoint clears earlier failures.
    assert_eq!(world.resume("ja").unwrap().failures, 0);
    // The first device is in quarantine.
    let session = world.cpu("w2");
    world.heartbeat(session, &[held("ja", 4)]);
    world.finish(session, &held("ja", 4), failed(FailureCause::Machine));
    assert_eq!(world.view("ja").failures, 1);
    world.pass(10);
    world.heartbeat(session, &[held("ja", 5)]);
    assert_eq!(world.commit(session, &held("ja", 5), 3), Verdict::Accepted);
    assert_eq!(world.view("ja").failures, 0);
}

/// Before, a job that wrote a checkpoint after each resume and then failed was retried for ever.
#[test]
fn another_checkpoint_of_the_same_step_is_no_progress() {
    let mut world = World::new();
    let session = world.cpu("w1");
    world.submit("ja", retries(2));
    let commit = |world: &mut World, epoch: u64, step: u64| {
        world.step(Event::CommitCheckpoint {
            session,
            request: 5,
            held: held("ja", epoch),
            manifest: manifest(&format!("{step}, written by attempt {epoch}")),
            step,
        });
        assert_eq!(world.verdict(), Verdict::Accepted);
    };
    for (epoch, step, failures) in [(1, 3, 1), (2, 3, 2), (3, 4, 1), (4, 4, 2)] {
        commit(&mut world, epoch, step);
        world.finish(session, &held("ja", epoch), failed(FailureCause::Job));
        assert_eq!(world.view("ja").failures, failures, "after attempt {epoch}");
        let checkpoint = world.state.job(&JobId::new("ja")).unwrap().checkpoint.clone();
        let written = manifest(&format!("{step}, written by attempt {epoch}"));
        assert_eq!(checkpoint.unwrap().manifest, written);
        world.pass(8);
        world.heartbeat(session, &[]);
    }
    commit(&mut world, 5, 4);
    world.finish(session, &held("ja", 5), failed(FailureCause::Job));
    assert_eq!(world.view("ja").state, JobState::Failed);
}

#[test]
fn bad_input_and_internal_errors_are_not_retried() {
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
fn jobs_of_a_leaving_worker_move_to_other_workers() {
    let mut world = World::new();
    world.submit("ja", retries(0));
    let one = world.cpu("w1");
    world.heartbeat(one, &[held("ja", 1)]);
    let two = world.cpu("w2");
    world.step(Event::WorkerLeaving {
        session: one,
        reason: "shutdown".into(),
    });
    world.finish(one, &held("ja", 1), Outcome::stopped());
    assert_eq!(world.assigned(), [(two, held("ja", 2))]);
    assert_eq!(world.view("ja").failures, 0);
}

#[test]
fn a_second_worker_of_the_same_name_gets_a_unique_name() {
    let mut world = World::new();
    world.cpu("box");
    let mut other = registration("w-other", vec![device(DeviceKind::Cpu, 0)], Vec::new());
    other.name = "box".into();
    world.sessions += 1;
    let session = SessionId(world.sessions);
    world.step(Event::WorkerRegistered {
        session,
        fresh_id: WorkerId::new("fresh"),
        same_machine: true,
        registration: Box::new(other),
    });
    // The first worker registers again and keeps its name.
    world.cpu("box");
    let name = |id: &str| world.state.workers[&WorkerId::new(id)].name.clone();
    assert_eq!((name("box").as_str(), name("w-other").as_str()), ("box", "box-w-other"));
}
