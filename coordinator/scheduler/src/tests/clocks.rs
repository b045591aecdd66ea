//! Tests of start times, time limits and waits, also when the wall clock is wrong and after a restart.

use super::*;
use crate::RestoredJob;

impl World {
    /// Restores the jobs and workers as a coordinator does that starts again.
    fn restart(&mut self) {
        let jobs = self.state.jobs.values().map(|job| RestoredJob {
            job: serde_json::from_str(&serde_json::to_string(job).unwrap()).unwrap(),
            cursor: job.cursor,
            seq: 0,
        });
        let workers = self.state.workers.values();
        let workers = workers.map(|worker| serde_json::from_str(&serde_json::to_string(worker).unwrap()).unwrap());
        self.state = State::restore(settings(), self.now, jobs.collect(), workers.collect());
        check(&self.state).unwrap();
    }
}

#[test]
fn a_job_does_not_start_before_its_start_time() {
    let mut world = World::new();
    world.gpus("w1", 1);
    let at = world.now.after(Duration::from_secs(3725));
    world.submit_after("j1", retries(0), &[], Some(at));
    assert_eq!(
        world.reason("j1"),
        "starts in 1 h 2 min at the earliest, as its config asks"
    );
    world.submit("j2", retries(0));
    assert_eq!(world.running(), ["j2"], "no other job waits for it");
    world.finish(SessionId(1), &held("j2", 1), Outcome::Completed);
    world.pass(3724);
    assert_eq!(world.running(), Vec::<String>::new());
    world.pass(1);
    assert_eq!(world.running(), ["j1"]);
}

/// Times of events do not advance while the coordinator's machine is suspended.
#[test]
fn start_times_are_those_of_the_wall_clock() {
    let mut world = World::new();
    let session = world.gpus("w1", 1);
    let hour = Duration::from_secs(3600);
    let at = world.now.after(hour);
    world.submit_after("j1", retries(3), &[], Some(at));
    world.step(Event::Tick);
    assert_eq!(world.running(), Vec::<String>::new());
    world.state.set_wall_clock_ahead(hour);
    world.step(Event::Tick);
    assert_eq!(world.running(), ["j1"]);
    // The wait before a retry is as long as ever.
    world.finish(session, &held("j1", 1), failed(FailureCause::Storage));
    world.step(Event::Tick);
    assert_eq!(world.running(), Vec::<String>::new());
    world.pass(2);
    assert_eq!(world.running(), ["j1"]);
}

/// Before, a retry waited until the wall clock came to the time that it had shown while it was set ahead.
#[test]
fn a_retry_waits_no_longer_after_the_wall_clock_was_set_ahead() {
    for restart in [false, true] {
        let mut world = World::new();
        let session = world.gpus("w1", 1);
        world.state.set_wall_clock_ahead(Duration::from_secs(36_000));
        world.submit("j1", retries(3));
        world.finish(session, &held("j1", 1), failed(FailureCause::Storage));
        world.state.set_wall_clock_ahead(Duration::ZERO);
        if restart {
            world.restart();
            world.gpus("w1", 1);
        }
        world.step(Event::Tick);
        assert_eq!(world.running(), Vec::<String>::new());
        let reason = world.reason("j1");
        assert!(reason.starts_with("tried again in 1 s; before: "), "{reason}");
        world.pass(2);
        assert_eq!(world.running(), ["j1"]);
    }
}

/// Before, a time limit and a quarantine were longer by as much as the clock had been ahead before a restart.
#[test]
fn a_clock_that_was_ahead_before_a_restart_lengthens_nothing() {
    let mut world = World::new();
    let session = world.gpus("w1", 2);
    let limited = Requirements {
        time_limit: Some(10_000),
        ..retries(3)
    };
    world.submit("j1", limited);
    world.submit("j2", retries(3));
    world.finish(session, &held("j2", 1), failed(FailureCause::DeviceStuck));
    world.now = UnixMillis(1000);
    world.restart();
    let devices = vec![device(DeviceKind::Cuda, 0), device(DeviceKind::Cuda, 1)];
    let session = world.worker("w1", devices, vec![held("j1", 1)]);
    let quarantined = |world: &World| world.state.worker_views(|_| true)[0].devices[1].quarantined;
    for seconds in [5, 4] {
        world.pass(seconds);
        world.heartbeat(session, &[held("j1", 1)]);
    }
    assert_eq!(world.state("j1"), JobState::Running);
    world.pass(1);
    assert_eq!(world.state("j1"), JobState::Stopping);
    assert!(quarantined(&world));
    world.pass(50);
    assert!(!quarantined(&world));
}

/// Before, the times of a job lagged by the time for which the coordinator's machine had been suspended.
#[test]
fn recorded_times_are_those_of_the_wall_clock_and_time_limits_are_not() {
    let mut world = World::new();
    let session = world.gpus("w1", 1);
    let hour = Duration::from_secs(3600);
    world.state.set_wall_clock_ahead(hour);
    let submitted = world.now.after(hour);
    let limited = Requirements {
        time_limit: Some(10_000),
        ..retries(3)
    };
    world.submit("j1", limited);
    let view = world.view("j1");
    assert_eq!((view.created, view.started), (submitted, Some(submitted)));
    assert_eq!(view.attempts[0].created, submitted);
    let event = world.last.iter().find_map(|effect| match effect {
        Effect::Persist(Record::Event { event, .. }) => Some(event.time),
        _ => None,
    });
    assert_eq!(event, Some(submitted));

    // The machine is suspended for another hour: the attempt has not used its time limit.
    world.state.set_wall_clock_ahead(hour * 2);
    world.pass(4);
    world.heartbeat(session, &[held("j1", 1)]);
    assert_eq!(
        world.state.worker_views(|_| true)[0].last_seen,
        world.now.after(hour * 2)
    );
    assert_eq!(world.state("j1"), JobState::Running);
    let failed_at = world.now.after(hour * 2);
    world.finish(session, &held("j1", 1), failed(FailureCause::Storage));
    assert_eq!(world.view("j1").attempts[0].ended, Some(failed_at));
    assert_eq!(world.state.job(&JobId::new("j1")).unwrap().used_millis, 4000);

    // The wall clock is set back, and the coordinator starts again: the times of this job do not go back.
    world.state.set_wall_clock_ahead(Duration::ZERO);
    world.restart();
    world.stop("j1", true).unwrap();
    assert_eq!(world.view("j1").ended, Some(failed_at));
    world.submit("j2", retries(0));
    assert_eq!(world.view("j2").created, world.now);
}

#[test]
fn a_job_saves_and_stops_at_its_time_limit() {
    let mut world = World::new();
    let session = world.gpus("w1", 1);
    let limited = Requirements {
        time_limit: Some(10_000),
        ..retries(3)
    };
    world.submit("j1", limited);
    world.pass(4);
    world.heartbeat(session, &[held("j1", 1)]);
    world.finish(session, &held("j1", 1), failed(FailureCause::Storage));
    world.pass(60);
    assert_eq!(
        world.running(),
        ["j1"],
        "the wait between two tries is not running time"
    );
    world.pass(5);
    world.heartbeat(session, &[held("j1", 2)]);
    assert_eq!(world.state("j1"), JobState::Running);
    world.pass(1);
    assert_eq!(world.state("j1"), JobState::Stopping);
    assert!(world.is_asked_to_save("j1", 2));
    assert_eq!(
        world.reason("j1"),
        "its time limit of 10 s is over: it saves, then stops"
    );
    world.finish(session, &held("j1", 2), Outcome::stopped());
    assert_eq!(world.state("j1"), JobState::Stopped);
    assert!(
        world.reason("j1").contains("`aitk resume` gives it as much time again"),
        "{}",
        world.reason("j1")
    );
    world.resume("j1").unwrap();
    world.pass(5);
    assert_eq!(world.state("j1"), JobState::Running);
    // Its worker is gone when the time is over again. Before, the job was said to be stopped on request.
    world.heartbeat(session, &[held("j1", 3)]);
    world.pass(5);
    assert_eq!(world.state("j1"), JobState::Stopping);
    world.pass(2);
    assert_eq!(world.state("j1"), JobState::Stopped);
    let reason = world.reason("j1");
    assert!(
        reason.starts_with("its time limit is over: ") && reason.contains("lost on w1"),
        "{reason}"
    );
}
