//! What every attempt of this worker shares.

use crate::folders::Folders;
use crate::kept::KeptCheckpoints;
use crate::runner::{Groups, Spawner};
use crate::stage::cache::Cache;
use crate::stage::derived::DerivedCaches;
use crate::stage::hub::{Hub, Secrets};
use crate::storage::StorageAccess;
use crate::trace::Spans;
use std::ffi::OsString;
use std::time::Duration;
use tokio::sync::watch;

pub(crate) struct Context {
    /// Checkpoints that are not with the coordinator yet.
    pub(crate) kept: KeptCheckpoints,
    /// Why the coordinator refuses this worker, while it does.
    pub(crate) refused: watch::Sender<Option<String>>,
    pub(crate) folders: Folders,
    pub(crate) cache: Cache,
    pub(crate) derived: DerivedCaches,
    pub(crate) hub: Hub,
    /// Tokens of the hub that users' jobs may name.
    pub(crate) hub_secrets: Secrets,
    pub(crate) spawner: Spawner,
    pub(crate) storage: StorageAccess,
    pub(crate) attempt_command: Vec<OsString>,
    /// Attempts can be confined on this machine.
    pub(crate) files_are_confined: bool,
    /// Attempts that cannot be confined fail.
    pub(crate) require_sandbox: bool,
    /// The largest file that an attempt may write.
    pub(crate) largest_file: u64,
    /// Makes control groups for attempts, where this machine lets it.
    pub(crate) groups: Option<Groups>,
    /// How long a child may take to save and stop.
    pub(crate) grace: Duration,
    /// How long a child may show no progress, where its job does not say.
    pub(crate) progress_timeout: Duration,
    /// How long storage may be unavailable before an attempt fails that fetches from it.
    pub(crate) storage_patience: Duration,
    /// How long the end of a job waits for its results to be stored.
    pub(crate) end_patience: Duration,
    pub(crate) spans: Spans,
}
