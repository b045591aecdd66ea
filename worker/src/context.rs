//! The state that all attempts of a worker share.

use crate::data_folder::DataFolder;
use crate::extensions::AllowedExtensions;
use crate::runner::{ControlGroups, Spawner};
use crate::stage::cache::InputCache;
use crate::stage::derived::DerivedCaches;
use crate::stage::hub::{Hub, UserTokens};
use crate::storage::StorageAccess;
use crate::trace::SpanRecorder;
use crate::uncommitted::UncommittedCheckpoints;
use aitk_common::capability::Device;
use std::ffi::OsString;
use std::time::Duration;
use tokio::sync::watch;

pub(crate) struct Context {
    /// Checkpoints that the coordinator has not committed yet.
    pub(crate) uncommitted: UncommittedCheckpoints,
    /// Why the coordinator refuses this worker; `None` while it does not.
    pub(crate) refusal: watch::Sender<Option<String>>,
    pub(crate) data_folder: DataFolder,
    /// The devices that the worker offers.
    pub(crate) devices: Vec<Device>,
    pub(crate) cache: InputCache,
    pub(crate) derived: DerivedCaches,
    pub(crate) hub: Hub,
    /// Hugging Face tokens that jobs of their owners may name.
    pub(crate) hub_tokens: UserTokens,
    pub(crate) spawner: Spawner,
    pub(crate) storage: StorageAccess,
    pub(crate) attempt_command: Vec<OsString>,
    /// The programs that jobs may run as extensions.
    pub(crate) extensions: AllowedExtensions,
    /// Whether file access of attempts can be confined on this machine.
    pub(crate) files_are_confined: bool,
    /// Whether an attempt that cannot be confined fails.
    pub(crate) require_sandbox: bool,
    /// The largest file that an attempt may write, in bytes.
    pub(crate) largest_file: u64,
    /// Creates control groups for attempts. `None`: this machine does not allow it.
    pub(crate) control_groups: Option<ControlGroups>,
    /// How long a child may take to save and stop.
    pub(crate) grace: Duration,
    /// How long a child may show no progress, if its job does not set a limit.
    pub(crate) progress_timeout: Duration,
    /// How long storage may be unavailable before an attempt that fetches from it fails.
    pub(crate) storage_timeout: Duration,
    /// How long a finished job waits for its results to be stored.
    pub(crate) end_timeout: Duration,
    pub(crate) spans: SpanRecorder,
}
