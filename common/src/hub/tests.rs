//! Tests against a small HTTP server that supports ranges.

use super::*;
use crate::model_files::{ModelFileKind, identify};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

#[derive(Default)]
struct Site {
    files: BTreeMap<String, Vec<u8>>,
    requests: Vec<String>,
    /// Whether files can only be listed.
    is_gated: bool,
    /// How many requests are answered with status 429, and after how many seconds such a request may be repeated.
    busy: (u32, u64),
}

type Shared = Arc<Mutex<Site>>;

async fn start() -> (Shared, HubReader) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let site = Shared::default();
    let shared = site.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, shared.clone()));
        }
    });
    (site, HubReader::new(Some(url), Some("t".into())))
}

/// Serves one request per connection.
async fn serve(mut stream: TcpStream, site: Shared) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return,
        }
    }
    let head = String::from_utf8_lossy(&head).to_lowercase();
    let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
    let range = head.split_once("range: bytes=").and_then(|(_, rest)| {
        let (from, rest) = rest.split_once('-')?;
        let to: usize = rest.split("\r\n").next()?.parse().ok()?;
        Some((from.parse::<usize>().ok()?, to))
    });
    let (status, body) = {
        let mut site = site.lock().unwrap();
        site.requests.push(path.clone());
        let is_closed = site.is_gated && !path.starts_with("/api/");
        let is_busy = site.busy.0 > 0;
        site.busy.0 = site.busy.0.saturating_sub(1);
        match (site.files.get(&path), range) {
            _ if is_busy => (429, Vec::new()),
            _ if is_closed => (401, Vec::new()),
            (None, _) => (404, Vec::new()),
            (Some(content), None) => (200, content.clone()),
            (Some(content), Some((from, _))) if from >= content.len() => (416, Vec::new()),
            (Some(content), Some((from, to))) => (206, content[from..content.len().min(to + 1)].to_vec()),
        }
    };
    let wait = site.lock().unwrap().busy.1;
    let head = format!(
        "HTTP/1.1 {status} x\r\nContent-Length: {}\r\nRetry-After: {wait}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let _ = stream.write_all(head.as_bytes()).await;
    let _ = stream.write_all(&body).await;
    let _ = stream.shutdown().await;
}

fn publish(site: &Shared, files: &[(&str, &[u8])]) {
    let siblings: Vec<_> = files
        .iter()
        .map(|(name, content)| json!({"rfilename": name, "size": content.len()}))
        .collect();
    let mut site = site.lock().unwrap();
    let gated = if site.is_gated { json!("auto") } else { json!(false) };
    let list = json!({"sha": "abc123", "gated": gated, "siblings": siblings});
    let list = list.to_string().into_bytes();
    site.files
        .insert("/api/models/org/tiny/revision/main?blobs=true".to_owned(), list);
    for (name, content) in files {
        let path = format!("/org/tiny/resolve/abc123/{name}").to_lowercase();
        site.files.insert(path, content.to_vec());
    }
}

/// A safetensors file with this tensor.
fn weights(name: &str, shape: &[u64]) -> Vec<u8> {
    let header = json!({name: {"dtype": "F16", "shape": shape, "data_offsets": [0, 4]}}).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(3 << 20, 0);
    bytes
}

/// A command waits for the hub, but not for long.
#[tokio::test]
async fn a_busy_hub_is_asked_again_when_it_says_so_unless_that_is_too_late() {
    let (site, hub) = start().await;
    publish(&site, &[("config.json", b"{}")]);
    site.lock().unwrap().busy = (MAX_BUSY_TRIES - 1, 0);
    hub.inventory("org/tiny").await.unwrap();
    for (tries, wait, requests) in [(MAX_BUSY_TRIES, 0, MAX_BUSY_TRIES), (1, MAX_BUSY_WAIT.as_secs() + 1, 1)] {
        site.lock().unwrap().requests.clear();
        site.lock().unwrap().busy = (tries, wait);
        let error = hub.inventory("org/tiny").await.unwrap_err();
        assert!(
            matches!(&error, HubError::Unavailable(text) if text.contains("429")),
            "{error}"
        );
        assert_eq!(site.lock().unwrap().requests.len(), requests as usize);
    }
}

#[tokio::test]
async fn small_files_identify_the_family_of_a_repository() {
    let (site, hub) = start().await;
    let identity = async || {
        let (commit, files) = hub.inventory("org/tiny").await.unwrap();
        assert_eq!(commit, "abc123");
        match identify(&files) {
            ModelFileKind::Model { family, evidence, .. } => format!("{family}: {evidence}"),
            other => format!("{other:?}"),
        }
    };

    publish(
        &site,
        &[
            ("model_index.json", br#"{"_class_name": "FluxPipeline"}"#),
            (
                "transformer/config.json",
                br#"{"_class_name": "FluxTransformer2DModel"}"#,
            ),
            ("transformer/diffusion_pytorch_model.safetensors", &[0; 100]),
            ("flux1-dev.safetensors", &[0; 100]),
        ],
    );
    assert_eq!(identity().await, "FLUX.1: model_index.json names FluxPipeline");
    let requests = std::mem::take(&mut site.lock().unwrap().requests);
    assert!(
        requests.iter().all(|path| !path.contains("safetensors")),
        "weights are not read: {requests:?}"
    );

    let one = weights("double_blocks.0.img_attn.qkv.weight", &[9216, 3072]);
    publish(&site, &[("one.safetensors", &one), ("README.md", b"x")]);
    let found = identity().await;
    assert!(
        found.starts_with("FLUX.1: one.safetensors has `double_blocks."),
        "{found}"
    );

    // A header that is longer than the first request.
    let long = weights(&format!("joint_blocks.0.{}", "x".repeat(600 << 10)), &[1, 1]);
    publish(&site, &[("one.safetensors", &long)]);
    assert!(identity().await.starts_with("Stable Diffusion 3: "));

    publish(&site, &[("model.bin", b"pickle")]);
    assert!(identity().await.starts_with("Pickle"));
    publish(&site, &[("empty.safetensors", b"")]);
    assert!(identity().await.starts_with("Unknown"));
}

#[tokio::test]
async fn a_missing_repository_and_an_unreachable_hub_are_distinguished() {
    let (_site, hub) = start().await;
    assert!(matches!(
        hub.inventory("org/none").await,
        Err(HubError::NotFound { .. })
    ));
    let unreachable = HubReader::new(Some("http://127.0.0.1:1".into()), None);
    assert!(matches!(
        unreachable.inventory("org/tiny").await,
        Err(HubError::Unavailable(_))
    ));
}

#[tokio::test]
async fn a_gated_repository_says_how_to_get_access() {
    let (site, hub) = start().await;
    site.lock().unwrap().is_gated = true;
    publish(&site, &[("model_index.json", b"{}")]);
    let denied = hub.inventory("org/tiny").await.unwrap_err().to_string();
    assert!(denied.contains("the account of the token has no access"), "{denied}");
    let without_token = HubReader::new(Some(hub.endpoint().to_owned()), None);
    let error = without_token.inventory("org/tiny").await.unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, HubError::Gated { has_token: false, .. }), "{text}");
    for part in [
        "org/tiny is gated",
        "there is no token",
        "accept its terms at http://127.0.0.1",
        "/settings/tokens",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_redirect_leads_to_an_address_with_tls_or_stays_on_a_hub_without_it() {
    let url = |text: &str| Url::parse(text).unwrap();
    for (hub, to, is_followed) in [
        ("https://hub.lab", "https://cdn.example.com/x", true),
        ("http://hub.lab:9000", "http://hub.lab:9000/x", true),
        ("http://hub.lab", "http://hub.lab:80/x", true),
        ("http://hub.lab:9000", "http://hub.lab:9001/x", false),
        ("http://hub.lab", "http://cdn.example.com/x", false),
        // The same host and port.
        ("https://hub.lab:8443", "http://hub.lab:8443/x", false),
        ("https://hub.lab", "http://hub.lab/x", false),
    ] {
        assert_eq!(may_follow(Some(&url(hub)), &url(to)), is_followed, "{hub} {to}");
    }
    assert!(!may_follow(None, &url("http://hub.lab")));
}
