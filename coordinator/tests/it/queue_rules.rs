//! Queue rules through the protocol, before and after a restart.

use crate::access::wait_for_audit_line;
use crate::support::{FakeWorker, TestCoordinator, held_attempt, submission, within};
use aitk_common::attempt::Outcome;
use aitk_common::control_plane::{Forecast, JobState, JobView, Submission, ToWorker, WorkerView};
use aitk_common::id::UserName;
use aitk_common::plan::parameter_counts::ParameterCounts;
use aitk_common::plan::profile::MemoryProfile;
use aitk_common::requested_outputs::RequestedOutputs;
use aitk_proto::v1;
use std::time::Duration;
use tonic::{Code, Status};

const LONG_LEASE: Duration = Duration::from_secs(60);

/// A LoRA of Stable Diffusion 1.x, with this `cluster` section.
fn lora(name: &str, cluster: &str) -> Submission {
    let job_json = format!(
        r#"{{"job":"extension","name":"{name}","meta":{{}},"config":{{}},"process":[{{"type":"sd_trainer","kind":{{"train":{{
            "training_folder":"out","model":{{"arch":"sd1","name_or_path":"org/m","dtype":"float32"}},"network":{{"linear":4}},
            "train":{{"steps":100,"dtype":"float32"}},"datasets":[{{"folder_path":"./data","resolution":[512]}}]}}}}}}],
            "cluster":{{{cluster}}}}}"#
    );
    Submission {
        job_json,
        ..submission(name)
    }
}

async fn submit(coordinator: &TestCoordinator, submission: Submission) -> JobView {
    let mut jobs = coordinator.clients.jobs.clone();
    let reply = within(jobs.submit(v1::SubmitRequest::from(submission))).await.unwrap();
    coordinator.job(&reply.into_inner().job_id).await
}

async fn drain(coordinator: &TestCoordinator, worker: &str, drain: bool, now: bool) -> WorkerView {
    let request = v1::DrainWorkerRequest {
        worker: worker.into(),
        drain,
        now,
    };
    let mut jobs = coordinator.clients.jobs.clone();
    within(jobs.drain_worker(request))
        .await
        .unwrap()
        .into_inner()
        .try_into()
        .unwrap()
}

async fn next_stop_message(worker: &mut FakeWorker) -> bool {
    worker
        .wait_for_message(|message| match message {
            ToWorker::Stop { save, .. } => Some(save),
            _ => None,
        })
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn fit_and_explain_name_devices_and_reasons() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let fit = |submission: Submission| {
        let mut jobs = coordinator.clients.jobs.clone();
        async move {
            let reply = within(jobs.fit(v1::SubmitRequest::from(submission))).await.unwrap();
            Forecast::try_from(reply.into_inner()).unwrap()
        }
    };
    let without_workers = fit(lora("a", "")).await;
    assert!(
        !without_workers.fits_somewhere() && without_workers.summary.contains("no worker is connected"),
        "{without_workers:?}"
    );
    let mut worker = FakeWorker::new(&coordinator, "w1").await;
    // All of SD 1.5 does not fit into the 4 GiB of this device. With a smaller profile it does, a tiny model does, and so does a
    // job whose `memory_budget` fits.
    let all_in_memory = || lora("a", r#""memory_profile":"cpu_only""#);
    let whole = fit(all_in_memory()).await;
    assert!(
        !whole.fits_somewhere() && whole.summary.contains("with the profile cpu_only"),
        "{whole:?}"
    );
    let smaller_profile = fit(lora("a", "")).await;
    assert_eq!(
        smaller_profile.devices[0].profile,
        Some(MemoryProfile::GpuPoor),
        "{smaller_profile:?}"
    );
    let toy = Submission {
        parameter_counts: Some(ParameterCounts {
            denoiser: 1_000_000,
            text: 1,
            vae: 1,
            ..ParameterCounts::default()
        }),
        ..lora("a", "")
    };
    let toy = fit(toy).await;
    assert!(
        toy.fits_somewhere() && toy.devices[0].can_start_now && toy.devices[0].memory.is_some(),
        "{toy:?}"
    );
    assert_eq!(toy.devices[0].profile, Some(MemoryProfile::CpuOnly));
    let with_budget = fit(lora("a", r#""memory_budget":1000000000"#)).await;
    assert!(
        with_budget
            .summary
            .starts_with("would start now on w1 cpu: extreme (0.9 GiB of 4.0 GiB"),
        "{with_budget:?}"
    );

    let job = submit(&coordinator, all_in_memory()).await;
    assert_eq!(job.state, JobState::Queued);
    let request = v1::ExplainRequest {
        job_id: job.id.to_string(),
    };
    let explained = within(coordinator.clients.jobs.clone().explain(request))
        .await
        .unwrap()
        .into_inner();
    let explained = Forecast::try_from(explained).unwrap();
    assert_eq!(explained.summary, job.reason);
    assert!(
        explained.devices[0]
            .description
            .starts_with("w1 cpu: too small: even cpu_only needs about"),
        "{explained:?}"
    );
    let unknown_job = v1::ExplainRequest {
        job_id: "jnobody".into(),
    };
    let refused = within(coordinator.clients.jobs.clone().explain(unknown_job))
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::NotFound);
    let small = submit(&coordinator, lora("b", r#""memory_budget":1000000000"#)).await;
    assert_eq!(worker.next_assignment().await.job, small.id);
    within(coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pauses_priorities_owners_and_dependencies_survive_a_restart() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let mut worker = FakeWorker::new(&coordinator, "w1").await;
    let owned = Submission {
        owner: Some(UserName::new("ada")),
        ..submission("first")
    };
    let first = submit(&coordinator, owned).await;
    assert_eq!(first.owner, UserName::new("ada"));
    let work = worker.next_assignment().await;
    worker.heartbeat(&[held_attempt(&work)]).await;
    let small = r#""memory_budget":1000000000"#;
    let second = submit(
        &coordinator,
        lora("second", &format!(r#"{small},"after":["{}"]"#, first.id)),
    )
    .await;
    assert!(
        second.reason.starts_with(&format!("waits for {} (first)", first.id)),
        "{}",
        second.reason
    );
    let third = submit(&coordinator, lora("third", small)).await;
    let change = v1::SetPriorityRequest {
        job_id: third.id.to_string(),
        priority: -7,
    };
    let third: JobView = within(coordinator.clients.jobs.clone().set_priority(change))
        .await
        .unwrap()
        .into_inner()
        .try_into()
        .unwrap();
    assert_eq!(third.priority, -7);
    let pause = v1::PauseJobRequest {
        job_id: third.id.to_string(),
    };
    within(coordinator.clients.jobs.clone().pause(pause)).await.unwrap();
    let unknown = lora("fourth", r#""after":["nobody"]"#);
    let refused = within(
        coordinator
            .clients
            .jobs
            .clone()
            .submit(v1::SubmitRequest::from(unknown)),
    )
    .await
    .unwrap_err();
    assert!(refused.message().contains("no job \"nobody\""), "{refused:?}");

    let coordinator = coordinator.restart().await;
    let third = coordinator.job(third.id.as_str()).await;
    assert!(
        third.paused && third.priority == -7 && third.reason.starts_with("paused"),
        "{third:?}"
    );
    let registration = FakeWorker::registration("w1", Some(worker.id.clone()), vec![held_attempt(&work)]);
    let mut worker = FakeWorker::register(&coordinator.clients, registration).await;
    assert_eq!(worker.keep, std::slice::from_ref(&work.attempt));
    worker
        .request(|request| aitk_common::control_plane::ToCoordinator::Finished {
            request,
            held: held_attempt(&work),
            outcome: Outcome::Completed,
        })
        .await;
    let next = worker.next_assignment().await;
    assert_eq!(next.job, second.id);
    within(coordinator.running.shutdown()).await;
}

/// The answer to `Save` or `Sample`.
async fn request_outputs(
    coordinator: &TestCoordinator,
    job: &JobView,
    outputs: RequestedOutputs,
) -> Result<JobView, Status> {
    let (mut jobs, job_id) = (coordinator.clients.jobs.clone(), job.id.to_string());
    let answer = match outputs.samples {
        true => within(jobs.sample(v1::SampleJobRequest { job_id })).await,
        false => within(jobs.save(v1::SaveJobRequest { job_id })).await,
    };
    answer.map(|job| job.into_inner().try_into().unwrap())
}

/// A refusal with the code for a state, and with these texts.
fn assert_refused(answer: Result<JobView, Status>, parts: &[&str]) {
    let refused = answer.unwrap_err();
    assert_eq!(refused.code(), Code::Aborted, "{refused:?}");
    for part in parts {
        assert!(refused.message().contains(part), "\"{part}\" is not in: {refused:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_for_outputs_reaches_the_worker_or_is_refused() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let small = r#""memory_budget":1000000000"#;
    let training = submit(&coordinator, lora("training", small)).await;
    let refused = request_outputs(&coordinator, &training, RequestedOutputs::SAVE).await;
    assert_refused(refused, &["cannot save now", "queued", "aitk explain"]);
    let mut worker = FakeWorker::new(&coordinator, "w1").await;
    let work = worker.next_assignment().await;
    worker.heartbeat(&[held_attempt(&work)]).await;
    // Each request is passed on; the worker merges those that it has not served.
    for _ in 0..2 {
        let view = request_outputs(&coordinator, &training, RequestedOutputs::SAVE)
            .await
            .unwrap();
        assert_eq!((view.id, view.state), (training.id.clone(), JobState::Running));
        let (held, outputs) = worker
            .wait_for_message(|message| match message {
                ToWorker::RequestOutputs { held, outputs } => Some((held, outputs)),
                _ => None,
            })
            .await;
        assert_eq!((held, outputs), (held_attempt(&work), RequestedOutputs::SAVE));
    }
    let no_samples = request_outputs(&coordinator, &training, RequestedOutputs::SAMPLES).await;
    assert_refused(no_samples, &["cannot sample on request", "has no prompts"]);
    // What is refused is in the audit log, too.
    for (action, done) in [("job.save", true), ("job.save", false), ("job.sample", false)] {
        let is_line = |line: &v1::AuditLine| line.action == action && line.done == done;
        let line = wait_for_audit_line(&coordinator.clients, action, is_line).await;
        assert_eq!(line.object, training.id.as_str(), "{line:?}");
    }

    // The worker is lost: nothing is kept for the next attempt.
    drop(worker);
    let mut refusals = tokio::time::interval(Duration::from_millis(20));
    let refused = within(async {
        loop {
            refusals.tick().await;
            if let Err(refused) = request_outputs(&coordinator, &training, RequestedOutputs::SAVE).await {
                return refused;
            }
        }
    })
    .await;
    assert_refused(Err(refused), &["runs on w1", "not connected"]);
    within(coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn outputs_are_requested_only_of_trainings_and_of_workers_that_know_requests() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let images = submit(&coordinator, submission("images")).await;
    let older = aitk_common::control_plane::Registration {
        outputs_on_request: false,
        ..FakeWorker::registration("w1", None, Vec::new())
    };
    let mut worker = FakeWorker::register(&coordinator.clients, older).await;
    let work = worker.next_assignment().await;
    assert_eq!(work.job, images.id);
    for outputs in [RequestedOutputs::SAVE, RequestedOutputs::SAMPLES] {
        let refused = request_outputs(&coordinator, &images, outputs).await;
        assert_refused(refused, &["on request", "it has no training"]);
    }
    worker
        .request(|request| aitk_common::control_plane::ToCoordinator::Finished {
            request,
            held: held_attempt(&work),
            outcome: Outcome::Completed,
        })
        .await;
    let training = submit(&coordinator, lora("training", r#""memory_budget":1000000000"#)).await;
    worker.next_assignment().await;
    let refused = request_outputs(&coordinator, &training, RequestedOutputs::SAVE).await;
    assert_refused(refused, &["runs on w1", "aitk test", "does not know such requests"]);
    within(coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drained_worker_gives_its_job_back_and_stays_drained_after_a_restart() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let mut one = FakeWorker::new(&coordinator, "w1").await;
    let job = submit(&coordinator, submission("a")).await;
    let work = one.next_assignment().await;
    assert_eq!(work.job, job.id);
    one.heartbeat(&[held_attempt(&work)]).await;
    let drained = drain(&coordinator, "w1", true, true).await;
    assert!(
        drained.drained && drained.devices[0].jobs == [job.id.clone()],
        "{drained:?}"
    );
    assert!(next_stop_message(&mut one).await, "it saves first");
    one.request(|request| aitk_common::control_plane::ToCoordinator::Finished {
        request,
        held: held_attempt(&work),
        outcome: Outcome::stopped(),
    })
    .await;
    let waiting = coordinator.job(job.id.as_str()).await;
    assert_eq!((waiting.state, waiting.failures), (JobState::Queued, 0));
    assert!(waiting.reason.contains("w1 is drained"), "{}", waiting.reason);
    let coordinator = coordinator.restart().await;
    let registration = FakeWorker::registration("w1", Some(one.id.clone()), Vec::new());
    let mut one = FakeWorker::register(&coordinator.clients, registration).await;
    assert_eq!(
        coordinator.job(job.id.as_str()).await.state,
        JobState::Queued,
        "also after a restart"
    );
    drain(&coordinator, one.id.clone().as_str(), false, false).await;
    assert_eq!(one.next_assignment().await.job, job.id);
    let request = v1::DrainWorkerRequest {
        worker: "nobody".into(),
        drain: true,
        now: false,
    };
    let refused = within(coordinator.clients.jobs.clone().drain_worker(request))
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::NotFound);
    within(coordinator.running.shutdown()).await;
}
