//! Malicious jobs, each of which would make a worker read or write files of others.

use crate::access::{create_token, wait_for_audit_line};
use crate::support::data_sets::put;
use crate::support::{FakeWorker, TIMEOUT, TestCoordinator, input, job_json, submission, within};
use aitk_common::control_plane::{NewMember, Submission};
use aitk_proto::client::connect;
use aitk_proto::remote_blobs::RemoteBlobs;
use aitk_proto::v1;
use std::time::Duration;
use tonic::Code;

const LONG_LEASE: Duration = Duration::from_secs(60);

/// Attacks by a submitter: the JSON of each job, which no config gives, and a part of the expected error.
fn attacks(admins_token: &str) -> Vec<(String, String)> {
    let generate = job_json("n", "");
    let edited = |from: &str, to: &str| {
        assert!(generate.contains(from), "{from}");
        generate.replace(from, to)
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
    // Reading files, and special files.
    for path in [
        admins_token,
        "/etc/passwd",
        "/nowhere/at/all",
        "/proc/self/environ",
        "/proc/1/environ",
        "/dev/zero",
        "../../token",
    ] {
        all.push((edited(prompts, &format!("{path:?}")), foreign(path)));
        all.push((edited("org/model", path), foreign(path)));
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
        edited(prompts, r#"["a --ctrl_img /etc/passwd"]"#),
        "only FLUX.1 Kontext (`arch: flux_kontext`)".into(),
    ));
    let kontext = r#""name_or_path":"org/model","arch":"flux_kontext""#;
    all.push((
        edited(prompts, r#"["a --ctrl_img /etc/passwd"]"#).replace(r#""name_or_path":"org/model""#, kontext),
        foreign("/etc/passwd"),
    ));
    for keys in [
        r#","control_path":["/etc"]"#,
        r#","control_path":["/etc"],"control_path_1":"/etc""#,
    ] {
        let job = training("n", keys).replace(r#""name_or_path":"org/model""#, kontext);
        all.push((job, foreign("/etc")));
    }
    // Writing files.
    for name in ["/etc/cron.d/job", "../../trees/other", "a/b", "..", "a\\b", "nul"] {
        all.push((training(name, ""), "cannot name a folder".into()));
        let process_name =
            training("n", "").replace(r#""training_folder""#, &format!(r#""name":{name:?},"training_folder""#));
        all.push((process_name, "config.process[0].name: ".into()));
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_with_paths_of_other_files_is_refused_and_audited() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let (secret, _) = create_token(&coordinator.clients, "mallory", "submitter", None).await;
    let mallory = connect(&coordinator.running.url(), &secret, None).await.unwrap();
    put(&RemoteBlobs::with_budget(&mallory, TIMEOUT), &input().to_bytes()).await;
    // This file exists. The error must be the same as for a file that does not.
    let admins_token = coordinator.dir.path().join("token");
    std::fs::write(&admins_token, "the admin's").unwrap();
    let attacks = attacks(admins_token.to_str().unwrap());
    for (job_json, expected) in &attacks {
        let request = Submission {
            job_json: job_json.clone(),
            ..submission("n")
        };
        let error = within(mallory.jobs.clone().submit(v1::SubmitRequest::from(request)))
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{job_json}: {error}");
        assert!(error.message().contains(expected.as_str()), "{job_json}: {error}");
    }
    let error_for = |path: &str| {
        let (_, error) = attacks.iter().find(|(_, error)| error.contains(path)).unwrap();
        error.replace(path, "")
    };
    assert_eq!(error_for("/etc/passwd"), error_for("/nowhere/at/all"));
    let refusal = wait_for_audit_line(&coordinator.clients, "the refusal", |line| {
        line.action == "job.submit" && !line.done && line.detail.contains("/proc/self/environ")
    })
    .await;
    assert_eq!(refusal.who, "mallory");

    // The same for a member of an array; then no job of the array exists.
    let member = |job_json: String| NewMember {
        job_json,
        seed_group: 0,
    };
    let (malicious, _) = &attacks[0];
    let request = v1::SubmitArrayRequest {
        shared: Some(submission("shared").into()),
        name: "sweep".into(),
        members: [job_json("good", ""), malicious.clone()]
            .map(|json| member(json).into())
            .into(),
        at_most: 0,
    };
    let error = within(mallory.jobs.clone().submit_array(request)).await.unwrap_err();
    assert!(error.message().starts_with("members[1]: job_json: "), "{error}");
    // `fit` gets no inputs, so it does not check paths. It checks names and numbers.
    let fit = |job_json: &str| v1::SubmitRequest {
        job_json: job_json.to_owned(),
        ..v1::SubmitRequest::from(submission("n"))
    };
    within(mallory.jobs.clone().fit(fit(&attacks[0].0))).await.unwrap();
    let (bad_name, _) = attacks.last().unwrap();
    within(mallory.jobs.clone().fit(fit(bad_name))).await.unwrap_err();

    // Only the valid job exists.
    let good = within(mallory.jobs.clone().submit(v1::SubmitRequest::from(submission("good"))))
        .await
        .unwrap()
        .into_inner()
        .job_id;
    let mut worker = FakeWorker::new(&coordinator, "w1").await;
    assert_eq!(worker.next_assignment().await.job.as_str(), good);
    within(coordinator.running.shutdown()).await;
}
