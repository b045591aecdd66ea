//! The object storage, for whoever cannot reach it: blobs pass through a file of ours, so that they are checked before
//! they are stored, and stored before they are acknowledged.

use super::auth::caller;
use super::shared::Shared;
use super::status::{storage_failed, storage_full, store_failed, token_ended};
use crate::access::Identity;
use crate::scope::VisibleBlobs;
use crate::transfers::TransferPermit;
use aitk_common::hash::ContentHash;
use aitk_common::security::role::Role;
use aitk_common::storage::{BlobStore, StorageError};
use aitk_proto::BLOB_CHUNK_BYTES;
use aitk_proto::v1;
use aitk_proto::v1::blobs_server::Blobs;
use aitk_scheduler::State;
use sha2::{Digest, Sha256};
use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

/// Hashes in one question.
const MOST_HASHES: usize = 1000;
/// A peer that sends or takes nothing for so long has gone.
const SILENCE: Duration = Duration::from_secs(60);
/// Bytes a second that an upload has to have on average after its first minute: a tenth of a slow line.
const SLOWEST: u64 = 8 << 10;
/// Bytes that are read from the storage at once.
const READ_BYTES: u64 = 4 << 20;
/// Pieces between us and the socket: 4 MiB at most per transfer.
const WIRE_BUFFER: usize = 4;

#[derive(Debug)]
pub(super) struct BlobsApi(pub(super) Shared);

/// A file of a transfer; gone when the transfer is.
struct Transit {
    path: PathBuf,
    // Waiting transfers wait for this, so that the disk holds a bounded number of them.
    _permit: TransferPermit,
}

impl Drop for Transit {
    fn drop(&mut self) {
        // It may never have been made. What is left by a crash is swept at the next start.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn parse(text: &str) -> Result<ContentHash, Status> {
    ContentHash::parse(text).map_err(|error| Status::invalid_argument(format!("sha256: {error}")))
}

fn local(error: &std::io::Error) -> Status {
    if error.kind() == std::io::ErrorKind::StorageFull {
        return storage_full("the coordinator's disk is full".into());
    }
    Status::internal(format!("the coordinator's disk failed: {error}"))
}

impl BlobsApi {
    async fn transit(&self, who: &Identity) -> Result<Transit, Status> {
        let permit = self.0.uploads.permit(&who.name).await;
        let permit = permit.map_err(|_| Status::unavailable("the coordinator is shutting down"))?;
        let path = self.0.transit.join(format!("{}.part", uuid::Uuid::new_v4().simple()));
        Ok(Transit { path, _permit: permit })
    }

    /// Operators and administrators fetch anything, workers what they need for what they run, others only files of jobs
    /// that they see. What they may not see looks as if it were not there.
    async fn may_fetch(&self, who: &Identity, hash: ContentHash) -> Result<(), Status> {
        if who.role.changes_all() {
            return Ok(());
        }
        let (may, why) = if who.role == Role::Worker {
            let reach = self.0.scope.reach(who).await?;
            (
                reach.is_at_work(who) && reach.holds(&hash),
                "nothing that this worker runs needs it",
            )
        } else {
            let sees = self.sees_file(who, hash).await?;
            (sees, "not a file of a job that this user sees")
        };
        if may {
            return Ok(());
        }
        self.refused(who, "blob.get", hash, why);
        Err(Status::not_found(format!("the object storage has no blob {hash}")))
    }

    fn refused(&self, who: &Identity, action: &str, hash: ContentHash, why: &str) {
        let mut line = who.line(self.0.clock.now(), action, &hash.to_hex());
        (line.done, line.detail) = (false, why.to_owned());
        self.0.access.note(line);
    }

    async fn sees_file(&self, who: &Identity, hash: ContentHash) -> Result<bool, Status> {
        let jobs = self
            .0
            .store
            .jobs_with_file(&hash)
            .await
            .map_err(|error| store_failed(&error))?;
        let name = who.clone();
        let sees = move |state: &State, _| {
            jobs.iter()
                .filter_map(|id| state.job(id))
                .any(|job| name.sees(&job.requirements.owner))
        };
        Ok(self.0.core.query(sees).await?)
    }

    /// Which blobs are there, of those in reach: of others nobody is told. Those that are stay for a while, as whoever
    /// asked relies on it.
    async fn look(&self, reach: &VisibleBlobs, hashes: &[ContentHash]) -> Result<Vec<bool>, Status> {
        let near: Vec<_> = hashes.iter().copied().filter(|hash| reach.holds(hash)).collect();
        let _held = self.0.pins.hold(near.clone()).await;
        let present = self.0.blobs.has(&near).await.map_err(|error| storage_failed(&error))?;
        let there: HashSet<_> = near
            .into_iter()
            .zip(present)
            .filter_map(|(hash, there)| there.then_some(hash))
            .collect();
        // Whoever asks may name it much later, when the rest of a large data set is sent.
        let long = self.0.collector.retention.grace;
        self.0.pins.tell(there.iter().copied(), long);
        Ok(hashes.iter().map(|hash| there.contains(hash)).collect())
    }

    /// What a caller may see who is about to send this blob; a worker that runs nothing has nothing to send.
    async fn may_send(&self, who: &Identity, hash: ContentHash) -> Result<VisibleBlobs, Status> {
        let reach = self.0.scope.reach(who).await?;
        if reach.is_at_work(who) {
            return Ok(reach);
        }
        self.refused(who, "blob.put", hash, "this worker runs nothing");
        Err(Status::permission_denied(
            "this worker has no attempt that runs, so there is nothing for it to store",
        ))
    }

    /// An upload, from its header to the storage.
    async fn receive(
        &self,
        who: &Identity,
        mut parts: Streaming<v1::PutBlobRequest>,
    ) -> Result<Response<v1::PutBlobReply>, Status> {
        use v1::put_blob_request::Part;
        let Some(Part::Header(header)) = next(&mut parts).await? else {
            return Err(Status::invalid_argument("part: the first one must be the header"));
        };
        let hash = parse(&header.sha256)?;
        let _calling = self.0.scope.calling(who);
        let reach = self.may_send(who, hash).await?;
        if self.look(&reach, &[hash]).await?.first() == Some(&true) {
            return Ok(Response::new(v1::PutBlobReply { existed: true }));
        }
        let spending = self.0.scope.spend(who, &reach, header.bytes).map_err(|too_much| {
            self.refused(who, "blob.put", hash, &too_much.to_string());
            Status::resource_exhausted(too_much.to_string())
        })?;
        let transit = self.transit(who).await?;
        let room = self.0.space.promise(header.bytes);
        let _room = room.map_err(|room| {
            storage_full(format!(
                "the coordinator's disk is full: {} bytes are free, {} of them are kept for the database, and this blob has {}",
                room.free, room.reserve, header.bytes
            ))
        })?;
        let (began, mut held_back) = (Instant::now(), Duration::ZERO);
        // Others wait for a worker's checkpoints.
        let is_limited = !who.role.changes_all() && who.role != Role::Worker;
        let mut file = tokio::fs::File::create(&transit.path)
            .await
            .map_err(|error| local(&error))?;
        let mut received = 0_u64;
        while let Some(part) = next(&mut parts).await? {
            let Part::Data(data) = part else {
                return Err(Status::invalid_argument("part: a second header"));
            };
            received = received.saturating_add(data.len() as u64);
            if received > header.bytes {
                return Err(Status::invalid_argument(format!(
                    "data: more than the announced {} bytes",
                    header.bytes
                )));
            }
            if is_limited {
                let wait = self.0.upload_rate.take(&who.name, data.len() as u64, Instant::now());
                tokio::time::sleep(wait).await;
                held_back += wait;
            }
            // What we hold back ourselves is not the sender's doing.
            if is_too_slow(received, began.elapsed().saturating_sub(held_back)) {
                return Err(Status::deadline_exceeded(format!(
                    "an upload of less than {SLOWEST} bytes a second keeps others waiting; send the blob again over a better line"
                )));
            }
            file.write_all(&data).await.map_err(|error| local(&error))?;
        }
        file.flush().await.map_err(|error| local(&error))?;
        drop(file);
        if received != header.bytes {
            return Err(Status::invalid_argument(format!(
                "data: {received} bytes came, {} were announced; send the blob again",
                header.bytes
            )));
        }
        // An upload takes time: the attempt that it was for may have ended.
        self.may_send(who, hash).await?;
        let _held = self.0.pins.hold(vec![hash]).await;
        // The store hashes what it reads, and refuses what is not what it should be.
        self.0
            .blobs
            .put_file(hash, &transit.path)
            .await
            .map_err(|error| storage_failed(&error))?;
        self.0.scope.sent(who, hash, received).await?;
        spending.arrived();
        self.0.pins.tell([hash], self.0.collector.retention.short());
        Ok(Response::new(v1::PutBlobReply { existed: false }))
    }
}

async fn next(parts: &mut Streaming<v1::PutBlobRequest>) -> Result<Option<v1::put_blob_request::Part>, Status> {
    let message = tokio::time::timeout(SILENCE, parts.message())
        .await
        .map_err(|_| Status::deadline_exceeded("nothing was sent for a minute; send the blob again"))??;
    match message {
        None => Ok(None),
        Some(message) => message
            .part
            .map(Some)
            .ok_or_else(|| Status::invalid_argument("part: neither header nor data")),
    }
}

#[tonic::async_trait]
impl Blobs for BlobsApi {
    async fn has(&self, request: Request<v1::HasRequest>) -> Result<Response<v1::HasReply>, Status> {
        let who = caller(&request)?;
        let texts = request.into_inner().sha256;
        if texts.len() > MOST_HASHES {
            return Err(Status::invalid_argument(format!(
                "sha256: {} hashes; at most {MOST_HASHES}",
                texts.len()
            )));
        }
        let hashes = texts.iter().map(|text| parse(text)).collect::<Result<Vec<_>, _>>()?;
        let _calling = self.0.scope.calling(&who);
        let reach = self.0.scope.reach(&who).await?;
        let present = self.look(&reach, &hashes).await?;
        Ok(Response::new(v1::HasReply { present }))
    }

    async fn put(&self, request: Request<Streaming<v1::PutBlobRequest>>) -> Result<Response<v1::PutBlobReply>, Status> {
        let who = caller(&request)?;
        tokio::select! {
            put = self.receive(&who, request.into_inner()) => put,
            () = self.0.access.ended(&who) => Err(token_ended()),
        }
    }

    type GetStream = ReceiverStream<Result<v1::GetBlobReply, Status>>;

    async fn get(&self, request: Request<v1::GetBlobRequest>) -> Result<Response<Self::GetStream>, Status> {
        let who = caller(&request)?;
        let v1::GetBlobRequest { sha256, offset } = request.into_inner();
        let hash = parse(&sha256)?;
        self.may_fetch(&who, hash).await?;
        let permit = self.0.downloads.permit(&who.name).await;
        let permit = permit.map_err(|_| Status::unavailable("the coordinator is shutting down"))?;
        let size = self.0.blobs.size(hash).await.map_err(|error| storage_failed(&error))?;
        let bytes = size.ok_or_else(|| storage_failed(&StorageError::NotFound { hash }))?;
        if offset > bytes {
            return Err(Status::out_of_range(format!(
                "offset: {offset}, but the blob has {bytes} bytes"
            )));
        }
        let header = v1::BlobHeader {
            sha256: hash.to_hex(),
            bytes,
            offset,
        };
        let blobs = self.0.blobs.clone();
        let (sender, receiver) = mpsc::channel(WIRE_BUFFER);
        let access = self.0.access.clone();
        tokio::spawn(async move {
            let _permit = permit;
            // A receiver that went away, or an error it cannot be told, ends the transfer; both show on its side.
            tokio::select! {
                _ = send_blob(blobs, hash, header, &sender) => {}
                () = access.ended(&who) => {
                    let _ = tokio::time::timeout(SILENCE, sender.send(Err(token_ended()))).await;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

/// Whether an upload takes longer than it may. In the first minute nobody is.
fn is_too_slow(received: u64, since: Duration) -> bool {
    let counted = since.saturating_sub(SILENCE).as_secs();
    received < counted.saturating_mul(SLOWEST)
}

/// Sends a blob as it is read from the storage: no room on a disk is needed for it. The whole is checked at its end, by us and by
/// whoever gets it.
async fn send_blob(
    blobs: Arc<dyn BlobStore>,
    hash: ContentHash,
    header: v1::BlobHeader,
    sender: &mpsc::Sender<Result<v1::GetBlobReply, Status>>,
) -> Result<(), tokio::time::error::Elapsed> {
    use v1::get_blob_reply::Part;
    let (bytes, first) = (header.bytes, header.offset);
    let send = async |message| -> Result<bool, tokio::time::error::Elapsed> {
        Ok(tokio::time::timeout(SILENCE, sender.send(message)).await?.is_ok())
    };
    let header = v1::GetBlobReply {
        part: Some(Part::Header(header)),
    };
    if !send(Ok(header)).await? {
        return Ok(());
    }
    let (mut at, mut hasher) = (first, Sha256::new());
    while at < bytes {
        let end = bytes.min(at + READ_BYTES);
        let mut part = match blobs.get_range(hash, at..end).await {
            Ok(part) => part,
            Err(error) => {
                send(Err(storage_failed(&error))).await?;
                return Ok(());
            }
        };
        at = end;
        hasher.update(&part);
        // Whoever fetches the rest of a blob has its beginning and checks the whole.
        let is_checked = first == 0 && at == bytes;
        if is_checked && ContentHash::from_digest(hasher.clone().finalize().into()) != hash {
            let damaged = format!("the blob {hash} in the object storage is damaged; nothing of it can be used");
            send(Err(Status::data_loss(damaged))).await?;
            return Ok(());
        }
        while !part.is_empty() {
            let data = part.split_to(part.len().min(BLOB_CHUNK_BYTES)).to_vec();
            let part = Some(Part::Data(data));
            if !send(Ok(v1::GetBlobReply { part })).await? {
                return Ok(());
            }
        }
    }
    Ok(())
}
