//! Tests against an S3 server (`s3s-fs`), connected directly and through a faulty proxy.
//!
//! The server is the one of the whole-system tests (`tests/src/bin/s3-server.rs`), which `cargo test --workspace`
//! builds. Without a server these tests print that they are skipped; in CI they fail.

use super::proxy::{Mode, Proxy};
use super::server::{self, Server};
use super::{Bucket, MIB, blob, contract};
use crate::support::files_below;
use aitk_common::storage::{BlobStore, StorageError};

fn bucket(server: &Server) -> Bucket {
    Bucket {
        address: "s3://bucket/pool".to_owned(),
        server: format!("127.0.0.1:{}", server.port()),
        settings: |endpoint| {
            vec![
                ("aws_endpoint", endpoint.to_owned()),
                ("aws_access_key_id", server::KEY.to_owned()),
                ("aws_secret_access_key", server::SECRET.to_owned()),
                ("aws_region", "us-east-1".to_owned()),
            ]
        },
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn blobs_round_trip() {
    let Some(server) = Server::start() else { return };
    contract::blobs_round_trip(&bucket(&server)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_round_trips() {
    let Some(server) = Server::start() else { return };
    contract::a_checkpoint_round_trips(&bucket(&server)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_retried_during_an_outage() {
    let Some(server) = Server::start() else { return };
    contract::requests_are_retried_during_an_outage(&bucket(&server)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn permanent_failures_are_errors() {
    let Some(server) = Server::start() else { return };
    contract::permanent_failures_are_errors(&bucket(&server)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_upload_leaves_no_partial_object() {
    let Some(server) = Server::start() else { return };
    contract::an_interrupted_upload_leaves_no_partial_object(&bucket(&server)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_download_continues() {
    let Some(server) = Server::start() else { return };
    contract::an_interrupted_download_continues(&bucket(&server)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_line_is_enough_for_an_upload() {
    let Some(server) = Server::start() else { return };
    contract::a_slow_line_is_enough_for_an_upload(&bucket(&server)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_keys_and_a_missing_bucket_are_errors_without_retries() {
    let Some(server) = Server::start() else { return };
    let bucket = bucket(&server);
    let (hash, bytes) = blob(9, 10);
    // The test server creates missing buckets; real servers do not.
    let proxy = Proxy::start(&bucket.server, Mode::RespondNoBucket).await;
    let error = bucket.through(&proxy).put_bytes(hash, bytes.clone()).await.unwrap_err();
    assert!(
        matches!(error, StorageError::Denied { .. }) && error.to_string().contains("bucket"),
        "{error}"
    );
    let mut options = bucket.short_timeouts(&server.endpoint());
    options
        .settings
        .insert("aws_secret_access_key".to_owned(), "wrong".to_owned());
    let wrong = bucket.open(&options);
    let error = wrong.put_bytes(hash, bytes).await.unwrap_err();
    assert!(matches!(error, StorageError::Denied { .. }), "{error}");
    assert!(!error.to_string().contains("wrong"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blob_damaged_in_the_bucket_is_refused() {
    let Some(server) = Server::start() else { return };
    let (hash, bytes) = blob(10, 7 * MIB);
    let store = bucket(&server).direct();
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
