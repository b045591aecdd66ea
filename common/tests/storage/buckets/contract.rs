//! Tests that every bucket must pass, connected directly and through a faulty proxy.

use super::proxy::{Mode, Proxy};
use super::{Bucket, MIB, blob};
use crate::support::{files_below, save};
use aitk_common::hash::ContentHash;
use aitk_common::storage::{BlobStore, Options, StorageError, checkpoints};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Blobs of all sizes round-trip: empty, small, and large ones in parts.
pub(super) async fn blobs_round_trip(bucket: &Bucket) {
    let store = bucket.direct();
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

/// A checkpoint round-trips.
pub(super) async fn a_checkpoint_round_trips(bucket: &Bucket) {
    let store = bucket.direct();
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

/// Requests are retried during an outage, with the default timeouts. `AITK_TEST_OUTAGE_SECONDS` sets its length.
pub(super) async fn requests_are_retried_during_an_outage(bucket: &Bucket) {
    let seconds = std::env::var("AITK_TEST_OUTAGE_SECONDS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(3);
    let proxy = Proxy::start(&bucket.server, Mode::Respond500).await;
    let store = bucket.with_default_timeouts(&proxy.endpoint());
    let (hash, bytes) = blob(1, 20 * MIB);
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("source"), &bytes).unwrap();
    let (source, target) = (place.path().join("source"), place.path().join("target"));
    let is_over = AtomicBool::new(false);
    let outage = async {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        is_over.store(true, Ordering::SeqCst);
        proxy.set(Mode::Pass);
    };
    let put = async {
        store.put_file(hash, &source).await.unwrap();
        assert!(
            is_over.load(Ordering::SeqCst),
            "it returned before the end of the outage"
        );
    };
    tokio::join!(put, outage);

    // An outage in the middle of a download.
    proxy.set(Mode::CutResponsesAfter(MIB));
    let outage = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        proxy.set(Mode::Respond500);
        tokio::time::sleep(Duration::from_secs(1)).await;
        proxy.set(Mode::Pass);
    };
    let (result, ()) = tokio::join!(store.get_to_file(hash, &target), outage);
    assert_eq!(result.unwrap(), bytes.len() as u64);
    assert_eq!(std::fs::read(&target).unwrap(), bytes);
}

/// A part takes longer than the budget for retries, as on a line of less than a megabit. Before, it was given up in the middle.
pub(super) async fn a_slow_line_is_enough_for_an_upload(bucket: &Bucket) {
    // 6 MiB take 96 pauses of 10 ms or more, and the rest of what the system buffers.
    let proxy = Proxy::start(&bucket.server, Mode::SlowRequests(10)).await;
    let store = bucket.open(&Options {
        quick_timeout: Duration::from_secs(20),
        transfer_timeout: Duration::from_secs(100),
        budget: Duration::from_millis(500),
        ..bucket.short_timeouts(&proxy.endpoint())
    });
    let (hash, bytes) = blob(9, 11 * MIB);
    let place = tempfile::tempdir().unwrap();
    let source = place.path().join("source");
    std::fs::write(&source, &bytes).unwrap();
    store.put_file(hash, &source).await.unwrap();
    assert_eq!(bucket.direct().get_bytes(hash, u64::MAX).await.unwrap(), bytes);
}

/// Permanent 500s, hangs, closed ports and truncated responses give errors after the time limit.
pub(super) async fn permanent_failures_are_errors(bucket: &Bucket) {
    let (hash, bytes) = blob(2, 6 * MIB);
    bucket.direct().put_bytes(hash, bytes).await.unwrap();
    let (other, other_bytes) = blob(3, 100_000);
    let (large, large_bytes) = blob(4, 11 * MIB);
    for mode in [Mode::Respond500, Mode::Hang, Mode::Refuse, Mode::CutResponsesAfter(40)] {
        let proxy = Proxy::start(&bucket.server, mode).await;
        let store = bucket.through(&proxy);
        let place = tempfile::tempdir().unwrap();
        let (source, target) = (place.path().join("source"), place.path().join("target"));
        std::fs::write(&source, &large_bytes).unwrap();
        let asked = [hash];
        let (has, small, parts, get) = tokio::join!(
            store.has(&asked),
            store.put_bytes(other, other_bytes.clone()),
            store.put_file(large, &source),
            store.get_to_file(hash, &target)
        );
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
        assert_eq!(files_below(place.path()).len(), 1, "{mode:?}: only the source is there");
    }
    let direct = bucket.direct();
    let present = direct.has(&[hash, large]).await.unwrap();
    assert_eq!(
        present,
        [true, false],
        "the existing blob remains, and no partial blob exists"
    );
}

/// Applies to small uploads and to multipart uploads.
pub(super) async fn an_interrupted_upload_leaves_no_partial_object(bucket: &Bucket) {
    let place = tempfile::tempdir().unwrap();
    for (seed, size) in [(5, 4 * MIB), (6, 12 * MIB)] {
        let (hash, bytes) = blob(seed, size);
        let source = place.path().join("source");
        std::fs::write(&source, &bytes).unwrap();
        let proxy = Proxy::start(&bucket.server, Mode::CutRequestsAfter(MIB)).await;
        let store = bucket.through(&proxy);
        let error = store.put_file(hash, &source).await.unwrap_err();
        assert!(matches!(error, StorageError::Unavailable { .. }), "{error}");
        assert_eq!(bucket.direct().has(&[hash]).await.unwrap(), [false]);
        // The same call afterwards succeeds.
        proxy.set(Mode::Pass);
        let store = bucket.with_default_timeouts(&proxy.endpoint());
        store.put_file(hash, &source).await.unwrap();
        assert_eq!(store.get_bytes(hash, u64::MAX).await.unwrap(), bytes);
    }
}

/// A broken download continues; received parts are not downloaded again.
pub(super) async fn an_interrupted_download_continues(bucket: &Bucket) {
    let (hash, bytes) = blob(8, 16 * MIB);
    bucket.direct().put_bytes(hash, bytes.clone()).await.unwrap();
    let proxy = Proxy::start(&bucket.server, Mode::CutFirstResponses(3 * MIB, 4)).await;
    let place = tempfile::tempdir().unwrap();
    let target = place.path().join("target");
    bucket
        .with_default_timeouts(&proxy.endpoint())
        .get_to_file(hash, &target)
        .await
        .unwrap();
    assert_eq!(std::fs::read(&target).unwrap(), bytes);
    assert_eq!(files_below(place.path()).len(), 1);
}
