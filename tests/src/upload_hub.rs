//! A model hub that takes uploads, as Hugging Face does: repositories, Git LFS with the transfers `basic` and `multipart`, commits.
//!
//! Large files go to a second port, as on Hugging Face to another host; what reaches it with the token is recorded.

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The token that may write.
pub const TOKEN: &str = "hf_write";

/// A repository.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repository {
    /// Whether it was made private.
    pub private: bool,
    /// Its files, large ones by their content.
    pub files: BTreeMap<String, Vec<u8>>,
    /// The summaries of its commits.
    pub commits: Vec<String>,
}

/// What the hub has, and how it behaves.
#[derive(Debug, Default)]
pub struct Contents {
    /// The repositories by name.
    pub repositories: BTreeMap<String, Repository>,
    /// The content of large files, by SHA-256.
    pub large: BTreeMap<String, Vec<u8>>,
    /// Parts of large files that are not complete.
    parts: BTreeMap<(String, u64), Vec<u8>>,
    /// How many of the next requests are refused because the hub is busy.
    pub busy: u32,
    /// Files of at least this size are stored as large files.
    pub large_from: u64,
    /// The size of the parts of large files; `None`: sent as a whole.
    pub part_bytes: Option<u64>,
    /// The address that is named for large files, instead of the storage's.
    pub storage_address: Option<String>,
    /// Requests to the storage that had the user's token.
    pub leaked_tokens: u32,
    /// Requests with content to the storage.
    pub stored: u32,
    /// The role of the token: `read`, `write` (empty, the default, too) or `fineGrained`.
    pub role: String,
    /// What a commit is answered with, and not done: a proxy's page.
    pub commit_answer: Option<String>,
    /// Whether requests for a new repository get no answer.
    pub ignores_create: bool,
    /// How many of them got none.
    pub unanswered: u32,
}

/// The running hub. It listens until the runtime ends.
#[derive(Clone, Debug)]
pub struct UploadHub {
    address: SocketAddr,
    storage: SocketAddr,
    contents: Arc<Mutex<Contents>>,
}

impl UploadHub {
    /// Starts a hub on two free local ports.
    ///
    /// # Errors
    /// When no port can be bound.
    pub async fn start() -> io::Result<Self> {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let storage = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let hub = Self {
            address: listener.local_addr()?,
            storage: storage.local_addr()?,
            contents: Arc::default(),
        };
        hub.contents().large_from = 1000;
        let router = Router::new()
            .route("/api/whoami-v2", get(whoami))
            .route("/api/repos/create", post(create))
            .route("/api/models/{owner}/{name}/preupload/main", post(preupload))
            .route("/api/models/{owner}/{name}/commit/main", post(commit))
            .route("/{owner}/{name}/info/lfs/objects/batch", post(batch))
            .route("/verify", post(verify))
            .route("/storage/{oid}", put(store).post(complete))
            .layer(DefaultBodyLimit::max(16 << 20))
            .with_state(hub.clone());
        let stored = Router::new()
            .route("/storage/{oid}", put(store).post(complete))
            .layer(DefaultBodyLimit::max(16 << 20))
            .with_state(hub.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        tokio::spawn(async move { axum::serve(storage, stored).await });
        Ok(hub)
    }

    /// The value for `HF_ENDPOINT`.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The storage's own address: not the hub's, and without TLS.
    #[must_use]
    pub fn storage_endpoint(&self) -> String {
        format!("http://{}", self.storage)
    }

    /// What it has.
    pub fn contents(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses a request without the token, or while the hub is busy.
    fn refusal(&self, headers: &HeaderMap) -> Option<Response> {
        let mut contents = self.contents();
        if contents.busy > 0 {
            contents.busy -= 1;
            return Some(StatusCode::SERVICE_UNAVAILABLE.into_response());
        }
        if headers
            .get("authorization")
            .is_none_or(|value| value != &format!("Bearer {TOKEN}"))
        {
            let reason = json!({"error": "Invalid credentials in Authorization header"});
            return Some((StatusCode::UNAUTHORIZED, Json(reason)).into_response());
        }
        None
    }
}

async fn whoami(State(hub): State<UploadHub>, headers: HeaderMap) -> Response {
    if let Some(refusal) = hub.refusal(&headers) {
        return refusal;
    }
    let role = hub.contents().role.clone();
    Json(json!({"type": "user", "name": "me", "auth": {"type": "access_token", "accessToken": {"role": role}}}))
        .into_response()
}

async fn create(State(hub): State<UploadHub>, headers: HeaderMap, Json(body): Json<Value>) -> Response {
    if let Some(refusal) = hub.refusal(&headers) {
        return refusal;
    }
    let is_ignored = {
        let mut contents = hub.contents();
        let is_ignored = contents.ignores_create;
        contents.unanswered += u32::from(is_ignored);
        is_ignored
    };
    if is_ignored {
        std::future::pending::<()>().await;
    }
    let text = |key: &str| body[key].as_str().unwrap_or_default().to_owned();
    let repo = format!("{}/{}", text("organization"), text("name"));
    if repo.starts_with("others/") {
        let reason = json!({"error": "You don't have the rights to create a model under the namespace \"others\""});
        return (StatusCode::FORBIDDEN, Json(reason)).into_response();
    }
    let mut contents = hub.contents();
    if contents.repositories.contains_key(&repo) {
        return (
            StatusCode::CONFLICT,
            Json(json!({"error": "You already created this model repo"})),
        )
            .into_response();
    }
    let private = body["private"] == true;
    contents.repositories.insert(
        repo.clone(),
        Repository {
            private,
            ..Repository::default()
        },
    );
    Json(json!({"url": format!("{}/{repo}", hub.endpoint())})).into_response()
}

async fn preupload(
    State(hub): State<UploadHub>,
    Path((owner, name)): Path<(String, String)>,
    headers: HeaderMap,
    Json(body): Json<Value>,
) -> Response {
    if let Some(refusal) = hub.refusal(&headers) {
        return refusal;
    }
    let contents = hub.contents();
    if !contents.repositories.contains_key(&format!("{owner}/{name}")) {
        return StatusCode::NOT_FOUND.into_response();
    }
    let files = body["files"].as_array().cloned().unwrap_or_default();
    let files: Vec<Value> = (files.iter())
        .map(|file| {
            let is_large = file["size"].as_u64().unwrap_or(0) >= contents.large_from;
            let mode = if is_large { "lfs" } else { "regular" };
            json!({"path": file["path"], "uploadMode": mode, "shouldIgnore": false, "oid": null})
        })
        .collect();
    Json(json!({"files": files, "commitOid": "0"})).into_response()
}

async fn batch(
    State(hub): State<UploadHub>,
    Path((_owner, _name)): Path<(String, String)>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    if let Some(refusal) = hub.refusal(&headers) {
        return refusal;
    }
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let contents = hub.contents();
    let storage = contents.storage_address.clone().unwrap_or_else(|| hub.endpoint());
    let objects = body["objects"].as_array().cloned().unwrap_or_default();
    let objects: Vec<Value> = (objects.iter())
        .map(|object| {
            let (oid, size) = (
                object["oid"].as_str().unwrap_or_default(),
                object["size"].as_u64().unwrap_or(0),
            );
            if contents.large.contains_key(oid) {
                return json!({"oid": oid, "size": size});
            }
            let href = format!("{storage}/storage/{oid}");
            let mut header = serde_json::Map::new();
            if let Some(part_bytes) = contents.part_bytes {
                header.insert("chunk_size".into(), part_bytes.to_string().into());
                for part in 1..=size.div_ceil(part_bytes) {
                    header.insert(format!("{part:05}"), format!("{href}?part={part}").into());
                }
            }
            json!({"oid": oid, "size": size, "actions": {
                "upload": {"href": href, "header": header},
                "verify": {"href": format!("{}/verify", hub.endpoint())},
            }})
        })
        .collect();
    let transfer = if contents.part_bytes.is_some() {
        "multipart"
    } else {
        "basic"
    };
    Json(json!({"transfer": transfer, "objects": objects})).into_response()
}

async fn verify(State(hub): State<UploadHub>, headers: HeaderMap, body: Bytes) -> Response {
    if let Some(refusal) = hub.refusal(&headers) {
        return refusal;
    }
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let contents = hub.contents();
    let stored = body["oid"].as_str().and_then(|oid| contents.large.get(oid));
    match stored.is_some_and(|stored| Some(stored.len() as u64) == body["size"].as_u64()) {
        true => StatusCode::OK.into_response(),
        false => (StatusCode::UNPROCESSABLE_ENTITY, Json(json!({"error": "not stored"}))).into_response(),
    }
}

async fn store(
    State(hub): State<UploadHub>,
    Path(oid): Path<String>,
    Query(query): Query<BTreeMap<String, u64>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let mut contents = hub.contents();
    contents.stored += 1;
    contents.leaked_tokens += u32::from(headers.contains_key("authorization"));
    if contents.busy > 0 {
        contents.busy -= 1;
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    match query.get("part") {
        None => contents.large.insert(oid, body.to_vec()),
        Some(part) => contents.parts.insert((oid, *part), body.to_vec()),
    };
    [("etag", format!("\"{}\"", query.get("part").unwrap_or(&0)))].into_response()
}

async fn complete(State(hub): State<UploadHub>, Path(oid): Path<String>, body: Bytes) -> Response {
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let mut contents = hub.contents();
    let listed = body["parts"].as_array().cloned().unwrap_or_default();
    let mut whole = Vec::new();
    for (part, number) in listed.iter().zip(1..) {
        let content = contents.parts.remove(&(oid.clone(), number));
        match content.filter(|_| part["partNumber"] == number && part["etag"] == format!("\"{number}\"")) {
            Some(content) => whole.extend(content),
            None => return StatusCode::BAD_REQUEST.into_response(),
        }
    }
    contents.large.insert(oid, whole);
    Json(json!({})).into_response()
}

async fn commit(
    State(hub): State<UploadHub>,
    Path((owner, name)): Path<(String, String)>,
    headers: HeaderMap,
    body: String,
) -> Response {
    if let Some(refusal) = hub.refusal(&headers) {
        return refusal;
    }
    let mut contents = hub.contents();
    if let Some(answer) = &contents.commit_answer {
        return (StatusCode::OK, answer.clone()).into_response();
    }
    let Contents {
        repositories, large, ..
    } = &mut *contents;
    let Some(repository) = repositories.get_mut(&format!("{owner}/{name}")) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    for line in body.lines() {
        let line: Value = serde_json::from_str(line).unwrap_or_default();
        let value = &line["value"];
        let path = value["path"].as_str().unwrap_or_default().to_owned();
        match line["key"].as_str() {
            Some("header") => repository
                .commits
                .push(value["summary"].as_str().unwrap_or_default().to_owned()),
            Some("file") => {
                let content = BASE64_STANDARD
                    .decode(value["content"].as_str().unwrap_or_default())
                    .unwrap_or_default();
                repository.files.insert(path, content);
            }
            Some("lfsFile") => match value["oid"].as_str().and_then(|oid| large.get(oid)) {
                Some(content) => {
                    repository.files.insert(path, content.clone());
                }
                None => {
                    return (
                        StatusCode::BAD_REQUEST,
                        Json(json!({"error": "a large file is missing"})),
                    )
                        .into_response();
                }
            },
            _ => return StatusCode::BAD_REQUEST.into_response(),
        }
    }
    Json(json!({"commitUrl": "", "commitOid": "0", "pullRequestUrl": null})).into_response()
}
