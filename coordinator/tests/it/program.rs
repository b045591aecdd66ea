//! The program: its options, and the variables that set them for a service.

use crate::support::daemon::Daemon;
use std::path::Path;
use std::process::{Command, Output};

fn run(folder: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_aitk-coordinator"))
        .args(arguments)
        .env("AITK_COORDINATOR_DATA_DIR", folder)
        .envs(environment.iter().copied())
        .output()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_with_a_level_can_be_json_and_has_no_colours_in_a_file() {
    for (arguments, json) in [(&["--json"][..], true), (&[][..], false)] {
        let folder = tempfile::tempdir().unwrap();
        // It is started with a level.
        let daemon = Daemon::start(folder.path(), arguments, &[]).await;
        let log = daemon.log();
        assert!(log.contains("INFO") && !log.contains('\u{1b}'), "{log}");
        let first: Result<serde_json::Value, _> = serde_json::from_str(log.lines().next().unwrap());
        assert_eq!(first.is_ok(), json, "{log}");
    }
    let folder = tempfile::tempdir().unwrap();
    let output = run(folder.path(), &["--log-level", "verbose"], &[]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("\"verbose\""), "{stderr}");
}

#[test]
fn variables_set_options_that_have_no_value() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["AITK_DIRECT_STORAGE", "AITK_ALLOW_WORKER_TOKENS", "AITK_JSON_LOG"] {
        for value in ["1", "true", "yes", "0", "off"] {
            let output = run(folder.path(), &["init"], &[(name, value)]);
            assert!(output.status.success(), "{name}={value} {output:?}");
        }
        let output = run(folder.path(), &["init"], &[(name, "perhaps")]);
        assert_eq!(output.status.code(), Some(2), "{name} {output:?}");
    }
}

#[test]
fn a_command_without_a_token_says_how_it_reaches_a_service() {
    let folder = tempfile::tempdir().unwrap();
    let output = run(
        folder.path(),
        &["worker", "join-token"],
        &[("AITK_TOKEN", ""), ("AITK_TOKEN_FILE", "")],
    );
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "{stderr}");
    assert!(
        stderr.contains("sudo -u aitk") && stderr.contains("token file"),
        "{stderr}"
    );
}
