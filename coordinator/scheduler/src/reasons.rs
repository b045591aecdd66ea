//! Why a job waits, what keeps it off a device, and why an attempt is fenced: as data, which `messages` renders as text.

use super::model::{DependencyCondition, Job};
use super::state::checkpoint_offer::CheckpointOffer;
use super::state::classes::FitError;
use aitk_common::capability::DeviceKind;
use aitk_common::control_plane::{AttemptState, JobState};
use aitk_common::id::{Epoch, JobId, UserName};
use std::collections::BTreeSet;
use std::time::Duration;

/// Why a waiting job waits.
#[derive(Debug)]
pub(super) enum WaitReason<'a> {
    /// A worker uploads a checkpoint from which the job will go on.
    CheckpointUpload { offer: &'a CheckpointOffer, left: Duration },
    /// Its user paused it. `stopped` is the reason that was noted when its attempt stopped for that.
    Paused { job: &'a JobId, stopped: Option<&'a str> },
    /// Another job or array has to end first.
    Dependency {
        before: DependencyJob<'a>,
        condition: DependencyCondition,
    },
    /// The config names a start time.
    StartTime { left: Duration },
    /// The next try after a failure that does not count against the job.
    UncountedRetry { seconds: u128, last: &'a str },
    /// The next try after a failure that counts.
    Retry {
        number: u64,
        max: u64,
        seconds: u128,
        last: &'a str,
    },
    /// There is no room for results on the coordinator's disk. In bytes.
    StorageFull { free: u64, reserved: u64 },
    /// The object storage refuses the coordinator. `error` is what it answered.
    StorageRefusal { error: &'a str },
    /// As many members of its array run as may.
    ArrayLimit { array: &'a JobId, at_most: u32 },
    /// No worker is connected.
    NoWorker,
    /// Its user holds as many devices as allowed.
    Quota { owner: &'a UserName, quota: u32 },
    /// A device is ready. Placement follows every change, so this is seen only between two steps.
    StartsNow,
    /// No connected device fits.
    NoDeviceFits(Vec<FitError>),
    /// Every device that fits takes no work; the first of them says why.
    NoDeviceAccepts { fitting: usize, first: Availability<'a> },
    /// A running job is being preempted for it.
    Preempting(JobLabel<'a>),
    /// It is a part of a job, and faster devices finish all parts before `device` would finish this one.
    LeftToFaster { device: String, faster: BTreeSet<String> },
    /// All devices that fit are busy. `ahead` is `None` when there are too many jobs before it to count.
    InQueue { ahead: Option<usize>, devices: usize },
}

/// A job or an array that another one waits for.
#[derive(Debug)]
pub(super) enum DependencyJob<'a> {
    Job(&'a Job),
    /// `counts` says how many members are in which state.
    Array {
        id: JobId,
        name: &'a str,
        counts: String,
    },
    /// It was removed.
    Unknown(JobId),
}

/// Whether a device on which a job fits takes it now, and if not, why.
#[derive(Debug)]
pub(super) enum Availability<'a> {
    Ready,
    /// The job runs on it.
    RunsHere,
    Drained {
        worker: &'a str,
    },
    Leaving {
        worker: &'a str,
    },
    Quarantined {
        worker: &'a str,
        reason: &'a str,
    },
    /// Reserved for a part that moves here from a slower device.
    Reserved(JobLabel<'a>),
    /// The jobs that run here, and whether each of them is being preempted.
    Busy(Vec<(JobLabel<'a>, bool)>),
    /// Faster devices finish everything that waits before this one would finish this part.
    LeftToFaster {
        faster: BTreeSet<String>,
    },
    /// The work would take `times` as long as on `fastest`.
    TooSlow {
        times: f64,
        fastest: String,
        kind: DeviceKind,
    },
}

/// A job as a user may see it: of another user's job only the owner is named.
#[derive(Debug)]
pub(super) enum JobLabel<'a> {
    Own { id: &'a JobId, name: &'a str },
    OfUser(&'a UserName),
    Unknown(&'a JobId),
}

/// The status of a job that does not wait.
#[derive(Debug)]
pub(super) struct JobStatus<'a> {
    pub(super) state: JobState,
    /// Time since the live attempt began, its worker and its device.
    pub(super) running: Option<(Duration, &'a str, String)>,
    /// Additional text; may be empty.
    pub(super) reason: String,
}

/// A connected device on which a job fits, as one line of a forecast.
#[derive(Debug)]
pub(super) struct FitLine<'a> {
    pub(super) device: &'a str,
    pub(super) profile: &'a str,
    /// Bytes that the job needs there; none: not known.
    pub(super) bytes: Option<u64>,
    pub(super) budget: u64,
    pub(super) seconds: Option<f64>,
    /// Whether `seconds` comes from measurements.
    pub(super) is_speed_measured: bool,
    pub(super) availability: &'a Availability<'a>,
}

/// Why an attempt that a worker reports on is not the current one of its job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FenceReason {
    /// No attempt with this id is known.
    Unknown,
    /// The attempt has another epoch than the report.
    WrongEpoch { reported: Epoch, known: Epoch },
    /// The job has a newer attempt.
    Superseded { epoch: Epoch, newest: Epoch },
    /// The attempt has ended.
    Ended(AttemptState),
    /// It is the current attempt, but another worker holds its lease.
    OtherWorker,
}
