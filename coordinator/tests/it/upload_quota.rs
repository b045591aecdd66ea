//! Each user's uploads are counted, limited and throttled, and are removed when no job references them.

use crate::access::{audit_log, create_token, wait_for_audit_line};
use crate::support::data_sets::{collect, data_set, put, submission_with};
use crate::support::{TIMEOUT, config, within};
use aitk_common::hash::ContentHash;
use aitk_common::storage::{BlobStore, StorageError};
use aitk_coordinator::{Config, CoordinatorHandle, Limits, Retention, start};
use aitk_proto::client::{Clients, connect};
use aitk_proto::remote_blobs::RemoteBlobs;
use std::path::Path;
use std::time::{Duration, SystemTime};

const KIB: usize = 1 << 10;

struct TestServer {
    running: CoordinatorHandle,
    admin: Clients,
}

/// Starts a coordinator. `unreferenced` is how long uploads that no job references are kept.
async fn start_server(dir: &Path, limits: Limits, unreferenced: Duration) -> TestServer {
    let running = start(Config {
        limits,
        disk_reserve: Some(0),
        retention: Retention {
            every: None,
            unreferenced,
            ..Retention::default()
        },
        ..config(dir, Duration::from_secs(60))
    })
    .await
    .unwrap();
    let admin = connect(&running.url(), &running.token, None).await.unwrap();
    TestServer { running, admin }
}

impl TestServer {
    async fn blobs_of(&self, secret: &str) -> RemoteBlobs {
        let clients = connect(&self.running.url(), secret, None).await.unwrap();
        RemoteBlobs::with_budget(&clients, TIMEOUT)
    }
}

fn blob(fill: u8, bytes: usize) -> Vec<u8> {
    vec![fill; bytes]
}

#[tokio::test(flavor = "multi_thread")]
async fn uploads_count_against_a_users_quota_even_when_no_job_references_them() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits {
        stored_bytes: Some(1 << 20),
        ..Limits::default()
    };
    let server = start_server(dir.path(), limits, Duration::ZERO).await;
    let (eve_token, _) = create_token(&server.admin, "eve", "submitter", None).await;
    let (ada_token, _) = create_token(&server.admin, "ada", "submitter", None).await;
    let (eve, ada) = (server.blobs_of(&eve_token).await, server.blobs_of(&ada_token).await);
    put(&eve, &blob(1, 400 * KIB)).await;
    put(&eve, &blob(2, 400 * KIB)).await;
    let third = blob(3, 400 * KIB);
    let store = async |blobs: &RemoteBlobs, bytes: &[u8]| {
        let bytes = bytes.to_vec();
        within(blobs.put_bytes(ContentHash::of(&bytes), bytes.into())).await
    };
    let error = store(&eve, &third).await.unwrap_err();
    let StorageError::Failed { message, .. } = &error else {
        panic!("{error:?}");
    };
    for expected in ["user eve", "has 0.0 GiB", "--user-stored-gib", "aitk rm"] {
        assert!(message.contains(expected), "{expected}: {message}");
    }
    let noted = wait_for_audit_line(&server.admin, "the refusal", |line| {
        line.action == "blob.put" && !line.done
    })
    .await;
    assert_eq!(
        (noted.who.as_str(), noted.object),
        ("eve", ContentHash::of(&third).to_hex())
    );
    // A repeated upload counts once, other users have quotas of their own, and administrators have none.
    put(&eve, &blob(2, 400 * KIB)).await;
    put(&ada, &third).await;
    put(&RemoteBlobs::new(&server.admin), &blob(4, 2 << 20)).await;
    // Small blobs count with a minimum size, so their number is limited, too.
    let mut small = 0_u32;
    while store(&eve, &small.to_be_bytes()).await.is_ok() {
        small += 1;
        assert!(small < 200, "{small} blobs of a few bytes");
    }
    // Uploads count until they are removed, also after a restart.
    within(server.running.shutdown()).await;
    let server = self::start_server(dir.path(), limits, Duration::ZERO).await;
    let eve = server.blobs_of(&eve_token).await;
    store(&eve, &third).await.unwrap_err();
    assert_eq!(collect(&server.admin, false).await.removed, 3 + u64::from(small));
    put(&eve, &third).await;
    assert!(
        audit_log(&server.admin)
            .await
            .iter()
            .all(|line| line.who != "ada" || line.done)
    );
    within(server.running.shutdown()).await;
}

/// Older versions recorded uploads without a size; they count once a garbage collection has measured them.
#[tokio::test(flavor = "multi_thread")]
async fn uploads_recorded_without_a_size_are_measured() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits {
        stored_bytes: Some(1 << 20),
        ..Limits::default()
    };
    let hour = Duration::from_secs(3600);
    let server = start_server(dir.path(), limits, hour).await;
    let (token, _) = create_token(&server.admin, "eve", "submitter", None).await;
    put(&server.blobs_of(&token).await, &blob(1, 800 * KIB)).await;
    within(server.running.shutdown()).await;
    let file = sqlx::sqlite::SqliteConnectOptions::new().filename(dir.path().join("aitk.db"));
    let database = sqlx::SqlitePool::connect_with(file).await.unwrap();
    sqlx::query("UPDATE uploads SET bytes = NULL")
        .execute(&database)
        .await
        .unwrap();
    database.close().await;

    let server = self::start_server(dir.path(), limits, hour).await;
    let eve = server.blobs_of(&token).await;
    let put_more = async || {
        let more = blob(2, 400 * KIB);
        within(eve.put_bytes(ContentHash::of(&more), more.into())).await
    };
    assert_eq!(eve.has(&[ContentHash::of(&blob(1, 800 * KIB))]).await.unwrap(), [true]);
    assert_eq!(collect(&server.admin, false).await.removed, 0);
    let error = put_more().await.unwrap_err();
    assert!(error.to_string().contains("--user-stored-gib"), "{error}");
    within(server.running.shutdown()).await;
}

/// Changes the blob's modification time to this long ago.
fn backdate(dir: &Path, hash: ContentHash, by: Duration) {
    let id = hash.to_hex();
    let path = dir.join("storage/blobs").join(&id[..2]).join(&id);
    let file = std::fs::File::options().append(true).open(path).unwrap();
    file.set_modified(SystemTime::now() - by).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn unreferenced_uploads_are_removed_after_an_hour_unless_their_uploader_is_active() {
    let dir = tempfile::tempdir().unwrap();
    let defaults = Retention::default();
    let start = || start_server(dir.path(), Limits::default(), defaults.unreferenced);
    let server = start().await;
    let (eve_token, _) = create_token(&server.admin, "eve", "submitter", None).await;
    let (ada_token, _) = create_token(&server.admin, "ada", "submitter", None).await;
    let eve = server.blobs_of(&eve_token).await;
    let (named, contents) = data_set("named");
    for bytes in [contents[0].clone(), contents[1].clone(), named.to_bytes()] {
        put(&eve, &bytes).await;
    }
    let clients = connect(&server.running.url(), &eve_token, None).await.unwrap();
    within(clients.jobs.clone().submit(submission_with("named", &named)))
        .await
        .unwrap();
    let (old, young) = (put(&eve, b"old").await, put(&eve, b"young").await);
    let unknown = put(&RemoteBlobs::new(&server.admin), b"by an administrator").await;
    let of_named = [named.id(), ContentHash::of(&contents[0]), ContentHash::of(&contents[1])];
    for hash in [old, unknown].iter().chain(&of_named) {
        backdate(dir.path(), *hash, Duration::from_secs(2 * 3600));
    }
    backdate(dir.path(), young, Duration::from_secs(30 * 60));
    // Her uploads were confirmed a moment ago, so nothing is removed.
    assert_eq!(collect(&server.admin, false).await.removed, 0);
    within(server.running.shutdown()).await;

    // A slow upload goes on after a restart: a request for another blob keeps her earlier uploads.
    let server = start().await;
    assert_eq!(collect(&server.admin, true).await.removed, 1);
    server
        .blobs_of(&eve_token)
        .await
        .has(&[ContentHash::of(b"next")])
        .await
        .unwrap();
    assert_eq!(collect(&server.admin, true).await.removed, 0);
    assert_eq!(collect(&server.admin, false).await.removed, 0);
    within(server.running.shutdown()).await;

    // Requests of other users do not keep her uploads.
    let server = start().await;
    server.blobs_of(&ada_token).await.has(&[old]).await.unwrap();
    assert_eq!(collect(&server.admin, false).await.removed, 1);
    let blobs = RemoteBlobs::new(&server.admin);
    assert_eq!(blobs.has(&[old, young, unknown]).await.unwrap(), [false, true, true]);
    assert_eq!(blobs.has(&of_named).await.unwrap(), [true; 3]);
    // An administrator's uploads are kept for a day.
    within(server.running.shutdown()).await;
    backdate(dir.path(), unknown, Duration::from_secs(25 * 3600));
    let server = start().await;
    assert_eq!(collect(&server.admin, false).await.removed, 1);
    within(server.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_throttled_user_does_not_delay_other_users_uploads() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits {
        upload_rate: Some(1 << 20),
        ..Limits::default()
    };
    let server = start_server(dir.path(), limits, Duration::from_secs(3600)).await;
    let (eve_token, _) = create_token(&server.admin, "eve", "submitter", None).await;
    let (ada_token, _) = create_token(&server.admin, "ada", "submitter", None).await;
    let (eve, ada) = (server.blobs_of(&eve_token).await, server.blobs_of(&ada_token).await);
    // 128 MiB at 1 MiB/s: more than two minutes.
    let flood: Vec<_> = (0..8_u8)
        .map(|fill| {
            let eve = eve.clone();
            tokio::spawn(async move {
                let bytes = blob(fill, 16 << 20);
                eve.put_bytes(ContentHash::of(&bytes), bytes.into()).await
            })
        })
        .collect();
    put(&eve, b"throttled, not blocked").await;
    put(&ada, &blob(100, 1 << 20)).await;
    put(&RemoteBlobs::new(&server.admin), &blob(101, 16 << 20)).await;
    assert!(flood.iter().all(|upload| !upload.is_finished()));
    for upload in &flood {
        upload.abort();
    }
    within(server.running.shutdown()).await;
}
