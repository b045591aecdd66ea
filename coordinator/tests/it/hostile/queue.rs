//! Jobs and machines of absurd sizes.
#![allow(clippy::print_stdout, reason = "figures for whoever asks for them")]

use super::{Besieged, view};
use crate::support::{FakeWorker, job_json, submission, within};
use aitk_common::control::{JobState, ToCoordinator};
use aitk_common::hash::ContentHash;
use aitk_proto::v1;
use std::collections::HashMap;
use std::time::{Duration, Instant};
use tonic::Code;

fn named(name: &str, cluster: &str) -> v1::SubmitRequest {
    v1::SubmitRequest {
        job_json: job_json(name, cluster),
        ..v1::SubmitRequest::from(submission(name))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_of_ten_megabytes_is_refused_in_words() {
    let besieged = Besieged::start().await;
    let clients = besieged.daemon.clients().await;
    let long = "x".repeat(10 << 20);
    let text = v1::SubmitRequest {
        config_text: long.clone(),
        ..named("long", "")
    };
    let json = v1::SubmitRequest {
        job_json: format!(r#"{{"job":"extension","name":"long","process":["{long}"]}}"#),
        ..named("long", "")
    };
    let memory = besieged.memory();
    for _ in 0..4 {
        for request in [&text, &json] {
            for fit in [false, true] {
                let mut jobs = clients.jobs.clone();
                let error = if fit {
                    within(jobs.fit(request.clone())).await.unwrap_err()
                } else {
                    within(jobs.submit(request.clone())).await.unwrap_err()
                };
                assert_eq!(error.code(), Code::InvalidArgument, "{error}");
                assert!(error.message().contains("a config may have at most 4194304"), "{error}");
            }
        }
    }
    let inputs = |count: usize, path: usize| -> HashMap<String, String> {
        let hash = ContentHash::of(b"x").to_hex();
        (0..count)
            .map(|number| (format!("{number:0path$}"), hash.clone()))
            .collect()
    };
    for (inputs, words) in [(inputs(10_001, 1), "at most 10000"), (inputs(1, 4097), "at most 4096")] {
        let request = v1::SubmitRequest {
            inputs,
            ..named("inputs", "")
        };
        let error = within(clients.jobs.clone().submit(request)).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert!(error.message().contains(words), "{error}");
    }
    besieged.has_not_grown(memory, 128 << 20);
    besieged.works().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_of_absurd_sizes_do_not_register() {
    let besieged = Besieged::start().await;
    let clients = besieged.daemon.clients().await;
    let base = || v1::Register::from(FakeWorker::registration("w", None, Vec::new()));
    let device = base().devices[0].clone();
    let many = |count: u32| {
        let numbered = |index| {
            let mut device = device.clone();
            if let Some(device) = &mut device.device {
                device.index = index;
            }
            device
        };
        (0..count).map(numbered).collect::<Vec<_>>()
    };
    let labels = |count: usize, bytes: usize| -> HashMap<String, String> {
        (0..count)
            .map(|number| (format!("k{number}"), "v".repeat(bytes)))
            .collect()
    };
    let refused = [
        (
            v1::Register {
                devices: many(10_000),
                ..base()
            },
            "at most 1024",
        ),
        (
            v1::Register {
                labels: labels(1, 1 << 20),
                ..base()
            },
            "at most 256",
        ),
        (
            v1::Register {
                labels: labels(10_000, 1),
                ..base()
            },
            "at most 256",
        ),
        (
            v1::Register {
                name: "n".repeat(1 << 20),
                ..base()
            },
            "at most 256",
        ),
        (
            v1::Register {
                worker_id: "w".repeat(1 << 20),
                ..base()
            },
            "worker_id",
        ),
        (
            v1::Register {
                worker_id: "../../etc".into(),
                ..base()
            },
            "worker_id",
        ),
    ];
    let memory = besieged.memory();
    for (register, words) in refused {
        let first = v1::WorkerMessage {
            request_id: 0,
            message: Some(v1::worker_message::Message::Register(register)),
        };
        let (sender, receiver) = tokio::sync::mpsc::channel(4);
        sender.send(first).await.unwrap();
        let stream = tokio_stream::wrappers::ReceiverStream::new(receiver);
        let mut answers = within(clients.workers.clone().session(stream))
            .await
            .unwrap()
            .into_inner();
        let error = within(answers.message()).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert!(
            error.message().contains(words) && error.message().len() < 1000,
            "{error}"
        );
    }
    besieged.has_not_grown(memory, 64 << 20);
    // As many devices as may be, with memory beyond what any number holds, do no harm.
    let mut huge = FakeWorker::registration("huge", None, Vec::new());
    let device = huge.devices[0].clone();
    huge.devices = (0..1024)
        .map(|index| {
            let mut device = device.clone();
            device.device.index = index;
            (device.memory_total, device.memory_budget) = (u64::MAX, u64::MAX);
            device
        })
        .collect();
    let huge = FakeWorker::register(&clients, huge).await;
    let sized = v1::SubmitRequest {
        anatomy: Some(v1::Anatomy {
            denoiser: u64::MAX,
            text: u64::MAX,
            vae: u64::MAX,
            denoiser_stored: Some(v1::StoredWeights {
                quantised: u64::MAX,
                bytes: u64::MAX,
                halves: u64::MAX,
            }),
            ..v1::Anatomy::default()
        }),
        ..named(
            "sized",
            r#""memory_budget":9223372036854775807,"labels":{"no":"where"}"#,
        )
    };
    let job = within(clients.jobs.clone().submit(sized))
        .await
        .unwrap()
        .into_inner()
        .job_id;
    assert_eq!(view(&clients, &job).await.state, JobState::Queued);
    drop(huge);
    besieged.works().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_identity_is_one_session() {
    let besieged = Besieged::start().await;
    let clients = besieged.daemon.clients().await;
    let first = FakeWorker::registration("twin", None, Vec::new());
    let mut worker = FakeWorker::register(&clients, first).await;
    let id = worker.id.clone();
    // Each takes over from the one before, which is told so and need not come back.
    for _ in 0..20 {
        let again = FakeWorker::registration("twin", Some(id.clone()), Vec::new());
        let next = FakeWorker::register(&clients, again).await;
        let told = worker
            .until(|message| match message {
                aitk_common::control::ToWorker::GoingAway { reason, retry } => Some((reason, retry)),
                _ => None,
            })
            .await;
        assert!(told.0.contains("took over") && !told.1, "{told:?}");
        // What the older one still says changes nothing.
        worker.send(ToCoordinator::GoingAway { reason: "echo".into() }).await;
        worker = next;
    }
    let workers = within(clients.jobs.clone().list_workers(v1::ListWorkersRequest {}))
        .await
        .unwrap();
    let workers = workers.into_inner().workers;
    assert!(
        workers.len() == 1 && workers[0].connected && !workers[0].leaving,
        "{workers:?}"
    );
    drop(worker);
    besieged.works().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_jobs_that_fit_nowhere_cost_nothing_to_have() {
    // A debug build checks every invariant of every job after each step, which takes its time.
    const JOBS: u64 = if cfg!(debug_assertions) { 1_000 } else { 10_000 };
    let besieged = Besieged::start().await;
    let clients = besieged.daemon.clients().await;
    let _worker = FakeWorker::register(&clients, FakeWorker::registration("small", None, Vec::new())).await;
    // Each asks for something else, so that nothing is decided for all of them at once.
    let begin = Instant::now();
    let submitting: Vec<_> = (0..16)
        .map(|client| {
            let clients = clients.clone();
            tokio::spawn(async move {
                for number in (client..JOBS).step_by(16) {
                    let memory = (1_u64 << 50) + number;
                    let job = named(&format!("n{number}"), &format!(r#""memory_budget":{memory}"#));
                    clients.jobs.clone().submit(job).await.unwrap();
                }
            })
        })
        .collect();
    for one in submitting {
        one.await.unwrap();
    }
    println!("submitted in {:?}", begin.elapsed());
    let begin = Instant::now();
    let request = v1::ListJobsRequest {
        all: true,
        ..Default::default()
    };
    let listed = within(clients.jobs.clone().list(request))
        .await
        .unwrap()
        .into_inner()
        .jobs;
    println!("listed in {:?}", begin.elapsed());
    assert_eq!(listed.len() as u64, JOBS);
    assert!(
        listed.iter().all(|job| job.reason.contains("of device memory")),
        "{:?}",
        listed[0]
    );
    let explained = within(clients.jobs.clone().explain(v1::ExplainRequest {
        job_id: listed[0].id.clone(),
    }))
    .await
    .unwrap();
    assert!(explained.into_inner().summary.contains("of device memory"));

    // They wait without anything being done for them.
    if let Some(before) = cpu_ticks(besieged.daemon.id()) {
        tokio::time::sleep(Duration::from_secs(5)).await;
        let spent = cpu_ticks(besieged.daemon.id()).unwrap() - before;
        println!("{spent} hundredths of a second of a core in 5 s");
    }
    // And keep nobody out.
    let begin = Instant::now();
    besieged.works().await;
    println!("a job between them took {:?}", begin.elapsed());
}

/// Processor time of a process, in hundredths of a second; none where the kernel does not say.
fn cpu_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    let fields: Vec<&str> = rest.split(' ').collect();
    Some(fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?)
}
