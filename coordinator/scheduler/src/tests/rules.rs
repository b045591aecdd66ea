//! Tests of the queue's rules: fair share, quotas, dependencies, pauses, drains, and failures by cause.

use super::*;

impl World {
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
        world.reason("a1").contains("user ada may hold 1 device at once"),
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
