//! Certificates that are none of ours, or not for this.

use super::{Lab, Member, Trust, line, within};
use crate::support::FakeWorker;
use aitk_common::control::ToCoordinator;
use aitk_common::id::WorkerId;
use aitk_common::security::ca::Ca;
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair, SanType};
use std::path::Path;
use tonic::Code;

/// A certificate that an authority in a folder signs without our code.
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

fn member(lab: &Lab, (certificate, key): (String, String)) -> Member {
    Member {
        name: "box".into(),
        worker_id: "w1".into(),
        certificate,
        key,
        trust: Trust::Authority(lab.ca),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_of_another_authority_opens_nothing() {
    let (lab, other) = (Lab::start().await, Lab::start().await);
    let mut stranger = other.member("box").await;
    stranger.trust = Trust::Authority(lab.ca);
    stranger.knock(&lab).await.unwrap_err();
    let refused = line(&lab, "the stranger", |line| {
        line.action == "login" && line.detail.contains("another authority")
    })
    .await;
    assert!(
        !refused.done && refused.from == "127.0.0.1" && refused.by.is_empty(),
        "{refused:?}"
    );
    // An authority of the same name.
    let folder = tempfile::tempdir().unwrap();
    Ca::create(
        &folder.path().join("ca"),
        aitk_common::control::UnixMillis(1_700_000_000_000),
    )
    .unwrap();
    member(&lab, forge(&folder.path().join("ca"), |_| {}))
        .knock(&lab)
        .await
        .unwrap_err();
    within(lab.running.shutdown()).await;
    within(other.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_of_ours_for_something_else_opens_nothing() {
    let lab = Lab::start().await;
    let folder = lab.dir.path().join("ca");
    // As a coordinator has one.
    let servers = forge(&folder, |params| {
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    });
    member(&lab, servers).knock(&lab).await.unwrap_err();
    line(&lab, "a server's", |line| line.detail.contains("not a worker's")).await;
    // Signed by whoever has the key, but never given out here; or with what is no enrolment.
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
    let problem = member(&lab, forge(&folder, unknown("c0123456789")))
        .knock(&lab)
        .await
        .unwrap_err();
    assert!(
        problem.contains("no worker that this coordinator knows") && problem.contains("join again"),
        "{problem}"
    );
    line(&lab, "an unknown one", |line| line.by == "c0123456789" && !line.done).await;
    let problem = member(&lab, forge(&folder, |_| {})).knock(&lab).await.unwrap_err();
    assert!(problem.contains("no token was given"), "{problem}");
    // The enrolment of another worker under one's own name.
    let good = lab.member("good").await;
    let id = lab.certificates().await.remove(0).id;
    let stolen = forge(&folder, move |params| {
        params.subject_alt_names = vec![SanType::URI(
            format!("aitk:worker:box:{id}:9999999999999")
                .as_str()
                .try_into()
                .unwrap(),
        )];
    });
    let problem = member(&lab, stolen).knock(&lab).await.unwrap_err();
    assert!(problem.contains("does not have the worker's name"), "{problem}");
    good.knock(&lab).await.unwrap();
    within(lab.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workers_certificate_is_no_servers() {
    let lab = Lab::start().await;
    let good = lab.member("good").await;
    // A worker that plays the coordinator, with the authority's certificate in its chain.
    let folder = tempfile::tempdir().unwrap();
    let chain = good.certificate.clone() + &std::fs::read_to_string(lab.dir.path().join("ca/ca.pem")).unwrap();
    let (cert, key) = (folder.path().join("cert"), folder.path().join("key"));
    std::fs::write(&cert, chain).unwrap();
    std::fs::write(&key, &good.key).unwrap();
    let config = super::Config {
        tls: Some(super::TlsFiles { cert, key }),
        ..crate::support::config(folder.path(), std::time::Duration::from_secs(60))
    };
    let impostor = super::start(config).await.unwrap();
    let (text, _) = lab.join_token("box").await;
    let error = within(super::connect(&impostor.url(), &text, None)).await.unwrap_err();
    assert!(matches!(error, super::ConnectError::Untrusted { .. }), "{error}");
    within(impostor.shutdown()).await;
    within(lab.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_decides_which_worker_it_is() {
    let lab = Lab::start().await;
    let (one, two) = (lab.member("one").await, lab.member("two").await);
    let clients = one.connect(&lab).await.unwrap();
    // Whatever it calls itself.
    let worker = FakeWorker::register(&clients, FakeWorker::registration("zwei", None, Vec::new())).await;
    assert_eq!(worker.id.as_str(), one.worker_id);
    let request = super::v1::ListWorkersRequest::default();
    let seen = within(lab.admin.jobs.clone().list_workers(request))
        .await
        .unwrap()
        .into_inner()
        .workers;
    assert_eq!(
        seen.iter().map(|worker| worker.name.as_str()).collect::<Vec<_>>(),
        ["one"]
    );

    let clients = two.connect(&lab).await.unwrap();
    let stolen = FakeWorker::registration("one", Some(WorkerId::new(one.worker_id.as_str())), Vec::new());
    let first = ToCoordinator::Register(Box::new(stolen));
    let (_sender, mut messages) = FakeWorker::open(&clients, Some(first)).await.unwrap();
    let error = within(messages.message()).await.unwrap_err();
    assert_eq!(error.code(), Code::PermissionDenied, "{error}");
    let refused = line(&lab, "the claim", |line| line.action == "worker.join" && !line.done).await;
    assert!(refused.who == "two" && refused.object == one.worker_id, "{refused:?}");

    // Two machines with one certificate: the later one has the place, as with two data folders that were copied.
    let mut worker = worker;
    let clients = one.connect(&lab).await.unwrap();
    let later = FakeWorker::register(&clients, FakeWorker::registration("one", None, Vec::new())).await;
    assert_eq!(later.id, worker.id);
    while worker.next().await.is_some() {}
    within(lab.running.shutdown()).await;
}
