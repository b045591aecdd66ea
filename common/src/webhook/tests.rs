//! Tests against a small HTTP server.

use super::*;
use serde_json::json;
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// The received requests (head and body), and the responses in order; the last response is repeated.
#[derive(Default)]
struct Site {
    requests: Vec<(String, String)>,
    responses: Vec<&'static str>,
}

async fn start(responses: &[&'static str]) -> (Arc<Mutex<Site>>, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let site = Arc::new(Mutex::new(Site {
        requests: Vec::new(),
        responses: responses.to_vec(),
    }));
    let shared = site.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, shared.clone()));
        }
    });
    (site, port)
}

async fn serve(mut stream: TcpStream, site: Arc<Mutex<Site>>) {
    // A TLS handshake begins with byte 22. This server does not support TLS.
    let Ok(first) = stream.read_u8().await else { return };
    if first == 22 {
        return;
    }
    let mut head = vec![first];
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return,
        }
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let length = head
        .to_lowercase()
        .split_once("content-length: ")
        .and_then(|(_, rest)| rest.split("\r\n").next()?.parse().ok())
        .unwrap_or(0);
    let mut body = vec![0; length];
    if stream.read_exact(&mut body).await.is_err() {
        return;
    }
    let response = {
        let mut site = site.lock().unwrap();
        site.requests.push((head, String::from_utf8_lossy(&body).into_owned()));
        let at = (site.requests.len() - 1).min(site.responses.len() - 1);
        site.responses[at]
    };
    let _ = stream.write_all(response.as_bytes()).await;
    let _ = stream.shutdown().await;
}

/// A webhook that allows private addresses, without delays between retries.
fn private_webhook(url: &str) -> Webhook {
    Webhook {
        retry_delays: [Duration::ZERO; 2],
        ..Webhook::new(url, true).unwrap()
    }
}

const OK: &str = "HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n";
const BUSY: &str = "HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
const REDIRECT: &str =
    "HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/latest\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
const NOT_FOUND: &str = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";

#[test]
fn only_https_urls_without_passwords_are_accepted() {
    for good in ["https://example.org/x?y=z", "https://example.org:8443"] {
        Webhook::new(good, false).unwrap();
    }
    Webhook::new("http://192.168.1.2/x", true).unwrap();
    for (bad, allow_private, expected) in [
        ("http://example.org/", false, "no TLS"),
        ("ftp://example.org/", true, "the scheme ftp;"),
        ("file:///etc/passwd", true, "the scheme file;"),
        ("https://", false, "not a URL"),
        ("example.org", false, "not a URL"),
        ("https://me:secret@example.org/", false, "a password"),
        ("https://me@example.org/", true, "a user name"),
        (
            &format!("https://example.org/{}", "x".repeat(3000)),
            false,
            "at most 2048",
        ),
    ] {
        let error = Webhook::new(bad, allow_private).unwrap_err().to_string();
        assert!(error.contains(expected), "{bad}: {error}");
        assert!(!error.contains("secret"), "{error}");
    }
    let shown = format!("{:?}", Webhook::new("https://example.org/secret", false).unwrap());
    assert_eq!(shown, "Webhook(example.org)");
}

#[tokio::test]
async fn a_message_is_posted_completely_and_retried_while_the_server_is_busy() {
    let (site, port) = start(&[BUSY, OK]).await;
    let webhook = private_webhook(&format!("http://localhost:{port}/hook/secret"));
    webhook.post(&json!({"text": "ended"})).await.unwrap();
    let site = site.lock().unwrap();
    assert_eq!(site.requests.len(), 2);
    for (head, body) in &site.requests {
        assert!(head.starts_with("POST /hook/secret HTTP/1.1\r\n"), "{head}");
        assert!(head.to_lowercase().contains("content-type: application/json"), "{head}");
        assert_eq!(body, r#"{"text":"ended"}"#);
    }
}

#[tokio::test]
async fn private_addresses_are_refused_in_every_form_before_anything_is_sent() {
    let (site, port) = start(&[OK]).await;
    // The server has no TLS, but the address is checked before a connection is made.
    for host in [
        "127.0.0.1",
        "localhost",
        "2130706433",
        "0x7f.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "169.254.169.254",
    ] {
        let webhook = Webhook::new(&format!("https://{host}:{port}/"), false).unwrap();
        let error = webhook.post(&json!({})).await.unwrap_err();
        assert!(matches!(error, WebhookError::Private { .. }), "{host}: {error}");
    }
    assert_eq!(site.lock().unwrap().requests.len(), 0);
}

#[tokio::test]
async fn redirects_are_not_followed_and_errors_do_not_contain_the_path() {
    for (response, expected) in [(REDIRECT, "a redirect"), (NOT_FOUND, "404")] {
        let (site, port) = start(&[response]).await;
        let webhook = private_webhook(&format!("http://127.0.0.1:{port}/secret"));
        let error = webhook.post(&json!({})).await.unwrap_err().to_string();
        assert!(error.contains(expected) && !error.contains("secret"), "{error}");
        assert_eq!(site.lock().unwrap().requests.len(), 1, "{response}");
    }
    // A closed port, and an https:// URL of a server without TLS.
    let (_, plain) = start(&[OK]).await;
    let closed = TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    for url in [
        format!("http://127.0.0.1:{closed}/secret"),
        format!("https://127.0.0.1:{plain}/secret"),
    ] {
        let error = private_webhook(&url).post(&json!({})).await.unwrap_err();
        assert!(matches!(error, WebhookError::Unreachable { .. }), "{url}: {error}");
        assert!(!error.to_string().contains("secret"), "{error}");
    }
    let long = json!({ "text": "x".repeat(100_000) });
    assert!(
        Webhook::new("https://example.org", false)
            .unwrap()
            .post(&long)
            .await
            .is_err()
    );
}
