//! `aitk-coordinator token` and `aitk-coordinator audit`.

use super::list;
use crate::support::daemon::Daemon;
use crate::support::within;
use aitk_proto::client::connect;
use aitk_proto::v1;
use std::process::Command;
use tonic::Code;

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_made_listed_and_ended_by_command() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(folder.path(), &[], &[]).await;
    let url = daemon.url();
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_aitk-coordinator"))
            .args(arguments)
            .args(["--server", &url, "--data-dir"])
            .arg(folder.path())
            .env_remove("AITK_TOKEN")
            .env_remove("AITK_TOKEN_FILE")
            .output()
            .unwrap();
        let out = String::from_utf8(output.stdout).unwrap().trim().to_owned();
        (output.status.success(), out, String::from_utf8(output.stderr).unwrap())
    };
    let (good, secret, told) = run(&["token", "create", "anna", "--role", "viewer"]);
    assert!(
        good && secret.starts_with("aitk_") && secret.lines().count() == 1,
        "{secret} {told}"
    );
    assert!(
        told.contains("for anna, role viewer, until ") && !told.contains(&secret),
        "{told}"
    );
    let anna = connect(&url, &secret, None).await.unwrap();
    assert_eq!(list(&anna).await, Vec::<String>::new());
    let (good, listed, _) = run(&["token", "ls", "--json"]);
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert!(good && listed["name"] == "anna" && listed["role"] == "viewer" && listed["revoked"].is_null());
    let (good, said, _) = run(&["token", "revoke", listed["id"].as_str().unwrap()]);
    assert!(good && said.contains("of anna (viewer) is revoked"), "{said}");
    let error = within(anna.jobs.clone().info(v1::InfoRequest {})).await.unwrap_err();
    assert_eq!(error.code(), Code::Unauthenticated);
    let (good, log, _) = run(&["audit"]);
    assert!(
        good && log.contains("token.create") && log.contains("token.revoke") && !log.contains(&secret),
        "{log}"
    );
    let (good, _, error) = run(&["token", "create", "anna", "--role", "boss"]);
    assert!(!good && error.contains("expected viewer, submitter"), "{error}");
    let file = folder.path().join("box-token");
    let (good, said, _) = run(&[
        "token",
        "create",
        "box",
        "--role",
        "worker",
        "-o",
        file.to_str().unwrap(),
    ]);
    assert!(good && said == file.display().to_string());
    assert!(
        aitk_common::security::token::Token::read(&file).is_ok(),
        "readable by its owner alone"
    );
}
