//! Sends files to the storage of large files (Git LFS), with the transfers `basic` and, for files of some gigabytes, Hugging Face's
//! `multipart`.

use super::endpoint::shown;
use super::request::{LFS_JSON, Requests, time_limit, unavailable, wait};
use super::upload::{PushError, Source, file_error};
use crate::fsutil::regular;
use futures::stream;
use reqwest::header::{CONTENT_LENGTH, CONTENT_TYPE, ETAG, HeaderName, HeaderValue};
use reqwest::{Body, Method, Response, Url};
use serde::Deserialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

/// Bytes of a file that are read at once.
const PIECE_BYTES: u64 = 1 << 20;
/// The number of parts of a file, at most: that of S3.
const MAX_PARTS: u64 = 10_000;

/// A file that the hub stores with Git LFS.
pub(super) struct LargeFile<'a> {
    /// SHA-256 of its content.
    pub(super) oid: &'a str,
    pub(super) size: u64,
    pub(super) source: &'a Source,
}

#[derive(Deserialize)]
struct Batch {
    objects: Vec<Object>,
}

#[derive(Deserialize)]
struct Object {
    oid: String,
    /// Absent if the content is there already.
    actions: Option<Actions>,
    error: Option<ObjectError>,
}

#[derive(Deserialize)]
struct ObjectError {
    #[serde(default)]
    message: String,
}

#[derive(Deserialize)]
struct Actions {
    upload: Option<Action>,
    verify: Option<Action>,
}

#[derive(Deserialize)]
struct Action {
    href: String,
    /// HTTP headers; for `multipart` the size of a part, and the address of each part by its number.
    #[serde(default)]
    header: BTreeMap<String, serde_json::Value>,
}

#[derive(Deserialize)]
struct Nothing {}

/// Sends the files that the hub does not have. Returns the bytes that were sent.
pub(super) async fn send(
    requests: &Requests,
    repo: &str,
    files: &[LargeFile<'_>],
    sent: &(dyn Fn(u64) + Sync),
) -> Result<u64, PushError> {
    if files.is_empty() {
        return Ok(0);
    }
    let listed: Vec<_> = files
        .iter()
        .map(|file| json!({"oid": file.oid, "size": file.size}))
        .collect();
    let url = format!("{}/{repo}.git/info/lfs/objects/batch", requests.endpoint);
    let body = json!({
        "operation": "upload",
        "transfers": ["basic", "multipart"],
        "hash_algo": "sha256",
        "ref": {"name": "main"},
        "objects": listed,
    });
    let batch: Batch = requests.post_lfs(&url, &body).await?;
    let mut objects: BTreeMap<String, Object> = batch
        .objects
        .into_iter()
        .map(|object| (object.oid.clone(), object))
        .collect();
    let mut sent_bytes = 0;
    for file in files {
        let Some(object) = objects.remove(file.oid) else {
            // Two files with the same content: sent once. Anything else is noticed when the hub refuses the commit.
            sent(file.size);
            continue;
        };
        if let Some(error) = object.error {
            let message: String = error.message.chars().filter(|c| !c.is_control()).take(300).collect();
            return Err(PushError::Refused(format!("{url}: {message}")));
        }
        match object.actions {
            Some(Actions {
                upload: Some(upload),
                verify,
            }) => {
                send_file(requests, file, &upload, sent).await?;
                sent_bytes += file.size;
                if let Some(verify) = verify {
                    allowed(requests, &verify.href)?;
                    verify_file(requests, file, &verify).await?;
                }
            }
            _ => sent(file.size),
        }
    }
    Ok(sent_bytes)
}

/// Asks the hub to check what was stored. The token goes to the hub's own address only.
async fn verify_file(requests: &Requests, file: &LargeFile<'_>, verify: &Action) -> Result<(), PushError> {
    let body = json!({"oid": file.oid, "size": file.size});
    if is_hub(requests, &verify.href) {
        let url = verify.href.clone();
        let _answer: serde_json::Value = requests.post_lfs(&url, &body).await.or_else(|error| match error {
            // The body may be empty.
            PushError::Unavailable(_) => Ok(serde_json::Value::Null),
            other => Err(other),
        })?;
    }
    Ok(())
}

async fn send_file(
    requests: &Requests,
    file: &LargeFile<'_>,
    upload: &Action,
    sent: &(dyn Fn(u64) + Sync),
) -> Result<(), PushError> {
    allowed(requests, &upload.href)?;
    let Some(part_bytes) = upload.header.get("chunk_size") else {
        let answer = put(requests, file, &upload.href, 0..file.size, &upload.header, sent).await?;
        return requests.check(answer).await.map(drop);
    };
    let invalid = || PushError::Unavailable(format!("{} named no usable parts of a large file", requests.endpoint));
    let part_bytes: u64 = match part_bytes {
        serde_json::Value::String(text) => text.parse().map_err(|_| invalid())?,
        number => number.as_u64().ok_or_else(invalid)?,
    };
    let numbered: BTreeMap<u64, &str> = (upload.header.iter())
        .filter_map(|(number, address)| Some((number.parse().ok()?, address.as_str()?)))
        .collect();
    let parts = file
        .size
        .checked_div(part_bytes)
        .map(|_| file.size.div_ceil(part_bytes))
        .ok_or_else(invalid)?;
    if parts == 0 || parts > MAX_PARTS || !numbered.keys().copied().eq(1..=parts) {
        return Err(invalid());
    }
    let mut done = Vec::new();
    for (number, address) in numbered {
        allowed(requests, address)?;
        let from = (number - 1) * part_bytes;
        let range = from..(from + part_bytes).min(file.size);
        let answer = put(requests, file, address, range, &BTreeMap::new(), sent).await?;
        let tag = answer
            .headers()
            .get(ETAG)
            .and_then(|tag| tag.to_str().ok())
            .map(str::to_owned);
        requests.check(answer).await?;
        done.push(json!({"partNumber": number, "etag": tag.ok_or_else(invalid)?}));
    }
    let body = json!({"oid": file.oid, "parts": done});
    if is_hub(requests, &upload.href) {
        let _completed: Nothing = requests.post_lfs(&upload.href, &body).await?;
        return Ok(());
    }
    // Without the token: a mirror of the hub names the hub's own address.
    let request = || {
        let request = requests.client.post(&upload.href).timeout(time_limit(0));
        request.header(CONTENT_TYPE, LFS_JSON).body(body.to_string())
    };
    let answer = requests.send("the storage of large files", &request).await?;
    requests.check(answer).await.map(drop)
}

/// Sends a range of a file, several times if the storage is busy or the connection is lost.
async fn put(
    requests: &Requests,
    file: &LargeFile<'_>,
    address: &str,
    range: std::ops::Range<u64>,
    headers: &BTreeMap<String, serde_json::Value>,
    sent: &(dyn Fn(u64) + Sync),
) -> Result<Response, PushError> {
    let length = range.end - range.start;
    for attempt in 1.. {
        let mut request = requests
            .client
            .request(Method::PUT, address)
            .header(CONTENT_LENGTH, length);
        for (name, value) in headers {
            let name = HeaderName::try_from(name.as_str()).ok();
            let value = value.as_str().and_then(|value| HeaderValue::try_from(value).ok());
            if let (Some(name), Some(value)) = (name, value) {
                request = request.header(name, value);
            }
        }
        request = request.timeout(time_limit(length));
        let answer = request.body(content(file.source, range.clone())?).send().await;
        match wait(&answer, attempt) {
            Some(wait) => tokio::time::sleep(wait).await,
            None => {
                sent(length);
                return answer.map_err(|error| unavailable("the storage of large files", &error));
            }
        }
    }
    Err(PushError::Unavailable(
        "the storage of large files gives no response".to_owned(),
    ))
}

/// A range of a file as the body of a request, read piece by piece.
fn content(source: &Source, range: std::ops::Range<u64>) -> Result<Body, PushError> {
    let path = match source {
        Source::Text(text) => {
            let bound = |at| usize::try_from(at).unwrap_or(usize::MAX);
            let part = text
                .as_bytes()
                .get(bound(range.start)..bound(range.end))
                .unwrap_or_default();
            return Ok(Body::from(part.to_vec()));
        }
        Source::File(path) => path,
    };
    let (mut file, _) = regular::open(path).map_err(|error| file_error(path, error))?;
    file.seek(SeekFrom::Start(range.start))
        .map_err(|error| file_error(path, error))?;
    let pieces = stream::try_unfold((file, range.end - range.start), |(file, left)| async move {
        match left {
            0 => Ok(None),
            _ => read_piece(file, left).await.map(Some),
        }
    });
    Ok(Body::wrap_stream(pieces))
}

/// Reads the next piece, off the threads of the runtime.
async fn read_piece(mut file: File, left: u64) -> std::io::Result<(Vec<u8>, (File, u64))> {
    let length = left.min(PIECE_BYTES);
    let read = tokio::task::spawn_blocking(move || {
        let mut piece = vec![0; usize::try_from(length).unwrap_or_default()];
        file.read_exact(&mut piece)?;
        Ok::<_, std::io::Error>((piece, file))
    });
    let (piece, file) = read.await.map_err(std::io::Error::other)??;
    Ok((piece, (file, left - length)))
}

/// Refuses addresses without TLS, except on the hub's own host.
fn allowed(requests: &Requests, address: &str) -> Result<(), PushError> {
    let parsed = Url::parse(address).ok();
    let is_encrypted = parsed.as_ref().is_some_and(|url| url.scheme() == "https");
    if is_encrypted || is_hub(requests, address) {
        return Ok(());
    }
    let named = parsed.map_or_else(|| "no address".to_owned(), |url| shown(&url));
    Err(PushError::Refused(format!(
        "{} names {named} as the storage of a large file, without TLS: only addresses of the hub itself may be without it. Ask who runs \
         the hub to give the storage https, or the hub's own address",
        requests.endpoint
    )))
}

/// Whether an address is the hub's own.
fn is_hub(requests: &Requests, address: &str) -> bool {
    let origin = |text: &str| Url::parse(text).ok().map(|url| url.origin());
    origin(address).is_some_and(|address| Some(address) == origin(&requests.endpoint))
}
