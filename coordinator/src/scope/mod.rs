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
pub(crate) use uploads::{Calling, Uploads};

use crate::access::{Access, Identity};
use crate::runner::{Core, Gone};
use crate::store::{Store, StoreError};
use aitk_common::hash::ContentHash;
use aitk_common::id::{AttemptId, JobId, UserName};
use aitk_common::security::role::Role;
use aitk_common::storage::{BlobStore, StorageError};
use aitk_scheduler::{State, gib};
use allowance::Allowance;
use lists::{Files, Lists};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use uploads::{Coming, Sent};

/// Inputs of jobs that are remembered, all together: 32 MB of hashes.
const INPUTS: usize = 1_000_000;

/// Why it is not known what somebody may see.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ScopeError {
    #[error(transparent)]
    Gone(#[from] Gone),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// Why an upload is more than its sender may store.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TooMuch {
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
pub(crate) enum Spending {
    /// The sender has no bound.
    Free,
    /// Of a worker.
    Worker(allowance::Spending),
    /// Of a user.
    User(#[allow(dead_code, reason = "held until the upload ends")] Coming),
}

impl Spending {
    /// The bytes arrived, and are noted.
    pub(crate) fn arrived(self) {
        if let Self::Worker(spending) = self {
            spending.arrived();
        }
    }
}

/// What a caller may see at this moment.
#[derive(Debug)]
pub(crate) enum VisibleBlobs {
    /// Everything.
    All,
    /// These.
    Some(Box<Part>),
}

/// A part of the storage.
#[derive(Debug)]
pub(crate) struct Part {
    sent: Sent,
    lists: Vec<(ContentHash, Files)>,
    /// A worker's live attempts.
    attempts: BTreeSet<AttemptId>,
}

impl VisibleBlobs {
    /// Whether this blob is in reach.
    pub(crate) fn holds(&self, hash: &ContentHash) -> bool {
        match self {
            Self::All => true,
            Self::Some(part) => {
                let listed = |(list, files): &(ContentHash, Files)| list == hash || files.binary_search(hash).is_ok();
                part.sent.holds(hash) || part.lists.iter().any(listed)
            }
        }
    }

    /// Whether a worker has anything to send for; true for everybody else.
    pub(crate) fn is_at_work(&self, who: &Identity) -> bool {
        match self {
            Self::Some(part) if who.role == Role::Worker => !part.attempts.is_empty(),
            _ => true,
        }
    }
}

/// The inputs of jobs that ran lately.
#[derive(Debug, Default)]
struct Inputs {
    of: HashMap<JobId, Arc<[ContentHash]>>,
    count: usize,
}

/// See the module. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Scope {
    core: Core,
    access: Access,
    store: Arc<dyn Store>,
    blobs: Arc<dyn BlobStore>,
    uploads: Arc<Uploads>,
    /// Workers may talk to the bucket themselves, so that nobody knows what they sent.
    direct: bool,
    lists: Arc<Lists>,
    inputs: Arc<Mutex<Inputs>>,
    allowance: Allowance,
    /// Bytes that a user may have in the storage.
    most_stored: Option<u64>,
}

impl Scope {
    pub(crate) fn new(
        core: Core,
        access: Access,
        store: Arc<dyn Store>,
        blobs: Arc<dyn BlobStore>,
        uploads: Arc<Uploads>,
        direct: bool,
        most_stored: Option<u64>,
    ) -> Self {
        Self {
            core,
            access,
            store,
            blobs,
            uploads,
            direct,
            lists: Arc::default(),
            inputs: Arc::default(),
            allowance: Allowance::default(),
            most_stored,
        }
    }

    /// What this caller may see.
    pub(crate) async fn reach(&self, who: &Identity) -> Result<VisibleBlobs, ScopeError> {
        if who.role.changes_all() {
            return Ok(VisibleBlobs::All);
        }
        let running = if who.role == Role::Worker {
            let workers = self.access.workers_of(&who.name).await;
            let look = move |state: &State, _| state.running_on(&workers);
            self.core.query(look).await?
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
        Ok(VisibleBlobs::Some(Box::new(Part {
            sent: self.uploads.of(&key(who)).await?,
            lists,
            attempts: running.into_iter().map(|work| work.attempt).collect(),
        })))
    }

    /// What this caller may make a job point to.
    pub(crate) async fn may_name(&self, who: &Identity) -> Result<VisibleBlobs, ScopeError> {
        if who.role == Role::Worker && self.direct {
            return Ok(VisibleBlobs::All);
        }
        self.reach(who).await
    }

    /// Whether a worker with this token is kept away from the bucket itself.
    pub(crate) fn keeps_bucket_from(&self, who: &Identity) -> bool {
        who.role == Role::Worker && !self.direct
    }

    /// Sets aside what somebody is about to send.
    ///
    /// # Errors
    /// [`TooMuch`], when a worker sends more than is sensible, or a user has too much already.
    pub(crate) fn spend(&self, who: &Identity, reach: &VisibleBlobs, bytes: u64) -> Result<Spending, TooMuch> {
        let VisibleBlobs::Some(part) = reach else {
            return Ok(Spending::Free);
        };
        if who.role == Role::Worker {
            let spending = self.allowance.spend(who.name.as_str(), part.attempts.clone(), bytes);
            return spending.map(Spending::Worker).ok_or(TooMuch::Worker { bytes });
        }
        let Some(most) = self.most_stored else {
            return Ok(Spending::Free);
        };
        let coming = self.uploads.set_aside(&key(who), &part.sent, bytes, most);
        coming.map(Spending::User).map_err(|in_use| TooMuch::User {
            who: who.name.clone(),
            in_use,
            bytes,
            most,
        })
    }

    /// Somebody asks for blobs or sends one: what they sent stays while they do, and a while longer.
    pub(crate) fn calling(&self, who: &Identity) -> Calling {
        self.uploads.calling(&key(who))
    }

    /// Somebody sent this blob, all of it. Durable when this returns.
    pub(crate) async fn sent(&self, who: &Identity, hash: ContentHash, bytes: u64) -> Result<(), ScopeError> {
        if who.role.changes_all() {
            return Ok(());
        }
        Ok(self.uploads.note(&key(who), hash, bytes).await?)
    }

    /// Something that a worker sent is part of its job now.
    pub(crate) fn named(&self, who: &Identity) {
        self.allowance.named(who.name.as_str());
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
        if let Some(inputs) = known().of.get(job) {
            return Ok(inputs.clone());
        }
        let payload = self.store.payload(job).await?.unwrap_or_default();
        let distinct: BTreeSet<ContentHash> = payload.inputs.values().copied().collect();
        let inputs: Arc<[ContentHash]> = distinct.into_iter().collect();
        let mut known = known();
        if known.count + inputs.len() >= INPUTS {
            *known = Inputs::default();
        }
        // A job without inputs takes room, too.
        known.count += inputs.len() + 1;
        known.of.insert(job.clone(), inputs.clone());
        Ok(inputs)
    }
}

/// Under which name somebody's uploads are kept: a machine that is called as a user is, is not that user.
fn key(who: &Identity) -> String {
    let kind = if who.role == Role::Worker { "worker" } else { "user" };
    format!("{kind}/{}", who.name)
}
