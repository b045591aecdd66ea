//! What one user sends is counted, bounded and slowed, and goes when no job names it.

use crate::access::{audit, line, token};
use crate::support::blobs::{collect, data_set, put, wants};
use crate::support::{PATIENCE, config, within};
use aitk_common::hash::ContentHash;
use aitk_common::storage::{BlobStore, StorageError};
use aitk_coordinator::{Config, Limits, Retention, Running, start};
use aitk_proto::client::{Clients, connect};
use aitk_proto::remote_blobs::RemoteBlobs;
use std::path::Path;
use std::time::{Duration, SystemTime};

const KIB: usize = 1 << 10;

struct Place {
    running: Running,
    admin: Clients,
}

async fn place(dir: &Path, limits: Limits, unnamed: Duration) -> Place {
    let running = start(Config {
        limits,
        disk_reserve: Some(0),
        retention: Retention {
            every: None,
            unnamed,
            ..Retention::default()
        },
        ..config(dir, Duration::from_secs(60))
    })
    .await
    .unwrap();
    let admin = connect(&running.url(), &running.token, None).await.unwrap();
    Place { running, admin }
}

impl Place {
    async fn user(&self, secret: &str) -> RemoteBlobs {
        let clients = connect(&self.running.url(), secret, None).await.unwrap();
        RemoteBlobs::with_budget(&clients, PATIENCE)
    }
}

/// A blob of this size.
fn blob(fill: u8, bytes: usize) -> Vec<u8> {
    vec![fill; bytes]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_stores_so_much_also_what_no_job_names() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits {
        stored_bytes: Some(1 << 20),
        ..Limits::default()
    };
    let place = place(dir.path(), limits, Duration::ZERO).await;
    let (eve_token, _) = token(&place.admin, "eve", "submitter", None).await;
    let (ada_token, _) = token(&place.admin, "ada", "submitter", None).await;
    let (eve, ada) = (place.user(&eve_token).await, place.user(&ada_token).await);
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
    for words in ["user eve", "has 0.0 GiB", "--user-stored-gib", "aitk rm"] {
        assert!(message.contains(words), "{words}: {message}");
    }
    let noted = line(&place.admin, "the refusal", |line| {
        line.action == "blob.put" && !line.done
    })
    .await;
    assert_eq!(
        (noted.who.as_str(), noted.object),
        ("eve", ContentHash::of(&third).to_hex())
    );
    // What is there already takes no more, others have room of their own, and who runs the place is not held to it.
    put(&eve, &blob(2, 400 * KIB)).await;
    put(&ada, &third).await;
    put(&RemoteBlobs::new(&place.admin), &blob(4, 2 << 20)).await;
    // Many small ones are not for nothing.
    let mut small = 0_u32;
    while store(&eve, &small.to_be_bytes()).await.is_ok() {
        small += 1;
        assert!(small < 200, "{small} blobs of a few bytes");
    }
    // It is counted as long as it is there, also after a restart.
    within(place.running.shutdown()).await;
    let place = self::place(dir.path(), limits, Duration::ZERO).await;
    let eve = place.user(&eve_token).await;
    store(&eve, &third).await.unwrap_err();
    assert_eq!(collect(&place.admin, false).await.removed, 3 + u64::from(small));
    put(&eve, &third).await;
    assert!(
        audit(&place.admin)
            .await
            .iter()
            .all(|line| line.who != "ada" || line.done)
    );
    within(place.running.shutdown()).await;
}

/// What an older version noted without a size counts when the storage has been looked through.
#[tokio::test(flavor = "multi_thread")]
async fn what_an_older_version_noted_is_measured() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits {
        stored_bytes: Some(1 << 20),
        ..Limits::default()
    };
    let hour = Duration::from_secs(3600);
    let place = place(dir.path(), limits, hour).await;
    let (token, _) = token(&place.admin, "eve", "submitter", None).await;
    put(&place.user(&token).await, &blob(1, 800 * KIB)).await;
    within(place.running.shutdown()).await;
    let file = sqlx::sqlite::SqliteConnectOptions::new().filename(dir.path().join("aitk.db"));
    let database = sqlx::SqlitePool::connect_with(file).await.unwrap();
    sqlx::query("UPDATE uploads SET bytes = NULL")
        .execute(&database)
        .await
        .unwrap();
    database.close().await;

    let place = self::place(dir.path(), limits, hour).await;
    let eve = place.user(&token).await;
    let put_more = async || {
        let more = blob(2, 400 * KIB);
        within(eve.put_bytes(ContentHash::of(&more), more.into())).await
    };
    assert_eq!(eve.has(&[ContentHash::of(&blob(1, 800 * KIB))]).await.unwrap(), [true]);
    assert_eq!(collect(&place.admin, false).await.removed, 0);
    let error = put_more().await.unwrap_err();
    assert!(error.to_string().contains("--user-stored-gib"), "{error}");
    within(place.running.shutdown()).await;
}

/// As if it had been stored so long ago.
fn age(dir: &Path, hash: ContentHash, by: Duration) {
    let id = hash.to_hex();
    let path = dir.join("storage/blobs").join(&id[..2]).join(&id);
    let file = std::fs::File::options().append(true).open(path).unwrap();
    file.set_modified(SystemTime::now() - by).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_no_job_names_goes_after_an_hour_unless_its_sender_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let defaults = Retention::default();
    let start = || place(dir.path(), Limits::default(), defaults.unnamed);
    let place = start().await;
    let (eve_token, _) = token(&place.admin, "eve", "submitter", None).await;
    let (ada_token, _) = token(&place.admin, "ada", "submitter", None).await;
    let eve = place.user(&eve_token).await;
    let (named, contents) = data_set("named");
    for bytes in [contents[0].clone(), contents[1].clone(), named.to_bytes()] {
        put(&eve, &bytes).await;
    }
    let clients = connect(&place.running.url(), &eve_token, None).await.unwrap();
    within(clients.jobs.clone().submit(wants("named", &named)))
        .await
        .unwrap();
    let (old, young) = (put(&eve, b"old").await, put(&eve, b"young").await);
    let unknown = put(&RemoteBlobs::new(&place.admin), b"by an administrator").await;
    let of_named = [named.id(), ContentHash::of(&contents[0]), ContentHash::of(&contents[1])];
    for hash in [old, unknown].iter().chain(&of_named) {
        age(dir.path(), *hash, Duration::from_secs(2 * 3600));
    }
    age(dir.path(), young, Duration::from_secs(30 * 60));
    // She was told a moment ago that they are there.
    assert_eq!(collect(&place.admin, false).await.removed, 0);
    within(place.running.shutdown()).await;

    // A slow upload goes on after a restart: she asks for something else, and what she sent before stays.
    let place = start().await;
    assert_eq!(collect(&place.admin, true).await.removed, 1);
    place
        .user(&eve_token)
        .await
        .has(&[ContentHash::of(b"next")])
        .await
        .unwrap();
    assert_eq!(collect(&place.admin, true).await.removed, 0);
    assert_eq!(collect(&place.admin, false).await.removed, 0);
    within(place.running.shutdown()).await;

    // What others do is no reason.
    let place = start().await;
    place.user(&ada_token).await.has(&[old]).await.unwrap();
    assert_eq!(collect(&place.admin, false).await.removed, 1);
    let blobs = RemoteBlobs::new(&place.admin);
    assert_eq!(blobs.has(&[old, young, unknown]).await.unwrap(), [false, true, true]);
    assert_eq!(blobs.has(&of_named).await.unwrap(), [true; 3]);
    // Nobody knows who sends for an administrator: a day.
    within(place.running.shutdown()).await;
    age(dir.path(), unknown, Duration::from_secs(25 * 3600));
    let place = start().await;
    assert_eq!(collect(&place.admin, false).await.removed, 1);
    within(place.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_users_upload_does_not_starve_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits {
        upload_rate: Some(1 << 20),
        ..Limits::default()
    };
    let place = place(dir.path(), limits, Duration::from_secs(3600)).await;
    let (eve_token, _) = token(&place.admin, "eve", "submitter", None).await;
    let (ada_token, _) = token(&place.admin, "ada", "submitter", None).await;
    let (eve, ada) = (place.user(&eve_token).await, place.user(&ada_token).await);
    // A minute's worth and more, in several uploads.
    let flood: Vec<_> = (0..8_u8)
        .map(|fill| {
            let eve = eve.clone();
            tokio::spawn(async move {
                let bytes = blob(fill, 16 << 20);
                eve.put_bytes(ContentHash::of(&bytes), bytes.into()).await
            })
        })
        .collect();
    put(&eve, b"she is held to it, not shut out").await;
    put(&ada, &blob(100, 1 << 20)).await;
    put(&RemoteBlobs::new(&place.admin), &blob(101, 16 << 20)).await;
    assert!(flood.iter().all(|upload| !upload.is_finished()));
    for upload in &flood {
        upload.abort();
    }
    within(place.running.shutdown()).await;
}
