//! A small hub with faults.

use super::super::{AllowList, Hub, ModelRequest, RepositoryParts};
use aitk_common::hash::ContentHash;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

#[derive(Default)]
pub(super) struct ServerState {
    /// Content by path.
    pub(super) files: BTreeMap<String, Vec<u8>>,
    /// The HTTP status of every answer, if set.
    pub(super) status: Option<u16>,
    /// Answers requests for this path with status 429 and this `Retry-After`, so many times.
    pub(super) busy: Option<(String, u32, u64)>,
    /// Closes the connection after half of this path, once.
    pub(super) cut: Option<String>,
    /// How often it does so again.
    pub(super) more_cuts: u32,
    pub(super) requests: Vec<String>,
    /// Requests without a token are refused.
    pub(super) private: bool,
    /// Requests without a token may list, but not read.
    pub(super) gated: bool,
    /// The number of requests with a token.
    pub(super) tokens: usize,
}

/// A model for a job that another user submitted.
pub(super) fn submitted_by_others(repo: &str) -> ModelRequest<'_> {
    ModelRequest {
        repo,
        revision: None,
        parts: RepositoryParts::All,
        in_place: false,
    }
}

pub(super) struct Server {
    pub(super) state: Arc<Mutex<ServerState>>,
    url: String,
    task: tokio::task::JoinHandle<()>,
}

impl Server {
    pub(super) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(Mutex::new(ServerState::default()));
        let shared = Arc::clone(&state);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, Arc::clone(&shared)));
            }
        });
        Self { state, url, task }
    }

    /// Publishes `org/tiny` with these files; those that end in safetensors are announced with their hash.
    pub(super) fn publish(&self, files: &[(&str, &[u8])]) {
        let mut state = self.state.lock().unwrap();
        let siblings: Vec<_> = files
            .iter()
            .map(|(name, content)| match name.ends_with(".safetensors") {
                true => json!({"rfilename": name, "size": content.len(),
                    "lfs": {"sha256": ContentHash::of(content).to_hex(), "size": content.len()}}),
                false => json!({"rfilename": name, "size": content.len()}),
            })
            .collect();
        let list = json!({"sha": "abc123", "siblings": siblings}).to_string();
        state.files.insert(
            "/api/models/org/tiny/revision/main?blobs=true".to_owned(),
            list.into_bytes(),
        );
        for (name, content) in files {
            state
                .files
                .insert(format!("/org/tiny/resolve/abc123/{name}"), content.to_vec());
        }
    }

    pub(super) fn hub(&self, folder: &Path) -> Hub {
        Hub {
            first_delay: Duration::from_millis(1),
            ..Hub::new(
                folder.to_owned(),
                self.url.clone(),
                Some("t".into()),
                AllowList::default(),
            )
        }
    }

    /// A hub with a token and this allow list.
    pub(super) fn hub_with_allow_list(&self, folder: &Path, list: &str) -> Hub {
        Hub {
            allow_list: AllowList::parse(&[list.to_owned()]).unwrap(),
            ..self.hub(folder)
        }
    }

    /// Publishes `org/tiny` at a commit; `main` stays unchanged.
    pub(super) fn publish_at(&self, commit: &str, files: &[(&str, &[u8])]) {
        let siblings: Vec<_> = files
            .iter()
            .map(|(name, content)| json!({"rfilename": name, "size": content.len()}))
            .collect();
        let list = json!({"sha": commit, "siblings": siblings}).to_string().into_bytes();
        let mut state = self.state.lock().unwrap();
        state
            .files
            .insert(format!("/api/models/org/tiny/revision/{commit}?blobs=true"), list);
        for (name, content) in files {
            state
                .files
                .insert(format!("/org/tiny/resolve/{commit}/{name}"), content.to_vec());
        }
    }

    pub(super) fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().unwrap().requests)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Serves one request per connection.
async fn serve(mut stream: TcpStream, state: Arc<Mutex<ServerState>>) {
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
        let mut state = state.lock().unwrap();
        let has_token = head.to_lowercase().contains("authorization: bearer t\r\n");
        state.tokens += usize::from(has_token);
        let is_hidden = !has_token && (state.private || (state.gated && !path.starts_with("/api/")));
        if is_hidden {
            state.status = Some(401);
        }
        state.requests.push(match from {
            Some(from) => format!("{path} from {from}"),
            None => path.clone(),
        });
        let status = state.status.take_if(|_| is_hidden).or(state.status);
        let wait = match &mut state.busy {
            Some((busy, left, wait)) if *busy == path && *left > 0 => {
                *left -= 1;
                Some(*wait)
            }
            _ => None,
        };
        match (status, state.files.get(&path).cloned()) {
            _ if wait.is_some() => {
                let wait = wait.unwrap_or_default();
                (
                    format!("HTTP/1.1 429 x\r\nRetry-After: {wait}\r\nContent-Length: 0\r\n"),
                    Vec::new(),
                )
            }
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
                let is_cut = state.cut.as_ref() == Some(&path);
                if is_cut {
                    match state.more_cuts.checked_sub(1) {
                        Some(left) => state.more_cuts = left,
                        None => state.cut = None,
                    }
                }
                let sent = if is_cut { rest[..rest.len() / 2].to_vec() } else { rest };
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

/// A `model_index.json` with a U-Net, a tokenizer and a safety checker.
pub(super) const INDEX: &[u8] =
    br#"{"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "X"], "tokenizer": ["t", "Y"],
    "safety_checker": ["s", "Z"]}"#;
