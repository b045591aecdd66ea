//! Permissions of each role, and the list of tokens.

use super::{LONG_LEASE, audit_log, client_with_role, create_token, drain, get, stop, submit, wait_for_audit_line};
use crate::support::{FakeWorker, TestCoordinator, eventually, within};
use aitk_common::control_plane::ToCoordinator;
use aitk_common::hash::ContentHash;
use aitk_proto::v1;
use tonic::Code;

#[tokio::test(flavor = "multi_thread")]
async fn each_role_has_its_permissions_and_no_others() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let job = coordinator.submit("a").await.job.to_string();
    let viewer = client_with_role(&coordinator, "vera", "viewer").await;
    assert_eq!(get(&viewer, &job).await.unwrap().owner, "default");
    let has = v1::HasRequest {
        sha256: vec![ContentHash::of(b"x").to_hex()],
        ..Default::default()
    };
    let worker = client_with_role(&coordinator, "box", "worker").await;
    let submitter = client_with_role(&coordinator, "sam", "submitter").await;
    let operator = client_with_role(&coordinator, "olga", "operator").await;
    let gc = v1::CollectGarbageRequest { dry_run: true };
    let create = v1::CreateTokenRequest {
        name: "me".into(),
        role: "admin".into(),
        expires_in_ms: None,
    };
    let refusals = [
        submit(&viewer, "b").await.map(drop),
        stop(&viewer, &job).await.map(drop),
        within(viewer.blobs.clone().has(has)).await.map(drop),
        get(&worker, &job).await.map(drop),
        within(worker.jobs.clone().list_workers(v1::ListWorkersRequest::default()))
            .await
            .map(drop),
        submit(&worker, "b").await.map(drop),
        drain(&submitter).await,
        drain(&viewer).await,
        within(submitter.admin.clone().create_token(create.clone()))
            .await
            .map(drop),
        within(operator.admin.clone().create_token(create)).await.map(drop),
        within(operator.admin.clone().list_tokens(v1::ListTokensRequest::default()))
            .await
            .map(drop),
        within(operator.admin.clone().read_audit(v1::ReadAuditRequest::default()))
            .await
            .map(drop),
        within(operator.admin.clone().collect_garbage(gc)).await.map(drop),
    ];
    let calls = refusals.len();
    for (number, refusal) in refusals.into_iter().enumerate() {
        let error = refusal.unwrap_err();
        assert_eq!(error.code(), Code::PermissionDenied, "{number}: {error}");
        assert!(error.message().contains("your token's role is"), "{error}");
    }
    for clients in [&viewer, &submitter, &operator] {
        let first = ToCoordinator::Register(Box::new(FakeWorker::registration("w", None, Vec::new())));
        let error = FakeWorker::open(clients, Some(first)).await.unwrap_err();
        assert_eq!(error.code(), Code::PermissionDenied, "{error}");
    }
    let refused = eventually("every refusal in the log", || async {
        let lines = audit_log(&coordinator.clients).await;
        let refused: Vec<_> = lines.into_iter().filter(|line| line.action == "refused").collect();
        (refused.len() == calls + 3).then_some(refused)
    })
    .await;
    assert!(
        refused
            .iter()
            .all(|line| !line.done && line.from == "127.0.0.1" && !line.by.is_empty())
    );
    assert!(
        refused[0].who == "vera" && refused[0].detail.contains("viewer may not submit"),
        "{refused:?}"
    );

    // Permitted calls.
    let theirs = submit(&operator, "c").await.unwrap();
    assert_eq!(get(&operator, &theirs).await.unwrap().owner, "olga");
    stop(&operator, &job).await.unwrap();
    let done = wait_for_audit_line(&coordinator.clients, "the stop", |line| line.action == "job.stop").await;
    assert!(done.done && done.who == "olga" && done.object == job, "{done:?}");
    let registration = FakeWorker::registration("w", None, Vec::new());
    let _worker = FakeWorker::register(&worker, registration).await;
    drain(&operator).await.unwrap();
    let done = wait_for_audit_line(&coordinator.clients, "the drain", |line| line.action == "worker.drain").await;
    assert!(done.done && done.who == "olga" && done.object == "w", "{done:?}");
    within(coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_listed_page_by_page() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let mut made = Vec::new();
    for name in ["ada", "ben", "cleo", "dan", "eve"] {
        made.push(create_token(&coordinator.clients, name, "viewer", None).await.1);
    }
    let (mut listed, mut page_token, mut pages) = (Vec::new(), String::new(), 0);
    loop {
        let request = v1::ListTokensRequest {
            page_token,
            page_size: 2,
        };
        let reply = within(coordinator.clients.admin.clone().list_tokens(request))
            .await
            .unwrap()
            .into_inner();
        assert!((1..=2).contains(&reply.tokens.len()));
        listed.extend(reply.tokens.into_iter().map(|token| token.id));
        pages += 1;
        page_token = reply.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    listed.sort_unstable();
    made.sort_unstable();
    assert_eq!((listed, pages), (made, 3));
    let request = v1::ListTokensRequest {
        page_token: "x".into(),
        page_size: 0,
    };
    let error = within(coordinator.clients.admin.clone().list_tokens(request))
        .await
        .unwrap_err();
    assert!(error.message().contains("page_token"), "{error}");
    within(coordinator.running.shutdown()).await;
}
