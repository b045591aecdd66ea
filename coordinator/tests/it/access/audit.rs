//! Stored tokens, and the append-only audit log.

use super::{LONG_LEASE, audit_log, create_token, get, put_input, submit, wait_for_audit_line};
use crate::support::postgres::Postgres;
use crate::support::{TestCoordinator, config, input, within};
use aitk_common::control_plane::UnixMillis;
use aitk_coordinator::store::{SqlStore, Store};
use aitk_coordinator::{Config, start};
use aitk_proto::client::connect;
use aitk_proto::v1;
use tonic::Code;

#[tokio::test(flavor = "multi_thread")]
async fn the_database_contains_no_secret_and_the_audit_log_is_append_only() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let (secret, _) = create_token(&coordinator.clients, "anna", "admin", None).await;
    for file in ["aitk.db", "aitk.db-wal"] {
        let bytes = std::fs::read(coordinator.dir.path().join(file)).unwrap_or_default();
        let holds = |text: &str| bytes.windows(text.len()).any(|window| window == text.as_bytes());
        assert!(
            !holds(&secret) && !holds(&secret[5..]) && !holds(&coordinator.running.token),
            "{file}"
        );
    }
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(coordinator.dir.path().join("aitk.db"));
    let database = sqlx::SqlitePool::connect_with(options).await.unwrap();
    for attack in ["DELETE FROM audit", "UPDATE audit SET record = '{}'"] {
        let error = sqlx::query(attack).execute(&database).await.unwrap_err();
        assert!(error.to_string().contains("append-only"), "{error}");
    }
    for attack in [
        "INSERT OR REPLACE INTO audit (seq, id, record) SELECT seq, 'x', '{}' FROM audit",
        "REPLACE INTO audit (id, record) SELECT id, '{}' FROM audit",
    ] {
        sqlx::query(attack).execute(&database).await.unwrap();
        let changed = "SELECT COUNT(*) FROM audit WHERE record = '{}'";
        let changed: i64 = sqlx::query_scalar(changed).fetch_one(&database).await.unwrap();
        assert_eq!(changed, 0, "{attack}");
    }
    assert!(
        audit_log(&coordinator.clients)
            .await
            .iter()
            .any(|line| line.action == "token.create" && line.done)
    );
    within(coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_audit_log_on_postgres_is_append_only() {
    let Some(server) = Postgres::start() else { return };
    let store = SqlStore::postgres(&server.url().parse().unwrap()).await.unwrap();
    let line: aitk_coordinator::AuditLine = serde_json::from_value(serde_json::json!({
        "id": "1", "time": 1, "who": "a", "by": "b", "from": "", "action": "x", "object": "", "done": true, "detail": "",
    }))
    .unwrap();
    for _ in 0..2 {
        // A commit is repeated when its answer was lost; the line is stored once.
        store.administer(&[], std::slice::from_ref(&line)).await.unwrap();
    }
    let database = sqlx::PgPool::connect(&server.url()).await.unwrap();
    for attack in [
        "DELETE FROM audit",
        "UPDATE audit SET record = '{}'",
        "TRUNCATE audit",
        "INSERT INTO audit (id, record) VALUES ('1', '{}') ON CONFLICT (id) DO UPDATE SET record = excluded.record",
    ] {
        let error = sqlx::query(attack).execute(&database).await.unwrap_err();
        assert!(error.to_string().contains("append-only"), "{error}");
    }
    // Old refusals may be removed.
    let refused = aitk_coordinator::AuditLine {
        id: "2".to_owned(),
        done: false,
        ..line.clone()
    };
    store.administer(&[], &[refused]).await.unwrap();
    assert_eq!(store.forget_refusals(0, UnixMillis(2)).await.unwrap().lines, 1);
    assert_eq!(store.audit(0, 10).await.unwrap(), [(1, line)]);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_work_on_postgres_as_on_sqlite() {
    let Some(server) = Postgres::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let config = || Config {
        database: Some(server.url().parse().unwrap()),
        ..config(dir.path(), LONG_LEASE)
    };
    let running = start(config()).await.unwrap();
    let admin = connect(&running.url(), &running.token, None).await.unwrap();
    let (anna_secret, _) = create_token(&admin, "anna", "submitter", None).await;
    let (ben_secret, ben_id) = create_token(&admin, "ben", "submitter", None).await;
    let anna = connect(&running.url(), &anna_secret, None).await.unwrap();
    put_input(&anna).await;
    let job = submit(&anna, "hers").await.unwrap();
    let ben = connect(&running.url(), &ben_secret, None).await.unwrap();
    assert_eq!(get(&ben, &job).await.unwrap_err().code(), Code::NotFound);
    let request = v1::GetBlobRequest {
        sha256: input().id().to_hex(),
        offset: 0,
    };
    let error = within(ben.blobs.clone().get(request)).await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound, "{error}");
    let request = v1::RevokeTokenRequest { id: ben_id };
    within(admin.admin.clone().revoke_token(request)).await.unwrap();
    within(running.shutdown()).await;

    let running = start(config()).await.unwrap();
    let connect_as = async |secret: &str| connect(&running.url(), secret, None).await.unwrap();
    assert_eq!(get(&connect_as(&anna_secret).await, &job).await.unwrap().owner, "anna");
    let error = get(&connect_as(&ben_secret).await, &job).await.unwrap_err();
    assert_eq!(error.code(), Code::Unauthenticated);
    let admin = connect_as(&running.token).await;
    let submitted = wait_for_audit_line(&admin, "the submission", |line| line.action == "job.submit").await;
    assert!(
        submitted.done && submitted.who == "anna" && submitted.object == job,
        "{submitted:?}"
    );
    let lines = audit_log(&admin).await;
    assert!(lines.windows(2).all(|pair| pair[0].seq < pair[1].seq), "{lines:?}");
    assert!(!format!("{lines:?}").contains(&anna_secret));
    within(running.shutdown()).await;
}
