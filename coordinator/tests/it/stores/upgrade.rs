//! Migration of a database of an earlier version.

use super::store::{artifact, event, hash, job_of, submit};
use aitk_common::control_plane::EventBody;
use aitk_coordinator::store::{SqlStore, Store};
use aitk_scheduler::{Record, Settings, State};
use std::collections::HashSet;
use std::time::Duration;

/// Rows of an earlier version are found in the tables of this one.
#[tokio::test(flavor = "multi_thread")]
async fn an_older_sqlite_file_is_migrated() {
    let folder = tempfile::tempdir().unwrap();
    let (file, migrations) = (folder.path().join("aitk.db"), folder.path().join("migrations"));
    std::fs::create_dir(&migrations).unwrap();
    let first = "migrations/sqlite/0001_jobs.sql";
    std::fs::copy(
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(first),
        migrations.join("0001_jobs.sql"),
    )
    .unwrap();
    let options = sqlx::sqlite::SqliteConnectOptions::new()
        .filename(&file)
        .create_if_missing(true);
    let old = sqlx::SqlitePool::connect_with(options).await.unwrap();
    sqlx::migrate::Migrator::new(migrations)
        .await
        .unwrap()
        .run(&old)
        .await
        .unwrap();
    let mut state = State::new(Settings::from_lease(Duration::from_secs(6)));
    let job = serde_json::to_string(&job_of(&submit(&mut state, "jold"))).unwrap();
    sqlx::query("INSERT INTO jobs (id, record, config_text, config_format, job_json, inputs) VALUES ('jold', $1, '', 'yaml', '{}', '{}')")
        .bind(job)
        .execute(&old)
        .await
        .unwrap();
    for cursor in 1..=3 {
        let body = EventBody::Checkpoint {
            step: cursor,
            manifest: hash(&format!("m{cursor}")),
        };
        let Record::Event { event, .. } = event("jold", cursor, body, None) else {
            unreachable!()
        };
        sqlx::query("INSERT INTO events (job, cursor, trim, event) VALUES ('jold', $1, 0, $2)")
            .bind(cursor as i64)
            .bind(serde_json::to_string(&*event).unwrap())
            .execute(&old)
            .await
            .unwrap();
    }
    sqlx::query("INSERT INTO artifacts (job, identity, name, artifact) VALUES ('jold', 'x', 'x', $1)")
        .bind(serde_json::to_string(&artifact("x", None, "file")).unwrap())
        .execute(&old)
        .await
        .unwrap();
    old.close().await;

    let store = SqlStore::sqlite(&file).await.unwrap();
    let roots = store.roots().await.unwrap();
    assert_eq!(roots.len(), 1);
    assert_eq!(roots[0].artifacts, [hash("file")]);
    assert_eq!(
        roots[0].checkpoints.iter().copied().collect::<HashSet<_>>(),
        [hash("m2"), hash("m3")].into()
    );
    store.close().await;
}
