//! Counters of a user, for quotas and fair share.

/// The index of a user in the table of users. Users are never removed from it.
pub(crate) type UserIndex = usize;

/// What a user uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct User {
    /// Waiting jobs.
    pub(crate) waiting: usize,
    /// Running jobs: each holds a device or a share of one.
    pub(crate) running: u32,
    /// Device time used, in milliseconds. A user that becomes active starts at the least value of all active users, so that
    /// time without jobs neither gains nor loses anything.
    pub(crate) device_millis: u64,
}
