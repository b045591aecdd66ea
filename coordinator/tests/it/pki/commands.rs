//! `aitk-coordinator init` and `aitk-coordinator worker`, and what they print.

use super::{Trust, within};
use crate::support::daemon::Daemon;
use aitk_common::hash::ContentHash;
use aitk_common::security::ca::WorkerRequest;
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
async fn from_nothing_to_a_worker_and_a_user() {
    let folder = tempfile::tempdir().unwrap();
    let (good, said, told) = run(folder.path(), &["init", "--hostname", "gpu.lab"]);
    assert!(good && said.contains("SHA-256"), "{said} {told}");
    assert!(
        told.contains("aitk-worker join https://gpu.lab:7420") && told.contains("ca.key"),
        "{told}"
    );
    let (good, again, _) = run(folder.path(), &["init"]);
    assert!(good && again.contains("nothing was changed"), "{again}");
    let (good, _, error) = run(&folder.path().join("x"), &["init", "--hostname", "not a name"]);
    assert!(!good && error.contains("not a name"), "{error}");

    let daemon = Daemon::start(folder.path(), &[], &[]).await;
    let url = daemon.url();
    assert!(url.starts_with("https://"));
    // On the coordinator's machine neither token, authority nor port need be said.
    let server: [&str; 0] = [];
    let port = url.rsplit(':').next().unwrap();
    let (good, text, told) = run(folder.path(), &[&["worker", "join-token", "box"][..], &server].concat());
    assert!(
        good && told.contains(&format!("aitk-worker join https://HOST:{port} TOKEN")) && !told.contains(&text),
        "{text} {told}"
    );
    let invitation = JoinToken::parse(&text).unwrap();
    let request = WorkerRequest::new(None).unwrap();
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
    let member = within(connect_with(&url, credentials, None)).await.unwrap();
    within(member.jobs.clone().info(v1::InfoRequest {})).await.unwrap();

    let (good, listed, _) = run(
        folder.path(),
        &[&["worker", "certs", "ls", "--json"][..], &server].concat(),
    );
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert!(
        good && listed["name"] == "box" && listed["revoked"].is_null(),
        "{listed}"
    );
    let (good, said, _) = run(folder.path(), &[&["worker", "revoke", "box"][..], &server].concat());
    assert!(good && said.contains("of box"), "{said}");
    within(member.jobs.clone().info(v1::InfoRequest {})).await.unwrap_err();
    let (good, said, _) = run(folder.path(), &[&["worker", "certs", "ls"][..], &server].concat());
    assert!(good && said.contains("revoked"), "{said}");
    let (good, _, error) = run(folder.path(), &[&["worker", "revoke", "nobody"][..], &server].concat());
    assert!(!good && error.contains("certs ls"), "{error}");

    // A user's token names the authority, so it is all that a user needs.
    let (good, token, _) = run(
        folder.path(),
        &[&["token", "create", "anna", "--role", "viewer"][..], &server].concat(),
    );
    assert!(good && join::split(&token).1 == Some(invitation.ca), "{token}");
    let anna = within(connect(&url, &token, None)).await.unwrap();
    within(anna.jobs.clone().info(v1::InfoRequest {})).await.unwrap();
    // With another authority's hash it is shown to nobody.
    let turned = format!("{}.{}", join::split(&token).0, ContentHash::of(b"another"));
    within(connect(&url, &turned, None)).await.unwrap_err();
    let (good, log, _) = run(folder.path(), &[&["audit"][..], &server].concat());
    let secret = join::split(&text).0;
    assert!(
        good && log.contains("join_token.create") && log.contains("worker.enrol") && !log.contains(secret),
        "{log}"
    );
}
