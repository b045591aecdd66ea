//! Requests for outputs of running trainings.

use super::*;
use crate::NewArray;
use aitk_common::requested_outputs::RequestedOutputs;

impl World {
    fn ask(&mut self, job: &str, outputs: RequestedOutputs) -> Result<JobView, Refusal> {
        self.step(Event::OutputsRequested {
            ticket: Ticket(8),
            job: job.into(),
            outputs,
        });
        self.reply()
    }

    fn refusal(&mut self, job: &str) -> String {
        let refused = self.ask(job, RequestedOutputs::SAVE).unwrap_err();
        assert!(matches!(refused, Refusal::Conflict(_)), "{refused:?}");
        assert!(!self.is_asked(job, RequestedOutputs::SAVE));
        refused.to_string()
    }

    /// Whether the last step asked the first attempt of this job.
    fn is_asked(&self, job: &str, outputs: RequestedOutputs) -> bool {
        let is_request = |message: &ToWorker| matches!(message, ToWorker::RequestOutputs { held: asked, outputs: these } if *asked == held(job, 1) && *these == outputs);
        self.sent(is_request)
    }
}

fn contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "\"{part}\" is not in: {text}");
    }
}

#[test]
fn a_running_job_is_asked_and_nothing_is_stored() {
    let mut world = World::new();
    world.submit("ja", retries(3));
    let session = world.cpu("w1");
    let before = world.state.job(&JobId::new("ja")).cloned();
    for outputs in [
        RequestedOutputs::SAVE,
        RequestedOutputs::SAMPLES,
        RequestedOutputs::SAVE,
    ] {
        let view = world.ask("ja", outputs).unwrap();
        assert_eq!(view.state, JobState::Running);
        assert!(world.is_asked("ja", outputs));
        let is_record = |effect: &Effect| matches!(effect, Effect::Persist(_) | Effect::Publish(..));
        assert!(!world.last.iter().any(is_record), "{:?}", world.last);
    }
    assert_eq!(world.state.job(&JobId::new("ja")).cloned(), before);
    // The worker is lost with the request: the next attempt is not asked.
    world.step(Event::SessionClosed { session });
    let refused = world.refusal("ja");
    contains(&refused, &["ja cannot save now", "runs on w1", "not connected"]);
    world.pass(600);
    world.cpu("w2");
    // Its retry waits a moment.
    world.pass(10);
    assert_eq!(world.view("ja").state, JobState::Running);
    assert!(!world.sent(|message| matches!(message, ToWorker::RequestOutputs { .. })));
}

#[test]
fn a_job_that_does_not_run_is_refused_with_its_state_and_what_to_do() {
    let mut world = World::new();
    assert!(matches!(
        world.ask("ja", RequestedOutputs::SAVE),
        Err(Refusal::NotFound(_))
    ));
    world.submit("ja", retries(3));
    contains(
        &world.refusal("ja"),
        &["ja cannot save now", "queued", "`aitk explain ja`"],
    );
    let session = world.cpu("w1");
    world.step(Event::PauseRequested {
        ticket: Ticket(5),
        job: "ja".into(),
    });
    contains(
        &world.refusal("ja"),
        &[
            "about to leave its device",
            "saves, then waits until it is resumed",
            "again",
        ],
    );
    world.finish(session, &held("ja", 1), Outcome::stopped());
    contains(&world.refusal("ja"), &["paused", "`aitk resume ja`"]);

    world.submit("jb", retries(3));
    world.step(Event::StopRequested {
        ticket: Ticket(5),
        job: "jb".into(),
        now: false,
    });
    contains(&world.refusal("jb"), &["stopping", "saves, then stops"]);
    world.finish(session, &held("jb", 1), Outcome::stopped());
    contains(
        &world.refusal("jb"),
        &["stopped", "`aitk artifacts ls jb`", "`aitk resume jb`"],
    );
    world.submit("jc", retries(3));
    world.finish(session, &held("jc", 1), Outcome::Completed);
    contains(&world.refusal("jc"), &["completed", "`aitk artifacts ls jc`"]);
}

#[test]
fn a_worker_that_does_not_know_requests_gets_none() {
    let mut world = World::new();
    world.submit("ja", retries(3));
    world.sessions += 1;
    let older = Registration {
        outputs_on_request: false,
        version: "0.0.9".into(),
        ..registration("w1", vec![device(DeviceKind::Cpu, 0)], Vec::new())
    };
    world.step(Event::WorkerRegistered {
        session: SessionId(world.sessions),
        fresh_id: WorkerId::new("fresh"),
        same_machine: true,
        registration: Box::new(older),
    });
    assert_eq!(world.view("ja").state, JobState::Running);
    contains(&world.refusal("ja"), &["runs on w1", "aitk 0.0.9", "install"]);
}

#[test]
fn the_members_of_an_array_that_run_are_asked() {
    let mut world = World::new();
    let member = |index| new_job(&format!("ja-{index}"), retries(3));
    world.step(Event::ArraySubmitted {
        ticket: Ticket(1),
        array: Box::new(NewArray {
            id: JobId::new("ja"),
            name: "ja".into(),
            at_most: None,
            split: false,
            idempotency_key: None,
            members: (0..2).map(member).collect(),
        }),
    });
    world.refusal("ja");
    world.cpu("w1");
    world.ask("ja", RequestedOutputs::SAMPLES).unwrap();
    assert!(world.is_asked("ja-0", RequestedOutputs::SAMPLES));
    assert!(!world.is_asked("ja-1", RequestedOutputs::SAMPLES));
}
