//! Decides which blobs a caller can see and refer to.
//!
//! A worker sees the blobs that the live attempts of its owner's workers need, and its own uploads; a submitter sees
//! their own uploads. All other blobs are reported as missing, whether they exist or not, so that callers cannot find
//! out what others have. Operators and administrators see everything.

mod lists;
mod reference;
mod upload_limit;
mod uploads;

pub(crate) use reference::BlobReference;
pub(crate) use uploads::{ActiveCall, Uploads};

use crate::access::{Access, Identity};
use crate::scheduler_task::{SchedulerHandle, SchedulerStopped};
use crate::store::{Store, StoreError};
use aitk_common::hash::ContentHash;
use aitk_common::id::{AttemptId, JobId, UserName};
use aitk_common::security::role::Role;
use aitk_common::storage::{BlobStore, StorageError};
use aitk_scheduler::{State, gib};
use lists::{Files, ListCache};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use upload_limit::UnreferencedUploadLimiter;
use uploads::{PendingUpload, SentBlobs};

/// Maximum number of cached input hashes: 32 MB.
const MAX_CACHED_INPUTS: usize = 1_000_000;

/// Why the visible blobs could not be determined.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BlobAccessError {
    #[error(transparent)]
    Stopped(#[from] SchedulerStopped),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// Why an upload exceeds its sender's limit.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UploadLimitExceeded {
    #[error("{bytes} bytes exceed what this worker may upload before a job refers to one of its uploads")]
    Worker { bytes: u64 },
    #[error(
        "what user {who} has sent and is sending has {} in the object storage, this blob has {}, and a user may have {} there \
         (`--user-stored-gib` of the coordinator): remove jobs whose data is not needed any more (`aitk rm`), or wait until what \
         no job names is removed, an hour or two after it was sent",
        gib(*in_use), gib(*bytes), gib(*max)
    )]
    User {
        who: UserName,
        in_use: u64,
        bytes: u64,
        max: u64,
    },
}

/// Bytes reserved for an upload.
#[derive(Debug)]
pub(crate) enum UploadReservation {
    /// The sender has no limit.
    Unlimited,
    /// Reserved from a worker's allowance.
    Worker(upload_limit::Reservation),
    /// Reserved from a user's limit.
    User(#[allow(dead_code, reason = "held until the upload ends")] PendingUpload),
}

impl UploadReservation {
    /// The upload is complete and recorded.
    pub(crate) fn commit(self) {
        if let Self::Worker(reservation) = self {
            reservation.commit();
        }
    }
}

/// The blobs that a caller can see at this moment.
#[derive(Debug)]
pub(crate) enum VisibleBlobs {
    /// All blobs.
    All,
    /// Only these blobs.
    Listed(Box<CallerBlobs>),
}

/// The blobs that one caller can see.
#[derive(Debug)]
pub(crate) struct CallerBlobs {
    sent: SentBlobs,
    lists: Vec<(ContentHash, Files)>,
    /// Live attempts of a worker's owner.
    attempts: BTreeSet<AttemptId>,
}

impl VisibleBlobs {
    /// Whether this blob is visible.
    pub(crate) fn contains(&self, hash: &ContentHash) -> bool {
        match self {
            Self::All => true,
            Self::Listed(blobs) => {
                let listed = |(list, files): &(ContentHash, Files)| list == hash || files.binary_search(hash).is_ok();
                blobs.sent.contains(hash) || blobs.lists.iter().any(listed)
            }
        }
    }

    /// Whether the caller may upload: a worker only while it has a live attempt.
    pub(crate) fn can_upload(&self, who: &Identity) -> bool {
        match self {
            Self::Listed(blobs) if who.role == Role::Worker => !blobs.attempts.is_empty(),
            _ => true,
        }
    }
}

/// Cached inputs of recently run jobs.
#[derive(Debug, Default)]
struct InputCache {
    by_job: HashMap<JobId, Arc<[ContentHash]>>,
    count: usize,
}

/// Decides which blobs a caller can see; see the module. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct BlobAccess {
    scheduler: SchedulerHandle,
    access: Access,
    store: Arc<dyn Store>,
    blobs: Arc<dyn BlobStore>,
    uploads: Arc<Uploads>,
    /// Workers may use the bucket directly, so that their uploads are not known here.
    direct_storage: bool,
    lists: Arc<ListCache>,
    inputs: Arc<Mutex<InputCache>>,
    allowance: UnreferencedUploadLimiter,
    /// Maximum bytes per user in the storage.
    max_stored: Option<u64>,
}

impl BlobAccess {
    pub(crate) fn new(
        scheduler: SchedulerHandle,
        access: Access,
        store: Arc<dyn Store>,
        blobs: Arc<dyn BlobStore>,
        uploads: Arc<Uploads>,
        direct_storage: bool,
        max_stored: Option<u64>,
    ) -> Self {
        Self {
            scheduler,
            access,
            store,
            blobs,
            uploads,
            direct_storage,
            lists: Arc::default(),
            inputs: Arc::default(),
            allowance: UnreferencedUploadLimiter::default(),
            max_stored,
        }
    }

    /// Returns the blobs that this caller can see.
    pub(crate) async fn visible_blobs(&self, who: &Identity) -> Result<VisibleBlobs, BlobAccessError> {
        if who.role.changes_all() {
            return Ok(VisibleBlobs::All);
        }
        let running = if who.role == Role::Worker {
            let workers = self.access.workers_of(&who.name).await;
            let query = move |state: &State, _| state.running_on(&workers);
            self.scheduler.query(query).await?
        } else {
            Vec::new()
        };
        let mut lists = Vec::new();
        for work in &running {
            for snapshot in self.inputs_of(&work.job).await?.iter() {
                self.add(&mut lists, BlobReference::Snapshot(*snapshot)).await?;
            }
            if let Some(manifest) = work.checkpoint {
                self.add(&mut lists, BlobReference::Checkpoint(manifest)).await?;
            }
        }
        Ok(VisibleBlobs::Listed(Box::new(CallerBlobs {
            sent: self.uploads.sent_by(&owner_key(who)).await?,
            lists,
            attempts: running.into_iter().map(|work| work.attempt).collect(),
        })))
    }

    /// Returns the blobs to which this caller may make a job refer.
    pub(crate) async fn referable_blobs(&self, who: &Identity) -> Result<VisibleBlobs, BlobAccessError> {
        if who.role == Role::Worker && self.direct_storage {
            return Ok(VisibleBlobs::All);
        }
        self.visible_blobs(who).await
    }

    /// Whether this caller is not told the storage URL.
    pub(crate) fn hides_storage_url_from(&self, who: &Identity) -> bool {
        who.role == Role::Worker && !self.direct_storage
    }

    /// Reserves bytes for an upload.
    ///
    /// # Errors
    /// [`UploadLimitExceeded`], when a worker uploads too much before a job refers to it, or a user's limit is
    /// reached.
    pub(crate) fn reserve_upload(
        &self,
        who: &Identity,
        visible: &VisibleBlobs,
        bytes: u64,
    ) -> Result<UploadReservation, UploadLimitExceeded> {
        let VisibleBlobs::Listed(blobs) = visible else {
            return Ok(UploadReservation::Unlimited);
        };
        if who.role == Role::Worker {
            let reservation = self.allowance.reserve(who.name.as_str(), blobs.attempts.clone(), bytes);
            return reservation
                .map(UploadReservation::Worker)
                .ok_or(UploadLimitExceeded::Worker { bytes });
        }
        let Some(max) = self.max_stored else {
            return Ok(UploadReservation::Unlimited);
        };
        let pending = self.uploads.reserve(&owner_key(who), &blobs.sent, bytes, max);
        pending
            .map(UploadReservation::User)
            .map_err(|in_use| UploadLimitExceeded::User {
                who: who.name.clone(),
                in_use,
                bytes,
                max,
            })
    }

    /// Records that the caller checks or uploads blobs: its earlier uploads are kept during the returned call, and a
    /// while longer.
    pub(crate) fn begin_call(&self, who: &Identity) -> ActiveCall {
        self.uploads.begin_call(&owner_key(who))
    }

    /// Records that the caller uploaded this blob. Durable when this returns.
    pub(crate) async fn record_upload(
        &self,
        who: &Identity,
        hash: ContentHash,
        bytes: u64,
    ) -> Result<(), BlobAccessError> {
        if who.role.changes_all() {
            return Ok(());
        }
        Ok(self.uploads.record(&owner_key(who), hash, bytes).await?)
    }

    /// Restarts the allowance of a worker, because a job refers to its upload now.
    pub(crate) fn reset_allowance(&self, who: &Identity) {
        self.allowance.reset(who.name.as_str());
    }

    async fn add(
        &self,
        lists: &mut Vec<(ContentHash, Files)>,
        reference: BlobReference,
    ) -> Result<(), BlobAccessError> {
        if lists.iter().any(|(hash, _)| *hash == reference.hash()) {
            return Ok(());
        }
        let files = match self.lists.files(self.blobs.as_ref(), reference).await {
            Ok(files) => files,
            Err(error) if error.is_transient() || error.is_refusal() => return Err(error.into()),
            // An unreadable list makes nothing visible; a request for the list itself reports the error.
            Err(_) => Files::from([]),
        };
        lists.push((reference.hash(), files));
        Ok(())
    }

    async fn inputs_of(&self, job: &JobId) -> Result<Arc<[ContentHash]>, StoreError> {
        let known = || self.inputs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(inputs) = known().by_job.get(job) {
            return Ok(inputs.clone());
        }
        let payload = self.store.payload(job).await?.unwrap_or_default();
        let distinct: BTreeSet<ContentHash> = payload.inputs.values().copied().collect();
        let inputs: Arc<[ContentHash]> = distinct.into_iter().collect();
        let mut known = known();
        if known.count + inputs.len() >= MAX_CACHED_INPUTS {
            *known = InputCache::default();
        }
        // A job without inputs takes space too.
        known.count += inputs.len() + 1;
        known.by_job.insert(job.clone(), inputs.clone());
        Ok(inputs)
    }
}

/// Returns the key of a caller's uploads. It includes the kind, so that a worker and a user with the same name are
/// distinct.
pub(crate) fn owner_key(who: &Identity) -> String {
    let kind = if who.role == Role::Worker { "worker" } else { "user" };
    format!("{kind}/{}", who.name)
}
