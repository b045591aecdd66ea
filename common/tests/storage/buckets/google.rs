//! `gs://`. Its protocol (the XML API) is S3's but for the signatures, so the S3 server of these tests can serve it when
//! nothing is signed; another server is taken when `AITK_TEST_GOOGLE_ENDPOINT` names one, with a bucket `bucket` in it.

use super::server::Server;
use super::{Bucket, contract};
use url::Url;

fn settings(endpoint: &str) -> Vec<(&'static str, String)> {
    vec![
        ("google_base_url", endpoint.to_owned()),
        ("google_skip_signature", "true".to_owned()),
        // In place of the metadata server that a machine of Google's has.
        (
            "google_service_account_key",
            r#"{"private_key": "", "private_key_id": "", "client_email": "", "disable_oauth": true}"#.to_owned(),
        ),
    ]
}

/// The bucket, and the server when it is ours.
fn bucket() -> Option<(Bucket, Option<Server>)> {
    let named = std::env::var("AITK_TEST_GOOGLE_ENDPOINT")
        .ok()
        .filter(|text| !text.is_empty());
    let (server, ours) = match named {
        Some(endpoint) => {
            let url = Url::parse(&endpoint).unwrap();
            let server = format!("{}:{}", url.host_str().unwrap(), url.port_or_known_default().unwrap());
            (server, None)
        }
        None => {
            let ours = Server::start_open()?;
            (format!("127.0.0.1:{}", ours.port()), Some(ours))
        }
    };
    let address = format!("gs://bucket/{}", uuid::Uuid::new_v4().simple());
    let bucket = Bucket {
        address,
        server,
        settings,
    };
    Some((bucket, ours))
}

#[tokio::test(flavor = "multi_thread")]
async fn blobs_go_in_and_come_out() {
    let Some((bucket, _server)) = bucket() else { return };
    contract::blobs_go_in_and_come_out(&bucket).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_travels() {
    let Some((bucket, _server)) = bucket() else { return };
    contract::a_checkpoint_travels(&bucket).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_is_sat_out() {
    let Some((bucket, _server)) = bucket() else { return };
    contract::an_outage_is_sat_out(&bucket).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn trouble_without_end_is_said() {
    let Some((bucket, _server)) = bucket() else { return };
    contract::trouble_without_end_is_said(&bucket).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_is_cut_off_leaves_no_half_object() {
    let Some((bucket, _server)) = bucket() else { return };
    contract::an_upload_that_is_cut_off_leaves_no_half_object(&bucket).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_download_that_is_cut_off_goes_on() {
    let Some((bucket, _server)) = bucket() else { return };
    contract::a_download_that_is_cut_off_goes_on(&bucket).await;
}
