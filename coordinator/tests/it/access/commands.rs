//! The commands `aitk-coordinator token` and `aitk-coordinator audit`.

use super::list;
use crate::support::daemon::Daemon;
use crate::support::within;
use aitk_proto::client::connect;
use aitk_proto::v1;
use std::process::Command;
use tonic::Code;

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_created_listed_and_revoked_on_the_command_line() {
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
    let (success, secret, stderr) = run(&["token", "create", "anna", "--role", "viewer"]);
    assert!(
        success && secret.starts_with("aitk_") && secret.lines().count() == 1,
        "{secret} {stderr}"
    );
    assert!(
        stderr.contains("for anna, role viewer, until ") && !stderr.contains(&secret),
        "{stderr}"
    );
    let anna = connect(&url, &secret, None).await.unwrap();
    assert_eq!(list(&anna).await, Vec::<String>::new());
    let (success, listed, _) = run(&["token", "ls", "--json"]);
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert!(success && listed["name"] == "anna" && listed["role"] == "viewer" && listed["revoked"].is_null());
    let (_, columns, _) = run(&["token", "ls"]);
    let columns: Vec<&str> = columns.split_whitespace().collect();
    assert_eq!(columns[1..4], ["anna", "viewer", "until"], "{columns:?}");
    let (success, stdout, _) = run(&["token", "revoke", listed["id"].as_str().unwrap()]);
    assert!(success && stdout.contains("of anna (viewer) is revoked"), "{stdout}");
    let error = within(anna.jobs.clone().info(v1::InfoRequest {})).await.unwrap_err();
    assert_eq!(error.code(), Code::Unauthenticated);
    let (success, log, _) = run(&["audit"]);
    assert!(
        success && log.contains("token.create") && log.contains("token.revoke") && !log.contains(&secret),
        "{log}"
    );
    let (success, _, error) = run(&["token", "create", "anna", "--role", "boss"]);
    assert!(!success && error.contains("expected viewer, submitter"), "{error}");
    let file = folder.path().join("box-token");
    let (success, stdout, _) = run(&[
        "token",
        "create",
        "box",
        "--role",
        "worker",
        "-o",
        file.to_str().unwrap(),
    ]);
    assert!(success && stdout == file.display().to_string());
    assert!(
        aitk_common::security::token::Token::read(&file).is_ok(),
        "readable by its owner alone"
    );
}
