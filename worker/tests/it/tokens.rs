//! Workers and a user with tokens of their own: their access to storage is enough to run a job.

use crate::support::{JOB, TestCluster, emit, emit_checkpoint, emit_finished, put_model, script, wait_until_connected};
use aitk_common::control_plane::JobState;
use aitk_common::hash::ContentHash;
use aitk_common::storage::{BlobStore, snapshot};
use aitk_proto::client::{Clients, connect};
use aitk_proto::remote_blobs::RemoteBlobs;
use aitk_proto::v1;
use serde_json::json;
use std::collections::HashMap;
use std::time::Duration;

async fn token(admin: &Clients, name: &str, role: &str) -> String {
    let request = v1::CreateTokenRequest {
        name: name.into(),
        role: role.into(),
        expires_in_ms: None,
    };
    let created = admin.admin.clone().create_token(request).await.unwrap();
    created.into_inner().secret
}

async fn worker(cluster: &TestCluster, token: String, name: &str, text: &str) -> aitk_worker::WorkerHandle {
    let mut config = cluster.config(name, text);
    config.token = token;
    let worker = aitk_worker::start(config).await.unwrap();
    wait_until_connected(&worker).await;
    worker
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_moves_between_workers_with_minimal_access() {
    let mut cluster = TestCluster::start().await;
    let admin = cluster.clients().await;
    let secret = token(&admin, "anna", "submitter").await;
    let anna = connect(&cluster.url(), &secret, None).await.unwrap();
    let data = cluster.path("data");
    std::fs::create_dir(&data).unwrap();
    std::fs::write(data.join("a.txt"), "a caption").unwrap();
    let store = RemoteBlobs::with_budget(&anna, Duration::from_secs(20));
    let scanned = snapshot::scan(&data, &mut |_| {}).unwrap();
    let id = snapshot::upload(&store, &scanned, &mut |_| {}).await.unwrap().id;
    let request = v1::SubmitRequest {
        config_text: "job: generate".into(),
        config_format: "yaml".into(),
        job_json: JOB.into(),
        inputs: HashMap::from([
            ("my.data".to_owned(), id.to_hex()),
            ("model".to_owned(), put_model(&store).await.to_hex()),
        ]),
        ..v1::SubmitRequest::default()
    };
    let job = anna.jobs.clone().submit(request).await.unwrap().into_inner().job_id;

    let checkpoint = cluster.checkpoint(5);
    let caption = r#"where=$(sed -n 's/.*"my.data": "\(.*trees.*\)".*/\1/p' "$2"); cat "$where/a.txt"; echo"#;
    let first = script(&[
        "trap 'stop=1' TERM\n",
        caption,
        "\n",
        &emit(json!({"event": "progress", "done": 5, "total": 10, "seconds_per_step": null})),
        "while [ -z \"$stop\" ]; do sleep 0.02; done\n",
        &emit_checkpoint(&checkpoint, 5),
        &emit_finished("stopped"),
    ]);
    let leaving = worker(&cluster, token(&admin, "box-1", "worker").await, "one", &first).await;
    cluster
        .wait_until(&job, "under way", |job| job.progress.is_some())
        .await;
    // Uploads from before the restart still count.
    cluster.stop_coordinator().await;
    cluster.start_coordinator().await;
    wait_until_connected(&leaving).await;
    leaving.shutdown().await;
    let view = cluster.job(&job).await;
    assert_eq!(view.checkpoint_step, Some(5), "{view:#?}");

    let artifact = json!({"event": "artifact", "kind": "lora", "path": "HERE", "name": "my.safetensors", "step": 5, "index": null});
    let artifact = artifact.to_string().replace("HERE", "'\"$PWD\"'/output/my.safetensors");
    let second = script(&[
        caption,
        "\n",
        r#"resume=$(sed -n 's/.*"resume_from": "\(.*\)".*/\1/p' "$2"); cat "$resume/state.json"; echo"#,
        "\nprintf lora > output/my.safetensors\n",
        &format!("echo '{artifact}'\n"),
        &emit_finished("completed"),
    ]);
    let admin = cluster.clients().await;
    let staying = worker(&cluster, token(&admin, "box-2", "worker").await, "two", &second).await;
    let view = cluster.wait_for_state(&job, JobState::Completed).await;
    let log = cluster.log(&job).await;
    assert!(log.iter().any(|line| line == "state of 5"), "{log:?}");
    assert_eq!(log.iter().filter(|line| *line == "a caption").count(), 2, "{log:?}");
    assert_eq!(view.attempts.len(), 2, "{view:#?}");
    let lora = ContentHash::of(b"lora");
    assert_eq!(store.get_bytes(lora, 100).await.unwrap().as_ref(), b"lora");
    staying.shutdown().await;

    // No request was refused.
    let request = v1::ReadAuditRequest { after: 0, limit: 0 };
    let lines = admin
        .admin
        .clone()
        .read_audit(request)
        .await
        .unwrap()
        .into_inner()
        .lines;
    assert!(lines.iter().all(|line| line.done), "{lines:#?}");
}
