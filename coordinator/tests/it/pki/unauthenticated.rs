//! Certificates of other authorities, and certificates for other purposes.

use super::{JoinedWorker, PkiServer, Trust, wait_for_audit_line, within};
use crate::support::FakeWorker;
use aitk_common::control_plane::ToCoordinator;
use aitk_common::id::WorkerId;
use aitk_common::security::ca::Ca;
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair, SanType};
use std::path::Path;
use tonic::Code;

/// Signs a certificate with the authority in a folder, without the coordinator's own code.
fn forge(folder: &Path, change: impl FnOnce(&mut CertificateParams)) -> (String, String) {
    let key = KeyPair::from_pem(&std::fs::read_to_string(folder.join("ca.key")).unwrap()).unwrap();
    let mut authority = CertificateParams::default();
    let name = &aitk_common::hash::ContentHash::of(key.public_key_raw()).to_hex()[..16];
    authority.distinguished_name = rcgen::DistinguishedName::new();
    authority
        .distinguished_name
        .push(DnType::CommonName, format!("aitk {name}"));
    let issuer = Issuer::new(authority, key);
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "box");
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    change(&mut params);
    let own = KeyPair::generate().unwrap();
    let cert = params.signed_by(&own, &issuer).unwrap();
    (cert.pem(), own.serialize_pem())
}

fn worker_with(server: &PkiServer, (certificate, key): (String, String)) -> JoinedWorker {
    JoinedWorker {
        name: "box".into(),
        worker_id: "w1".into(),
        certificate,
        key,
        trust: Trust::Authority(server.ca),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_of_another_authority_is_refused() {
    let (server, other) = (PkiServer::start().await, PkiServer::start().await);
    let mut foreign = other.join_worker("box").await;
    foreign.trust = Trust::Authority(server.ca);
    foreign.try_call(&server).await.unwrap_err();
    let refused = wait_for_audit_line(&server, "the foreign certificate", |line| {
        line.action == "login" && line.detail.contains("another authority")
    })
    .await;
    assert!(
        !refused.done && refused.from == "127.0.0.1" && refused.by.is_empty(),
        "{refused:?}"
    );
    // An authority with the same name.
    let folder = tempfile::tempdir().unwrap();
    Ca::create(
        &folder.path().join("ca"),
        aitk_common::control_plane::UnixMillis(1_700_000_000_000),
    )
    .unwrap();
    worker_with(&server, forge(&folder.path().join("ca"), |_| {}))
        .try_call(&server)
        .await
        .unwrap_err();
    within(server.running.shutdown()).await;
    within(other.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn our_authoritys_certificate_for_another_purpose_is_refused() {
    let server = PkiServer::start().await;
    let folder = server.dir.path().join("ca");
    // A server certificate.
    let servers = forge(&folder, |params| {
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    });
    worker_with(&server, servers).try_call(&server).await.unwrap_err();
    wait_for_audit_line(&server, "a server's", |line| line.detail.contains("not a worker's")).await;
    // Signed with the authority's key, but with an unknown enrolment or none.
    let unknown = |id: &'static str| {
        move |params: &mut CertificateParams| {
            params.subject_alt_names = vec![SanType::URI(
                format!("aitk:worker:box:{id}:9999999999999")
                    .as_str()
                    .try_into()
                    .unwrap(),
            )];
        }
    };
    let problem = worker_with(&server, forge(&folder, unknown("c0123456789")))
        .try_call(&server)
        .await
        .unwrap_err();
    assert!(
        problem.contains("no worker that this coordinator knows") && problem.contains("join again"),
        "{problem}"
    );
    wait_for_audit_line(&server, "an unknown one", |line| line.by == "c0123456789" && !line.done).await;
    let problem = worker_with(&server, forge(&folder, |_| {}))
        .try_call(&server)
        .await
        .unwrap_err();
    assert!(problem.contains("no token was given"), "{problem}");
    // Another worker's enrolment with a different name.
    let good = server.join_worker("good").await;
    let id = server.certificates().await.remove(0).id;
    let stolen = forge(&folder, move |params| {
        params.subject_alt_names = vec![SanType::URI(
            format!("aitk:worker:box:{id}:9999999999999")
                .as_str()
                .try_into()
                .unwrap(),
        )];
    });
    let problem = worker_with(&server, stolen).try_call(&server).await.unwrap_err();
    assert!(problem.contains("does not have the worker's name"), "{problem}");
    good.try_call(&server).await.unwrap();
    within(server.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workers_certificate_cannot_be_used_by_a_server() {
    let server = PkiServer::start().await;
    let good = server.join_worker("good").await;
    // A worker poses as the coordinator, with the authority's certificate in its chain.
    let folder = tempfile::tempdir().unwrap();
    let chain = good.certificate.clone() + &std::fs::read_to_string(server.dir.path().join("ca/ca.pem")).unwrap();
    let (cert, key) = (folder.path().join("cert"), folder.path().join("key"));
    std::fs::write(&cert, chain).unwrap();
    std::fs::write(&key, &good.key).unwrap();
    let config = super::Config {
        tls: Some(super::TlsFiles { cert, key }),
        ..crate::support::config(folder.path(), std::time::Duration::from_secs(60))
    };
    let impostor = super::start(config).await.unwrap();
    let (text, _) = server.join_token("box").await;
    let error = within(super::connect(&impostor.url(), &text, None)).await.unwrap_err();
    assert!(matches!(error, super::ConnectError::Untrusted { .. }), "{error}");
    within(impostor.shutdown()).await;
    within(server.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_determines_the_workers_identity() {
    let server = PkiServer::start().await;
    let (one, two) = (server.join_worker("one").await, server.join_worker("two").await);
    let clients = one.connect(&server).await.unwrap();
    // The name in the registration is ignored.
    let worker = FakeWorker::register(&clients, FakeWorker::registration("another-name", None, Vec::new())).await;
    assert_eq!(worker.id.as_str(), one.worker_id);
    let request = super::v1::ListWorkersRequest::default();
    let seen = within(server.admin.jobs.clone().list_workers(request))
        .await
        .unwrap()
        .into_inner()
        .workers;
    assert_eq!(
        seen.iter().map(|worker| worker.name.as_str()).collect::<Vec<_>>(),
        ["one"]
    );

    let clients = two.connect(&server).await.unwrap();
    let stolen = FakeWorker::registration("one", Some(WorkerId::new(one.worker_id.as_str())), Vec::new());
    let first = ToCoordinator::Register(Box::new(stolen));
    let (_sender, mut messages) = FakeWorker::open(&clients, Some(first)).await.unwrap();
    let error = within(messages.message()).await.unwrap_err();
    assert_eq!(error.code(), Code::PermissionDenied, "{error}");
    let refused = wait_for_audit_line(&server, "the refused worker id", |line| {
        line.action == "worker.join" && !line.done
    })
    .await;
    assert!(refused.who == "two" && refused.object == one.worker_id, "{refused:?}");

    // Two sessions with one certificate, as after copying a data folder: the later one replaces the earlier one.
    let mut worker = worker;
    let clients = one.connect(&server).await.unwrap();
    let later = FakeWorker::register(&clients, FakeWorker::registration("one", None, Vec::new())).await;
    assert_eq!(later.id, worker.id);
    while worker.next().await.is_some() {}
    within(server.running.shutdown()).await;
}
