//! Join tokens: one machine, once, at the right coordinator, under the right name.

use super::{Lab, eventually, line, within};
use aitk_common::id::UserName;
use aitk_common::security::ca::WorkerRequest;
use aitk_common::security::join;
use aitk_proto::client::{ConnectError, connect};
use aitk_proto::v1;
use std::time::Duration;
use tonic::Code;

#[tokio::test(flavor = "multi_thread")]
async fn a_join_token_lets_one_machine_in_and_only_once() {
    let lab = Lab::start().await;
    let (text, id) = lab.join_token("").await;
    let joined = lab.join(&text, None).await.unwrap();
    assert_eq!(
        joined.name, "gpu-lab",
        "the name of the machine, as far as it can be one"
    );
    joined.knock(&lab).await.unwrap();
    let made = line(&lab, "the enrolment", |line| line.action == "worker.enrol" && line.done).await;
    assert!(
        made.by == id && made.who == "gpu-lab" && made.object == joined.worker_id,
        "{made:?}"
    );
    line(&lab, "the first use", |line| {
        line.action == "certificate.use" && line.who == "gpu-lab"
    })
    .await;

    let again = lab.join(&text, Some("other")).await.err().unwrap();
    assert_eq!(again.code(), Code::Unauthenticated, "{again}");
    assert!(again.message().contains("used already"), "{again}");
    let refused = line(&lab, "the second use", |line| {
        line.action == "worker.enrol" && !line.done
    })
    .await;
    assert!(
        refused.by == id && refused.detail.contains("used already"),
        "{refused:?}"
    );

    // Also after a restart. And the secret is in no file.
    let secret = join::split(&text).0.to_owned();
    let lab = lab.restart().await;
    let again = lab.join(&text, Some("other")).await.err().unwrap();
    assert_eq!(again.code(), Code::Unauthenticated, "{again}");
    joined.knock(&lab).await.unwrap();
    for entry in std::fs::read_dir(lab.dir.path()).unwrap().flatten() {
        if let Ok(bytes) = std::fs::read(entry.path()) {
            let holds = bytes.windows(secret.len()).any(|part| part == secret.as_bytes());
            assert!(!holds, "{}", entry.path().display());
        }
    }
    within(lab.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_whose_answer_was_lost_asks_again_and_gets_the_same_one() {
    let lab = Lab::start().await;
    let (text, _) = lab.join_token("").await;
    let request = WorkerRequest::new(Some(&UserName::new("box"))).unwrap();
    let ask = async |lab: &Lab, request: &WorkerRequest| {
        let clients = within(connect(&lab.url(), &text, None)).await.unwrap();
        let wire = v1::JoinRequest {
            request: Some(request.request.clone().into()),
            host: "box".to_owned(),
            worker_id: String::new(),
        };
        let reply = within(clients.workers.clone().join(wire)).await;
        reply.map(tonic::Response::into_inner)
    };
    let first = ask(&lab, &request).await.unwrap();
    // As if it had never come. Also after a restart.
    let lab = lab.restart().await;
    let again = WorkerRequest::with_key_pem(&request.key_pem, Some(&UserName::new("box"))).unwrap();
    let second = ask(&lab, &again).await.unwrap();
    assert_eq!(first.worker_id, second.worker_id);
    assert_eq!(
        first.certificate.unwrap().certificate,
        second.certificate.unwrap().certificate
    );
    assert_eq!(lab.certificates().await.len(), 1);
    line(&lab, "the second answer", |line| {
        line.done && line.detail.contains("again")
    })
    .await;
    // Another key gets nothing, and after a revocation nobody does.
    let other = WorkerRequest::new(Some(&UserName::new("box"))).unwrap();
    assert_eq!(ask(&lab, &other).await.unwrap_err().code(), Code::Unauthenticated);
    lab.revoke("box").await.unwrap();
    assert_eq!(ask(&lab, &again).await.unwrap_err().code(), Code::Unauthenticated);
    within(lab.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_that_show_it_at_once_one_gets_in() {
    let lab = Lab::start().await;
    let (text, _) = lab.join_token("").await;
    let names: Vec<String> = (0..8).map(|n| format!("box-{n}")).collect();
    let tries = futures::future::join_all(names.iter().map(|name| lab.join(&text, Some(name)))).await;
    assert_eq!(tries.iter().filter(|joined| joined.is_ok()).count(), 1);
    assert_eq!(lab.certificates().await.len(), 1);
    within(lab.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_join_token_expires_and_opens_nothing_else() {
    let lab = Lab::start().await;
    let (text, id) = lab.join_token_for("box", Duration::from_millis(1)).await;
    let refused = eventually("its end", || async { lab.join(&text, None).await.err() }).await;
    assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
    assert!(refused.message().contains("expired"), "{refused}");
    let line = line(&lab, "the expired token", |line| {
        line.action == "worker.enrol" && !line.done
    })
    .await;
    assert!(
        line.by == id && line.detail.contains("expired") && line.who == "box",
        "{line:?}"
    );

    let (good, _) = lab.join_token("box").await;
    let clients = within(connect(&lab.url(), &good, None)).await.unwrap();
    let error = within(clients.jobs.clone().info(v1::InfoRequest {})).await.unwrap_err();
    assert_eq!(error.code(), Code::Unauthenticated, "{error}");
    lab.join(&good, None).await.unwrap();

    for (name, life) in [("a b", 1), ("box", 0), ("box", u64::MAX)] {
        let request = v1::CreateJoinTokenRequest {
            name: name.into(),
            expires_in_ms: life,
        };
        let error = within(lab.admin.admin.clone().create_join_token(request))
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    }
    within(lab.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_stands_in_between_gets_nothing() {
    let (lab, other) = (Lab::start().await, Lab::start().await);
    let (text, _) = lab.join_token("box").await;
    // At another coordinator's address, whose certificate is good, but of another authority.
    let error = within(connect(&other.url(), &text, None)).await.unwrap_err();
    assert!(matches!(error, ConnectError::Untrusted { .. }), "{error}");
    assert!(error.to_string().contains("nothing was sent"), "{error}");
    // One that shows our authority's certificate, which is no secret, below a chain of its own.
    let token = format!("{}.{}", lab.running.token, other.ca);
    let error = within(connect(&lab.url(), &token, None)).await.unwrap_err();
    assert!(matches!(error, ConnectError::Untrusted { .. }), "{error}");
    let seen = crate::access::audit(&other.admin).await;
    assert!(
        seen.iter()
            .all(|line| line.action != "login" && line.action != "worker.enrol"),
        "{seen:?}"
    );
    // It is still good where it belongs.
    lab.join(&text, None).await.unwrap();
    // The right authority, under a name that the certificate does not have.
    let (text, _) = lab.join_token("box-2").await;
    let port = lab.running.addr.port();
    let error = within(connect(&format!("https://127.0.0.2:{port}"), &text, None)).await;
    // Nobody listens at that address, but for systems that have one loopback for all.
    assert!(error.is_err());
    within(lab.running.shutdown()).await;
    within(other.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_gets_the_name_of_its_token_and_no_other() {
    let lab = Lab::start().await;
    let (text, id) = lab.join_token("box-1").await;
    let refused = lab.join(&text, Some("box-2")).await.err().unwrap();
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    assert!(
        refused.message().contains("box-1") && refused.message().contains("box-2"),
        "{refused}"
    );
    let noted = line(&lab, "the other name", |line| {
        line.action == "worker.enrol" && !line.done
    })
    .await;
    assert!(noted.by == id && noted.detail.contains("box-2"), "{noted:?}");

    // A refusal uses nothing up.
    let clients = within(connect(&lab.url(), &text, None)).await.unwrap();
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
    let first = lab.join(&text, Some("box-1")).await.unwrap();

    // The name is taken, until that worker is ended.
    let (text, _) = lab.join_token("box-1").await;
    let refused = lab.join(&text, None).await.err().unwrap();
    assert_eq!(refused.code(), Code::AlreadyExists, "{refused}");
    assert!(refused.message().contains("worker revoke box-1"), "{refused}");
    line(&lab, "the taken name", |line| {
        line.action == "worker.enrol" && line.detail.contains("already")
    })
    .await;
    lab.revoke("box-1").await.unwrap();
    let refused = lab.join(&text, None).await.err().unwrap();
    assert!(
        refused.message().contains("revoked"),
        "unused join tokens of the name end, too: {refused}"
    );
    let (text, _) = lab.join_token("box-1").await;
    // Its folder still has its id: it gets its old place back.
    let second = lab.join_as(&text, None, &first.worker_id).await.unwrap();
    assert_eq!(second.worker_id, first.worker_id);
    second.knock(&lab).await.unwrap();
    assert!(first.knock(&lab).await.unwrap_err().contains("was revoked"));

    // Nobody joins into another worker's place.
    let (text, _) = lab.join_token("box-3").await;
    let refused = lab.join_as(&text, None, &first.worker_id).await.err().unwrap();
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    within(lab.running.shutdown()).await;
}
