//! Rate limiting of wrong tokens.

use super::{LONG_LEASE, audit_log, client_with_role, create_token, submit, wait_for_audit_line};
use crate::support::{TestCoordinator, eventually, within};
use aitk_proto::client::connect;
use aitk_proto::v1;
use tonic::{Code, Status};

async fn call_with_token(url: &str, secret: &str) -> Result<(), Status> {
    let clients = connect(url, secret, None).await.unwrap();
    within(clients.jobs.clone().info(v1::InfoRequest {})).await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_guesses_tokens_is_blocked_and_others_are_not() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let url = coordinator.running.url();
    let anna = client_with_role(&coordinator, "anna", "submitter").await;
    submit(&anna, "a").await.unwrap();
    let (fresh, _) = create_token(&coordinator.clients, "new", "viewer", None).await;
    let guess = async |secret: &str| call_with_token(&url, secret).await.unwrap_err();
    for number in 0..20 {
        let error = guess(&format!("a-guess-that-is-wrong-{number}")).await;
        assert_eq!(error.code(), Code::Unauthenticated, "{number}");
    }
    assert_eq!(guess("another-wrong-guess").await.code(), Code::ResourceExhausted);
    assert_eq!(
        guess(&fresh).await.code(),
        Code::ResourceExhausted,
        "a blocked client does not learn that a guess is right"
    );
    submit(&anna, "b").await.unwrap();
    coordinator.submit("c").await;
    let lines = eventually("20 audit lines", || async {
        let lines = audit_log(&coordinator.clients).await;
        let logins: Vec<_> = lines.into_iter().filter(|line| line.action == "login").collect();
        (logins.len() >= 20).then_some(logins)
    })
    .await;
    assert_eq!(lines.len(), 20, "the number of audit lines is limited");
    assert!(lines[19].detail.contains("too many") && lines.iter().all(|line| !line.done && line.from == "127.0.0.1"));
    assert!(
        !format!("{lines:?}").contains("a-guess"),
        "guessed tokens are not logged"
    );
    within(coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_token_that_retries_blocks_nobody() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let url = coordinator.running.url();
    let (old, id) = create_token(&coordinator.clients, "box", "worker", None).await;
    let revoke = v1::RevokeTokenRequest { id: id.clone() };
    within(coordinator.clients.admin.clone().revoke_token(revoke))
        .await
        .unwrap();
    for _ in 0..100 {
        assert_eq!(
            call_with_token(&url, &old).await.unwrap_err().code(),
            Code::Unauthenticated
        );
    }
    let (fresh, _) = create_token(&coordinator.clients, "new", "viewer", None).await;
    call_with_token(&url, &fresh).await.unwrap();
    let first = wait_for_audit_line(&coordinator.clients, "its first use", |line| {
        line.action == "token.use" && line.who == "new"
    })
    .await;
    assert!(first.done && first.from == "127.0.0.1", "{first:?}");
    let refused = wait_for_audit_line(&coordinator.clients, "the refused old token", |line| {
        line.action == "login"
    })
    .await;
    assert!(!refused.done && refused.by == id, "{refused:?}");
    within(coordinator.running.shutdown()).await;
}
