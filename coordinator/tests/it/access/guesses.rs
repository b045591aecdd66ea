//! Whoever guesses tokens.

use super::{CALM, audit, line, somebody, submit, token};
use crate::support::{Pool, eventually, within};
use aitk_proto::client::connect;
use aitk_proto::v1;
use tonic::{Code, Status};

async fn knock(url: &str, secret: &str) -> Result<(), Status> {
    let clients = connect(url, secret, None).await.unwrap();
    within(clients.jobs.clone().info(v1::InfoRequest {})).await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guesser_is_shut_out_and_others_are_not() {
    let pool = Pool::start(CALM).await;
    let url = pool.running.url();
    let anna = somebody(&pool, "anna", "submitter").await;
    submit(&anna, "a").await.unwrap();
    let (fresh, _) = token(&pool.clients, "new", "viewer", None).await;
    let guess = async |secret: &str| knock(&url, secret).await.unwrap_err();
    for number in 0..20 {
        let error = guess(&format!("a-guess-that-is-wrong-{number}")).await;
        assert_eq!(error.code(), Code::Unauthenticated, "{number}");
    }
    assert_eq!(guess("another-wrong-guess").await.code(), Code::ResourceExhausted);
    assert_eq!(
        guess(&fresh).await.code(),
        Code::ResourceExhausted,
        "a right guess looks like a wrong one"
    );
    submit(&anna, "b").await.unwrap();
    pool.submit("c").await;
    let lines = eventually("the lines", || async {
        let lines = audit(&pool.clients).await;
        let logins: Vec<_> = lines.into_iter().filter(|line| line.action == "login").collect();
        (logins.len() >= 20).then_some(logins)
    })
    .await;
    assert_eq!(lines.len(), 20, "a flood of guesses is no flood of lines");
    assert!(lines[19].detail.contains("too many") && lines.iter().all(|line| !line.done && line.from == "127.0.0.1"));
    assert!(
        !format!("{lines:?}").contains("a-guess"),
        "what was guessed is not written down"
    );
    within(pool.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_token_that_goes_on_trying_shuts_nobody_out() {
    let pool = Pool::start(CALM).await;
    let url = pool.running.url();
    let (old, id) = token(&pool.clients, "box", "worker", None).await;
    let revoke = v1::RevokeTokenRequest { id: id.clone() };
    within(pool.clients.admin.clone().revoke_token(revoke)).await.unwrap();
    for _ in 0..100 {
        assert_eq!(knock(&url, &old).await.unwrap_err().code(), Code::Unauthenticated);
    }
    let (fresh, _) = token(&pool.clients, "new", "viewer", None).await;
    knock(&url, &fresh).await.unwrap();
    let first = line(&pool.clients, "its first use", |line| {
        line.action == "token.use" && line.who == "new"
    })
    .await;
    assert!(first.done && first.from == "127.0.0.1", "{first:?}");
    let refused = line(&pool.clients, "the old one", |line| line.action == "login").await;
    assert!(!refused.done && refused.by == id, "{refused:?}");
    within(pool.running.shutdown()).await;
}
