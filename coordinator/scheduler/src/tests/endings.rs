//! Tests of how attempts end: what is saved, and what counts as a failure.

use super::*;

fn stopped_at(step: u64) -> Outcome {
    Outcome::Stopped {
        // The steps that the attempt claims do not count; here they are always wrong.
        saved_step: Some(step),
        at_step: Some(step),
    }
}

fn leaves(world: &mut World, session: SessionId) {
    world.step(Event::WorkerLeaving {
        session,
        reason: "the worker is shutting down".into(),
    });
}

#[test]
fn the_reason_of_a_stop_says_what_is_saved_and_lost() {
    let mut world = World::new();
    let session = world.cpu("w1");
    let stopped = |world: &mut World, id: &str, committed: Option<u64>, at: u64| {
        world.submit(id, retries(0));
        if let Some(committed) = committed {
            world.commit(session, &held(id, 1), committed);
        }
        world.stop(id, false).unwrap();
        world.finish(session, &held(id, 1), stopped_at(at));
        let view = world.view(id);
        assert_eq!(view.state, JobState::Stopped);
        (view.reason, view.attempts[0].message.clone())
    };
    assert_eq!(
        stopped(&mut world, "ja", Some(400), 437),
        (
            "stopped on request: saved at step 400; 37 steps since are lost".to_owned(),
            "stopped: saved at step 400; 37 steps since are lost".to_owned()
        )
    );
    assert_eq!(
        stopped(&mut world, "jb", Some(400), 400).0,
        "stopped on request: saved at step 400"
    );
    assert_eq!(
        stopped(&mut world, "jc", None, 1).0,
        "stopped on request: no state was saved: 1 step is lost, and it starts from the beginning"
    );
    assert_eq!(
        stopped(&mut world, "jd", None, 0).0,
        "stopped on request: no state was saved"
    );
}

#[test]
fn the_reason_of_a_pause_says_what_is_saved() {
    let mut world = World::new();
    let session = world.cpu("w1");
    world.submit("ja", retries(0));
    world.commit(session, &held("ja", 1), 10);
    world.step(Event::PauseRequested {
        ticket: Ticket(1),
        job: "ja".into(),
    });
    world.finish(session, &held("ja", 1), stopped_at(12));
    let view = world.view("ja");
    assert!(view.paused && view.state == JobState::Queued);
    assert_eq!(
        view.reason,
        "paused: saved at step 10; 2 steps since are lost; `aitk resume ja` lets it go on"
    );
}

#[test]
fn a_stopped_job_whose_attempt_fails_or_is_lost_says_what_is_saved() {
    let mut world = World::new();
    let session = world.cpu("w1");
    world.submit("ja", retries(0));
    world.commit(session, &held("ja", 1), 10);
    world.stop("ja", false).unwrap();
    world.finish(session, &held("ja", 1), failed(FailureCause::Machine));
    assert_eq!(
        world.view("ja").reason,
        "stopped on request: saved at step 10; its attempt ended with: boom"
    );
    world.submit("jb", retries(0));
    world.heartbeat(session, &[held("jb", 1)]);
    world.stop("jb", false).unwrap();
    world.pass(7);
    let reason = world.view("jb").reason;
    assert!(
        reason.starts_with("stopped on request: no state was saved; its attempt was lost on w1"),
        "{reason}"
    );
}

#[test]
fn a_hub_outage_counts_neither_against_the_device_nor_the_job() {
    let mut world = World::new();
    let session = world.cpu("w1");
    world.submit("ja", retries(1));
    let mut waits = Vec::new();
    for epoch in 1..=6 {
        world.finish(session, &held("ja", epoch), failed(FailureCause::Network));
        let view = world.view("ja");
        assert_eq!((view.state, view.failures), (JobState::Queued, 0), "{}", view.reason);
        assert!(
            view.reason.starts_with("tried again in ")
                && view.reason.contains("the network or a model hub failed: boom"),
            "{}",
            view.reason
        );
        // The device takes other jobs meanwhile.
        let other = format!("jo{epoch}");
        world.submit(&other, retries(0));
        assert_eq!(world.view(&other).state, JobState::Running);
        world.finish(session, &held(&other, 1), Outcome::Completed);
        let mut wait = 0;
        while world.view("ja").state == JobState::Queued && wait < 60 {
            world.pass(1);
            world.heartbeat(session, &[]);
            wait += 1;
        }
        waits.push(wait);
    }
    assert_eq!(waits, [2, 4, 8, 8, 8, 8], "ever less often, up to the limit");
    let view = world.state.worker_views(|_| true)[0].devices[0].clone();
    assert_eq!((view.faults, view.quarantined), (0, false));
    // After `network_timeout` the failures count.
    world.now = world.now.after(Duration::from_secs(2 * 3600));
    let session = world.worker("w1", vec![device(DeviceKind::Cpu, 0)], vec![held("ja", 7)]);
    world.finish(session, &held("ja", 7), failed(FailureCause::Network));
    assert_eq!(world.view("ja").failures, 1);
}

#[test]
fn progress_ends_a_network_outage() {
    let mut world = World::new();
    let session = world.cpu("w1");
    world.submit("ja", retries(0));
    world.finish(session, &held("ja", 1), failed(FailureCause::Network));
    world.pass(2);
    let progress = Progress {
        done: 1,
        total: 10,
        seconds_per_step: None,
    };
    world.step(Event::AttemptEvent {
        session,
        held: held("ja", 2),
        seq: 1,
        time: UnixMillis(0),
        report: Report::Progress(progress),
    });
    assert_eq!(world.state.job(&JobId::new("ja")).unwrap().network_outage, None);
}

#[test]
fn attempts_lost_by_an_announced_shutdown_do_not_count() {
    // Lost because the lease expires, and because the worker registers again.
    for comes_back in [false, true] {
        let mut world = World::new();
        let session = world.cpu("w1");
        world.submit("ja", retries(0));
        world.heartbeat(session, &[held("ja", 1)]);
        leaves(&mut world, session);
        world.step(Event::SessionClosed { session });
        if comes_back {
            world.cpu("w1");
        }
        world.pass(4);
        let view = world.view("ja");
        assert_eq!(view.attempts[0].state, AttemptState::Lost, "{view:#?}");
        assert_eq!(view.failures, 0);
        assert_ne!(view.state, JobState::Failed, "{}", view.reason);
    }
    // Without an announcement it counts.
    let mut world = World::new();
    let session = world.cpu("w1");
    world.submit("ja", retries(0));
    world.heartbeat(session, &[held("ja", 1)]);
    world.step(Event::SessionClosed { session });
    world.pass(4);
    assert_eq!(world.view("ja").state, JobState::Failed);
}

#[test]
fn a_stuck_device_is_quarantined_at_once() {
    let mut world = World::new();
    let one = world.cpu("w1");
    world.submit("ja", retries(1));
    world.heartbeat(one, &[held("ja", 1)]);
    let two = world.cpu("w2");
    let outcome = Outcome::Failed {
        cause: FailureCause::DeviceStuck,
        message: "no progress for 10 min, and its process 77 does not go\nmore".into(),
    };
    world.finish(one, &held("ja", 1), outcome);
    let of = |world: &World, name: &str| {
        let workers = world.state.worker_views(|_| true);
        let worker = workers.into_iter().find(|worker| worker.name == name).unwrap();
        worker.devices[0].clone()
    };
    let view = of(&world, "w1");
    assert!(view.quarantined);
    assert_eq!(
        view.quarantine_reason,
        "no progress for 10 min, and its process 77 does not go"
    );
    assert_eq!(of(&world, "w2").quarantine_reason, "");
    world.pass(1);
    assert_eq!(world.assigned(), [(two, held("ja", 2))]);
    world.step(Event::DrainRequested {
        ticket: Ticket(1),
        worker: "w1".into(),
        drain: false,
        now: false,
    });
    let view = of(&world, "w1");
    assert!(!view.quarantined && view.quarantine_reason.is_empty());
}

#[test]
fn failures_of_the_job_itself_leave_the_device_to_others() {
    let mut world = World::new();
    let session = world.cpu("w1");
    world.submit("ja", retries(5));
    for epoch in 1..=6 {
        world.finish(session, &held("ja", epoch), failed(FailureCause::Job));
        let view = world.state.worker_views(|_| true)[0].devices[0].clone();
        assert_eq!((view.faults, view.quarantined), (0, false));
        assert_eq!(world.view("ja").failures, epoch as u32);
        let other = format!("jo{epoch}");
        world.submit(&other, retries(0));
        assert_eq!(world.view(&other).state, JobState::Running);
        world.finish(session, &held(&other, 1), Outcome::Completed);
        world.pass(8);
        world.heartbeat(session, &[]);
    }
    let view = world.view("ja");
    assert_eq!(view.state, JobState::Failed);
    assert_eq!(
        view.reason,
        "gave up after 6 tries in a row; the last one: the job failed: boom"
    );
}

/// Before, such a failure was taken for an outage of the storage, and the job was tried again for ever.
#[test]
fn refusals_of_the_storage_count_against_the_job_and_not_the_device() {
    let mut world = World::new();
    let session = world.cpu("w1");
    world.submit("ja", retries(2));
    for epoch in 1..=3 {
        assert_eq!(world.view("ja").state, JobState::Running, "try {epoch}");
        world.finish(session, &held("ja", epoch), failed(FailureCause::StorageRefused));
        let view = world.state.worker_views(|_| true)[0].devices[0].clone();
        assert_eq!((view.faults, view.quarantined), (0, false));
        assert_eq!(world.view("ja").failures, epoch as u32);
        world.pass(8);
        world.heartbeat(session, &[]);
    }
    let view = world.view("ja");
    assert_eq!(view.state, JobState::Failed);
    assert_eq!(
        view.reason,
        "gave up after 3 tries in a row; the last one: object storage refused it: boom"
    );
}

#[test]
fn a_job_that_hangs_on_the_only_device_ends() {
    let mut world = World::new();
    let session = world.cpu("w1");
    world.submit("ja", retries(3));
    for epoch in 1..=3 {
        world.finish(session, &held("ja", epoch), failed(FailureCause::NoProgress));
        world.pass(4);
        world.heartbeat(session, &[]);
    }
    assert_eq!(world.view("ja").state, JobState::Queued);
    let reason = world.view("ja").reason;
    assert!(reason.contains("quarantined: 3 faults in a row"), "{reason}");
    // The quarantine ends by itself; the job is tried once more, and then it has no try left.
    for _ in 0..12 {
        world.pass(5);
        world.heartbeat(session, &[]);
    }
    world.finish(session, &held("ja", 4), failed(FailureCause::NoProgress));
    assert_eq!(world.view("ja").state, JobState::Failed);
}

#[test]
fn interrupted_attempts_do_not_count() {
    let mut world = World::new();
    let session = world.cpu("w1");
    world.submit("ja", retries(0));
    world.finish(session, &held("ja", 1), failed(FailureCause::Interrupted));
    assert_eq!(
        (world.view("ja").state, world.view("ja").failures),
        (JobState::Queued, 0)
    );
    world.pass(1);
    world.finish(session, &held("ja", 2), failed(FailureCause::Unknown));
    assert_eq!(world.view("ja").state, JobState::Failed);
}
