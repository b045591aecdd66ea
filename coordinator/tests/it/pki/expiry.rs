//! Renewal, expiry and revocation of certificates.

use super::{PkiConfig, PkiServer, ca_folder, eventually, wait_for_audit_line, within};
use crate::support::FakeWorker;
use aitk_common::control_plane::ToCoordinator;
use aitk_coordinator::{Config, backup, restore};
use aitk_proto::v1;
use std::time::Duration;
use tonic::Code;

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_is_renewed_over_its_own_connection() {
    let server = PkiServer::start().await;
    let old = server.join_worker("box").await;
    let before = server.certificates().await.remove(0);
    let clients = old.connect(&server).await.unwrap();
    let refused = old.renew(&clients, "other").await.err().unwrap();
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    wait_for_audit_line(&server, "the other name", |line| {
        line.action == "worker.renew" && !line.done && line.who == "box"
    })
    .await;

    let new = old.renew(&clients, "box").await.unwrap();
    let after = server.certificates().await.remove(0);
    assert!(after.serial != before.serial && after.id == before.id && after.expires_ms >= before.expires_ms);
    new.try_call(&server).await.unwrap();
    // The old one stays valid until it expires: a worker that lost power before it stored the new one is not locked out.
    old.try_call(&server).await.unwrap();
    wait_for_audit_line(&server, "the renewal", |line| {
        line.action == "worker.renew" && line.done
    })
    .await;

    // A renewal needs a certificate, not a token.
    let (secret, _) = crate::access::create_token(&server.admin, "box", "worker", None).await;
    let token = format!("{secret}.{}", server.ca);
    let clients = within(super::connect(&server.url(), &token, None)).await.unwrap();
    let refused = old.renew(&clients, "box").await.err().unwrap();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    within(server.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_certificate_is_refused_and_its_open_session_ends() {
    // Doubled until a session can be opened before the certificate expires, however busy the machine is.
    let mut lifetime = Duration::from_secs(2);
    let (server, joined, mut worker, clients) = loop {
        let server = PkiServer::start_with(|pki| pki.worker_life = lifetime).await;
        let joined = server.join_worker("box").await;
        if let Ok(clients) = joined.connect(&server).await {
            let first = FakeWorker::registration("box", None, Vec::new());
            let first = ToCoordinator::Register(Box::new(first));
            if let Ok((sender, messages)) = FakeWorker::open(&clients, Some(first)).await {
                break (server, joined, (sender, messages), clients);
            }
        }
        within(server.running.shutdown()).await;
        lifetime *= 2;
    };
    // The open session ends.
    let error = within(async {
        loop {
            if let Err(status) = worker.1.message().await {
                return status;
            }
        }
    })
    .await;
    assert_eq!(error.code(), Code::Unauthenticated, "{error}");
    // Calls on the open connection are refused.
    let refused = within(clients.jobs.clone().info(v1::InfoRequest {})).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
    assert!(
        refused.message().contains("has expired") && refused.message().contains("join again"),
        "{refused}"
    );
    wait_for_audit_line(&server, "on the old connection", |line| {
        line.action == "login" && line.who == "box" && line.detail == "the certificate has expired"
    })
    .await;
    assert!(joined.renew(&clients, "box").await.is_err());
    // New connections are refused by TLS, or by the coordinator in the very second of the expiry.
    eventually("a refusal by TLS", || async {
        joined.try_call(&server).await.unwrap_err();
        let lines = crate::access::audit_log(&server.admin).await;
        let is_refusal =
            |line: &v1::AuditLine| line.action == "login" && line.detail == "a certificate that has expired";
        lines.iter().any(is_refusal).then_some(())
    })
    .await;
    // Another worker can join with its name.
    server.join_worker("box").await;
    within(server.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_worker_is_disconnected_at_once_and_stays_refused() {
    let server = PkiServer::start().await;
    let joined = server.join_worker("box").await;
    let clients = joined.connect(&server).await.unwrap();
    let mut worker = FakeWorker::register(&clients, FakeWorker::registration("box", None, Vec::new())).await;
    let revoked = server.revoke("box").await.unwrap();
    assert_eq!((revoked.certificates.len(), revoked.join_tokens), (1, 0));
    while worker.next().await.is_some() {}
    let refused = joined.renew(&clients, "box").await.err().unwrap();
    assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
    assert!(joined.try_call(&server).await.unwrap_err().contains("was revoked"));
    let revoked = wait_for_audit_line(&server, "the revocation", |line| line.action == "worker.revoke").await;
    assert!(
        revoked.done && revoked.who == "admin" && revoked.object == "box",
        "{revoked:?}"
    );
    let refused = wait_for_audit_line(&server, "the revoked one", |line| {
        line.action == "login" && line.who == "box"
    })
    .await;
    assert!(
        !refused.done && refused.detail == "the certificate was revoked",
        "{refused:?}"
    );
    for name in ["box", "nobody", ""] {
        assert_eq!(server.revoke(name).await.unwrap_err().code(), Code::NotFound);
    }
    let server = server.restart().await;
    assert!(joined.try_call(&server).await.unwrap_err().contains("was revoked"));
    assert!(server.certificates().await.remove(0).revoked_ms.is_some());
    within(server.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_contains_joined_and_revoked_workers() {
    let server = PkiServer::start().await;
    let (good, bad) = (server.join_worker("good").await, server.join_worker("bad").await);
    let (unused, _) = server.join_token("later").await;
    server.revoke("bad").await.unwrap();
    let other = tempfile::tempdir().unwrap();
    let file = other.path().join("backup");
    within(backup(server.dir.path(), None, &file)).await.unwrap();
    within(restore(&other.path().join("data"), None, &file)).await.unwrap();
    let late = server.join_worker("late").await;
    let ca = server.ca;
    within(server.running.shutdown()).await;

    // A backup does not contain the certificate authority's folder; it is copied separately.
    let folder = ca_folder(server.dir.path());
    let config = Config {
        bind: "127.0.0.1:0".parse().unwrap(),
        pki: Some(PkiConfig::new(folder)),
        ..Config::new(other.path().join("data"))
    };
    let server = PkiServer::run(other, config, ca).await;
    good.try_call(&server).await.unwrap();
    assert!(bad.try_call(&server).await.unwrap_err().contains("was revoked"));
    assert!(late.try_call(&server).await.unwrap_err().contains("join again"));
    server.join(&unused, None).await.unwrap();
    eventually("three certificates", || async {
        (server.certificates().await.len() == 3).then_some(())
    })
    .await;
    within(server.running.shutdown()).await;
}
