//! Join tokens: each lets one worker join once, at the right coordinator and with the right name.

use super::{PkiServer, eventually, wait_for_audit_line, within};
use aitk_common::id::UserName;
use aitk_common::security::ca::CertificateRequestWithKey;
use aitk_common::security::join;
use aitk_proto::client::{ConnectError, connect};
use aitk_proto::v1;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tonic::Code;

#[tokio::test(flavor = "multi_thread")]
async fn a_join_token_works_once() {
    let server = PkiServer::start().await;
    let (text, id) = server.join_token("").await;
    let joined = server.join(&text, None).await.unwrap();
    assert_eq!(
        joined.name, "gpu-lab",
        "the host name, with invalid characters replaced"
    );
    joined.try_call(&server).await.unwrap();
    let enrolment = wait_for_audit_line(&server, "the enrolment", |line| {
        line.action == "worker.enrol" && line.done
    })
    .await;
    assert!(
        enrolment.by == id && enrolment.who == "gpu-lab" && enrolment.object == joined.worker_id,
        "{enrolment:?}"
    );
    wait_for_audit_line(&server, "the first use", |line| {
        line.action == "certificate.use" && line.who == "gpu-lab"
    })
    .await;

    let repeated = server.join(&text, Some("other")).await.err().unwrap();
    assert_eq!(repeated.code(), Code::Unauthenticated, "{repeated}");
    assert!(repeated.message().contains("used already"), "{repeated}");
    let refused = wait_for_audit_line(&server, "the second use", |line| {
        line.action == "worker.enrol" && !line.done
    })
    .await;
    assert!(
        refused.by == id && refused.detail.contains("used already"),
        "{refused:?}"
    );

    // The same after a restart, and no file contains the secret.
    let secret = join::split(&text).0.to_owned();
    let server = server.restart().await;
    let repeated = server.join(&text, Some("other")).await.err().unwrap();
    assert_eq!(repeated.code(), Code::Unauthenticated, "{repeated}");
    joined.try_call(&server).await.unwrap();
    for entry in std::fs::read_dir(server.dir.path()).unwrap().flatten() {
        if let Ok(bytes) = std::fs::read(entry.path()) {
            let holds = bytes.windows(secret.len()).any(|part| part == secret.as_bytes());
            assert!(!holds, "{}", entry.path().display());
        }
    }
    within(server.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_join_with_the_same_key_gets_the_same_certificate() {
    let server = PkiServer::start().await;
    let (text, _) = server.join_token("").await;
    let request = CertificateRequestWithKey::new(Some(&UserName::new("box"))).unwrap();
    let join = async |server: &PkiServer, request: &CertificateRequestWithKey| {
        let clients = within(connect(&server.url(), &text, None)).await.unwrap();
        let wire = v1::JoinRequest {
            request: Some(request.request.clone().into()),
            host: "box".to_owned(),
            worker_id: String::new(),
        };
        let reply = within(clients.workers.clone().join(wire)).await;
        reply.map(tonic::Response::into_inner)
    };
    let first = join(&server, &request).await.unwrap();
    // As if the answer had been lost. It also works after a restart.
    let server = server.restart().await;
    let repeated = CertificateRequestWithKey::with_key_pem(&request.key_pem, Some(&UserName::new("box"))).unwrap();
    let second = join(&server, &repeated).await.unwrap();
    assert_eq!(first.worker_id, second.worker_id);
    assert_eq!(
        first.certificate.unwrap().certificate,
        second.certificate.unwrap().certificate
    );
    assert_eq!(server.certificates().await.len(), 1);
    wait_for_audit_line(&server, "the second answer", |line| {
        line.done && line.detail.contains("again")
    })
    .await;
    // Another key is refused, and after a revocation every key is.
    let other = CertificateRequestWithKey::new(Some(&UserName::new("box"))).unwrap();
    assert_eq!(join(&server, &other).await.unwrap_err().code(), Code::Unauthenticated);
    server.revoke("box").await.unwrap();
    assert_eq!(
        join(&server, &repeated).await.unwrap_err().code(),
        Code::Unauthenticated
    );
    within(server.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_concurrent_joins_with_one_token_one_succeeds() {
    let server = PkiServer::start().await;
    let (text, _) = server.join_token("").await;
    let names: Vec<String> = (0..8).map(|n| format!("box-{n}")).collect();
    let results = futures::future::join_all(names.iter().map(|name| server.join(&text, Some(name)))).await;
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1);
    assert_eq!(server.certificates().await.len(), 1);
    within(server.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_join_token_expires_and_permits_only_joining() {
    let server = PkiServer::start().await;
    let (text, id) = server.join_token_for("box", Duration::from_millis(1)).await;
    let refused = eventually("the token to expire", || async { server.join(&text, None).await.err() }).await;
    assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
    assert!(refused.message().contains("expired"), "{refused}");
    let refusal = wait_for_audit_line(&server, "the expired token", |line| {
        line.action == "worker.enrol" && !line.done
    })
    .await;
    assert!(
        refusal.by == id && refusal.detail.contains("expired") && refusal.who == "box",
        "{refusal:?}"
    );

    let (good, _) = server.join_token("box").await;
    let clients = within(connect(&server.url(), &good, None)).await.unwrap();
    let error = within(clients.jobs.clone().info(v1::InfoRequest {})).await.unwrap_err();
    assert_eq!(error.code(), Code::Unauthenticated, "{error}");
    server.join(&good, None).await.unwrap();

    for (name, lifetime_ms) in [("a b", 1), ("box", 0), ("box", u64::MAX)] {
        let request = v1::CreateJoinTokenRequest {
            name: name.into(),
            expires_in_ms: lifetime_ms,
        };
        let error = within(server.admin.admin.clone().create_join_token(request))
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    }
    within(server.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_man_in_the_middle_gets_no_token() {
    let (server, other) = (PkiServer::start().await, PkiServer::start().await);
    let (text, _) = server.join_token("box").await;
    // Another coordinator's address: its certificate is valid, but from another authority.
    let error = within(connect(&other.url(), &text, None)).await.unwrap_err();
    assert!(matches!(error, ConnectError::Untrusted { .. }), "{error}");
    assert!(error.to_string().contains("nothing was sent"), "{error}");
    // The same with a token that names the other coordinator's authority.
    let token = format!("{}.{}", server.running.token, other.ca);
    let error = within(connect(&server.url(), &token, None)).await.unwrap_err();
    assert!(matches!(error, ConnectError::Untrusted { .. }), "{error}");
    let seen = crate::access::audit_log(&other.admin).await;
    assert!(
        seen.iter()
            .all(|line| line.action != "login" && line.action != "worker.enrol"),
        "{seen:?}"
    );
    // The token still works at its own coordinator.
    server.join(&text, None).await.unwrap();
    // The right coordinator, at an address for which its certificate is not valid: a proxy on 127.0.0.2. Not every system has
    // that address.
    match TcpListener::bind(("127.0.0.2", 0)).await {
        Err(error) => crate::skip::skip("address", format_args!("127.0.0.2: {error}")),
        Ok(proxy) => {
            let (address, target) = (proxy.local_addr().unwrap(), server.running.addr);
            let forwarding = tokio::spawn(async move {
                while let Ok((mut client, _)) = proxy.accept().await {
                    let mut upstream = TcpStream::connect(target).await.unwrap();
                    let _ = tokio::io::copy_bidirectional(&mut client, &mut upstream).await;
                }
            });
            let (text, _) = server.join_token("box-2").await;
            let error = within(connect(&format!("https://{address}"), &text, None))
                .await
                .unwrap_err();
            assert!(matches!(error, ConnectError::Untrusted { .. }), "{error}");
            forwarding.abort();
        }
    }
    within(server.running.shutdown()).await;
    within(other.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_gets_the_name_of_its_join_token_and_no_other() {
    let server = PkiServer::start().await;
    let (text, id) = server.join_token("box-1").await;
    let refused = server.join(&text, Some("box-2")).await.err().unwrap();
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    assert!(
        refused.message().contains("box-1") && refused.message().contains("box-2"),
        "{refused}"
    );
    let noted = wait_for_audit_line(&server, "the other name", |line| {
        line.action == "worker.enrol" && !line.done
    })
    .await;
    assert!(noted.by == id && noted.detail.contains("box-2"), "{noted:?}");

    // A refused request does not use the token up.
    let clients = within(connect(&server.url(), &text, None)).await.unwrap();
    for public_key in [Vec::new(), vec![4; 65], vec![0x30; 100_000]] {
        let request = v1::CertificateRequest {
            public_key,
            ..v1::CertificateRequest::default()
        };
        let wire = v1::JoinRequest {
            request: Some(request),
            ..v1::JoinRequest::default()
        };
        let error = within(clients.workers.clone().join(wire)).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    }
    let first = server.join(&text, Some("box-1")).await.unwrap();

    // The name is taken until that worker is revoked.
    let (text, _) = server.join_token("box-1").await;
    let refused = server.join(&text, None).await.err().unwrap();
    assert_eq!(refused.code(), Code::AlreadyExists, "{refused}");
    assert!(refused.message().contains("worker revoke box-1"), "{refused}");
    wait_for_audit_line(&server, "the taken name", |line| {
        line.action == "worker.enrol" && line.detail.contains("already")
    })
    .await;
    server.revoke("box-1").await.unwrap();
    let refused = server.join(&text, None).await.err().unwrap();
    assert!(
        refused.message().contains("revoked"),
        "unused join tokens for the name are revoked, too: {refused}"
    );
    let (text, _) = server.join_token("box-1").await;
    // A worker that still has its old id gets that id again.
    let second = server.join_as(&text, None, &first.worker_id).await.unwrap();
    assert_eq!(second.worker_id, first.worker_id);
    second.try_call(&server).await.unwrap();
    assert!(first.try_call(&server).await.unwrap_err().contains("was revoked"));

    // A worker cannot join with another worker's id.
    let (text, _) = server.join_token("box-3").await;
    let refused = server.join_as(&text, None, &first.worker_id).await.err().unwrap();
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    within(server.running.shutdown()).await;
}
