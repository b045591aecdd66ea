//! Tests of the removal of old jobs, checkpoints and workers.

use super::*;
use crate::MAX_EXPIRED_PER_CALL;
use aitk_common::control_plane::EventBody;

fn submit_after(world: &mut World, id: &str, after: &[&str]) {
    let job = NewJob {
        after: after.iter().map(|id| (*id).into()).collect(),
        ..new_job(id, retries(0))
    };
    world.step(Event::JobSubmitted {
        ticket: Ticket(1),
        job: Box::new(job),
    });
}

/// Runs retention with limits that every ended job exceeds.
fn expire(world: &mut World) {
    world.pass(1);
    let now = Some(world.now);
    world.step(Event::Expire {
        jobs_before: now,
        checkpoints_before: now,
    });
}

fn known(world: &World) -> Vec<&str> {
    let mut known: Vec<&str> = world.state.jobs.keys().map(JobId::as_str).collect();
    known.sort_unstable();
    known
}

#[test]
fn a_dependency_is_kept_while_its_dependents_may_start() {
    let mut world = World::new();
    let session = world.cpu("w1");
    world.submit("j1", retries(0));
    submit_after(&mut world, "j2", &["j1"]);
    submit_after(&mut world, "j3", &["j2"]);
    submit_after(&mut world, "j4", &["j3"]);
    world.finish(session, &held("j1", 1), Outcome::Completed);
    world.finish(session, &held("j2", 1), failed(FailureCause::BadInput));
    world.stop("j4", false).unwrap();
    assert_eq!(
        world
            .state
            .removable_jobs(Some(world.now.after(Duration::from_secs(1))))
            .len(),
        1
    );
    // j3 waits for j2, which failed and may be resumed; then it needs j1 to have completed.
    expire(&mut world);
    assert_eq!(known(&world), ["j1", "j2", "j3"]);
    world.resume("j2").unwrap();
    world.finish(session, &held("j2", 2), Outcome::Completed);
    expire(&mut world);
    assert_eq!(known(&world), ["j2", "j3"], "it runs, and may have to wait again");
    world.finish(session, &held("j3", 1), Outcome::Completed);
    expire(&mut world);
    assert_eq!(known(&world), Vec::<&str>::new());
}

#[test]
fn a_stopped_job_keeps_its_checkpoint() {
    let mut world = World::new();
    let session = world.cpu("w1");
    for (job, outcome) in [
        ("j1", Outcome::stopped()),
        ("j2", failed(FailureCause::BadInput)),
        ("j3", Outcome::Completed),
    ] {
        world.submit(job, retries(0));
        world.commit(session, &held(job, 1), 3);
        if job == "j1" {
            world.stop(job, false).unwrap();
        }
        world.finish(session, &held(job, 1), outcome);
    }
    world.pass(1);
    let (jobs_before, checkpoints_before) = (None, Some(world.now));
    world.step(Event::Expire {
        jobs_before,
        checkpoints_before,
    });
    let steps = ["j1", "j2", "j3"].map(|job| world.view(job).checkpoint_step);
    assert_eq!(steps, [Some(3), None, None]);
    let is_logged = |effect: &Effect| {
        matches!(effect, Effect::Publish(job, event) if job.as_str() == "j2"
            && matches!(&event.body, EventBody::Log { message, .. } if message.contains("it starts from the beginning")))
    };
    assert!(world.last.iter().any(is_logged), "{:?}", world.last);
    // Its user stopped it and resumes it from its checkpoint.
    world.resume("j1").unwrap();
    let resumed = world.last.iter().find_map(|effect| match effect {
        Effect::Assign(_, placed) => placed.resume,
        _ => None,
    });
    assert_eq!(resumed, Some(manifest("3")));
}

impl World {
    fn remove(&mut self, job: &str) -> Result<JobView, Refusal> {
        self.step(Event::RemoveRequested {
            ticket: Ticket(4),
            job: job.into(),
        });
        self.reply()
    }

    fn forget(&mut self, worker: &str) -> Result<(), Refusal> {
        self.step(Event::ForgetWorkerRequested {
            ticket: Ticket(4),
            worker: worker.into(),
        });
        let reply = self.last.iter().find_map(|effect| match effect {
            Effect::Reply(_, reply) => Some(reply.clone()),
            _ => None,
        });
        reply.expect("no reply").map(drop)
    }
}

#[test]
fn only_ended_jobs_without_dependents_can_be_removed() {
    let mut world = World::new();
    world.submit("ja", retries(0));
    submit_after(&mut world, "jb", &["ja"]);
    let refused = world.remove("ja").unwrap_err().to_string();
    assert!(refused.contains("aitk stop ja"), "{refused}");
    world.stop("ja", false).unwrap();
    let refused = world.remove("ja").unwrap_err().to_string();
    assert!(refused.contains("jb (queued) starts after job ja"), "{refused}");
    world.stop("jb", false).unwrap();
    world.remove("jb").unwrap();
    assert_eq!(world.remove("ja").unwrap().id.as_str(), "ja");
    let is_removed = |effect: &Effect| matches!(effect, Effect::Persist(Record::JobRemoved(id)) if id.as_str() == "ja");
    assert!(world.last.iter().any(is_removed));
    assert!(matches!(world.remove("ja"), Err(Refusal::NotFound(_))));
}

#[test]
fn only_disconnected_workers_without_jobs_can_be_removed() {
    let mut world = World::new();
    let session = world.cpu("w1");
    world.submit("ja", retries(0));
    assert!(world.forget("w1").unwrap_err().to_string().contains("is connected"));
    world.step(Event::SessionClosed { session });
    assert!(world.forget("w1").unwrap_err().to_string().contains("may still run ja"));
    world.stop("ja", true).unwrap();
    world.pass(60);
    world.forget("w1").unwrap();
    assert!(world.state.worker_views(|_| true).is_empty());
    let is_removed =
        |effect: &Effect| matches!(effect, Effect::Persist(Record::WorkerRemoved(id)) if id.as_str() == "w1");
    assert!(world.last.iter().any(is_removed));
    assert!(matches!(world.forget("w1"), Err(Refusal::UnknownWorker(_))));
    // It registers again and gets work.
    world.cpu("w1");
    world.submit("jb", retries(0));
    assert_eq!(world.view("jb").state, JobState::Running);
}

/// No other event waits for more than one batch.
#[test]
fn old_jobs_are_removed_in_batches() {
    let mut world = World::new();
    let jobs = 2 * MAX_EXPIRED_PER_CALL + 10;
    for number in 0..jobs {
        let id = format!("j{number}");
        world.submit(&id, retries(0));
        world.stop(&id, true).unwrap();
    }
    let mut left = vec![jobs];
    while !world.state.jobs.is_empty() {
        expire(&mut world);
        assert!(world.last.len() <= MAX_EXPIRED_PER_CALL, "{} effects", world.last.len());
        left.push(world.state.jobs.len());
        assert!(left.len() < 10, "{left:?}");
    }
    assert_eq!(left, [jobs, MAX_EXPIRED_PER_CALL + 10, 10, 0]);
}
