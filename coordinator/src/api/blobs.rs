//! Upload and download of blobs for clients without access to the object storage. An upload goes through a temporary
//! file, so that it is verified before it is stored and stored before it is acknowledged. One that breaks can be continued
//! (`super::unfinished_uploads`).

use super::auth::caller;
use super::shared::{Shared, run_to_end};
use super::status::{
    local_disk_status, storage_full_status, storage_refused_status, storage_status, store_status, token_ended_status,
};
use super::unfinished_uploads::{PartialUpload, ReceivingUpload, UploadKey};
use crate::access::Identity;
use crate::blob_access::{ActiveCall, VisibleBlobs};
use crate::disk_reserve::SpaceReservation;
use crate::transfer_limit::TransferPermit;
use aitk_common::hash::ContentHash;
use aitk_common::security::role::Role;
use aitk_common::storage::{BlobStore, StorageError};
use aitk_proto::BLOB_CHUNK_BYTES;
use aitk_proto::v1;
use aitk_proto::v1::blobs_server::Blobs;
use aitk_scheduler::State;
use sha2::{Digest, Sha256};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status, Streaming};

/// Maximum number of hashes in one request.
const MAX_HASHES: usize = 1000;
/// A transfer without progress for this time is cancelled.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Minimum average rate of an upload after its first minute, in bytes per second: a tenth of a slow line.
const MIN_UPLOAD_RATE: u64 = 8 << 10;
// At the lowest rate a chunk arrives before the transfer counts as idle.
const _: () = assert!(BLOB_CHUNK_BYTES as u64 <= MIN_UPLOAD_RATE * IDLE_TIMEOUT.as_secs());
/// Bytes read from the storage at once.
const READ_BYTES: u64 = 4 << 20;
/// Chunks buffered for the socket: at most 4 MiB per transfer.
const WIRE_BUFFER: usize = 16;

#[derive(Debug)]
pub(super) struct BlobsApi(pub(super) Shared);

fn parse(text: &str) -> Result<ContentHash, Status> {
    ContentHash::parse(text).map_err(|error| Status::invalid_argument(format!("sha256: {error}")))
}

/// What an upload holds until it is stored.
struct StoringGuards {
    _active_call: ActiveCall,
    _permit: TransferPermit,
    _space: SpaceReservation,
}

impl BlobsApi {
    /// Checks that the caller may download a blob: operators and administrators any, workers those that their running
    /// jobs need, users the files of jobs that they can see. An invisible blob is reported as not found.
    async fn check_download(&self, who: &Identity, hash: ContentHash) -> Result<(), Status> {
        if who.role.changes_all() {
            return Ok(());
        }
        let (may, why) = if who.role == Role::Worker {
            let visible = self.0.blob_access.visible_blobs(who).await?;
            (
                visible.can_upload(who) && visible.contains(&hash),
                "nothing that this worker runs needs it",
            )
        } else {
            let sees = self.can_see_file(who, hash).await?;
            (sees, "not a file of a job that this user sees")
        };
        if may {
            return Ok(());
        }
        self.audit_refused(who, "blob.get", hash, why);
        Err(Status::not_found(format!("the object storage has no blob {hash}")))
    }

    fn audit_refused(&self, who: &Identity, action: &str, hash: ContentHash, why: &str) {
        let mut line = who.audit_line(self.0.clock.wall_time(), action, &hash.to_hex());
        (line.done, line.detail) = (false, why.to_owned());
        self.0.access.record_audit(line);
    }

    async fn can_see_file(&self, who: &Identity, hash: ContentHash) -> Result<bool, Status> {
        let jobs = self
            .0
            .store
            .jobs_with_file(&hash)
            .await
            .map_err(|error| store_status(&error))?;
        let name = who.clone();
        let sees = move |state: &State, _| {
            jobs.iter()
                .filter_map(|id| state.job(id))
                .any(|job| name.can_see(&job.requirements.owner))
        };
        Ok(self.0.scheduler.query(sees).await?)
    }

    /// Returns which of these blobs exist; blobs that the caller cannot see count as missing. Existing blobs are
    /// protected from deletion for a while, because the caller relies on them.
    async fn find_present(&self, visible: &VisibleBlobs, hashes: &[ContentHash]) -> Result<Vec<bool>, Status> {
        let candidates: Vec<_> = hashes.iter().copied().filter(|hash| visible.contains(hash)).collect();
        let _pin_guard = self.0.pins.pin(candidates.clone()).await;
        let present = self
            .0
            .blobs
            .has(&candidates)
            .await
            .map_err(|error| storage_status(&error))?;
        let there: HashSet<_> = candidates
            .into_iter()
            .zip(present)
            .filter_map(|(hash, there)| there.then_some(hash))
            .collect();
        // The caller may refer to it much later, after uploading the rest of a large data set.
        let long = self.0.collector.retention.grace;
        self.0.pins.announce(there.iter().copied(), long);
        Ok(hashes.iter().map(|hash| there.contains(hash)).collect())
    }

    /// Checks that the caller may upload this blob and returns what it can see. A worker without a running attempt may
    /// not upload.
    async fn check_upload(&self, who: &Identity, hash: ContentHash) -> Result<VisibleBlobs, Status> {
        let visible = self.0.blob_access.visible_blobs(who).await?;
        if visible.can_upload(who) {
            return Ok(visible);
        }
        self.audit_refused(who, "blob.put", hash, "this worker runs nothing");
        Err(Status::permission_denied(
            "this worker has no attempt that runs, so it may not upload",
        ))
    }

    /// Begins an upload, or continues one that broke.
    async fn begin_upload(
        &self,
        who: &Identity,
        visible: &VisibleBlobs,
        header: &v1::BlobHeader,
        hash: ContentHash,
    ) -> Result<ReceivingUpload, Status> {
        let uploads = &self.0.unfinished_uploads;
        let key = UploadKey::new(who, &header.upload, hash)?;
        if header.offset > 0 {
            let kept = match &key {
                Some(key) => uploads.take(key, header.bytes, header.offset).await?,
                None => None,
            };
            let kept = kept.ok_or_else(|| {
                Status::out_of_range(format!(
                    "offset: the coordinator does not have the first {} bytes of this upload; send the blob from its beginning",
                    header.offset
                ))
            })?;
            return Ok(uploads.begin(key, kept));
        }
        if let Some(key) = &key {
            uploads.discard(key);
        }
        let reserve = || self.0.blob_access.reserve_upload(who, visible, header.bytes);
        let reserved = reserve().or_else(|too_much| match uploads.discard_of_sender(who) {
            true => reserve(),
            false => Err(too_much),
        });
        let reservation = reserved.map_err(|too_much| {
            self.audit_refused(who, "blob.put", hash, &too_much.to_string());
            Status::resource_exhausted(too_much.to_string())
        })?;
        let name = format!("{}.part", uuid::Uuid::new_v4().simple());
        let path = self.0.upload_folder.join(name);
        Ok(uploads.begin(key, PartialUpload::new(path, header.bytes, reservation)))
    }

    /// Reserves disk space for the bytes that an upload still has to send.
    fn reserve_space(&self, bytes: u64, missing: u64) -> Result<SpaceReservation, Status> {
        let reserved = self.0.space.reserve_upload(missing);
        // A sender may announce any size, so kept uploads are removed only where that is enough.
        let reserved = reserved.or_else(|space| {
            let lacking = missing.saturating_add(space.reserve).saturating_sub(space.free);
            match self.0.unfinished_uploads.discard_to_free(lacking) {
                true => self.0.space.reserve_upload(missing),
                false => Err(space),
            }
        });
        reserved.map_err(|space| {
            storage_full_status(format!(
                "the coordinator's disk is full: {} bytes are free, {} of them are reserved for the database, and this blob has {bytes}",
                space.free, space.reserve
            ))
        })
    }

    /// Receives an upload and stores it.
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
        let active_call = self.0.blob_access.begin_call(who);
        let visible = self.check_upload(who, hash).await?;
        if self.find_present(&visible, &[hash]).await?.first() == Some(&true) {
            return Ok(Response::new(v1::PutBlobReply { existed: true }));
        }
        // Before the data is sent.
        if let Some(refusal) = self.0.storage_monitor.refusal() {
            return Err(storage_refused_status(refusal.to_string()));
        }
        let mut upload = self.begin_upload(who, &visible, &header, hash).await?;
        // Acquired before the file is created, so that the disk holds a bounded number of files.
        let permit = tokio::select! {
            permit = self.0.uploads.permit(&who.name) => permit,
            () = upload.taken_over() => return Err(taken_over_status()),
        };
        let permit = permit.map_err(|_| Status::unavailable("the coordinator is shutting down"))?;
        let space = self.reserve_space(header.bytes, header.bytes.saturating_sub(header.offset))?;
        self.receive_data(who, header.bytes, &mut parts, &mut upload).await?;
        let guards = StoringGuards {
            _active_call: active_call,
            _permit: permit,
            _space: space,
        };
        let (api, who) = (Self(self.0.clone()), who.clone());
        // Also when the sender cancels the call: the blob may be stored all the same, and would not be counted.
        run_to_end(async move { api.store(&who, hash, header.bytes, upload, guards).await }).await
    }

    /// Stores an upload that is complete, and records it.
    async fn store(
        &self,
        who: &Identity,
        hash: ContentHash,
        bytes: u64,
        mut upload: ReceivingUpload,
        _guards: StoringGuards,
    ) -> Result<Response<v1::PutBlobReply>, Status> {
        // The attempt may have ended during the upload.
        if let Err(refused) = self.check_upload(who, hash).await {
            if refused.code() == Code::PermissionDenied {
                upload.discard();
            }
            return Err(refused);
        }
        let _pin_guard = self.0.pins.pin(vec![hash]).await;
        // The storage verifies the hash. No other call takes the upload over meanwhile: it would have it stored from the beginning, and of two
        // calls that take it from each other none would end.
        if let Err(error) = self.0.blobs.put_file(hash, upload.path()).await {
            // While the storage does not answer, or refuses this coordinator, the bytes are kept for the next try.
            if !(error.is_transient() || error.is_refusal()) {
                upload.discard();
            }
            return Err(storage_status(&error));
        }
        self.0.blob_access.record_upload(who, hash, bytes).await?;
        upload.commit();
        self.0
            .pins
            .announce([hash], self.0.collector.retention.unreferenced_retention());
        Ok(Response::new(v1::PutBlobReply { existed: false }))
    }

    /// Writes the data of an upload of `bytes` bytes to its file. If the call breaks, or is too slow, the upload is kept.
    async fn receive_data(
        &self,
        who: &Identity,
        bytes: u64,
        parts: &mut Streaming<v1::PutBlobRequest>,
        upload: &mut ReceivingUpload,
    ) -> Result<(), Status> {
        use v1::put_blob_request::Part;
        let (began, mut held_back) = (Instant::now(), Duration::ZERO);
        // No limit for workers: other jobs wait for their checkpoints.
        let is_limited = !who.role.changes_all() && who.role != Role::Worker;
        let first = upload.received();
        let mut file = match upload.open().await {
            Ok(file) => file,
            Err(error) => {
                upload.discard();
                return Err(local_disk_status(
                    "open a file for an upload in",
                    &self.0.upload_folder,
                    error,
                ));
            }
        };
        loop {
            let part = tokio::select! {
                part = next(parts) => part,
                () = upload.taken_over() => return Err(taken_over_status()),
            };
            let data = match part {
                Ok(Some(Part::Data(data))) => data,
                Ok(None) => break,
                Ok(Some(Part::Header(_))) => {
                    upload.discard();
                    return Err(Status::invalid_argument("part: a second header"));
                }
                Err(status) => {
                    if status.code() == Code::InvalidArgument {
                        upload.discard();
                    }
                    return Err(status);
                }
            };
            let length = data.len() as u64;
            if length > bytes.saturating_sub(upload.received()) {
                upload.discard();
                return Err(Status::invalid_argument(format!(
                    "data: more than the announced {bytes} bytes"
                )));
            }
            if is_limited {
                let wait = self.0.upload_rate.delay_after(&who.name, length, Instant::now());
                tokio::select! {
                    () = tokio::time::sleep(wait) => held_back += wait,
                    () = upload.taken_over() => return Err(taken_over_status()),
                }
            }
            if let Err(error) = file.write_all(&data).await {
                upload.discard();
                return Err(local_disk_status("write an upload in", &self.0.upload_folder, error));
            }
            upload.add(length);
            // Time in which we throttled the sender does not count.
            if is_too_slow(upload.received() - first, began.elapsed().saturating_sub(held_back)) {
                return Err(Status::deadline_exceeded(format!(
                    "an upload of less than {MIN_UPLOAD_RATE} bytes a second is too slow and blocks other uploads; send the blob again over a faster connection"
                )));
            }
        }
        if let Err(error) = file.flush().await {
            upload.discard();
            return Err(local_disk_status("write an upload in", &self.0.upload_folder, error));
        }
        let received = upload.received();
        if received != bytes {
            // A call that the sender cancels ends like this too, so what has arrived is kept.
            return Err(Status::invalid_argument(format!(
                "data: {received} bytes received, {bytes} were announced; send the blob again"
            )));
        }
        Ok(())
    }
}

/// Ends a call whose sender continues the upload in another one, because its connection broke.
fn taken_over_status() -> Status {
    Status::aborted("another call continues this upload")
}

/// Opens the file of an upload, to write from this position; at its beginning, creates it.
async fn next(parts: &mut Streaming<v1::PutBlobRequest>) -> Result<Option<v1::put_blob_request::Part>, Status> {
    let message = tokio::time::timeout(IDLE_TIMEOUT, parts.message())
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
        let v1::HasRequest { sha256: texts, upload } = request.into_inner();
        if texts.len() > MAX_HASHES {
            return Err(Status::invalid_argument(format!(
                "sha256: {} hashes; at most {MAX_HASHES}",
                texts.len()
            )));
        }
        let hashes = texts.iter().map(|text| parse(text)).collect::<Result<Vec<_>, _>>()?;
        let _active_call = self.0.blob_access.begin_call(&who);
        let visible = self.0.blob_access.visible_blobs(&who).await?;
        let present = self.find_present(&visible, &hashes).await?;
        let received = match hashes.as_slice() {
            [hash] => UploadKey::new(&who, &upload, *hash)?.map(|key| self.0.unfinished_uploads.received(&key)),
            _ => None,
        };
        Ok(Response::new(v1::HasReply {
            present,
            received: received.unwrap_or(0),
        }))
    }

    async fn put(&self, request: Request<Streaming<v1::PutBlobRequest>>) -> Result<Response<v1::PutBlobReply>, Status> {
        let who = caller(&request)?;
        tokio::select! {
            put = self.receive(&who, request.into_inner()) => put,
            () = self.0.access.wait_until_invalid(&who) => Err(token_ended_status()),
        }
    }

    type GetStream = ReceiverStream<Result<v1::GetBlobReply, Status>>;

    async fn get(&self, request: Request<v1::GetBlobRequest>) -> Result<Response<Self::GetStream>, Status> {
        let who = caller(&request)?;
        let v1::GetBlobRequest { sha256, offset } = request.into_inner();
        let hash = parse(&sha256)?;
        self.check_download(&who, hash).await?;
        let permit = self.0.downloads.permit(&who.name).await;
        let permit = permit.map_err(|_| Status::unavailable("the coordinator is shutting down"))?;
        let size = self.0.blobs.size(hash).await.map_err(|error| storage_status(&error))?;
        let bytes = size.ok_or_else(|| storage_status(&StorageError::NotFound { hash }))?;
        if offset > bytes {
            return Err(Status::out_of_range(format!(
                "offset: {offset}, but the blob has {bytes} bytes"
            )));
        }
        let header = v1::BlobHeader {
            sha256: hash.to_hex(),
            bytes,
            offset,
            upload: String::new(),
        };
        let blobs = self.0.blobs.clone();
        let (sender, receiver) = mpsc::channel(WIRE_BUFFER);
        let access = self.0.access.clone();
        tokio::spawn(async move {
            let _permit = permit;
            // A send error ends the transfer; the client notices that itself.
            tokio::select! {
                _ = send_blob(blobs, hash, header, &sender) => {}
                () = access.wait_until_invalid(&who) => {
                    let _ = tokio::time::timeout(IDLE_TIMEOUT, sender.send(Err(token_ended_status()))).await;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

/// Whether an upload is slower than allowed. The first minute does not count.
fn is_too_slow(received: u64, since: Duration) -> bool {
    let counted = since.saturating_sub(IDLE_TIMEOUT).as_secs();
    received < counted.saturating_mul(MIN_UPLOAD_RATE)
}

/// Streams a blob from the storage without a temporary file. The hash is checked at the end, here and by the client.
async fn send_blob(
    blobs: Arc<dyn BlobStore>,
    hash: ContentHash,
    header: v1::BlobHeader,
    sender: &mpsc::Sender<Result<v1::GetBlobReply, Status>>,
) -> Result<(), tokio::time::error::Elapsed> {
    use v1::get_blob_reply::Part;
    let (bytes, first) = (header.bytes, header.offset);
    let send = async |message| -> Result<bool, tokio::time::error::Elapsed> {
        Ok(tokio::time::timeout(IDLE_TIMEOUT, sender.send(message)).await?.is_ok())
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
                send(Err(storage_status(&error))).await?;
                return Ok(());
            }
        };
        at = end;
        hasher.update(&part);
        // A client that resumes a download has its beginning and checks the whole blob.
        let is_checked = first == 0 && at == bytes;
        if is_checked && ContentHash::from_digest(hasher.clone().finalize().into()) != hash {
            let damaged = format!("the blob {hash} in the object storage is damaged and cannot be used");
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
