//! Which credentials each connection needs, and the coordinator's own certificate.

use super::{
    Config, JoinedWorker, PkiConfig, PkiServer, TlsFiles, Trust, ca_folder, connect, eventually, init, start, within,
};
use crate::support::FakeWorker;
use aitk_common::control_plane::ToCoordinator;
use aitk_coordinator::StartError;
use aitk_proto::client::Clients;
use aitk_proto::v1;
use std::net::{IpAddr, UdpSocket};
use std::time::Duration;
use tonic::{Code, Status};

async fn open_session(clients: &Clients) -> Result<(), Status> {
    let first = ToCoordinator::Register(Box::new(FakeWorker::registration("w", None, Vec::new())));
    let (_sender, mut messages) = FakeWorker::open(clients, Some(first)).await?;
    within(messages.message()).await.map(drop)
}

async fn call_has(clients: &Clients) -> Result<(), Status> {
    within(clients.blobs.clone().has(v1::HasRequest::default()))
        .await
        .map(drop)
}

/// An address of this machine that is not loopback. Sends nothing: connecting a UDP socket only selects a local address.
fn own_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_loopback() && !ip.is_unspecified()).then_some(ip)
}

#[tokio::test(flavor = "multi_thread")]
async fn over_the_network_a_worker_needs_a_certificate_and_a_user_a_token() {
    let Some(ip) = own_address() else {
        crate::skip::skip("address", "this machine has only loopback addresses");
        return;
    };
    for tokens_allowed in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let ca = init(dir.path(), &[]).unwrap().hash;
        let config = Config {
            bind: (ip, 0).into(),
            pki: Some(PkiConfig {
                allow_worker_tokens: tokens_allowed,
                ..PkiConfig::new(ca_folder(dir.path()))
            }),
            ..Config::new(dir.path())
        };
        let server = PkiServer::run(dir, config, ca).await;
        let user = format!(
            "{}.{ca}",
            crate::access::create_token(&server.admin, "anna", "submitter", None)
                .await
                .0
        );
        let anna = within(connect(&server.url(), &user, None)).await.unwrap();
        call_has(&anna).await.unwrap();
        assert!(crate::access::list(&anna).await.is_empty());

        let worker = format!(
            "{}.{ca}",
            crate::access::create_token(&server.admin, "box", "worker", None)
                .await
                .0
        );
        let with_token = within(connect(&server.url(), &worker, None)).await.unwrap();
        for (who, clients) in [("box", &with_token), ("admin", &server.admin)] {
            let opened = open_session(clients).await;
            if tokens_allowed {
                opened.unwrap();
                continue;
            }
            let refused = opened.unwrap_err();
            assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
            assert!(refused.message().contains("--allow-worker-tokens"), "{refused}");
            let noted =
                super::wait_for_audit_line(&server, "the token", |line| line.action == "refused" && line.who == who)
                    .await;
            assert!(noted.detail.contains("needs a certificate"), "{noted:?}");
        }
        assert_eq!(call_has(&with_token).await.is_ok(), tokens_allowed);
        call_has(&server.admin).await.unwrap();

        let joined = server.join_worker("box-1").await;
        let certified = joined.connect(&server).await.unwrap();
        open_session(&certified).await.unwrap();
        call_has(&certified).await.unwrap();
        within(server.running.shutdown()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn on_loopback_workers_may_use_tokens() {
    let server = PkiServer::start().await;
    let worker = format!(
        "{}.{}",
        crate::access::create_token(&server.admin, "box", "worker", None)
            .await
            .0,
        server.ca
    );
    let with_token = within(connect(&server.url(), &worker, None)).await.unwrap();
    open_session(&with_token).await.unwrap();
    open_session(&server.admin).await.unwrap();
    within(server.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_certificate_from_elsewhere_works_with_worker_certificates() {
    let dir = tempfile::tempdir().unwrap();
    let ca = init(dir.path(), &[]).unwrap().hash;
    let (cert, key) = crate::connections::self_signed_certificate(dir.path());
    let config = Config {
        tls: Some(TlsFiles {
            cert: cert.clone(),
            key,
        }),
        pki: Some(PkiConfig::new(ca_folder(dir.path()))),
        ..crate::support::config(dir.path(), Duration::from_secs(60))
    };
    let running = start(config.clone()).await.unwrap();
    let admin = within(connect(&running.url(), &running.token, Some(&cert)))
        .await
        .unwrap();
    let server = PkiServer {
        running,
        admin,
        dir,
        ca,
        config,
    };
    let (text, _) = server.join_token("box").await;
    // The token names an authority that did not issue the server's certificate.
    within(connect(&server.url(), &text, None)).await.unwrap_err();
    let request = aitk_common::security::ca::CertificateRequestWithKey::new(None).unwrap();
    let clients = within(connect(&server.url(), &text, Some(&cert))).await.unwrap();
    let wire = v1::JoinRequest {
        request: Some(request.request.into()),
        ..v1::JoinRequest::default()
    };
    let reply = within(clients.workers.clone().join(wire)).await.unwrap().into_inner();
    let joined = JoinedWorker {
        name: reply.name,
        worker_id: reply.worker_id,
        certificate: reply.certificate.unwrap().certificate,
        key: request.key_pem,
        trust: Trust::Pem(std::fs::read_to_string(&cert).unwrap()),
    };
    joined.try_call(&server).await.unwrap();
    open_session(&joined.connect(&server).await.unwrap()).await.unwrap();
    within(server.running.shutdown()).await;
}

/// The certificate chain that the coordinator presents, in DER.
async fn presented_chain(server: &PkiServer) -> Vec<Vec<u8>> {
    use std::sync::Arc;
    use tokio_rustls::rustls;
    let mut roots = rustls::RootCertStore::empty();
    let pem = std::fs::read(server.dir.path().join("ca/ca.pem")).unwrap();
    let ca = <rustls::pki_types::CertificateDer as rustls::pki_types::pem::PemObject>::from_pem_slice(&pem).unwrap();
    roots.add(ca).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let tcp = tokio::net::TcpStream::connect(server.running.addr).await.unwrap();
    let name = rustls::pki_types::ServerName::try_from("localhost").unwrap();
    let stream = tokio_rustls::TlsConnector::from(Arc::new(config))
        .connect(name, tcp)
        .await
        .unwrap();
    let chain = stream.get_ref().1.peer_certificates().unwrap();
    chain.iter().map(|cert| cert.to_vec()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_coordinators_certificate_is_renewed_while_it_runs() {
    let server = PkiServer::start_with(|pki| {
        pki.server_life = Duration::from_secs(30);
        pki.hostnames = vec!["gpu.lab".into()];
    })
    .await;
    let first = within(presented_chain(&server)).await;
    assert_eq!(first.len(), 2, "the chain includes the authority's certificate");
    assert_eq!(aitk_common::hash::ContentHash::of(&first[1]), server.ca);
    let joined = server.join_worker("box").await;
    let clients = joined.connect(&server).await.unwrap();
    eventually("another certificate", || async {
        let now = within(presented_chain(&server)).await;
        (now[0] != first[0]).then_some(())
    })
    .await;
    // Open connections go on, and new ones work.
    within(clients.jobs.clone().info(v1::InfoRequest {})).await.unwrap();
    joined.try_call(&server).await.unwrap();
    within(server.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_incomplete_authority_prevents_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let open = Config {
        bind: "0.0.0.0:0".parse().unwrap(),
        ..Config::new(dir.path())
    };
    let error = start(open.clone()).await.unwrap_err();
    assert!(error.to_string().contains("aitk-coordinator init"), "{error}");
    let first = init(dir.path(), &["gpu.lab".into()]).unwrap();
    let repeated = init(dir.path(), &["other.lab".into()]).unwrap();
    assert!(first.created && !repeated.created && first.hash == repeated.hash);
    let folder = ca_folder(dir.path());
    assert_eq!(std::fs::read_to_string(folder.join("hostnames")).unwrap(), "gpu.lab\n");
    let config_with = |pki| Config {
        pki: Some(pki),
        ..open.clone()
    };
    let invalid = PkiConfig {
        hostnames: vec!["https://gpu.lab".into()],
        ..PkiConfig::new(&folder)
    };
    let error = start(config_with(invalid)).await.unwrap_err();
    assert!(
        matches!(error, StartError::Tls(_)) && error.to_string().contains("host name"),
        "{error}"
    );
    std::fs::remove_file(folder.join("ca.key")).unwrap();
    let error = start(config_with(PkiConfig::new(&folder))).await.unwrap_err();
    assert!(error.to_string().contains("ca.key"), "{error}");
    assert!(init(dir.path(), &[]).is_err(), "init does not overwrite it");
}

#[tokio::test(flavor = "multi_thread")]
async fn joining_needs_an_authority() {
    let dir = tempfile::tempdir().unwrap();
    let running = start(crate::support::config(dir.path(), Duration::from_secs(60)))
        .await
        .unwrap();
    let admin = connect(&running.url(), &running.token, None).await.unwrap();
    let request = v1::CreateJoinTokenRequest {
        name: String::new(),
        expires_in_ms: 1000,
    };
    let error = within(admin.admin.clone().create_join_token(request))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(error.message().contains("aitk-coordinator init"), "{error}");
    within(running.shutdown()).await;
}
