//! Tests of `az://` against a Blob service server such as Azurite.
//!
//! They run if `AITK_TEST_AZURE_ENDPOINT` is set, with the account in its path as for Azurite:
//!
//! ```text
//! npx azurite-blob --blobPort 10000 --location /tmp/azurite
//! AITK_TEST_AZURE_ENDPOINT=http://127.0.0.1:10000/devstoreaccount1 cargo test --workspace --test storage azure
//! ```

use super::{Bucket, blob, contract};
use aitk_common::storage::{BlobStore, StorageError};
use object_store::azure::{AzureAccessKey, AzureAuthorizer, AzureCredential};
use object_store::client::{HttpRequest, HttpRequestBody};
use url::Url;

/// Azurite's public default account.
const ACCOUNT: &str = "devstoreaccount1";
const KEY: &str = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

fn settings(endpoint: &str) -> Vec<(&'static str, String)> {
    vec![
        ("azure_storage_endpoint", format!("{endpoint}/{ACCOUNT}")),
        ("azure_storage_account_name", ACCOUNT.to_owned()),
        ("azure_storage_account_key", KEY.to_owned()),
    ]
}

/// Creates a new container. Prints a message and returns `None` without a server.
async fn bucket() -> Option<Bucket> {
    let Some(endpoint) = std::env::var("AITK_TEST_AZURE_ENDPOINT")
        .ok()
        .filter(|text| !text.is_empty())
    else {
        crate::skip::skip("azure", "AITK_TEST_AZURE_ENDPOINT is not set (see docs/storage.md)");
        return None;
    };
    let url = Url::parse(&endpoint).unwrap();
    let server = format!("{}:{}", url.host_str().unwrap(), url.port_or_known_default().unwrap());
    let container = format!("aitk-{}", uuid::Uuid::new_v4().simple());
    create(&format!("http://{server}/{ACCOUNT}/{container}?restype=container")).await;
    Some(Bucket {
        address: format!("az://{container}/pool"),
        server,
        settings,
    })
}

/// Creates a container, which `object_store` cannot do.
async fn create(url: &str) {
    let mut request = HttpRequest::new(HttpRequestBody::empty());
    *request.method_mut() = "PUT".parse().unwrap();
    *request.uri_mut() = url.parse().unwrap();
    request.headers_mut().insert("content-length", "0".parse().unwrap());
    let credential = AzureCredential::AccessKey(AzureAccessKey::try_new(KEY).unwrap());
    AzureAuthorizer::new(&credential, ACCOUNT)
        .try_authorize(&mut request)
        .unwrap();
    let _ = rustls::crypto::ring::default_provider().install_default();
    let headers = std::mem::take(request.headers_mut());
    let answer = reqwest::Client::new().put(url).headers(headers).send().await.unwrap();
    let status = answer.status();
    assert!(status.is_success(), "{status}: {}", answer.text().await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn blobs_round_trip() {
    let Some(bucket) = bucket().await else { return };
    contract::blobs_round_trip(&bucket).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_round_trips() {
    let Some(bucket) = bucket().await else { return };
    contract::a_checkpoint_round_trips(&bucket).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_retried_during_an_outage() {
    let Some(bucket) = bucket().await else { return };
    contract::requests_are_retried_during_an_outage(&bucket).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn permanent_failures_are_errors() {
    let Some(bucket) = bucket().await else { return };
    contract::permanent_failures_are_errors(&bucket).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_upload_leaves_no_partial_object() {
    let Some(bucket) = bucket().await else { return };
    contract::an_interrupted_upload_leaves_no_partial_object(&bucket).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_download_continues() {
    let Some(bucket) = bucket().await else { return };
    contract::an_interrupted_download_continues(&bucket).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_keys_and_a_missing_container_are_errors_without_retries() {
    let Some(mut bucket) = bucket().await else { return };
    let (hash, bytes) = blob(9, 10);
    let mut options = bucket.short_timeouts(&format!("http://{}", bucket.server));
    let wrong = "d3Jvbmc=".to_owned();
    options.settings.insert("azure_storage_account_key".to_owned(), wrong);
    let error = bucket.open(&options).put_bytes(hash, bytes.clone()).await.unwrap_err();
    assert!(matches!(error, StorageError::Denied { .. }), "{error}");
    bucket.address = "az://there-is-no-such-container/pool".to_owned();
    let error = bucket.direct().put_bytes(hash, bytes).await.unwrap_err();
    assert!(
        matches!(error, StorageError::Failed { .. }) && error.to_string().contains("container"),
        "{error}"
    );
}
