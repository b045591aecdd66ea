//! Workers and a user with tokens of their own: what each may see of the storage is enough for the whole path.

use crate::support::{JOB, Lab, connected, finished, put_model, saved, say, script};
use aitk_common::control::JobState;
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
    let made = admin.admin.clone().create_token(request).await.unwrap();
    made.into_inner().secret
}

async fn worker(lab: &Lab, token: String, name: &str, text: &str) -> aitk_worker::Running {
    let mut config = lab.config(name, text);
    config.token = token;
    let worker = aitk_worker::start(config).await.unwrap();
    connected(&worker).await;
    worker
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_moves_between_machines_that_see_nothing_but_what_they_need() {
    let mut lab = Lab::start().await;
    let admin = lab.clients().await;
    let secret = token(&admin, "anna", "submitter").await;
    let anna = connect(&lab.url(), &secret, None).await.unwrap();
    let data = lab.path("data");
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

    let checkpoint = lab.checkpoint(5);
    let caption = r#"where=$(sed -n 's/.*"my.data": "\(.*trees.*\)".*/\1/p' "$2"); cat "$where/a.txt"; echo"#;
    let first = script(&[
        "trap 'stop=1' TERM\n",
        caption,
        "\n",
        &say(json!({"event": "progress", "done": 5, "total": 10, "seconds_per_step": null})),
        "while [ -z \"$stop\" ]; do sleep 0.02; done\n",
        &saved(&checkpoint, 5),
        &finished("stopped"),
    ]);
    let leaving = worker(&lab, token(&admin, "box-1", "worker").await, "one", &first).await;
    lab.until(&job, "under way", |job| job.progress.is_some()).await;
    // What was uploaded before counts after.
    lab.stop_coordinator().await;
    lab.start_coordinator().await;
    connected(&leaving).await;
    leaving.shutdown().await;
    let view = lab.job(&job).await;
    assert_eq!(view.checkpoint_step, Some(5), "{view:#?}");

    let artifact = json!({"event": "artifact", "kind": "lora", "path": "HERE", "name": "my.safetensors", "step": 5, "index": null});
    let artifact = artifact.to_string().replace("HERE", "'\"$PWD\"'/output/my.safetensors");
    let second = script(&[
        caption,
        "\n",
        r#"resume=$(sed -n 's/.*"resume_from": "\(.*\)".*/\1/p' "$2"); cat "$resume/state.json"; echo"#,
        "\nprintf lora > output/my.safetensors\n",
        &format!("echo '{artifact}'\n"),
        &finished("completed"),
    ]);
    let admin = lab.clients().await;
    let staying = worker(&lab, token(&admin, "box-2", "worker").await, "two", &second).await;
    let view = lab.until_state(&job, JobState::Completed).await;
    let log = lab.log(&job).await;
    assert!(log.iter().any(|line| line == "state of 5"), "{log:?}");
    assert_eq!(log.iter().filter(|line| *line == "a caption").count(), 2, "{log:?}");
    assert_eq!(view.attempts.len(), 2, "{view:#?}");
    let lora = ContentHash::of(b"lora");
    assert_eq!(store.get_bytes(lora, 100).await.unwrap().as_ref(), b"lora");
    staying.shutdown().await;

    // Nobody was refused anything on the way.
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
