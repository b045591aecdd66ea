//! Tests of the queue's rules: fair share, quotas, dependencies, start times, pauses, drains, preemption, and failures by cause.

use super::*;
use crate::RestoredJob;
use aitk_common::id::UserName;

impl World {
    fn submit_after(&mut self, id: &str, requirements: Requirements, after: &[&str], not_before: Option<UnixMillis>) {
        let job = NewJob {
            after: after.iter().map(|id| (*id).into()).collect(),
            not_before,
            ..new_job(id, requirements)
        };
        self.step(Event::JobSubmitted {
            ticket: Ticket(1),
            job: Box::new(job),
        });
    }

    fn pause(&mut self, job: &str) -> Result<JobView, Refusal> {
        self.step(Event::PauseRequested {
            ticket: Ticket(5),
            job: job.into(),
        });
        self.reply()
    }

    fn priority(&mut self, job: &str, priority: i64) -> Result<JobView, Refusal> {
        self.step(Event::PriorityRequested {
            ticket: Ticket(6),
            job: job.into(),
            priority,
        });
        self.reply()
    }

    fn drain(&mut self, worker: &str, drain: bool, now: bool) {
        self.step(Event::DrainRequested {
            ticket: Ticket(7),
            worker: worker.into(),
            drain,
            now,
        });
        let good =
            |effect: &Effect| matches!(effect, Effect::Reply(_, Ok(Reply::Worker(view))) if view.drained == drain);
        assert!(self.last.iter().any(good), "{:?}", self.last);
    }

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

    fn gpus(&mut self, name: &str, count: u32) -> SessionId {
        let devices = (0..count).map(|index| device(DeviceKind::Cuda, index)).collect();
        self.worker(name, devices, Vec::new())
    }

    fn state(&self, job: &str) -> JobState {
        self.view(job).state
    }

    fn reason(&self, job: &str) -> String {
        self.view(job).reason
    }

    fn is_asked_to_save(&self, job: &str, epoch: u64) -> bool {
        self.sent(|message| matches!(message, ToWorker::Stop { held: asked, save: true } if *asked == held(job, epoch)))
    }

    fn running(&self) -> Vec<String> {
        let mut running: Vec<String> = self.state.live.keys().map(ToString::to_string).collect();
        running.sort();
        running
    }
}

fn of(owner: &str) -> Requirements {
    Requirements {
        owner: UserName::new(owner),
        ..retries(3)
    }
}

fn prior(priority: i64) -> Requirements {
    Requirements { priority, ..retries(3) }
}

fn yielding() -> Requirements {
    Requirements {
        yields: true,
        ..retries(3)
    }
}

#[test]
fn devices_are_shared_fairly_between_users() {
    let mut world = World::new();
    for index in 0..6 {
        world.submit(&format!("a{index}"), of("ada"));
    }
    for index in 0..6 {
        world.submit(&format!("b{index}"), of("bob"));
    }
    let session = world.gpus("w1", 4);
    assert_eq!(world.running(), ["a0", "a1", "b0", "b1"]);
    // A third user gets her share as soon as a job ends.
    world.submit("c0", of("cy"));
    world.pass(3);
    world.heartbeat(session, &[held("a0", 1), held("a1", 1), held("b0", 1), held("b1", 1)]);
    world.finish(session, &held("b0", 1), Outcome::Completed);
    assert_eq!(world.running(), ["a0", "a1", "b1", "c0"]);
    world.finish(session, &held("a0", 1), Outcome::Completed);
    assert_eq!(
        world.running(),
        ["a1", "a2", "b1", "c0"],
        "both users had used the same device time; ada submitted first"
    );
}

#[test]
fn users_share_one_device_by_device_time() {
    let mut world = World::new();
    for index in 0..4 {
        world.submit(&format!("a{index}"), of("ada"));
        world.submit(&format!("b{index}"), of("bob"));
    }
    let session = world.gpus("w1", 1);
    // Ada's jobs take five seconds, Bob's one.
    let mut order = String::new();
    while let Some(job) = world.running().first().cloned() {
        order.push_str(&job[..1]);
        world.pass(if job.starts_with('a') { 5 } else { 1 });
        world.finish(session, &held(&job, 1), Outcome::Completed);
    }
    assert_eq!(order, "abbbbaaa", "after Ada's first job, Bob has time to make up for");
    // Users gain nothing by having had no jobs.
    world.submit("a9", of("ada"));
    world.submit("b9", of("bob"));
    world.submit("a8", of("ada"));
    assert_eq!(world.running(), ["a9"]);
}

#[test]
fn priority_comes_before_fair_share_and_quotas_hold() {
    let mut world = World::new();
    world.state.settings.quotas.users.insert(UserName::new("ada"), 1);
    for index in 0..3 {
        world.submit(
            &format!("a{index}"),
            Requirements {
                priority: 5,
                ..of("ada")
            },
        );
    }
    world.submit("b0", of("bob"));
    let session = world.gpus("w1", 2);
    assert_eq!(world.running(), ["a0", "b0"]);
    assert!(
        world.reason("a1").contains("user ada may hold 1 devices at once"),
        "{}",
        world.reason("a1")
    );
    world.finish(session, &held("b0", 1), Outcome::Completed);
    assert_eq!(world.running(), ["a0"], "a free device does not lift a quota");
    world.finish(session, &held("a0", 1), Outcome::Completed);
    assert_eq!(world.running(), ["a1"]);
}

#[test]
fn a_job_starts_after_its_dependencies() {
    let mut world = World::new();
    let session = world.gpus("w1", 2);
    world.submit("j1", retries(0));
    world.submit_after("j2", retries(0), &["j1"], None);
    world.submit_after("j3", retries(0), &["j2", "j1"], None);
    assert_eq!(world.running(), ["j1"]);
    assert_eq!(world.reason("j2"), "waits for j1 (j1), which is running");
    world.finish(session, &held("j1", 1), failed(FailureCause::BadInput));
    assert_eq!(world.running(), Vec::<String>::new());
    assert!(
        world.reason("j2").contains("which has failed; `aitk resume j1`"),
        "{}",
        world.reason("j2")
    );
    world.resume("j1").unwrap();
    world.finish(session, &held("j1", 2), Outcome::Completed);
    assert_eq!(world.running(), ["j2"]);
    world.finish(session, &held("j2", 1), Outcome::Completed);
    assert_eq!(world.running(), ["j3"]);
    // A name is enough; of several jobs of a name the newest of the same user counts. Unknown names are refused.
    world.submit_after("k1", retries(0), &["j3"], None);
    assert!(world.reason("k1").starts_with("waits for j3"));
    world.submit_after("k2", retries(0), &["nobody"], None);
    assert!(world.state.job(&JobId::new("k2")).is_none());
    let refused = world
        .last
        .iter()
        .any(|e| matches!(e, Effect::Reply(_, Err(Refusal::Conflict(why))) if why.contains("\"nobody\"")));
    assert!(refused, "{:?}", world.last);
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

#[test]
fn a_paused_job_saves_and_keeps_its_queue_position() {
    let mut world = World::new();
    let session = world.gpus("w1", 1);
    world.submit("j1", retries(0));
    world.submit("j2", retries(0));
    world.submit("j3", retries(0));
    world.pause("j2").unwrap();
    assert_eq!(world.reason("j2"), "paused; `aitk resume j2` lets it go on");
    let paused = world.pause("j1").unwrap();
    assert!(paused.paused && world.is_asked_to_save("j1", 1));
    assert_eq!(world.state("j1"), JobState::Running, "until it has saved");
    world.finish(session, &held("j1", 1), Outcome::stopped());
    assert_eq!(
        (world.state("j1"), world.running()),
        (JobState::Queued, vec!["j3".to_owned()])
    );
    world.resume("j2").unwrap();
    world.resume("j1").unwrap();
    world.finish(session, &held("j3", 1), Outcome::Completed);
    assert_eq!(world.running(), ["j1"], "it came first");
    assert_eq!(world.view("j1").failures, 0);
    // A job that is resumed while it still saves continues as soon as it has saved.
    world.pause("j1").unwrap();
    world.resume("j1").unwrap();
    world.finish(session, &held("j1", 2), Outcome::stopped());
    assert_eq!(world.running(), ["j1"]);
    world.finish(session, &held("j1", 3), Outcome::Completed);
    assert!(matches!(world.pause("j1"), Err(Refusal::Conflict(_))));
}

#[test]
fn changing_a_priority_reorders_the_queue() {
    let mut world = World::new();
    for id in ["j1", "j2", "j3"] {
        world.submit(id, retries(0));
    }
    world.priority("j3", 2).unwrap();
    world.priority("j1", -1).unwrap();
    let order: Vec<String> = world
        .state
        .list_all_jobs(world.now, false, true)
        .iter()
        .map(|job| job.id.to_string())
        .collect();
    assert_eq!(order, ["j3", "j2", "j1"]);
    let session = world.gpus("w1", 1);
    for id in ["j3", "j2", "j1"] {
        assert_eq!(world.running(), [id]);
        world.finish(session, &held(id, 1), Outcome::Completed);
    }
    assert!(matches!(world.priority("j1", 3), Err(Refusal::Conflict(_))));
}

#[test]
fn a_drained_worker_gets_no_work_and_can_hand_its_jobs_over() {
    let mut world = World::new();
    let one = world.gpus("w1", 2);
    world.submit("j1", retries(0));
    world.drain("w1", true, false);
    world.submit("j2", retries(0));
    assert_eq!(world.running(), ["j1"]);
    assert!(world.reason("j2").contains("w1 is drained"), "{}", world.reason("j2"));
    // The drain outlasts a reconnection.
    let again = world.worker("w1", vec![device(DeviceKind::Cuda, 0)], vec![held("j1", 1)]);
    assert_ne!(one, again);
    assert_eq!(world.running(), ["j1"]);
    world.drain("w1", true, true);
    assert!(world.is_asked_to_save("j1", 1));
    world.finish(again, &held("j1", 1), Outcome::stopped());
    assert_eq!(world.state("j1"), JobState::Queued);
    let two = world.gpus("w2", 1);
    assert_eq!(world.assigned(), [(two, held("j1", 2))]);
    world.drain("w1", false, false);
    assert_eq!(world.running(), ["j1", "j2"]);
    world.step(Event::DrainRequested {
        ticket: Ticket(7),
        worker: "nobody".into(),
        drain: true,
        now: false,
    });
    assert!(matches!(
        world.last[0],
        Effect::Reply(_, Err(Refusal::UnknownWorker(_)))
    ));
}

#[test]
fn a_yielding_job_is_preempted_and_resumes_by_itself() {
    let mut world = World::new();
    let session = world.gpus("w1", 1);
    world.submit("train", yielding());
    world.heartbeat(session, &[held("train", 1)]);
    world.submit("other", yielding());
    assert!(!world.is_asked_to_save("train", 1), "it does not give way to its like");
    world.submit("low", prior(-1));
    assert!(!world.is_asked_to_save("train", 1), "nor to less urgent ones");
    world.submit("gen", retries(0));
    assert!(world.is_asked_to_save("train", 1));
    assert!(
        world.reason("train").starts_with("saves and gives way to gen (gen)"),
        "{}",
        world.reason("train")
    );
    assert_eq!(world.reason("gen"), "starts when train (train) has saved and given way");
    world.commit(session, &held("train", 1), 40);
    // Another waiting job does not preempt it again; and a worker that reconnects is asked again to stop it.
    world.submit("gen2", retries(0));
    assert!(!world.is_asked_to_save("train", 1));
    let session = world.worker("w1", vec![device(DeviceKind::Cuda, 0)], vec![held("train", 1)]);
    assert!(world.is_asked_to_save("train", 1));
    world.finish(session, &held("train", 1), Outcome::stopped());
    assert_eq!(world.running(), ["gen"]);
    assert_eq!(
        (world.state("train"), world.view("train").failures),
        (JobState::Queued, 0)
    );
    world.finish(session, &held("gen", 1), Outcome::Completed);
    assert_eq!(world.running(), ["gen2"], "those that do not yield go first");
    world.finish(session, &held("gen2", 1), Outcome::Completed);
    assert_eq!(
        world.running(),
        ["train"],
        "before its like, which came later, and before the less urgent"
    );
    let resume = world.last.iter().find_map(|effect| match effect {
        Effect::Assign(_, placed) => placed.resume,
        _ => None,
    });
    assert_eq!(resume, Some(manifest("40")), "from where it saved");
}

#[test]
fn yielding_jobs_do_not_preempt_each_other_in_turns() {
    let of_size = |requirements: Requirements, gib: u64| Requirements {
        memory: Some(gib << 30),
        ..requirements
    };
    let mut world = World::new();
    // 20 GiB: the small jobs share the device, the large one needs it alone.
    let session = world.gpus("w1", 1);
    world.submit("t1", of_size(yielding(), 4));
    world.heartbeat(session, &[held("t1", 1)]);
    world.submit("large", of_size(retries(0), 16));
    assert!(world.is_asked_to_save("t1", 1));
    // There is capacity beside the job that saves, but the device is being freed for the large job.
    world.submit("t2", of_size(yielding(), 4));
    assert_eq!(world.running(), ["t1"]);
    assert!(world.reason("t2").contains("busy"), "{}", world.reason("t2"));
    // A job that does not yield is not preempted and may start meanwhile.
    world.submit("quick", of_size(retries(0), 4));
    assert_eq!(world.running(), ["quick", "t1"]);
    world.finish(session, &held("quick", 1), Outcome::Completed);
    assert_eq!(world.running(), ["t1"]);
    world.finish(session, &held("t1", 1), Outcome::stopped());
    assert_eq!(world.running(), ["large"]);
    world.finish(session, &held("large", 1), Outcome::Completed);
    assert_eq!(world.running(), ["t1", "t2"]);
}

#[test]
fn no_more_jobs_are_preempted_than_needed() {
    let mut world = World::new();
    let session = world.gpus("w1", 3);
    for id in ["t1", "t2", "t3"] {
        world.submit(id, yielding());
        world.pass(1);
        world.heartbeat(session, &[held("t1", 1), held("t2", 1), held("t3", 1)]);
    }
    let preempted = |world: &World| {
        ["t1", "t2", "t3"]
            .iter()
            .filter(|id| world.reason(id).starts_with("saves and gives way"))
            .map(ToString::to_string)
            .collect::<Vec<_>>()
    };
    world.submit("g1", retries(0));
    assert_eq!(preempted(&world), ["t3"], "the latest has the least to lose");
    world.submit("g2", retries(0));
    assert_eq!(preempted(&world), ["t2", "t3"]);
    // A job that fits nowhere preempts no job.
    world.submit(
        "g3",
        Requirements {
            memory: Some(1 << 50),
            ..retries(0)
        },
    );
    assert_eq!(preempted(&world), ["t2", "t3"]);
    // One of the waiting jobs is stopped meanwhile: no further job is preempted.
    world.stop("g2", false).unwrap();
    world.finish(session, &held("t3", 1), Outcome::stopped());
    world.finish(session, &held("t2", 1), Outcome::stopped());
    assert_eq!(world.running(), ["g1", "t1", "t2"]);
}

/// Before, a job was also preempted for each waiting job that its user's quota keeps from starting.
#[test]
fn no_jobs_are_preempted_for_those_above_a_quota() {
    let mut world = World::new();
    let session = world.gpus("w1", 3);
    let users = &mut world.state.settings.quotas.users;
    users.insert(UserName::new("ada"), 1);
    for id in ["t1", "t2", "t3"] {
        world.submit(id, yielding());
    }
    for id in ["a1", "a2", "a3"] {
        world.submit(id, of("ada"));
    }
    let preempted = |world: &World| {
        let preempted = world.state.jobs.values().filter(|job| job.preemption.is_some());
        preempted.map(|job| job.id.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(preempted(&world), ["t3"]);
    world.finish(session, &held("t3", 1), Outcome::stopped());
    assert_eq!(world.running(), ["a1", "t1", "t2"]);
    assert_eq!(preempted(&world), Vec::<String>::new());
}

#[test]
fn out_of_memory_is_retried_once_with_a_smaller_profile() {
    let mut world = World::new();
    let session = world.gpus("w1", 1);
    let oom = || failed(FailureCause::OutOfMemory);
    world.submit("j1", retries(0));
    assert_eq!(world.view("j1").attempts[0].profile, MemoryProfile::FullGpu);
    world.finish(session, &held("j1", 1), oom());
    let view = world.view("j1");
    assert_eq!(
        (view.state, view.failures, view.attempts[1].profile),
        (JobState::Running, 0, MemoryProfile::Balanced)
    );
    assert!(view.attempts[0].message.contains("boom"));
    world.finish(session, &held("j1", 2), oom());
    assert_eq!(world.state("j1"), JobState::Failed);
    assert!(
        world.reason("j1").contains("with the smaller profile balanced as well"),
        "{}",
        world.reason("j1")
    );
    // A requested profile is kept: out of memory is then an ordinary failure.
    world.submit(
        "j2",
        Requirements {
            profile: Some(MemoryProfile::GpuPoor),
            ..retries(1)
        },
    );
    world.finish(session, &held("j2", 1), oom());
    assert!(
        world
            .reason("j2")
            .starts_with("try 2 of 2 in 1 s; before: not enough memory"),
        "{}",
        world.reason("j2")
    );
}

#[test]
fn resuming_a_job_tries_the_largest_profile_again() {
    let mut world = World::new();
    let session = world.gpus("w1", 1);
    world.submit("j1", retries(0));
    world.finish(session, &held("j1", 1), failed(FailureCause::OutOfMemory));
    assert_eq!(world.view("j1").attempts[1].profile, MemoryProfile::Balanced);
    world.stop("j1", false).unwrap();
    world.finish(session, &held("j1", 2), Outcome::stopped());
    world.resume("j1").unwrap();
    assert_eq!(world.view("j1").attempts[2].profile, MemoryProfile::FullGpu);
    // The same after a pause.
    world.finish(session, &held("j1", 3), failed(FailureCause::OutOfMemory));
    assert_eq!(world.view("j1").attempts[3].profile, MemoryProfile::Balanced);
    world.step(Event::PauseRequested {
        ticket: Ticket(4),
        job: "j1".into(),
    });
    world.finish(session, &held("j1", 4), Outcome::stopped());
    world.resume("j1").unwrap();
    assert_eq!(world.view("j1").attempts[4].profile, MemoryProfile::FullGpu);
}

#[test]
fn a_device_is_quarantined_after_three_faults() {
    let mut world = World::new();
    let session = world.gpus("w1", 1);
    for index in 1..=3 {
        let id = format!("j{index}");
        world.submit(&id, retries(0));
        world.finish(session, &held(&id, 1), failed(FailureCause::Machine));
        assert_eq!(world.state(&id), JobState::Failed);
    }
    world.submit("j4", retries(0));
    assert_eq!(
        world.reason("j4"),
        "the only device that fits takes no jobs: quarantined: 3 faults in a row, the last one: boom; `aitk worker undrain w1` frees it"
    );
    let view = world.state.worker_views(|_| true)[0].devices[0].clone();
    assert!(view.quarantined && view.faults == 3);
    // The quarantine ends after a while; one more fault starts it again. Ending a drain clears the faults.
    world.pass(60);
    assert_eq!(world.running(), ["j4"]);
    world.heartbeat(session, &[held("j4", 1)]);
    world.finish(session, &held("j4", 1), failed(FailureCause::Machine));
    world.submit("j5", retries(0));
    assert_eq!(world.state("j5"), JobState::Queued);
    world.drain("w1", false, false);
    assert_eq!(world.running(), ["j5"]);
    world.finish(session, &held("j5", 1), Outcome::Completed);
    assert_eq!(world.state.worker_views(|_| true)[0].devices[0].faults, 0);
}

#[test]
fn jobs_that_fit_nowhere_do_not_slow_down_placement() {
    let mut world = World::new();
    let session = world.gpus("w1", 1);
    for index in 0..2000_u64 {
        // Each in a class of its own.
        let requirements = Requirements {
            memory: Some((1 << 40) + index),
            ..retries(0)
        };
        let job = Box::new(new_job(&format!("big{index}"), requirements));
        world
            .state
            .handle(world.now, Event::JobSubmitted { ticket: Ticket(1), job });
    }
    world.submit("j1", retries(0));
    assert_eq!(world.running(), ["j1"]);
    let slot = world.state.slots.get(0).unwrap();
    assert_eq!(slot.classes.len(), 1, "the device knows only of those it fits");
    world.finish(session, &held("j1", 1), Outcome::Completed);
    assert!(world.state.classes.candidates.is_empty());
    assert!(
        world.reason("big7").contains("asks for 1024.0 GiB"),
        "{}",
        world.reason("big7")
    );
}
