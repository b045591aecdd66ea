//! Jobs that no client makes: each would have a worker read or write files that are not its own.

use crate::access::{line, token};
use crate::support::blobs::put;
use crate::support::{FakeWorker, Pool, input, job_json, submission, within};
use aitk_common::control::{NewMember, Submission};
use aitk_proto::client::connect;
use aitk_proto::remote_blobs::RemoteBlobs;
use aitk_proto::v1;
use std::time::Duration;
use tonic::Code;

const CALM: Duration = Duration::from_secs(60);

/// The attacks of a submitter, in JSON that no config gives, with what is said of each.
fn attacks(admins_token: &str) -> Vec<(String, String)> {
    let image = job_json("n", "");
    let with = |from: &str, to: &str| {
        assert!(image.contains(from), "{from}");
        image.replace(from, to)
    };
    let training = |name: &str, key: &str| {
        format!(
            r#"{{"job":"extension","name":{name:?},"meta":{{}},"config":{{}},"cluster":{{}},"process":[{{"type":"sd_trainer","kind":{{"train":{{
                "training_folder":"out","model":{{"name_or_path":"org/model","dtype":"float32"}},"network":{{}},"datasets":[{{"folder_path":"./data"{key}}}]}}}}}}]}}"#
        )
    };
    let prompts = r#"["a cat"]"#;
    let foreign = |path: &str| format!("`{path}` is not an input of this job");
    let mut all = vec![];
    // Reading, and special files.
    for path in [
        admins_token,
        "/etc/passwd",
        "/nowhere/at/all",
        "/proc/self/environ",
        "/proc/1/environ",
        "/dev/zero",
        "../../token",
    ] {
        all.push((with(prompts, &format!("{path:?}")), foreign(path)));
        all.push((with("org/model", path), foreign(path)));
    }
    for key in ["mask_path", "dataset_path", "random_triggers"] {
        let path = "/var/lib/aitk/worker/trees/other";
        all.push((training("n", &format!(r#","{key}":"{path}""#)), foreign(path)));
    }
    all.push((
        training("n", r#","caption_ext":"/../../../etc/passwd""#),
        "cannot end the name of a file".into(),
    ));
    all.push((
        with(prompts, r#"["a --ctrl_img /etc/passwd"]"#),
        "control images are not used yet".into(),
    ));
    // Writing.
    for name in ["/root/.docker/config", "../../trees/other", "a/b", "..", "a\\b", "nul"] {
        all.push((training(name, ""), "cannot name a folder".into()));
        let own = training("n", "").replace(r#""training_folder""#, &format!(r#""name":{name:?},"training_folder""#));
        all.push((own, "config.process[0].name: ".into()));
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_names_files_of_others_is_refused_and_noted() {
    let pool = Pool::start(CALM).await;
    let (secret, _) = token(&pool.clients, "mallory", "submitter", None).await;
    let mallory = connect(&pool.running.url(), &secret, None).await.unwrap();
    put(&RemoteBlobs::with_budget(&mallory, CALM), &input().to_bytes()).await;
    // It is there to be read: nothing may tell it from what is not there.
    let admins_token = pool.dir.path().join("token");
    std::fs::write(&admins_token, "the admin's").unwrap();
    let attacks = attacks(admins_token.to_str().unwrap());
    for (job_json, said) in &attacks {
        let request = Submission {
            job_json: job_json.clone(),
            ..submission("n")
        };
        let error = within(mallory.jobs.clone().submit(v1::SubmitRequest::from(request)))
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{job_json}: {error}");
        assert!(error.message().contains(said.as_str()), "{job_json}: {error}");
    }
    let told = |path: &str| {
        let found = attacks.iter().find(|(_, said)| said.contains(path)).unwrap();
        found.1.replace(path, "")
    };
    assert_eq!(told("/etc/passwd"), told("/nowhere/at/all"));
    let noted = line(&pool.clients, "the refusal", |line| {
        line.action == "job.submit" && !line.done && line.detail.contains("/proc/self/environ")
    })
    .await;
    assert_eq!(noted.who, "mallory");

    // As a member of an array, too; and nothing of the array is there then.
    let member = |job_json: String| NewMember {
        job_json,
        seed_group: 0,
    };
    let (hostile, _) = &attacks[0];
    let request = v1::SubmitArrayRequest {
        shared: Some(submission("shared").into()),
        name: "sweep".into(),
        members: [job_json("good", ""), hostile.clone()]
            .map(|json| member(json).into())
            .into(),
        at_most: 0,
    };
    let error = within(mallory.jobs.clone().submit_array(request)).await.unwrap_err();
    assert!(error.message().starts_with("members[1]: job_json: "), "{error}");
    // What `fit` is asked about is not sent, so its paths are not looked at; its names and numbers are.
    let fit = |job_json: &str| v1::SubmitRequest {
        job_json: job_json.to_owned(),
        ..v1::SubmitRequest::from(submission("n"))
    };
    within(mallory.jobs.clone().fit(fit(&attacks[0].0))).await.unwrap();
    let (named, _) = attacks.last().unwrap();
    within(mallory.jobs.clone().fit(fit(named))).await.unwrap_err();

    // What is left is what was well meant.
    let good = within(mallory.jobs.clone().submit(v1::SubmitRequest::from(submission("good"))))
        .await
        .unwrap()
        .into_inner()
        .job_id;
    let mut worker = FakeWorker::new(&pool, "w1").await;
    assert_eq!(worker.assigned().await.job.as_str(), good);
    within(pool.running.shutdown()).await;
}
