//! A worker and a real coordinator: from assignment to artifact, broken connections, refusals.

use crate::support::{
    self, TestCluster, emit, emit_checkpoint, emit_finished, eventually, script, wait_for, wait_until_connected,
};
use aitk_common::control_plane::{AttemptState, JobState};
use aitk_common::hash::ContentHash;
use aitk_common::storage::{BlobStore, checkpoints, snapshot};
use aitk_proto::remote_blobs::RemoteBlobs;
use aitk_proto::v1;
use aitk_worker::Refusal;
use serde_json::json;
use std::collections::HashMap;
use std::time::Duration;

fn emit_artifact(kind: &str, name: &str) -> String {
    let event =
        json!({"event": "artifact", "kind": kind, "path": "HERE/output/", "name": name, "step": 5, "index": null});
    let event = event
        .to_string()
        .replace("HERE/output/", &format!("'\"$PWD\"'/output/{name}"));
    format!("echo '{event}'\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_runs_from_its_inputs_to_its_artifact() {
    let cluster = TestCluster::start().await;
    let data = cluster.path("data");
    std::fs::create_dir(&data).unwrap();
    std::fs::write(data.join("a.txt"), "a caption").unwrap();
    let store = RemoteBlobs::new(&cluster.clients().await);
    let scanned = snapshot::scan(&data, &mut |_| {}).unwrap();
    let id = snapshot::upload(&store, &scanned, &mut |_| {}).await.unwrap().id;

    let checkpoint = cluster.checkpoint(5);
    let text = script(&[
        // Where the input is, from the attempt's specification.
        r#"where=$(sed -n 's/.*"my.data": "\(.*trees.*\)".*/\1/p' "$2"); "#,
        r#"cat "$where/a.txt"; echo; "#,
        r#"echo "seed $(grep -c '^  "seed"' "$2")"; "#,
        r#"printf x > "$TMPDIR/scratch"; "#,
        r#"case "$TMPDIR" in "$PWD"/*) echo "its own folder";; esac"#,
        "\n",
        &emit(json!({"event": "phase", "name": "training"})),
        &emit(json!({"event": "progress", "done": 5, "total": 10, "seconds_per_step": 0.5})),
        "printf lora > output/my.safetensors\n",
        &emit_artifact("lora", "my.safetensors"),
        &emit_checkpoint(&checkpoint, 5),
        &emit(json!({"event": "progress", "done": 10, "total": 10, "seconds_per_step": 0.5})),
        &emit_finished("completed"),
    ]);
    let worker = cluster.worker("w", &text).await;
    let job = cluster
        .submit(HashMap::from([("my.data".to_owned(), id.to_hex())]), false)
        .await;
    let view = cluster.wait_for_state(&job, JobState::Completed).await;
    assert_eq!(view.checkpoint_step, Some(5));
    assert_eq!(view.progress.unwrap().done, 10);
    assert_eq!(view.attempts.len(), 1);
    let log = cluster.log(&job).await;
    assert!(
        ["a caption", "seed 1", "its own folder"]
            .iter()
            .all(|expected| log.iter().any(|line| line == expected)),
        "{log:?}"
    );

    let request = v1::ArtifactsRequest {
        job_id: job,
        ..Default::default()
    };
    let artifacts = cluster
        .clients()
        .await
        .jobs
        .artifacts(request)
        .await
        .unwrap()
        .into_inner()
        .artifacts;
    assert_eq!(
        (artifacts.len(), artifacts[0].name.as_str(), artifacts[0].bytes),
        (1, "my.safetensors", 4)
    );
    let hash = ContentHash::parse(&artifacts[0].sha256).unwrap();
    assert_eq!(store.get_bytes(hash, 100).await.unwrap().as_ref(), b"lora");
    eventually("the attempt's folder was not removed", || {
        cluster.has_no_attempt_folders("w")
    })
    .await;
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_continues_while_the_coordinator_is_away() {
    let mut cluster = TestCluster::start().await;
    let checkpoint = cluster.checkpoint(7);
    let (away, finished_marker) = (cluster.path("away"), cluster.path("finished"));
    let text = script(&[
        &emit(json!({"event": "progress", "done": 1, "total": 10, "seconds_per_step": null})),
        &wait_for(&away),
        &emit(json!({"event": "log", "level": "info", "message": "logged while disconnected"})),
        &emit_checkpoint(&checkpoint, 7),
        "printf lora > output/my.safetensors\n",
        &emit_artifact("lora", "my.safetensors"),
        &emit(json!({"event": "progress", "done": 10, "total": 10, "seconds_per_step": null})),
        &emit_finished("completed"),
        &format!("touch '{}'\n", finished_marker.display()),
    ]);
    let worker = cluster.worker("w", &text).await;
    let job = cluster.submit(HashMap::new(), false).await;
    cluster
        .wait_until(&job, "under way", |job| job.progress.is_some())
        .await;
    cluster.stop_coordinator().await;
    std::fs::write(&away, "").unwrap();
    eventually("the child stopped with the coordinator", || finished_marker.exists()).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    cluster.start_coordinator().await;
    let view = cluster.wait_for_state(&job, JobState::Completed).await;
    assert_eq!((view.attempts.len(), view.checkpoint_step), (1, Some(7)), "{view:#?}");
    assert_eq!(view.progress.unwrap().done, 10);
    let log = cluster.log(&job).await;
    assert_eq!(
        log.iter().filter(|line| *line == "logged while disconnected").count(),
        1,
        "{log:?}"
    );
    eventually("the attempt's folder was not removed", || {
        cluster.has_no_attempt_folders("w")
    })
    .await;
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_shuts_down_saves_and_another_resumes() {
    let cluster = TestCluster::start().await;
    let checkpoint = cluster.checkpoint(3);
    let first = script(&[
        "trap 'stop=1' TERM\n",
        &emit(json!({"event": "progress", "done": 1, "total": 10, "seconds_per_step": null})),
        "while [ -z \"$stop\" ]; do sleep 0.02; done\n",
        &emit_checkpoint(&checkpoint, 3),
        &emit_finished("stopped"),
    ]);
    let leaving = cluster.worker("leaves", &first).await;
    let job = cluster.submit(HashMap::new(), false).await;
    cluster
        .wait_until(&job, "under way", |job| job.progress.is_some())
        .await;
    let second = script(&[
        r#"resume=$(sed -n 's/.*"resume_from": "\(.*\)".*/\1/p' "$2"); cat "$resume/state.json"; echo"#,
        "\n",
        &emit_finished("completed"),
    ]);
    leaving.shutdown().await;
    assert!(cluster.has_no_attempt_folders("leaves"));
    let staying = cluster.worker("stays", &second).await;
    let view = cluster.wait_for_state(&job, JobState::Completed).await;
    assert_eq!(view.attempts.len(), 2, "{view:#?}");
    assert_eq!(view.attempts[0].state, AttemptState::Stopped);
    let log = cluster.log(&job).await;
    assert!(log.iter().any(|line| line == "state of 3"), "{log:?}");
    staying.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_job_is_stopped_and_a_failed_job_has_a_reason() {
    let cluster = TestCluster::start().await;
    let text = script(&[
        "trap 'stop=1' TERM\n",
        &emit(json!({"event": "progress", "done": 1, "total": 10, "seconds_per_step": null})),
        "while [ -z \"$stop\" ]; do sleep 0.02; done\n",
        &emit_finished("stopped"),
    ]);
    let worker = cluster.worker("w", &text).await;
    let job = cluster.submit(HashMap::new(), false).await;
    cluster
        .wait_until(&job, "under way", |job| job.progress.is_some())
        .await;
    let stop = v1::StopJobRequest {
        job_id: job.clone(),
        now: false,
    };
    cluster.clients().await.jobs.stop(stop).await.unwrap();
    cluster.wait_for_state(&job, JobState::Stopped).await;
    worker.shutdown().await;

    let event = json!({"event": "finished", "outcome":
        {"outcome": "failed", "cause": "bad_input", "message": "data/a.png: the file is empty"}});
    let worker = cluster.worker("v", &emit(event)).await;
    let job = cluster.submit(HashMap::new(), false).await;
    let view = cluster.wait_for_state(&job, JobState::Failed).await;
    assert!(view.reason.contains("data/a.png: the file is empty"), "{}", view.reason);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_local_job_uploads_nothing_and_reports_local_paths() {
    let cluster = TestCluster::start().await;
    let file = cluster.path("my.safetensors");
    std::fs::write(&file, "lora").unwrap();
    let checkpoint = cluster.checkpoint(5);
    let text = script(&[
        &emit(
            json!({"event": "artifact", "kind": "lora", "path": file, "name": "my.safetensors", "step": 5, "index": null}),
        ),
        &emit(json!({"event": "checkpoint", "path": checkpoint, "step": 5})),
        r#"grep -c '"output_root": null' "$2"; pwd"#,
        "\n",
        &emit_finished("completed"),
    ]);
    let worker = cluster.worker("w", &text).await;
    let job = cluster.submit(HashMap::new(), true).await;
    let view = cluster.wait_for_state(&job, JobState::Completed).await;
    assert_eq!(view.checkpoint_step, None);
    let request = v1::ArtifactsRequest {
        job_id: job.clone(),
        ..Default::default()
    };
    let artifacts = cluster
        .clients()
        .await
        .jobs
        .artifacts(request)
        .await
        .unwrap()
        .into_inner()
        .artifacts;
    assert_eq!(
        (artifacts[0].local_path.as_str(), artifacts[0].sha256.as_str()),
        (file.to_str().unwrap(), "")
    );
    assert!(file.exists());
    let current_dir = std::env::current_dir().unwrap();
    let log = cluster.log(&job).await;
    assert!(
        log.iter().any(|line| line == "1") && log.iter().any(|line| *line == current_dir.display().to_string()),
        "{log:?}"
    );
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_that_was_killed_after_its_grace_period_reports_lost_steps() {
    let cluster = TestCluster::start().await;
    let checkpoint = cluster.checkpoint(400);
    let text = script(&[
        "trap '' TERM\n",
        &emit(json!({"event": "phase", "name": "training"})),
        &emit_checkpoint(&checkpoint, 400),
        &emit(json!({"event": "progress", "done": 437, "total": 1000, "seconds_per_step": 1.0})),
        "while :; do sleep 0.02; done\n",
    ]);
    let mut config = cluster.config("w", &text);
    config.grace = Duration::from_millis(300);
    let worker = aitk_worker::start(config).await.unwrap();
    wait_until_connected(&worker).await;
    let job = cluster.submit_training().await;
    cluster
        .wait_until(&job, "under way", |job| {
            job.checkpoint_step.is_some() && job.progress.is_some()
        })
        .await;
    cluster.stop(&job).await;
    let view = cluster.wait_for_state(&job, JobState::Stopped).await;
    assert_eq!(
        view.reason,
        "stopped on request: saved at step 400; 37 steps since are lost"
    );
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hung_child_is_reported_stopped_and_retried() {
    let cluster = TestCluster::start().await;
    let first = cluster.path("first");
    let text = script(&[
        &emit(json!({"event": "phase", "name": "training"})),
        &emit(json!({"event": "progress", "done": 1, "total": 10, "seconds_per_step": 0.1})),
        &emit(json!({"event": "progress", "done": 2, "total": 10, "seconds_per_step": 0.1})),
        &format!("if [ ! -e '{0}' ]; then touch '{0}'; ", first.display()),
        "while :; do kill -STOP $$; done; fi\n",
        &emit_finished("completed"),
    ]);
    let job = cluster.submit_training().await;
    // Follow the events from the start, so that short-lived ones are seen as well.
    let request = v1::EventsRequest {
        job_id: job.clone(),
        cursor: 0,
        follow: true,
    };
    let mut events = cluster.clients().await.jobs.events(request).await.unwrap().into_inner();
    let mut config = cluster.config("w", &text);
    config.grace = Duration::from_millis(300);
    config.progress_timeout = Duration::from_secs(3);
    let worker = aitk_worker::start(config).await.unwrap();
    wait_until_connected(&worker).await;
    let (mut phase_shown, mut rate_withdrawn) = (false, false);
    while !(phase_shown && rate_withdrawn) {
        let event = tokio::time::timeout(support::TIMEOUT, events.message()).await;
        let event = event.expect("no hang was reported").unwrap().expect("the job ended");
        match event.body {
            Some(v1::job_event::Body::Phase(phase)) => phase_shown |= phase.name.starts_with("no progress for "),
            Some(v1::job_event::Body::Progress(progress)) => rate_withdrawn |= progress.seconds_per_step.is_none(),
            _ => {}
        }
    }
    let view = cluster.wait_for_state(&job, JobState::Completed).await;
    assert!(view.attempts.len() > 1, "{view:#?}");
    assert!(
        view.attempts[0].message.starts_with("no progress for "),
        "{:?}",
        view.attempts[0]
    );
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_that_the_coordinator_does_not_know_is_fenced() {
    let mut cluster = TestCluster::start().await;
    let pid = cluster.path("pid");
    let text = script(&[
        &format!("echo $$ > '{}'\n", pid.display()),
        &emit(json!({"event": "progress", "done": 1, "total": 10, "seconds_per_step": null})),
        "while :; do sleep 0.05; done\n",
    ]);
    let worker = cluster.worker("w", &text).await;
    let job = cluster.submit(HashMap::new(), false).await;
    cluster
        .wait_until(&job, "under way", |job| job.progress.is_some())
        .await;
    let child: i32 = std::fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
    // The coordinator restarts without its database, so it does not know this attempt.
    cluster.stop_coordinator().await;
    let db = cluster.path("coordinator");
    for entry in std::fs::read_dir(&db).unwrap().flatten() {
        if entry.file_name().to_string_lossy().starts_with("aitk.db") {
            std::fs::remove_file(entry.path()).unwrap();
        }
    }
    cluster.start_coordinator().await;
    let is_gone = || nix::sys::signal::kill(nix::unistd::Pid::from_raw(child), None).is_err();
    eventually("the fenced child was not killed", is_gone).await;
    wait_until_connected(&worker).await;
    eventually("the attempt's folder was not removed", || {
        cluster.has_no_attempt_folders("w")
    })
    .await;
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_ends_the_worker_with_a_message() {
    let cluster = TestCluster::start().await;
    let mut config = cluster.config("w", "true");
    config.token = "0".repeat(64);
    let mut worker = aitk_worker::start(config).await.unwrap();
    let ended = tokio::time::timeout(support::TIMEOUT, worker.ended()).await.unwrap();
    assert!(
        matches!(&ended, Err(Refusal::Token(message)) if !message.is_empty()),
        "{ended:?}"
    );

    let mut config = cluster.config("v", "true");
    config.server = "http://example.com".into();
    let mut worker = aitk_worker::start(config).await.unwrap();
    let ended = tokio::time::timeout(support::TIMEOUT, worker.ended()).await.unwrap();
    assert!(
        matches!(&ended, Err(Refusal::Config(message)) if message.contains("TLS")),
        "{ended:?}"
    );
}

/// A coordinator with another protocol version.
struct NewerCoordinator;

#[tonic::async_trait]
impl v1::workers_server::Workers for NewerCoordinator {
    type SessionStream = tokio_stream::Empty<Result<v1::CoordinatorMessage, tonic::Status>>;

    async fn session(
        &self,
        _request: tonic::Request<tonic::Streaming<v1::WorkerMessage>>,
    ) -> Result<tonic::Response<Self::SessionStream>, tonic::Status> {
        Err(tonic::Status::failed_precondition(
            "this coordinator speaks protocol 2; update aitk-worker",
        ))
    }

    async fn join(
        &self,
        _request: tonic::Request<v1::JoinRequest>,
    ) -> Result<tonic::Response<v1::JoinReply>, tonic::Status> {
        Err(tonic::Status::unimplemented("not here"))
    }

    async fn renew(
        &self,
        _request: tonic::Request<v1::RenewRequest>,
    ) -> Result<tonic::Response<v1::RenewReply>, tonic::Status> {
        Err(tonic::Status::unimplemented("not here"))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_protocol_version_is_a_refusal() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let incoming = tonic::transport::server::TcpIncoming::from(listener);
    let service = v1::workers_server::WorkersServer::new(NewerCoordinator);
    let server = tonic::transport::Server::builder()
        .add_service(service)
        .serve_with_incoming(incoming);
    let server = tokio::spawn(server);
    let cluster = TestCluster::start().await;
    let mut config = cluster.config("w", "true");
    config.server = format!("http://{addr}");
    let mut worker = aitk_worker::start(config).await.unwrap();
    let ended = tokio::time::timeout(support::TIMEOUT, worker.ended()).await.unwrap();
    assert!(
        matches!(&ended, Err(Refusal::Protocol(message)) if message.contains("protocol 2")),
        "{ended:?}"
    );
    server.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_worker_keeps_its_id() {
    let cluster = TestCluster::start().await;
    let status_of = |worker: &aitk_worker::WorkerHandle| worker.status().borrow().clone();
    let first = cluster.worker("w", "true").await;
    let before = status_of(&first);
    first.shutdown().await;
    let second = cluster.worker("w", "true").await;
    assert_eq!(before, status_of(&second));
    second.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_uploaded_checkpoint_equals_the_original() {
    let cluster = TestCluster::start().await;
    let checkpoint = cluster.checkpoint(9);
    let text = script(&[&emit_checkpoint(&checkpoint, 9), &emit_finished("completed")]);
    let worker = cluster.worker("w", &text).await;
    let job = cluster.submit(HashMap::new(), false).await;
    cluster.wait_for_state(&job, JobState::Completed).await;
    let request = v1::EventsRequest {
        job_id: job,
        cursor: 0,
        follow: false,
    };
    let mut events = cluster.clients().await.jobs.events(request).await.unwrap().into_inner();
    let mut manifest = None;
    while let Some(event) = events.message().await.unwrap() {
        if let Some(v1::job_event::Body::Checkpoint(committed)) = event.body {
            manifest = Some(ContentHash::parse(&committed.manifest_sha256).unwrap());
        }
    }
    let store = RemoteBlobs::new(&cluster.clients().await);
    let target = cluster.path("fetched");
    std::fs::create_dir(&target).unwrap();
    let fetched = checkpoints::fetch(&store, manifest.unwrap(), &target, &mut |_| {})
        .await
        .unwrap();
    assert_eq!(fetched.step(), 9);
    worker.shutdown().await;
}

/// Creates a worker's token. Returns it with its id.
async fn create_worker_token(cluster: &TestCluster) -> (String, String) {
    let request = v1::CreateTokenRequest {
        name: "box".into(),
        role: "worker".into(),
        expires_in_ms: None,
    };
    let created = cluster
        .clients()
        .await
        .admin
        .create_token(request)
        .await
        .unwrap()
        .into_inner();
    (created.secret, created.token.unwrap().id)
}

fn write_token(path: &std::path::Path, secret: &str) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::write(path, secret).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

/// The names of a job's artifacts.
async fn artifacts(cluster: &TestCluster, job: &str) -> Vec<String> {
    let request = v1::ArtifactsRequest {
        job_id: job.to_owned(),
        ..Default::default()
    };
    let reply = cluster.clients().await.jobs.artifacts(request).await.unwrap();
    let artifacts = reply.into_inner().artifacts;
    artifacts.into_iter().map(|artifact| artifact.name).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_worker_keeps_checkpoints_and_sends_them_when_it_is_accepted_again() {
    let cluster = TestCluster::start().await;
    let checkpoint = cluster.checkpoint(7);
    let (refused, first, stopped) = (cluster.path("refused"), cluster.path("first"), cluster.path("stopped"));
    let text = script(&[
        r#"resume=$(sed -n 's/.*"resume_from": "\(.*\)".*/\1/p' "$2")"#,
        "\nif [ -n \"$resume\" ]; then cat \"$resume/state.json\"; echo\n",
        &emit_finished("completed"),
        "exit 0; fi\n",
        &format!(
            "if [ -e '{0}' ]; then echo from the beginning; exit 9; fi; touch '{0}'\n",
            first.display()
        ),
        "trap 'stop=1' TERM\n",
        &emit(json!({"event": "phase", "name": "training"})),
        &emit(json!({"event": "progress", "done": 1, "total": 10, "seconds_per_step": null})),
        &wait_for(&refused),
        "printf lora > output/my.safetensors\n",
        &emit_artifact("lora", "my.safetensors"),
        &emit_checkpoint(&checkpoint, 7),
        "while [ -z \"$stop\" ]; do sleep 0.02; done\n",
        &format!("touch '{}'\n", stopped.display()),
        &emit_finished("stopped"),
    ]);
    let (secret, id) = create_worker_token(&cluster).await;
    let token_file = cluster.path("token");
    write_token(&token_file, &secret);
    let mut config = cluster.config("w", &text);
    config.token = secret;
    config.token_file = Some(token_file.clone());
    let worker = aitk_worker::start(config).await.unwrap();
    wait_until_connected(&worker).await;
    let job = cluster.submit_training().await;
    cluster
        .wait_until(&job, "under way", |job| job.progress.is_some())
        .await;

    let request = v1::RevokeTokenRequest { id };
    cluster.clients().await.admin.revoke_token(request).await.unwrap();
    let mut status = worker.status();
    let refused_status = status.wait_for(|status| matches!(status, aitk_worker::Status::Refused(_)));
    tokio::time::timeout(support::TIMEOUT, refused_status)
        .await
        .expect("the worker does not report the refusal")
        .unwrap();
    // Its child goes on to its next checkpoint, and is asked to stop there. Meanwhile the coordinator marks the
    // attempt as lost.
    std::fs::write(&refused, "").unwrap();
    let view = cluster
        .wait_until(&job, "lost", |job| job.attempts[0].state == AttemptState::Lost)
        .await;
    assert_eq!((view.checkpoint_step, view.attempts.len()), (None, 1), "{view:#?}");
    eventually("the child is not asked to stop", || stopped.exists()).await;

    let (secret, _) = create_worker_token(&cluster).await;
    write_token(&token_file, &secret);
    let view = cluster.wait_for_state(&job, JobState::Completed).await;
    assert_eq!(view.checkpoint_step, Some(7), "{view:#?}");
    let log = cluster.log(&job).await;
    assert!(log.iter().any(|line| line == "state of 7"), "{log:?}");
    assert!(log.iter().all(|line| line != "from the beginning"), "{log:?}");
    // The next attempt does not repeat results from before the checkpoint.
    assert_eq!(artifacts(&cluster, &job).await, ["my.safetensors"]);
    let nothing_kept = || std::fs::read_dir(cluster.path("w/kept")).unwrap().next().is_none();
    eventually("the sent checkpoint was not removed", nothing_kept).await;
    eventually("the attempt's folder was not removed", || {
        cluster.has_no_attempt_folders("w")
    })
    .await;
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_that_was_not_sent_at_shutdown_is_sent_after_the_restart() {
    let mut cluster = TestCluster::start().await;
    let checkpoint = cluster.checkpoint(4);
    let text = script(&[
        r#"resume=$(sed -n 's/.*"resume_from": "\(.*\)".*/\1/p' "$2")"#,
        "\nif [ -n \"$resume\" ]; then cat \"$resume/state.json\"; echo\n",
        &emit_finished("completed"),
        "exit 0; fi\ntrap 'stop=1' TERM\n",
        &emit(json!({"event": "progress", "done": 1, "total": 10, "seconds_per_step": null})),
        "while [ -z \"$stop\" ]; do sleep 0.02; done\n",
        "printf lora > output/my.safetensors\n",
        &emit_artifact("lora", "my.safetensors"),
        &emit_checkpoint(&checkpoint, 4),
        &emit_finished("stopped"),
    ]);
    let mut config = cluster.config("w", &text);
    config.shutdown_timeout = support::TIMEOUT;
    let worker = aitk_worker::start(config.clone()).await.unwrap();
    wait_until_connected(&worker).await;
    let job = cluster.submit_training().await;
    cluster
        .wait_until(&job, "under way", |job| job.progress.is_some())
        .await;
    // The coordinator is away while the worker saves, and the worker is dropped then, as when its shutdown time is
    // over.
    cluster.stop_coordinator().await;
    let files = |folder: &std::path::Path| std::fs::read_dir(folder).map_or(0, Iterator::count);
    let is_saved = || {
        let attempts = std::fs::read_dir(cluster.path("w/attempts"))
            .into_iter()
            .flatten()
            .flatten();
        // The file has pin 1, the checkpoint has pin 2.
        attempts
            .map(|attempt| attempt.path().join("pins/2"))
            .any(|pin| files(&pin) == files(&checkpoint))
    };
    tokio::select! {
        () = worker.shutdown() => panic!("the shutdown ended although the checkpoint could not be sent"),
        () = eventually("no checkpoint was saved", is_saved) => {}
    }
    cluster.start_coordinator().await;
    assert_eq!(cluster.job(&job).await.checkpoint_step, None);
    let worker = support::restart_worker(config).await;
    let view = cluster.wait_for_state(&job, JobState::Completed).await;
    assert_eq!(view.checkpoint_step, Some(4), "{view:#?}");
    let log = cluster.log(&job).await;
    assert!(log.iter().any(|line| line == "state of 4"), "{log:?}");
    assert_eq!(artifacts(&cluster, &job).await, ["my.safetensors"]);
    worker.shutdown().await;
}
