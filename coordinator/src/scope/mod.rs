//! Which blobs a caller may see and name.
//!
//! A worker's token opens what the live attempts of its workers need, and what it sent itself; a submitter's what they
//! sent themselves. Everything else looks as if it were not there, whether it is or not, so that nobody finds out what
//! others have by asking. Operators and administrators see everything.

mod allowance;
mod lists;
mod reference;
mod uploads;

pub(crate) use reference::BlobReference;
pub(crate) use uploads::{ActiveCall, Uploads};

use crate::access::{Access, Identity};
use crate::runner::{SchedulerHandle, SchedulerStopped};
use crate::store::{Store, StoreError};
use aitk_common::hash::ContentHash;
use aitk_common::id::{AttemptId, JobId, UserName};
use aitk_common::security::role::Role;
use aitk_common::storage::{BlobStore, StorageError};
use aitk_scheduler::{State, gib};
use allowance::Allowance;
use lists::{Files, ListCache};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use uploads::{PendingUpload, SentBlobs};

/// InputCache of jobs that are remembered, all together: 32 MB of hashes.
const MAX_CACHED_INPUTS: usize = 1_000_000;

/// Why it is not known what somebody may see.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ScopeError {
    #[error(transparent)]
    Stopped(#[from] SchedulerStopped),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// Why an upload is more than its sender may store.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UploadLimitExceeded {
    #[error("{bytes} bytes are more than this worker may still store before something of it is accepted")]
    Worker { bytes: u64 },
    #[error(
        "what user {who} has sent and is sending has {} in the object storage, this blob has {}, and a user may have {} there \
         (`--user-stored-gib` of the coordinator): remove jobs whose data is not needed any more (`aitk rm`), or wait until what \
         no job names is removed, an hour or two after it was sent",
        gib(*in_use), gib(*bytes), gib(*most)
    )]
    User {
        who: UserName,
        in_use: u64,
        bytes: u64,
        most: u64,
    },
}

/// Room that is set aside for an upload.
#[derive(Debug)]
pub(crate) enum UploadReservation {
    /// The sender has no bound.
    Unlimited,
    /// Of a worker.
    Worker(allowance::Reservation),
    /// Of a user.
    User(#[allow(dead_code, reason = "held until the upload ends")] PendingUpload),
}

impl UploadReservation {
    /// The bytes arrived, and are noted.
    pub(crate) fn commit(self) {
        if let Self::Worker(reservation) = self {
            reservation.commit();
        }
    }
}

/// What a caller may see at this moment.
#[derive(Debug)]
pub(crate) enum VisibleBlobs {
    /// Everything.
    All,
    /// These.
    Listed(Box<CallerBlobs>),
}

/// A part of the storage.
#[derive(Debug)]
pub(crate) struct CallerBlobs {
    sent: SentBlobs,
    lists: Vec<(ContentHash, Files)>,
    /// A worker's live attempts.
    attempts: BTreeSet<AttemptId>,
}

impl VisibleBlobs {
    /// Whether this blob is in reach.
    pub(crate) fn contains(&self, hash: &ContentHash) -> bool {
        match self {
            Self::All => true,
            Self::Listed(blobs) => {
                let listed = |(list, files): &(ContentHash, Files)| list == hash || files.binary_search(hash).is_ok();
                blobs.sent.contains(hash) || blobs.lists.iter().any(listed)
            }
        }
    }

    /// Whether a worker has anything to send for; true for everybody else.
    pub(crate) fn can_upload(&self, who: &Identity) -> bool {
        match self {
            Self::Listed(blobs) if who.role == Role::Worker => !blobs.attempts.is_empty(),
            _ => true,
        }
    }
}

/// The inputs of jobs that ran lately.
#[derive(Debug, Default)]
struct InputCache {
    by_job: HashMap<JobId, Arc<[ContentHash]>>,
    count: usize,
}

/// See the module. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Scope {
    scheduler: SchedulerHandle,
    access: Access,
    store: Arc<dyn Store>,
    blobs: Arc<dyn BlobStore>,
    uploads: Arc<Uploads>,
    /// Workers may talk to the bucket themselves, so that nobody knows what they sent.
    direct_storage: bool,
    lists: Arc<ListCache>,
    inputs: Arc<Mutex<InputCache>>,
    allowance: Allowance,
    /// Bytes that a user may have in the storage.
    max_stored: Option<u64>,
}

impl Scope {
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
            allowance: Allowance::default(),
            max_stored,
        }
    }

    /// What this caller may see.
    pub(crate) async fn visible_blobs(&self, who: &Identity) -> Result<VisibleBlobs, ScopeError> {
        if who.role.changes_all() {
            return Ok(VisibleBlobs::All);
        }
        let running = if who.role == Role::Worker {
            let workers = self.access.workers_of(&who.name).await;
            let look = move |state: &State, _| state.running_on(&workers);
            self.scheduler.query(look).await?
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

    /// What this caller may make a job point to.
    pub(crate) async fn referable_blobs(&self, who: &Identity) -> Result<VisibleBlobs, ScopeError> {
        if who.role == Role::Worker && self.direct_storage {
            return Ok(VisibleBlobs::All);
        }
        self.visible_blobs(who).await
    }

    /// Whether a worker with this token is kept away from the bucket itself.
    pub(crate) fn hides_storage_url_from(&self, who: &Identity) -> bool {
        who.role == Role::Worker && !self.direct_storage
    }

    /// Sets aside what somebody is about to send.
    ///
    /// # Errors
    /// [`UploadLimitExceeded`], when a worker sends more than is sensible, or a user has too much already.
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
        let Some(most) = self.max_stored else {
            return Ok(UploadReservation::Unlimited);
        };
        let pending = self.uploads.reserve(&owner_key(who), &blobs.sent, bytes, most);
        pending
            .map(UploadReservation::User)
            .map_err(|in_use| UploadLimitExceeded::User {
                who: who.name.clone(),
                in_use,
                bytes,
                most,
            })
    }

    /// Somebody asks for blobs or sends one: what they sent stays while they do, and a while longer.
    pub(crate) fn begin_call(&self, who: &Identity) -> ActiveCall {
        self.uploads.begin_call(&owner_key(who))
    }

    /// Somebody sent this blob, all of it. Durable when this returns.
    pub(crate) async fn record_upload(&self, who: &Identity, hash: ContentHash, bytes: u64) -> Result<(), ScopeError> {
        if who.role.changes_all() {
            return Ok(());
        }
        Ok(self.uploads.record(&owner_key(who), hash, bytes).await?)
    }

    /// Something that a worker sent is part of its job now.
    pub(crate) fn reset_allowance(&self, who: &Identity) {
        self.allowance.reset(who.name.as_str());
    }

    async fn add(&self, lists: &mut Vec<(ContentHash, Files)>, named: BlobReference) -> Result<(), ScopeError> {
        if lists.iter().any(|(hash, _)| *hash == named.hash()) {
            return Ok(());
        }
        let files = match self.lists.files(self.blobs.as_ref(), named).await {
            Ok(files) => files,
            Err(error @ (StorageError::Unavailable { .. } | StorageError::Denied { .. })) => return Err(error.into()),
            // It leads nowhere; whoever asks for the list itself is told why.
            Err(_) => Files::from([]),
        };
        lists.push((named.hash(), files));
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
        // A job without inputs takes room, too.
        known.count += inputs.len() + 1;
        known.by_job.insert(job.clone(), inputs.clone());
        Ok(inputs)
    }
}

/// Under which name somebody's uploads are kept: a machine that is called as a user is, is not that user.
fn owner_key(who: &Identity) -> String {
    let kind = if who.role == Role::Worker { "worker" } else { "user" };
    format!("{kind}/{}", who.name)
}
