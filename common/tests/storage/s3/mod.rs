//! A real S3 server (`s3s-fs`), straight and through a proxy that misbehaves.
//!
//! The server is the one of the whole-system tests (`tests/src/bin/s3-server.rs`), which `cargo test --workspace`
//! builds; or the one that `AITK_S3S_FS` names. Where there is none these tests say that they were skipped, and fail in CI.

mod proxy;
mod server;

use crate::support::{Random, files_below, save};
use aitk_common::hash::ContentHash;
use aitk_common::storage::{BlobStore, ObjectBlobs, Options, StorageError, checkpoints};
use bytes::Bytes;
use proxy::{Mode, Proxy};
use server::Server;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

/// Impatient, so that tests are quick: a request 1 s, everything 4 s.
fn impatient(endpoint: &str) -> Options {
    let mut options = Options {
        quick_timeout: Duration::from_millis(700),
        transfer_timeout: Duration::from_secs(1),
        budget: Duration::from_secs(4),
        first_wait: Duration::from_millis(20),
        longest_wait: Duration::from_millis(200),
        part_bytes: 5 * MIB,
        ..Options::default()
    };
    for (key, value) in [
        ("aws_endpoint", endpoint),
        ("aws_access_key_id", server::KEY),
        ("aws_secret_access_key", server::SECRET),
        ("aws_region", "us-east-1"),
    ] {
        options.settings.insert(key.to_owned(), value.to_owned());
    }
    options
}

fn open(endpoint: &str) -> ObjectBlobs {
    ObjectBlobs::open_with("s3://bucket/pool", &impatient(endpoint)).unwrap()
}

fn blob(seed: u64, length: usize) -> (ContentHash, Bytes) {
    // Pseudo-random in blocks: quick to make, and no two parts alike.
    let block = Random::new(seed).bytes(4096);
    let mut bytes = Vec::with_capacity(length);
    while bytes.len() < length {
        let at = (bytes.len() / 4096) as u64;
        bytes.extend_from_slice(&at.to_le_bytes());
        bytes.extend_from_slice(&block[8..]);
    }
    bytes.truncate(length);
    (ContentHash::of(&bytes), Bytes::from(bytes))
}

#[tokio::test(flavor = "multi_thread")]
async fn blobs_go_in_and_come_out_small_empty_and_in_parts() {
    let Some(server) = Server::start() else { return };
    let store = open(&server.endpoint());
    let place = tempfile::tempdir().unwrap();
    let sizes = [0, 1, 5 * MIB, 5 * MIB + 1, 17 * MIB + 3];
    let blobs: Vec<_> = sizes.iter().map(|size| blob(*size as u64 + 1, *size)).collect();
    for (hash, bytes) in &blobs {
        let source = place.path().join("source");
        std::fs::write(&source, bytes).unwrap();
        store.put_file(*hash, &source).await.unwrap();
        store.put_file(*hash, &source).await.unwrap();
        let target = place.path().join("target");
        assert_eq!(store.get_to_file(*hash, &target).await.unwrap(), bytes.len() as u64);
        assert_eq!(std::fs::read(&target).unwrap(), *bytes);
        assert_eq!(store.get_bytes(*hash, u64::MAX).await.unwrap(), *bytes);
    }
    let hashes: Vec<_> = blobs.iter().map(|(hash, _)| *hash).collect();
    let absent = ContentHash::of(b"absent");
    assert_eq!(
        store.has(&[hashes[4], absent, hashes[0]]).await.unwrap(),
        [true, false, true]
    );
    let mut listed: Vec<_> = store
        .list()
        .await
        .unwrap()
        .into_iter()
        .map(|blob| (blob.hash, blob.bytes))
        .collect();
    let mut expected: Vec<_> = blobs.iter().map(|(hash, bytes)| (*hash, bytes.len() as u64)).collect();
    listed.sort();
    expected.sort();
    assert_eq!(listed, expected);
    assert!(matches!(
        store.get_bytes(absent, 10).await,
        Err(StorageError::NotFound { .. })
    ));
    assert!(matches!(
        store.get_bytes(hashes[2], 10).await,
        Err(StorageError::TooLarge { .. })
    ));
    store.delete(hashes[1]).await.unwrap();
    store.delete(hashes[1]).await.unwrap();
    assert_eq!(store.has(&hashes[..2]).await.unwrap(), [true, false]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_travels_through_s3() {
    let Some(server) = Server::start() else { return };
    let store = open(&server.endpoint());
    let place = tempfile::tempdir().unwrap();
    let folder = save(&place.path().join("here"), 7, 50_000);
    let hash = checkpoints::upload(&store, &folder, &mut |_| {}).await.unwrap();
    assert_eq!(checkpoints::upload(&store, &folder, &mut |_| {}).await.unwrap(), hash);
    let fetched = checkpoints::fetch(&store, hash, &place.path().join("there"), &mut |_| {})
        .await
        .unwrap();
    assert_eq!(
        (fetched.step(), files_below(fetched.folder())),
        (7, files_below(&folder))
    );
    assert_eq!(
        std::fs::read(fetched.folder().join("manifest.json")).unwrap(),
        std::fs::read(folder.join("manifest.json")).unwrap()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_is_sat_out() {
    let Some(server) = Server::start() else { return };
    // The default patience, and an outage as long as asked for.
    let seconds = std::env::var("AITK_TEST_OUTAGE_SECONDS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(3);
    let proxy = Proxy::start(server.port(), Mode::Answer500).await;
    let options = Options {
        settings: impatient(&proxy.endpoint()).settings,
        ..Options::default()
    };
    let store = ObjectBlobs::open_with("s3://bucket/pool", &options).unwrap();
    let (hash, bytes) = blob(1, 20 * MIB);
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("source"), &bytes).unwrap();
    let (source, target) = (place.path().join("source"), place.path().join("target"));
    let begin = Instant::now();
    let outage = async {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        proxy.set(Mode::Pass);
    };
    let (result, ()) = tokio::join!(store.put_file(hash, &source), outage);
    result.unwrap();
    let took = begin.elapsed();
    println!("a put through {seconds} s of 500 took {took:?}");
    assert!(took >= Duration::from_secs(seconds) && took < Duration::from_secs(seconds + 40));

    // An outage in the middle of a download.
    proxy.set(Mode::CutAnswersAfter(MIB));
    let outage = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        proxy.set(Mode::Answer500);
        tokio::time::sleep(Duration::from_secs(1)).await;
        proxy.set(Mode::Pass);
    };
    let (result, ()) = tokio::join!(store.get_to_file(hash, &target), outage);
    assert_eq!(result.unwrap(), bytes.len() as u64);
    assert_eq!(std::fs::read(&target).unwrap(), bytes);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_never_recovers_is_unavailable_in_bounded_time() {
    let Some(server) = Server::start() else { return };
    let (hash, bytes) = blob(2, 6 * MIB);
    open(&server.endpoint()).put_bytes(hash, bytes).await.unwrap();
    let (other, other_bytes) = blob(3, 100_000);
    let (large, large_bytes) = blob(4, 11 * MIB);
    for mode in [Mode::Answer500, Mode::Hang, Mode::Refuse, Mode::CutAnswersAfter(40)] {
        let proxy = Proxy::start(server.port(), mode).await;
        let store = open(&proxy.endpoint());
        let place = tempfile::tempdir().unwrap();
        let (source, target) = (place.path().join("source"), place.path().join("target"));
        std::fs::write(&source, &large_bytes).unwrap();
        let (begin, asked) = (Instant::now(), [hash]);
        let (has, small, parts, get) = tokio::join!(
            store.has(&asked),
            store.put_bytes(other, other_bytes.clone()),
            store.put_file(large, &source),
            store.get_to_file(hash, &target)
        );
        let took = begin.elapsed();
        for (what, error) in [
            ("has", has.err()),
            ("put", small.err()),
            ("multipart", parts.err()),
            ("get", get.err()),
        ] {
            assert!(
                matches!(error, Some(StorageError::Unavailable { .. })),
                "{mode:?} {what}: {error:?}"
            );
        }
        assert!(took < Duration::from_secs(8), "{mode:?} took {took:?}");
        assert_eq!(files_below(place.path()).len(), 1, "{mode:?}: only the source is there");
    }
    let direct = open(&server.endpoint());
    let present = direct.has(&[hash, large]).await.unwrap();
    assert_eq!(
        present,
        [true, false],
        "what was there stays, and nothing half is there"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_is_cut_off_leaves_no_half_object() {
    let Some(server) = Server::start() else { return };
    let place = tempfile::tempdir().unwrap();
    for (seed, size) in [(5, 4 * MIB), (6, 12 * MIB)] {
        let (hash, bytes) = blob(seed, size);
        let source = place.path().join("source");
        std::fs::write(&source, &bytes).unwrap();
        let proxy = Proxy::start(server.port(), Mode::CutRequestsAfter(MIB)).await;
        let store = open(&proxy.endpoint());
        let begin = Instant::now();
        let error = store.put_file(hash, &source).await.unwrap_err();
        assert!(matches!(error, StorageError::Unavailable { .. }), "{error}");
        assert!(begin.elapsed() < Duration::from_secs(8), "{:?}", begin.elapsed());
        assert_eq!(open(&server.endpoint()).has(&[hash]).await.unwrap(), [false]);
        // The same call afterwards succeeds.
        proxy.set(Mode::Pass);
        store.put_file(hash, &source).await.unwrap();
        assert_eq!(store.get_bytes(hash, u64::MAX).await.unwrap(), bytes);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_download_that_is_cut_off_goes_on_where_it_was() {
    let Some(server) = Server::start() else { return };
    let (hash, bytes) = blob(8, 16 * MIB);
    open(&server.endpoint()).put_bytes(hash, bytes.clone()).await.unwrap();
    let proxy = Proxy::start(server.port(), Mode::CutAnswersOnce(3 * MIB, 4)).await;
    let place = tempfile::tempdir().unwrap();
    let target = place.path().join("target");
    open(&proxy.endpoint()).get_to_file(hash, &target).await.unwrap();
    assert_eq!(std::fs::read(&target).unwrap(), bytes);
    assert_eq!(files_below(place.path()).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_keys_and_a_missing_bucket_are_said_at_once() {
    let Some(server) = Server::start() else { return };
    let (hash, bytes) = blob(9, 10);
    let begin = Instant::now();
    // The test server makes missing buckets, real ones do not.
    let proxy = Proxy::start(server.port(), Mode::AnswerNoBucket).await;
    let error = open(&proxy.endpoint())
        .put_bytes(hash, bytes.clone())
        .await
        .unwrap_err();
    assert!(
        matches!(error, StorageError::Failed { .. }) && error.to_string().contains("bucket"),
        "{error}"
    );
    let mut options = impatient(&server.endpoint());
    options
        .settings
        .insert("aws_secret_access_key".to_owned(), "wrong".to_owned());
    let wrong = ObjectBlobs::open_with("s3://bucket/pool", &options).unwrap();
    let error = wrong.put_bytes(hash, bytes).await.unwrap_err();
    assert!(matches!(error, StorageError::Denied { .. }), "{error}");
    assert!(!error.to_string().contains("wrong"), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blob_that_rots_in_the_bucket_is_refused() {
    let Some(server) = Server::start() else { return };
    let (hash, bytes) = blob(10, 7 * MIB);
    let store = open(&server.endpoint());
    store.put_bytes(hash, bytes).await.unwrap();
    let name = hash.to_hex();
    let object = files_below(server.root())
        .into_iter()
        .find(|file| file.ends_with(&name))
        .unwrap();
    let path = server.root().join(object);
    let mut content = std::fs::read(&path).unwrap();
    content[6 * MIB] ^= 4;
    std::fs::write(&path, content).unwrap();
    let place = tempfile::tempdir().unwrap();
    let error = store.get_to_file(hash, &place.path().join("target")).await.unwrap_err();
    assert!(matches!(error, StorageError::Corrupt { .. }), "{error}");
    assert!(matches!(
        store.get_bytes(hash, u64::MAX).await,
        Err(StorageError::Corrupt { .. })
    ));
    assert!(files_below(place.path()).is_empty());
}
