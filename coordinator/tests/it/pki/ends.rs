//! Certificates that are renewed, that expire, and that are revoked.

use super::{Lab, PkiConfig, ca_folder, eventually, line, within};
use crate::support::FakeWorker;
use aitk_common::control::ToCoordinator;
use aitk_coordinator::{Config, backup, restore};
use aitk_proto::v1;
use std::time::Duration;
use tonic::Code;

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_is_renewed_over_its_own_connection() {
    let lab = Lab::start().await;
    let old = lab.member("box").await;
    let before = lab.certificates().await.remove(0);
    let clients = old.connect(&lab).await.unwrap();
    let refused = old.renew(&clients, "other").await.err().unwrap();
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    line(&lab, "the other name", |line| {
        line.action == "worker.renew" && !line.done && line.who == "box"
    })
    .await;

    let new = old.renew(&clients, "box").await.unwrap();
    let after = lab.certificates().await.remove(0);
    assert!(after.serial != before.serial && after.id == before.id && after.expires_ms >= before.expires_ms);
    new.knock(&lab).await.unwrap();
    // Also the old one, until its end: a machine that lost power before it had stored the new one is not locked out.
    old.knock(&lab).await.unwrap();
    line(&lab, "the renewal", |line| line.action == "worker.renew" && line.done).await;

    // Only with a certificate.
    let (secret, _) = crate::access::token(&lab.admin, "box", "worker", None).await;
    let token = format!("{secret}.{}", lab.ca);
    let clients = within(super::connect(&lab.url(), &token, None)).await.unwrap();
    let refused = old.renew(&clients, "box").await.err().unwrap();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    within(lab.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_that_has_expired_opens_nothing_and_cuts_what_it_opened() {
    // Long enough to open something with it, on however busy a machine.
    let mut life = Duration::from_secs(2);
    let (lab, member, mut worker, clients) = loop {
        let lab = Lab::with(|pki| pki.worker_life = life).await;
        let member = lab.member("box").await;
        if let Ok(clients) = member.connect(&lab).await {
            let first = FakeWorker::registration("box", None, Vec::new());
            let first = ToCoordinator::Register(Box::new(first));
            if let Ok((sender, messages)) = FakeWorker::open(&clients, Some(first)).await {
                break (lab, member, (sender, messages), clients);
            }
        }
        within(lab.running.shutdown()).await;
        life *= 2;
    };
    // The session.
    let cut = within(async {
        loop {
            if let Err(status) = worker.1.message().await {
                return status;
            }
        }
    })
    .await;
    assert_eq!(cut.code(), Code::Unauthenticated, "{cut}");
    // The connection that was there before.
    let refused = within(clients.jobs.clone().info(v1::InfoRequest {})).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
    assert!(
        refused.message().contains("has expired") && refused.message().contains("join again"),
        "{refused}"
    );
    line(&lab, "on the old connection", |line| {
        line.action == "login" && line.who == "box" && line.detail == "the certificate has expired"
    })
    .await;
    assert!(member.renew(&clients, "box").await.is_err());
    // A new one. In the very second of its end TLS still lets it through, and the door refuses it.
    eventually("a refusal by TLS", || async {
        member.knock(&lab).await.unwrap_err();
        let lines = crate::access::audit(&lab.admin).await;
        let told = |line: &v1::AuditLine| line.action == "login" && line.detail == "a certificate that has expired";
        lines.iter().any(told).then_some(())
    })
    .await;
    // Its name is free again.
    lab.member("box").await;
    within(lab.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_worker_is_out_at_once_and_stays_out() {
    let lab = Lab::start().await;
    let member = lab.member("box").await;
    let clients = member.connect(&lab).await.unwrap();
    let mut worker = FakeWorker::register(&clients, FakeWorker::registration("box", None, Vec::new())).await;
    let ended = lab.revoke("box").await.unwrap();
    assert_eq!((ended.certificates.len(), ended.join_tokens), (1, 0));
    while worker.next().await.is_some() {}
    let refused = member.renew(&clients, "box").await.err().unwrap();
    assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
    assert!(member.knock(&lab).await.unwrap_err().contains("was revoked"));
    let revoked = line(&lab, "the revocation", |line| line.action == "worker.revoke").await;
    assert!(
        revoked.done && revoked.who == "admin" && revoked.object == "box",
        "{revoked:?}"
    );
    let refused = line(&lab, "the revoked one", |line| {
        line.action == "login" && line.who == "box"
    })
    .await;
    assert!(
        !refused.done && refused.detail == "the certificate was revoked",
        "{refused:?}"
    );
    for nobody in ["box", "nobody", ""] {
        assert_eq!(lab.revoke(nobody).await.unwrap_err().code(), Code::NotFound);
    }
    let lab = lab.restart().await;
    assert!(member.knock(&lab).await.unwrap_err().contains("was revoked"));
    assert!(lab.certificates().await.remove(0).revoked_ms.is_some());
    within(lab.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_knows_who_joined_and_who_was_revoked() {
    let lab = Lab::start().await;
    let (good, bad) = (lab.member("good").await, lab.member("bad").await);
    let (unused, _) = lab.join_token("later").await;
    lab.revoke("bad").await.unwrap();
    let other = tempfile::tempdir().unwrap();
    let file = other.path().join("backup");
    within(backup(lab.dir.path(), None, &file)).await.unwrap();
    within(restore(&other.path().join("data"), None, &file)).await.unwrap();
    let late = lab.member("late").await;
    let ca = lab.ca;
    within(lab.running.shutdown()).await;

    // The authority is no part of a backup of the database: it is copied.
    let folder = ca_folder(lab.dir.path());
    let config = Config {
        bind: "127.0.0.1:0".parse().unwrap(),
        pki: Some(PkiConfig::new(folder)),
        ..Config::new(other.path().join("data"))
    };
    let lab = Lab::run(other, config, ca).await;
    good.knock(&lab).await.unwrap();
    assert!(bad.knock(&lab).await.unwrap_err().contains("was revoked"));
    assert!(late.knock(&lab).await.unwrap_err().contains("join again"));
    lab.join(&unused, None).await.unwrap();
    eventually("all that is known", || async {
        (lab.certificates().await.len() == 3).then_some(())
    })
    .await;
    within(lab.running.shutdown()).await;
}
