//! What the scheduler knows of a user.

/// A user's place in the table of users, from which nobody is ever taken.
pub(crate) type UserIndex = usize;

/// What a user has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct User {
    /// Jobs that wait.
    pub(crate) waiting: usize,
    /// Devices, or shares of one.
    pub(crate) running: u32,
    /// Milliseconds of devices, counted from the least of all active users when this one became active: who was away
    /// neither saved up nor lost anything.
    pub(crate) spent: u64,
}
