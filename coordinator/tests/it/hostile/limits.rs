//! Limits on the sizes of jobs, workers and users' queues.

use super::{TestServer, view};
use crate::support::{FakeWorker, job_json, submission, within};
use aitk_common::control_plane::{JobState, ToCoordinator};
use aitk_common::hash::ContentHash;
use aitk_proto::client::Clients;
use aitk_proto::v1;
use std::collections::{HashMap, HashSet};
use std::time::Duration;
use tonic::Code;

/// Less than half a core over 5 seconds, in ticks of 10 ms.
const IDLE_CPU_TICKS: u64 = 250;

fn request(name: &str, cluster: &str) -> v1::SubmitRequest {
    v1::SubmitRequest {
        job_json: job_json(name, cluster),
        ..v1::SubmitRequest::from(submission(name))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_of_ten_megabytes_is_refused_with_the_limit() {
    let server = TestServer::start().await;
    let clients = server.daemon.clients().await;
    let long = "x".repeat(10 << 20);
    let text = v1::SubmitRequest {
        config_text: long.clone(),
        ..request("long", "")
    };
    let json = v1::SubmitRequest {
        job_json: format!(r#"{{"job":"extension","name":"long","process":["{long}"]}}"#),
        ..request("long", "")
    };
    let memory = server.resident_memory();
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
    for (inputs, expected) in [(inputs(10_001, 1), "at most 10000"), (inputs(1, 4097), "at most 4096")] {
        let request = v1::SubmitRequest {
            inputs,
            ..request("inputs", "")
        };
        let error = within(clients.jobs.clone().submit(request)).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert!(error.message().contains(expected), "{error}");
    }
    server.assert_memory_growth(memory, 128 << 20);
    server.assert_works().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_with_oversized_fields_cannot_register() {
    let server = TestServer::start().await;
    let clients = server.daemon.clients().await;
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
    let memory = server.resident_memory();
    for (register, expected) in refused {
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
            error.message().contains(expected) && error.message().len() < 1000,
            "{error}"
        );
    }
    server.assert_memory_growth(memory, 64 << 20);
    // The largest allowed number of devices, each with the largest memory size, is accepted and nothing overflows.
    let mut huge = FakeWorker::registration("huge", None, Vec::new());
    let device = huge.devices[0].clone();
    huge.devices = (0..1024)
        .map(|index| {
            let mut device = device.clone();
            device.id.index = index;
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
        ..request(
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
    server.assert_works().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_session_replaces_the_one_with_the_same_worker_id() {
    let server = TestServer::start().await;
    let clients = server.daemon.clients().await;
    let first = FakeWorker::registration("twin", None, Vec::new());
    let mut worker = FakeWorker::register(&clients, first).await;
    let id = worker.id.clone();
    // Each session replaces the one before, which gets a message that tells it not to reconnect.
    for _ in 0..20 {
        let registration = FakeWorker::registration("twin", Some(id.clone()), Vec::new());
        let next = FakeWorker::register(&clients, registration).await;
        let (reason, retry) = worker
            .wait_for_message(|message| match message {
                aitk_common::control_plane::ToWorker::GoingAway { reason, retry } => Some((reason, retry)),
                _ => None,
            })
            .await;
        assert!(reason.contains("took over") && !retry, "{reason} (retry: {retry})");
        // A later message on the replaced session has no effect.
        worker.send(ToCoordinator::GoingAway { reason: "echo".into() }).await;
        worker = next;
    }
    let workers = within(clients.jobs.clone().list_workers(v1::ListWorkersRequest::default()))
        .await
        .unwrap();
    let workers = workers.into_inner().workers;
    assert!(
        workers.len() == 1 && workers[0].connected && !workers[0].leaving,
        "{workers:?}"
    );
    drop(worker);
    server.assert_works().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_waiting_jobs_that_fit_nowhere_leave_the_coordinator_mostly_idle() {
    // A debug build checks every invariant of every job after each step, which is slow.
    const JOBS: u64 = if cfg!(debug_assertions) { 1_000 } else { 10_000 };
    let server = TestServer::start().await;
    let clients = server.daemon.clients().await;
    let _worker = FakeWorker::register(&clients, FakeWorker::registration("small", None, Vec::new())).await;
    // Each needs a different amount of memory, so each is a class of its own in the scheduler.
    let submitting: Vec<_> = (0..16)
        .map(|client| {
            let clients = clients.clone();
            tokio::spawn(async move {
                for number in (client..JOBS).step_by(16) {
                    let memory = (1_u64 << 50) + number;
                    let job = request(&format!("n{number}"), &format!(r#""memory_budget":{memory}"#));
                    clients.jobs.clone().submit(job).await.unwrap();
                }
            })
        })
        .collect();
    for task in submitting {
        task.await.unwrap();
    }
    let request = v1::ListJobsRequest {
        all: true,
        ..Default::default()
    };
    let listed = list_all_pages(&clients, request).await;
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

    // CPU time, not wall-clock time: other load on the machine does not increase it.
    if let Some(before) = cpu_ticks(server.daemon.id()) {
        tokio::time::sleep(Duration::from_secs(5)).await;
        let used = cpu_ticks(server.daemon.id()).unwrap() - before;
        assert!(
            used < IDLE_CPU_TICKS,
            "the coordinator used {used} ticks (10 ms each) of CPU time in 5 s without any event; expected less than {IDLE_CPU_TICKS}"
        );
    }
    // Another job still runs.
    server.assert_works().await;
}

/// All jobs of a list, read page by page, each once.
async fn list_all_pages(clients: &Clients, mut request: v1::ListJobsRequest) -> Vec<v1::Job> {
    let (mut all, mut seen) = (Vec::new(), HashSet::new());
    loop {
        let reply = within(clients.jobs.clone().list(request.clone())).await.unwrap();
        assert!(aitk_proto::encoded_len(reply.get_ref()) < 8 << 20);
        let reply = reply.into_inner();
        assert!((1..=1000).contains(&reply.jobs.len()), "{}", reply.jobs.len());
        all.extend(reply.jobs.into_iter().filter(|job| seen.insert(job.id.clone())));
        if reply.next_page_token.is_empty() {
            assert_eq!(reply.total, all.len() as u64);
            return all;
        }
        request.page_token = reply.next_page_token;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_and_names_work_with_many_waiting_jobs_that_have_long_names() {
    let server = TestServer::start().await;
    let (ada, eve) = (server.submitter("ada").await, server.submitter("eve").await);
    let admin = server.daemon.clients().await;
    for array in 0..3 {
        let name = |member: usize| format!("{array}-{member:04}-{}", "n".repeat(180));
        let members = (0..1000).map(|member| v1::ArrayMember {
            job_json: request(&name(member), r#""labels":{"no":"where"}"#).job_json,
            twin: 0,
        });
        let request = v1::SubmitArrayRequest {
            shared: Some(v1::SubmitRequest::from(submission("shared"))),
            name: name(0),
            members: members.collect(),
            at_most: 0,
        };
        within(eve.jobs.clone().submit_array(request)).await.unwrap();
    }
    let submitted = within(ada.jobs.clone().submit(request("needle", r#""priority":-5"#)))
        .await
        .unwrap();
    let needle = submitted.into_inner().job_id;

    let members = v1::ListJobsRequest {
        members: true,
        ..Default::default()
    };
    let all = list_all_pages(&admin, members.clone()).await;
    assert_eq!(all.len(), 3_001);
    assert_eq!(
        all.last().map(|job| job.id.as_str()),
        Some(needle.as_str()),
        "it has the lowest priority"
    );
    // A request without a page token gets the first page.
    let first = within(admin.jobs.clone().list(members.clone()))
        .await
        .unwrap()
        .into_inner();
    assert_eq!((first.jobs.len(), first.total), (1_000, 3_001));
    let listed_ids = |request: v1::ListJobsRequest| {
        let admin = admin.clone();
        async move {
            let jobs = within(admin.jobs.clone().list(request))
                .await
                .unwrap()
                .into_inner()
                .jobs;
            jobs.into_iter().map(|job| job.id).collect::<Vec<_>>()
        }
    };
    let (needle_only, none) = (vec![needle.clone()], Vec::<String>::new());
    let filters = [
        (
            v1::ListJobsRequest {
                owner: "ada".into(),
                ..members.clone()
            },
            &needle_only,
        ),
        (
            v1::ListJobsRequest {
                name: "needle".into(),
                ..members.clone()
            },
            &needle_only,
        ),
        (
            v1::ListJobsRequest {
                name_part: "eedl".into(),
                ..members.clone()
            },
            &needle_only,
        ),
        (
            v1::ListJobsRequest {
                states: vec![v1::JobState::Running.into()],
                ..members.clone()
            },
            &none,
        ),
        (
            v1::ListJobsRequest {
                since_ms: u64::MAX,
                ..members.clone()
            },
            &none,
        ),
    ];
    for (request, expected) in filters {
        assert_eq!(&listed_ids(request.clone()).await, expected, "{request:?}");
    }
    // A job is found by its name however many jobs others have. A change to a name that several jobs share asks for the id.
    assert_eq!(view(&admin, "needle").await.id.as_str(), needle);
    assert_eq!(view(&ada, "needle").await.id.as_str(), needle);
    within(ada.jobs.clone().submit(request("needle", ""))).await.unwrap();
    let stop = |job: &str| v1::StopJobRequest {
        job_id: job.into(),
        now: false,
    };
    let error = within(ada.jobs.clone().stop(stop("needle"))).await.unwrap_err();
    assert!(
        error.code() == Code::InvalidArgument && error.message().contains(&needle),
        "{error}"
    );
    within(ada.jobs.clone().stop(stop(&needle))).await.unwrap();
    within(ada.jobs.clone().stop(stop("needle"))).await.unwrap();
    for bad in ["x", "r.", "w.1.2"] {
        let request = v1::ListJobsRequest {
            page_token: bad.into(),
            ..Default::default()
        };
        let error = within(admin.jobs.clone().list(request)).await.unwrap_err();
        assert!(error.message().starts_with("page_token"), "{error}");
    }
    server.assert_works().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_submission_over_a_user_limit_names_the_limit_and_the_remedy() {
    let server = TestServer::start_with(&["--user-waiting-jobs", "5", "--user-config-mib", "1"]).await;
    let (ada, eve) = (server.submitter("ada").await, server.submitter("eve").await);
    let admin = server.daemon.clients().await;
    let submit = |clients: &Clients, request: v1::SubmitRequest| {
        let clients = clients.clone();
        async move { within(clients.jobs.clone().submit(request)).await }
    };
    let mut first = String::new();
    for number in 0..5 {
        let request = v1::SubmitRequest {
            idempotency_key: format!("key {number}"),
            ..request(&format!("n{number}"), "")
        };
        first = submit(&eve, request).await.unwrap().into_inner().job_id;
    }
    let refused = submit(&eve, request("n5", "")).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    for expected in [
        "user eve has 5 waiting jobs",
        "at most 5",
        "--user-waiting-jobs",
        "aitk stop",
    ] {
        assert!(refused.message().contains(expected), "{refused}");
    }
    let member = |name: &str| v1::ArrayMember {
        job_json: request(name, "").job_json,
        twin: 0,
    };
    let array = v1::SubmitArrayRequest {
        shared: Some(v1::SubmitRequest::from(submission("shared"))),
        name: "several".into(),
        members: vec![member("a"), member("b")],
        at_most: 0,
    };
    let refused = within(eve.jobs.clone().submit_array(array)).await.unwrap_err();
    assert!(refused.message().contains("wants 2 more"), "{refused}");
    let line =
        crate::access::wait_for_audit_line(&admin, "the refusal", |line| !line.done && line.action == "job.submit")
            .await;
    assert!(line.who == "eve" && line.detail.contains("waiting jobs"), "{line:?}");
    // A repeated submission is answered again, other users have limits of their own, and a stopped job frees its place.
    let repeated = v1::SubmitRequest {
        idempotency_key: "key 4".into(),
        ..request("n4", "")
    };
    let repeated = submit(&eve, repeated).await.unwrap().into_inner();
    assert!(repeated.existed && repeated.job_id == first);
    submit(&ada, request("hers", "")).await.unwrap();
    let stop = v1::StopJobRequest {
        job_id: first,
        now: false,
    };
    within(eve.jobs.clone().stop(stop)).await.unwrap();
    submit(&eve, request("n6", "")).await.unwrap();
    // The stored configs of ended jobs count as well.
    let long = v1::SubmitRequest {
        config_text: "x".repeat(1 << 20),
        ..request("long", "")
    };
    let refused = submit(&ada, long.clone()).await.unwrap_err();
    assert!(refused.message().contains("at most 1048576 are kept"), "{refused}");
    // Operators and administrators have no limit.
    submit(&admin, long).await.unwrap();
    server.assert_works().await;
}

/// CPU time of a process in ticks of 10 ms; `None` without `/proc`.
fn cpu_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    let fields: Vec<&str> = rest.split(' ').collect();
    Some(fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?)
}
