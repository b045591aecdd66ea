//! Types that coordinator, workers and clients exchange about jobs. Plain data, no wire types.

mod array;
mod events;
mod forecast;
pub(crate) mod non_finite;
mod session;
mod state;
mod time;
mod views;

pub use array::{ArrayCounts, ArrayView, MAX_ARRAY_MEMBERS, NewMember};
pub use events::{Artifact, EventBody, JobEvent, Progress, Report};
pub use forecast::{DeviceForecast, Forecast};
pub use session::{Assignment, AttemptRef, OfferedCheckpoint, Registration, ToCoordinator, ToWorker, Verdict};
pub use state::{AttemptState, JobState};
pub use time::UnixMillis;
pub use views::{AttemptView, JobView, ServerInfo, Submission, SubmissionReceipt, WorkerDeviceView, WorkerView};

/// The version of the wire protocol. Both sides must have the same version.
pub const PROTOCOL_VERSION: u32 = 1;
/// The size limit of a config in bytes, which applies to its text and to its parsed form.
pub const MAX_CONFIG_BYTES: usize = 4 << 20;
