//! Tests of preemption: jobs that yield save and give way to others.

use super::*;

fn with_priority(priority: i64) -> Requirements {
    Requirements { priority, ..ordinary() }
}

#[test]
fn a_yielding_job_is_preempted_and_resumes_by_itself() {
    let mut world = World::new();
    let session = world.gpus("w1", 1);
    world.submit("train", yielding());
    world.heartbeat(session, &[held("train", 1)]);
    world.submit("other", yielding());
    assert!(
        !world.is_asked_to_save("train", 1),
        "it does not give way to another yielding job"
    );
    world.submit("low", with_priority(-1));
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
        "before the yielding job that came later, and before the less urgent"
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

/// A job is not preempted for a waiting job that its user's quota keeps from starting.
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
