//! Tests of `gs://`. Its XML API is that of S3 except for signatures, so unsigned requests work with the S3 server of these
//! tests. `AITK_TEST_GOOGLE_ENDPOINT` selects another server, which must have a bucket named `bucket`.

use super::server::Server;
use super::{Bucket, contract};
use url::Url;

fn settings(endpoint: &str) -> Vec<(&'static str, String)> {
    vec![
        ("google_base_url", endpoint.to_owned()),
        ("google_skip_signature", "true".to_owned()),
        // Replaces the metadata server of Google's machines.
        (
            "google_service_account_key",
            r#"{"private_key": "", "private_key_id": "", "client_email": "", "disable_oauth": true}"#.to_owned(),
        ),
    ]
}

/// The bucket, and the server if this test started it.
fn bucket() -> Option<(Bucket, Option<Server>)> {
    let named = std::env::var("AITK_TEST_GOOGLE_ENDPOINT")
        .ok()
        .filter(|text| !text.is_empty());
    let (server, own_server) = match named {
        Some(endpoint) => {
            let url = Url::parse(&endpoint).unwrap();
            let server = format!("{}:{}", url.host_str().unwrap(), url.port_or_known_default().unwrap());
            (server, None)
        }
        None => {
            let own_server = Server::start_open()?;
            (format!("127.0.0.1:{}", own_server.port()), Some(own_server))
        }
    };
    let address = format!("gs://bucket/{}", uuid::Uuid::new_v4().simple());
    let bucket = Bucket {
        address,
        server,
        settings,
    };
    Some((bucket, own_server))
}

#[tokio::test(flavor = "multi_thread")]
async fn blobs_round_trip() {
    let Some((bucket, _server)) = bucket() else { return };
    contract::blobs_round_trip(&bucket).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_round_trips() {
    let Some((bucket, _server)) = bucket() else { return };
    contract::a_checkpoint_round_trips(&bucket).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_retried_during_an_outage() {
    let Some((bucket, _server)) = bucket() else { return };
    contract::requests_are_retried_during_an_outage(&bucket).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn permanent_failures_are_errors() {
    let Some((bucket, _server)) = bucket() else { return };
    contract::permanent_failures_are_errors(&bucket).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_upload_leaves_no_partial_object() {
    let Some((bucket, _server)) = bucket() else { return };
    contract::an_interrupted_upload_leaves_no_partial_object(&bucket).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_download_continues() {
    let Some((bucket, _server)) = bucket() else { return };
    contract::an_interrupted_download_continues(&bucket).await;
}
