//! The commands `aitk-coordinator init` and `aitk-coordinator worker`, and what they print.

use super::{Trust, within};
use crate::support::daemon::Daemon;
use aitk_common::hash::ContentHash;
use aitk_common::security::ca::CertificateRequestWithKey;
use aitk_common::security::join::{self, JoinToken};
use aitk_proto::client::{Credentials, connect, connect_with};
use aitk_proto::v1;
use std::path::Path;
use std::process::Command;

fn run(folder: &Path, arguments: &[&str]) -> (bool, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_aitk-coordinator"))
        .args(arguments)
        .env("AITK_COORDINATOR_DATA_DIR", folder)
        .env_remove("AITK_TOKEN")
        .env_remove("AITK_TOKEN_FILE")
        .env_remove("AITK_CA_FILE")
        .output()
        .unwrap();
    let out = String::from_utf8(output.stdout).unwrap().trim().to_owned();
    (output.status.success(), out, String::from_utf8(output.stderr).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_commands_set_up_a_coordinator_a_worker_and_a_user() {
    let folder = tempfile::tempdir().unwrap();
    let (success, stdout, stderr) = run(folder.path(), &["init", "--hostname", "gpu.lab"]);
    assert!(success && stdout.contains("SHA-256"), "{stdout} {stderr}");
    assert!(
        stderr.contains("aitk-worker join https://gpu.lab:7420") && stderr.contains("ca.key"),
        "{stderr}"
    );
    let (success, stdout, _) = run(folder.path(), &["init"]);
    assert!(success && stdout.contains("nothing was changed"), "{stdout}");
    let (success, _, stderr) = run(&folder.path().join("six"), &["init", "--hostname", "fd00::5"]);
    assert!(success && stderr.contains("join https://[fd00::5]:7420"), "{stderr}");
    let (success, _, error) = run(&folder.path().join("x"), &["init", "--hostname", "not a name"]);
    assert!(!success && error.contains("not a name"), "{error}");

    let daemon = Daemon::start(folder.path(), &[], &[]).await;
    let url = daemon.url();
    assert!(url.starts_with("https://"));
    // On the coordinator's machine the commands need no token, authority or address.
    let port = url.rsplit(':').next().unwrap();
    let (success, text, stderr) = run(folder.path(), &["worker", "join-token", "box"]);
    assert!(
        success
            && stderr.contains(&format!("aitk-worker join https://gpu.lab:{port} TOKEN"))
            && !stderr.contains(&text),
        "{text} {stderr}"
    );
    let invitation = JoinToken::parse(&text).unwrap();
    let request = CertificateRequestWithKey::new(None).unwrap();
    let wire = v1::JoinRequest {
        request: Some(request.request.into()),
        ..v1::JoinRequest::default()
    };
    let clients = within(connect(&url, &text, None)).await.unwrap();
    let reply = within(clients.workers.clone().join(wire)).await.unwrap().into_inner();
    let credentials = Credentials::with_certificate(
        reply.certificate.unwrap().certificate,
        request.key_pem,
        Trust::Authority(invitation.ca),
    );
    let joined = within(connect_with(&url, credentials, None)).await.unwrap();
    within(joined.jobs.clone().info(v1::InfoRequest {})).await.unwrap();

    let (success, listed, _) = run(folder.path(), &["worker", "certs", "ls", "--json"]);
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert!(
        success && listed["name"] == "box" && listed["revoked"].is_null(),
        "{listed}"
    );
    let (success, stdout, _) = run(folder.path(), &["worker", "revoke", "box"]);
    assert!(success && stdout.contains("of box"), "{stdout}");
    within(joined.jobs.clone().info(v1::InfoRequest {})).await.unwrap_err();
    let (success, stdout, _) = run(folder.path(), &["worker", "certs", "ls"]);
    assert!(success && stdout.contains("revoked"), "{stdout}");
    let (success, _, error) = run(folder.path(), &["worker", "revoke", "nobody"]);
    assert!(!success && error.contains("certs ls"), "{error}");

    // A user's token contains the authority's hash, so a user needs nothing else.
    let (success, token, _) = run(folder.path(), &["token", "create", "anna", "--role", "viewer"]);
    assert!(success && join::split(&token).1 == Some(invitation.ca), "{token}");
    let anna = within(connect(&url, &token, None)).await.unwrap();
    within(anna.jobs.clone().info(v1::InfoRequest {})).await.unwrap();
    // With another authority's hash, the client does not send the token.
    let wrong_authority = format!("{}.{}", join::split(&token).0, ContentHash::of(b"another"));
    within(connect(&url, &wrong_authority, None)).await.unwrap_err();
    let (success, log, _) = run(folder.path(), &["audit"]);
    let secret = join::split(&text).0;
    assert!(
        success && log.contains("join_token.create") && log.contains("worker.enrol") && !log.contains(secret),
        "{log}"
    );
}
