//! `aitk clone` against a real coordinator.

use crate::coordinator::TestCluster;
use crate::support::{code, err, out};
use aitk_proto::client::connect;
use aitk_proto::v1;
use std::path::Path;

async fn token(cluster: &TestCluster, name: &str, role: &str) -> String {
    let clients = connect(&cluster.coordinator.url(), &cluster.coordinator.token, None)
        .await
        .unwrap();
    let request = v1::CreateTokenRequest {
        name: name.to_owned(),
        role: role.to_owned(),
        expires_in_ms: None,
    };
    let reply = clients.admin.clone().create_token(request).await.unwrap();
    reply.into_inner().secret
}

/// Returns the submission of a job, and its JSON.
async fn submission(cluster: &TestCluster, id: &str) -> (serde_json::Value, v1::SubmitRequest) {
    let clients = connect(&cluster.coordinator.url(), &cluster.coordinator.token, None)
        .await
        .unwrap();
    let request = v1::GetJobRequest { job_id: id.to_owned() };
    let found = clients.jobs.clone().submission(request).await.unwrap().into_inner();
    (serde_json::from_str(&found.job_json).unwrap(), found)
}

fn files(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        match entry.path() {
            path if path.is_dir() => found.extend(files(&path)),
            path => found.push(path),
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_has_the_config_and_the_inputs_of_its_job() {
    let cluster = TestCluster::new().await;
    let ada = token(&cluster, "ada", "submitter").await;
    let as_ada = [("AITK_TOKEN", ada.as_str())];
    let text = std::fs::read_to_string(cluster.home.path().join("job.yaml")).unwrap();
    cluster.home.write(
        "job.yaml",
        &text.replace("trigger_word: \"p3rs0n\"", "trigger_word: ${WORD}"),
    );
    let submit = ["submit", "job.yaml", "--set", "train.steps=40"];
    let first = cluster
        .aitk_with(&submit, &[("AITK_TOKEN", ada.as_str()), ("WORD", "p3rs0n")])
        .await;
    assert_eq!(code(&first), 0, "{}", err(&first));
    let id = out(&first).trim().to_owned();
    let (job, sent) = submission(&cluster, &id).await;
    assert_eq!(job["process"][0]["kind"]["train"]["trigger_word"], "p3rs0n", "{job:#}");

    // The files are not on this machine any more, and the variable is not set.
    for folder in ["datasets", "models", "job.yaml"] {
        std::fs::rename(
            cluster.home.path().join(folder),
            cluster.home.path().join(format!("{folder}.away")),
        )
        .unwrap();
    }
    let copy = cluster
        .aitk_with(
            &["clone", &id, "-n", "second", "--set", "network.linear=4", "--json"],
            &as_ada,
        )
        .await;
    assert_eq!(code(&copy), 0, "{}", err(&copy));
    let said: serde_json::Value = serde_json::from_str(&out(&copy)).unwrap();
    assert_eq!(
        (&said["name"], &said["copy_of"]),
        (&"second".into(), &id.as_str().into())
    );
    let second = said["id"].as_str().unwrap();
    assert_ne!(second, id);
    let (copied, copy_sent) = submission(&cluster, second).await;
    let train = |job: &serde_json::Value| job["process"][0]["kind"]["train"].clone();
    assert_eq!(train(&copied)["trigger_word"], "p3rs0n");
    assert_eq!(
        (&train(&copied)["train"]["steps"], &train(&copied)["network"]["linear"]),
        (&40.into(), &4.into())
    );
    assert_eq!(copied["name"], "second");
    assert_eq!(
        (copy_sent.inputs, copy_sent.owner.as_str()),
        (sent.inputs.clone(), "ada")
    );
    assert_eq!(copy_sent.config_text, sent.config_text);
    // Except for the changes it is the same job.
    let mut same = copied.clone();
    same["name"] = job["name"].clone();
    same["process"][0]["kind"]["train"]["network"] = train(&job)["network"].clone();
    same["positions"] = job["positions"].clone();
    same["config"]["name"] = job["config"]["name"].clone();
    assert!(same == job, "something else was changed");
    let plain = cluster.aitk_with(&["clone", second], &as_ada).await;
    assert_eq!((code(&plain), out(&plain).lines().count()), (0, 1), "{}", err(&plain));
    assert!(
        err(&plain).contains(&format!("second is a copy of {second}")),
        "{}",
        err(&plain)
    );

    // Another data set is uploaded from this machine.
    std::fs::rename(
        cluster.home.path().join("datasets.away"),
        cluster.home.path().join("datasets"),
    )
    .unwrap();
    std::fs::rename(
        cluster.home.path().join("datasets/my_images"),
        cluster.home.path().join("datasets/others"),
    )
    .unwrap();
    std::fs::write(cluster.home.path().join("datasets/others/0.txt"), "another caption").unwrap();
    let other = ["clone", &id, "--set", "datasets[0].folder_path=datasets/others"];
    let other = cluster.aitk_with(&other, &as_ada).await;
    assert_eq!(code(&other), 0, "{}", err(&other));
    let (_, other) = submission(&cluster, out(&other).trim()).await;
    assert!(
        other.inputs.contains_key("datasets/others") && !other.inputs.contains_key("datasets/my_images"),
        "{:?}",
        other.inputs
    );
    cluster.coordinator.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_cannot_be_copied_are_refused_with_a_reason() {
    let cluster = TestCluster::new().await;
    let (ada, bob) = (
        token(&cluster, "ada", "submitter").await,
        token(&cluster, "bob", "submitter").await,
    );
    let viewer = token(&cluster, "eve", "viewer").await;
    let submitted = cluster
        .aitk_with(&["submit", "job.yaml"], &[("AITK_TOKEN", &ada)])
        .await;
    assert_eq!(code(&submitted), 0, "{}", err(&submitted));
    let id = out(&submitted).trim().to_owned();
    let array = cluster
        .aitk(&["submit", "job.yaml", "--sweep", "train.lr=1e-4,2e-4"])
        .await;
    let array = out(&array).trim().to_owned();
    for (args, token, exit, said) in [
        // A submitter does not see other users' jobs, and a viewer may not submit.
        (&["clone", id.as_str()][..], bob.as_str(), 3, "no job"),
        (&["clone", &id], &viewer, 4, "error:"),
        (&["clone", "nobody"], &ada, 3, "no job 'nobody'"),
        (
            &["clone", &id, "--set", "train.stepz=4"],
            &ada,
            1,
            "did you mean `steps`?",
        ),
        (&["clone", &id, "--set", "train.steps"], &ada, 2, "no '='"),
        (&["clone", &id, "-n", "../up"], &ada, 1, "cannot name a folder"),
        (
            &["clone", &id, "--set", "datasets[0].folder_path=gone"],
            &ada,
            3,
            "no file or folder 'gone' here",
        ),
        (
            &["clone", &id, "--set", "model.name_or_path=/dev/zero"],
            &ada,
            1,
            "a device",
        ),
        (&["clone", &id, "--notify-url", "https://x"], &ada, 2, "need --follow"),
        (&["clone", &array], &cluster.coordinator.token, 6, "an array of 2 jobs"),
    ] {
        let refused = cluster.aitk_with(args, &[("AITK_TOKEN", token)]).await;
        assert!(
            code(&refused) == exit && err(&refused).contains(said),
            "{args:?}: {} {}",
            code(&refused),
            err(&refused)
        );
        assert_eq!(out(&refused), "", "{args:?}");
    }
    let member = cluster.aitk(&["clone", &format!("{array}-1"), "-n", "again"]).await;
    assert_eq!(code(&member), 0, "{}", err(&member));

    // The audit log has an operator's reads of another user's job, and refused reads; it does not have the owner's
    // reads.
    let copied = cluster.aitk(&["clone", &id]).await;
    assert_eq!(code(&copied), 0, "{}", err(&copied));
    let of_bob = connect(&cluster.coordinator.url(), &bob, None).await.unwrap();
    let request = v1::GetJobRequest { job_id: id.clone() };
    let refused = of_bob.jobs.clone().submission(request).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::NotFound, "{refused}");
    let clients = connect(&cluster.coordinator.url(), &cluster.coordinator.token, None)
        .await
        .unwrap();
    let mut read = Vec::new();
    for _ in 0..100 {
        let request = v1::ReadAuditRequest::default();
        let lines = clients
            .admin
            .clone()
            .read_audit(request)
            .await
            .unwrap()
            .into_inner()
            .lines;
        read = lines
            .into_iter()
            .filter(|line| line.action == "job.read")
            .map(|line| (line.who, line.object, line.done))
            .collect();
        if read.len() >= 3 {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    // Bob was refused twice: the job and its submission. The order of the lines is not fixed.
    read.sort();
    let wanted = [
        ("admin".to_owned(), id.clone(), true),
        ("bob".to_owned(), id.clone(), false),
        ("bob".to_owned(), id.clone(), false),
    ];
    assert_eq!(read, wanted);

    // The inputs are gone from storage.
    for file in files(&cluster.data.path().join("storage")) {
        std::fs::remove_file(file).unwrap();
    }
    let gone = cluster.aitk_with(&["clone", &id], &[("AITK_TOKEN", &ada)]).await;
    assert_eq!(code(&gone), 6, "{}", err(&gone));
    assert!(
        err(&gone).contains("is not stored any more") && err(&gone).contains("`aitk submit CONFIG`"),
        "{}",
        err(&gone)
    );
    cluster.coordinator.shutdown().await;
}
