//! Tests of arrays.

use super::*;
use crate::NewArray;
use crate::RestoredJob;

impl World {
    pub(super) fn array(
        &mut self,
        id: &str,
        members: Vec<NewJob>,
        at_most: Option<u32>,
        split: bool,
    ) -> Result<JobId, Refusal> {
        let array = NewArray {
            id: JobId::new(id),
            name: format!("{id}_name"),
            at_most,
            split,
            idempotency_key: Some(format!("key of {id}")),
            members,
        };
        let array = Box::new(array);
        let ticket = Ticket(8);
        let submitted = |effect: &Effect| match effect {
            Effect::Reply(_, reply) => Some(reply.clone()),
            _ => None,
        };
        let reply = self
            .step(Event::ArraySubmitted { ticket, array })
            .iter()
            .find_map(submitted);
        reply.expect("no reply").map(|reply| match reply {
            Reply::Submitted(submitted) => submitted.job,
            other => panic!("{other:?}"),
        })
    }

    fn plain(&mut self, id: &str, count: u32, at_most: Option<u32>) {
        let taken = self.array(id, members(id, count), at_most, false);
        assert_eq!(taken, Ok(JobId::new(id)));
    }

    fn states(&self, id: &str) -> String {
        let states = self.state.list_members(self.now, &JobId::new(id));
        let letter = |view: &JobView| view.state.name().chars().next().unwrap();
        states.iter().map(letter).collect()
    }

    fn stored(&self) -> State {
        let jobs = self.state.jobs.values().map(|job| RestoredJob {
            job: serde_json::from_str(&serde_json::to_string(job).unwrap()).unwrap(),
            cursor: job.cursor,
            seq: 0,
        });
        let state = State::restore(settings(), self.now, jobs.collect(), Vec::new());
        check(&state).unwrap();
        state
    }
}

/// Before, those members went first which the store returned first.
#[test]
fn after_a_restart_members_start_in_the_order_of_submission() {
    let mut world = World::new();
    world.plain("ja", 4, Some(2));
    let jobs = world.state.jobs.values().map(|job| RestoredJob {
        job: serde_json::from_str(&serde_json::to_string(job).unwrap()).unwrap(),
        cursor: job.cursor,
        seq: 0,
    });
    let mut jobs: Vec<RestoredJob> = jobs.collect();
    jobs.reverse();
    world.state = State::restore(settings(), world.now, jobs, Vec::new());
    let session = world.cpu("w1");
    assert_eq!(world.assigned(), [(session, held("ja-0", 1))]);
    world.finish(session, &held("ja-0", 1), Outcome::Completed);
    assert_eq!(world.assigned(), [(session, held("ja-1", 1))]);
}

fn members(id: &str, count: u32) -> Vec<NewJob> {
    (0..count)
        .map(|index| new_job(&format!("{id}-{index}"), retries(0)))
        .collect()
}

#[test]
fn an_array_is_accepted_as_a_whole_and_only_once_per_key() {
    let mut world = World::new();
    world.plain("ja", 3, None);
    assert_eq!(world.state.jobs.len(), 3);
    let stored = world
        .last
        .iter()
        .filter(|effect| matches!(effect, Effect::Persist(Record::NewJob(..))))
        .count();
    assert_eq!(stored, 3, "in one step, so in one transaction");
    world.plain("ja", 3, None);
    assert_eq!(world.state.jobs.len(), 3, "the same key");
    let mut alike = members("jb", 3);
    alike[2].name = alike[0].name.clone();
    let refused = world.array("jb", alike, None, false).unwrap_err();
    assert!(refused.to_string().contains("same name"), "{refused}");
    let mut after_nobody = members("jc", 3);
    after_nobody[2].after = vec!["nobody".into()];
    assert!(world.array("jc", after_nobody, None, false).is_err());
    assert!(world.array("jd", members("jd", 1), None, false).is_err());
    assert!(world.array("je", members("je", 1001), None, false).is_err());
    assert!(
        world.array("jf", members("ja", 2), None, false).is_err(),
        "these ids are taken"
    );
    assert_eq!(world.state.jobs.len(), 3);
}

#[test]
fn an_array_is_found_by_id_prefix_or_name() {
    let mut world = World::new();
    world.plain("jab", 3, None);
    world.submit("jz", retries(0));
    let found = |world: &World, text: &str| world.state.find(text).map(|id| id.to_string());
    assert_eq!(found(&world, "jab"), Ok("jab".into()));
    assert_eq!(found(&world, "ja"), Ok("jab".into()));
    assert_eq!(found(&world, "jab-1"), Ok("jab-1".into()));
    let Err(Refusal::Ambiguous { matches, .. }) = world.state.find("j") else {
        panic!("j is several")
    };
    assert_eq!(matches, ["jab", "jz"]);
    assert!(matches!(world.state.find("jab-"), Err(Refusal::Ambiguous { .. })));
    let nobody = world.state.find_among("jab", |_| false);
    assert!(matches!(nobody, Err(Refusal::NotFound(_))));
    let after = NewJob {
        after: vec!["jab_name".into()],
        ..new_job("jl", retries(0))
    };
    world.step(Event::JobSubmitted {
        ticket: Ticket(1),
        job: Box::new(after),
    });
    assert_eq!(world.state.jobs[&JobId::new("jl")].after, [JobId::new("jab")]);
}

#[test]
fn requests_for_an_array_apply_to_its_members() {
    let mut world = World::new();
    world.plain("ja", 4, None);
    let session = world.cpu("w1");
    assert_eq!(world.states("ja"), "rqqq");
    world.finish(session, &held("ja-0", 1), Outcome::Completed);
    let event = Event::PauseRequested {
        ticket: Ticket(5),
        job: "ja".into(),
    };
    world.step(event);
    let view = world.reply().unwrap();
    assert!(view.paused && view.array.is_some(), "{view:?}");
    world.finish(session, &held("ja-1", 1), Outcome::stopped());
    assert_eq!(world.states("ja"), "cqqq");
    world.step(Event::PriorityRequested {
        ticket: Ticket(6),
        job: "ja".into(),
        priority: 7,
    });
    assert_eq!(world.reply().unwrap().priority, 7);
    assert_eq!(world.state.jobs[&JobId::new("ja-3")].requirements.priority, 7);
    world.resume("ja").unwrap();
    assert_eq!(world.states("ja"), "crqq");
    let stopped = world.stop("ja", false).unwrap();
    assert_eq!(stopped.state, JobState::Stopping);
    assert_eq!(world.states("ja"), "csss");
    world.finish(session, &held("ja-1", 2), Outcome::stopped());
    let view = world.view("ja");
    assert_eq!(
        (view.state, view.reason.as_str()),
        (JobState::Stopped, "1 completed, 3 stopped")
    );
    world.resume("ja").unwrap();
    assert_eq!(world.view("ja").state, JobState::Running);
    for index in [1, 2, 3] {
        let epoch = world.state.jobs[&JobId::new(format!("ja-{index}"))].epoch().0;
        world.finish(session, &held(&format!("ja-{index}"), epoch), Outcome::Completed);
    }
    let view = world.view("ja");
    assert_eq!((view.state, view.progress.unwrap().done), (JobState::Completed, 4));
    assert!(view.ended.is_some());
    assert!(matches!(world.stop("ja", false), Err(Refusal::Conflict(_))));
}

#[test]
fn a_list_shows_an_array_as_one_row() {
    let mut world = World::new();
    world.plain("ja", 3, None);
    world.submit("jz", retries(0));
    let session = world.cpu("w1");
    let ids = |views: Vec<JobView>| views.iter().map(|view| view.id.to_string()).collect::<Vec<_>>();
    let overview = |world: &World| ids(world.state.list_all_jobs(world.now, false, false));
    assert_eq!(overview(&world), ["ja", "jz"]);
    let members = ids(world.state.list_all_jobs(world.now, false, true));
    assert_eq!(members, ["ja-0", "ja-1", "ja-2", "jz"]);
    world.finish(session, &held("ja-0", 1), failed(FailureCause::BadInput));
    assert_eq!(overview(&world), ["ja", "jz"]);
    let reason = world.view("ja").reason;
    assert!(
        reason.starts_with("1 running, 1 waiting, 1 failed; ja-0 failed: boom"),
        "{reason}"
    );
    world.stop("ja", true).unwrap();
    world.finish(session, &held("ja-1", 1), Outcome::stopped());
    assert_eq!(overview(&world), ["jz", "ja"], "it has ended");
    assert_eq!(world.view("ja").state, JobState::Failed);
    assert_eq!(ids(world.state.list_all_jobs(world.now, true, false)).len(), 2);
    let forecast = world.state.explain_job(world.now, &JobId::new("ja")).unwrap();
    assert!(
        forecast.summary.contains("2 stopped") && forecast.devices.len() == 1,
        "{forecast:?}"
    );
}

/// Before, the devices were those of the first waiting member by index, although the reason was that of another one.
#[test]
fn the_reason_and_the_devices_of_an_array_are_those_of_one_member() {
    let mut world = World::new();
    let session = world.cpu("w1");
    let on = |kind| Requirements {
        device: Some(kind),
        ..retries(3)
    };
    let members = vec![
        new_job("ja-0", on(DeviceKind::Cpu)),
        new_job("ja-1", on(DeviceKind::Cuda)),
    ];
    world.array("ja", members, Some(1), false).unwrap();
    // The first member waits before its next try, so that the second one takes its place. Then the first waits for the limit.
    world.finish(session, &held("ja-0", 1), failed(FailureCause::Storage));
    world.heartbeat(session, &[]);
    world.pass(2);
    assert_eq!(world.states("ja"), "qq");
    let array = world.state.explain_job(world.now, &JobId::new("ja")).unwrap();
    let second = world.state.explain_job(world.now, &JobId::new("ja-1")).unwrap();
    assert!(array.summary.ends_with(&second.summary), "{}", array.summary);
    assert_eq!(array.devices, second.devices);
    assert!(!array.devices[0].fits);
}

#[test]
fn a_job_after_an_array_waits_for_all_members() {
    let mut world = World::new();
    world.plain("ja", 2, None);
    let after = NewJob {
        after: vec!["ja".into()],
        ..new_job("jl", retries(0))
    };
    world.step(Event::JobSubmitted {
        ticket: Ticket(1),
        job: Box::new(after),
    });
    let session = world.cpu("w1");
    world.finish(session, &held("ja-0", 1), Outcome::Completed);
    assert_eq!(
        world.view("jl").reason,
        "waits for the array ja (ja_name): 1 completed, 1 running"
    );
    check(&world.stored()).unwrap();
    world.finish(session, &held("ja-1", 1), Outcome::Completed);
    assert_eq!(world.view("jl").state, JobState::Running);
}

#[test]
fn at_most_the_allowed_number_of_members_run() {
    let mut world = World::new();
    world.plain("ja", 5, Some(2));
    let session = world.worker(
        "w1",
        (0..4).map(|index| device(DeviceKind::Cuda, index)).collect(),
        Vec::new(),
    );
    assert_eq!(world.states("ja"), "rrqqq");
    let reason = world.view("ja-4").reason;
    assert!(
        reason.starts_with("at most 2 jobs of its array ja may run at the same time"),
        "{reason}"
    );
    // A member that fails, is stopped or is paused makes room for another one.
    world.finish(session, &held("ja-0", 1), failed(FailureCause::BadInput));
    assert_eq!(world.states("ja"), "frrqq");
    world.stop("ja-3", false).unwrap();
    world.stop("ja-1", true).unwrap();
    world.finish(session, &held("ja-1", 1), Outcome::stopped());
    assert_eq!(world.states("ja"), "fsrsr");
    world.resume("ja").unwrap();
    assert_eq!(world.states("ja"), "qqrqr");
    let restored = world.stored();
    let waiting = restored
        .jobs
        .values()
        .filter(|job| matches!(job.queue_state, crate::model::QueueState::Ready(_)));
    assert_eq!(waiting.count(), 0, "two still run");
    // A member that returns from its device goes first.
    world.step(Event::DrainRequested {
        ticket: Ticket(7),
        worker: "w1".into(),
        drain: true,
        now: true,
    });
    world.finish(session, &held("ja-2", 1), Outcome::stopped());
    let ready = |world: &World| {
        world.state.arrays[&JobId::new("ja")]
            .ready
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
    };
    assert_eq!(ready(&world), ["ja-2"]);
}

#[test]
fn an_array_is_removed_as_a_whole() {
    let mut world = World::new();
    world.plain("ja", 2, None);
    let session = world.cpu("w1");
    let expire = |world: &mut World| {
        world.pass(1);
        world.heartbeat(session, &[held("ja-1", 1)]);
        let event = Event::Expire {
            jobs_before: Some(world.now),
            checkpoints_before: None,
        };
        world.step(event);
    };
    world.finish(session, &held("ja-0", 1), Outcome::Completed);
    expire(&mut world);
    assert_eq!(world.state.jobs.len(), 2, "one of it still runs");
    let after = NewJob {
        after: vec!["ja-1".into()],
        ..new_job("jl", retries(0))
    };
    world.step(Event::JobSubmitted {
        ticket: Ticket(1),
        job: Box::new(after),
    });
    world.finish(session, &held("ja-1", 1), Outcome::Completed);
    world.pass(1);
    expire(&mut world);
    assert_eq!(
        world.state.jobs.len(),
        3,
        "another one started after a member and may have to wait again"
    );
    world.finish(session, &held("jl", 1), Outcome::Completed);
    expire(&mut world);
    assert!(world.state.jobs.is_empty() && world.state.arrays.is_empty() && world.state.keys.is_empty());
}
