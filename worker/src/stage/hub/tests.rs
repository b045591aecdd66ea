//! Against a small server that knows how to misbehave.

use super::*;
use aitk_common::hash::ContentHash;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

#[derive(Default)]
struct Site {
    /// Path -> content.
    files: BTreeMap<String, Vec<u8>>,
    /// Answered for everything, when set.
    status: Option<u16>,
    /// Breaks off after half of this path, once.
    cut: Option<String>,
    requests: Vec<String>,
}

struct Server {
    site: Arc<Mutex<Site>>,
    url: String,
    task: tokio::task::JoinHandle<()>,
}

impl Server {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let site = Arc::new(Mutex::new(Site::default()));
        let shared = Arc::clone(&site);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, Arc::clone(&shared)));
            }
        });
        Self { site, url, task }
    }

    /// A repository `org/tiny` with these files; those that end in safetensors are announced with their hash.
    fn publish(&self, files: &[(&str, &[u8])]) {
        let mut site = self.site.lock().unwrap();
        let siblings: Vec<_> = files
            .iter()
            .map(|(name, content)| match name.ends_with(".safetensors") {
                true => json!({"rfilename": name, "size": content.len(),
                    "lfs": {"sha256": ContentHash::of(content).to_hex(), "size": content.len()}}),
                false => json!({"rfilename": name, "size": content.len()}),
            })
            .collect();
        let list = json!({"sha": "abc123", "siblings": siblings}).to_string();
        site.files.insert(
            "/api/models/org/tiny/revision/main?blobs=true".to_owned(),
            list.into_bytes(),
        );
        for (name, content) in files {
            site.files
                .insert(format!("/org/tiny/resolve/abc123/{name}"), content.to_vec());
        }
    }

    fn hub(&self, folder: &Path) -> Hub {
        Hub {
            first_wait: Duration::from_millis(1),
            ..Hub::new(folder.to_owned(), self.url.clone(), Some("t".into()))
        }
    }

    fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.site.lock().unwrap().requests)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// One request a connection.
async fn serve(mut stream: TcpStream, site: Arc<Mutex<Site>>) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return,
        }
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
    let from = head
        .to_lowercase()
        .split_once("range: bytes=")
        .and_then(|(_, rest)| rest.split('-').next().and_then(|from| from.parse::<usize>().ok()));
    let (answer, body) = {
        let mut site = site.lock().unwrap();
        site.requests.push(match from {
            Some(from) => format!("{path} from {from}"),
            None => path.clone(),
        });
        match (site.status, site.files.get(&path).cloned()) {
            (Some(status), _) => (format!("HTTP/1.1 {status} x\r\nContent-Length: 0\r\n"), Vec::new()),
            (None, None) => ("HTTP/1.1 404 x\r\nContent-Length: 0\r\n".to_owned(), Vec::new()),
            (None, Some(content)) => {
                let begin = from.unwrap_or(0).min(content.len());
                let rest = content[begin..].to_vec();
                let range =
                    from.map(|from| format!("Content-Range: bytes {from}-{}/{}\r\n", content.len(), content.len()));
                let status = if from.is_some() { 206 } else { 200 };
                let answer = format!(
                    "HTTP/1.1 {status} x\r\nContent-Length: {}\r\n{}",
                    rest.len(),
                    range.unwrap_or_default()
                );
                let cut = site.cut.take_if(|cut| *cut == path).is_some();
                let sent = if cut { rest[..rest.len() / 2].to_vec() } else { rest };
                (answer, sent)
            }
        }
    };
    let _ = stream
        .write_all(format!("{answer}Connection: close\r\n\r\n").as_bytes())
        .await;
    let _ = stream.write_all(&body).await;
    let _ = stream.shutdown().await;
}

const INDEX: &[u8] =
    br#"{"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "X"], "tokenizer": ["t", "Y"],
    "safety_checker": ["s", "Z"]}"#;

#[tokio::test]
async fn a_model_is_fetched_once_and_a_broken_download_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start().await;
    let weights: Vec<u8> = (0..100_000_u32).flat_map(|at| at.to_le_bytes()).collect();
    server.publish(&[
        ("model_index.json", INDEX),
        ("README.md", b"x"),
        ("v1-5-pruned.safetensors", b"a single file"),
        ("unet/config.json", b"{}"),
        ("unet/diffusion_pytorch_model.safetensors", &weights),
        ("unet/diffusion_pytorch_model.fp16.safetensors", b"half"),
        ("unet/diffusion_pytorch_model.bin", b"pickle"),
        ("tokenizer/merges.txt", b""),
        ("safety_checker/model.safetensors", b"no"),
    ]);
    let big = "/org/tiny/resolve/abc123/unet/diffusion_pytorch_model.safetensors".to_owned();
    server.site.lock().unwrap().cut = Some(big.clone());
    let hub = server.hub(folder.path());
    let model = hub.fetch("org/tiny", &|_| {}).await.unwrap();
    assert_eq!(
        std::fs::read(model.join("unet/diffusion_pytorch_model.safetensors")).unwrap(),
        weights
    );
    assert!(model.join("tokenizer/merges.txt").exists() && model.join("model_index.json").exists());
    for absent in [
        "README.md",
        "v1-5-pruned.safetensors",
        "safety_checker",
        "unet/diffusion_pytorch_model.bin",
    ] {
        assert!(!model.join(absent).exists(), "{absent}");
    }
    assert!(!model.join("unet/diffusion_pytorch_model.fp16.safetensors").exists());
    let requests = server.requests();
    assert!(
        requests
            .iter()
            .any(|request| request.starts_with(&format!("{big} from "))),
        "{requests:?}"
    );

    assert_eq!(hub.fetch("org/tiny", &|_| {}).await.unwrap(), model);
    assert_eq!(server.requests().len(), 1);
    server.site.lock().unwrap().status = Some(503);
    assert_eq!(hub.fetch("org/tiny", &|_| {}).await.unwrap(), model);
    assert!(matches!(
        hub.fetch("org/other", &|_| {}).await,
        Err(HubError::Unavailable { .. })
    ));
}

#[tokio::test]
async fn what_is_not_as_announced_is_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start().await;
    server.publish(&[("model_index.json", INDEX), ("unet/model.safetensors", b"right")]);
    let key = "/org/tiny/resolve/abc123/unet/model.safetensors".to_owned();
    server.site.lock().unwrap().files.insert(key.clone(), b"wrong".to_vec());
    let hub = server.hub(folder.path());
    let error = hub.fetch("org/tiny", &|_| {}).await.unwrap_err();
    assert!(
        matches!(&error, HubError::Damaged { file, .. } if file == "unet/model.safetensors"),
        "{error}"
    );
    server
        .site
        .lock()
        .unwrap()
        .files
        .insert(key, b"right and more".to_vec());
    assert!(matches!(
        hub.fetch("org/tiny", &|_| {}).await,
        Err(HubError::Damaged { .. })
    ));

    server.publish(&[("model_index.json", INDEX), ("unet/model.bin", b"pickle")]);
    let error = hub.fetch("org/tiny", &|_| {}).await.unwrap_err();
    assert!(
        matches!(&error, HubError::Layout { problem, .. } if problem.contains("pickle")),
        "{error}"
    );
    server.publish(&[
        ("model_index.json", INDEX),
        ("unet/model.safetensors", b"x"),
        ("unet/..\\x.json", b"x"),
    ]);
    let error = hub.fetch("org/tiny", &|_| {}).await.unwrap_err();
    assert!(matches!(&error, HubError::Layout { .. }), "{error}");
    server.publish(&[("config.json", b"{}"), ("vae.safetensors", b"x"), ("sub/y.json", b"{}")]);
    let part = hub.fetch("org/tiny", &|_| {}).await.unwrap();
    assert!(part.join("vae.safetensors").exists() && !part.join("sub").exists());
    for (status, expected) in [(401, "licence"), (404, "not found")] {
        server.site.lock().unwrap().status = Some(status);
        let message = hub.fetch("org/tiny", &|_| {}).await.unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn only_org_and_name_is_a_repository() {
    for yes in [
        "runwayml/stable-diffusion-v1-5",
        "stable-diffusion-v1-5/stable-diffusion-v1-5",
        "a/b.c_d",
    ] {
        assert!(is_repository(yes), "{yes}");
    }
    for no in [
        "model",
        "/abs/path",
        "./a",
        "../a",
        "a/b/c",
        "a/..",
        "a b/c",
        "models/x.safetensors",
        "src/lib.rs",
        "~/x",
    ] {
        assert!(!is_repository(no), "{no}");
    }
}
