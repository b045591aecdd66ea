//! Behaviour that only PostgreSQL has: a single writer, server restarts, passwords.

use super::store::{commit, submit};

use crate::support;
use crate::support::postgres::{PASSWORD, Postgres};
use aitk_coordinator::store::{SqlStore, Store, StoreError};
use aitk_scheduler::{Settings, State};
use std::time::Duration;

#[tokio::test(flavor = "multi_thread")]
async fn postgres_has_one_writer_and_survives_a_restart() {
    let Some(mut server) = Postgres::start() else { return };
    let url = server.url().parse().unwrap();
    let store = SqlStore::postgres(&url).await.unwrap();
    let second = SqlStore::postgres(&url).await.unwrap_err();
    assert!(matches!(second, StoreError::InUse { .. }), "{second}");
    assert!(!second.to_string().contains(PASSWORD));
    let mut state = State::new(Settings::from_lease(Duration::from_secs(6)));
    commit(&store, &submit(&mut state, "ja")).await;

    // Open connections break; later attempts succeed, and the store takes its lock again.
    server.restart();
    let records = submit(&mut state, "jb");
    support::eventually("a commit after the restart", || async {
        store.commit(&records, &[]).await.ok()
    })
    .await;
    assert_eq!(store.load().await.unwrap().jobs.len(), 2);
    support::eventually("the store to take its lock again", || async {
        store.renew().await.unwrap();
        matches!(SqlStore::postgres(&url).await, Err(StoreError::InUse { .. })).then_some(())
    })
    .await;

    // Another writer takes over: from then on this store cannot write.
    let pool = sqlx::PgPool::connect(&server.url()).await.unwrap();
    sqlx::query("UPDATE writer SET epoch = epoch + 1")
        .execute(&pool)
        .await
        .unwrap();
    let late = store.commit(&submit(&mut state, "jc"), &[]).await.unwrap_err();
    assert!(
        matches!(late, StoreError::Superseded { .. }) && !late.is_transient(),
        "{late}"
    );
    assert_eq!(store.load().await.unwrap().jobs.len(), 2);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_error_does_not_contain_the_password() {
    let Some(server) = Postgres::start() else { return };
    let url = server.url().replace(PASSWORD, "geraten-und-falsch").parse().unwrap();
    let error = SqlStore::postgres(&url).await.unwrap_err();
    let text = format!("{error} {error:?}");
    assert!(
        matches!(error, StoreError::Open { .. }) && !text.contains("geraten-und-falsch"),
        "{text}"
    );
}
