//! The coordinator's clock.

use aitk_common::control::UnixMillis;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// A wall clock that never goes back while the process lives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    wall: UnixMillis,
    start: Instant,
}

impl Clock {
    pub(crate) fn new() -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            wall: UnixMillis(0).after(wall),
            start: Instant::now(),
        }
    }

    /// For leases and patience. It stands still while the machine is suspended, as those do who are waited for, and never
    /// goes back.
    pub(crate) fn now(&self) -> UnixMillis {
        self.wall.after(self.start.elapsed())
    }

    /// For what ends at a date: tokens, certificates. It goes on while the machine is suspended; a wall clock that is set
    /// back makes nothing live longer than [`Self::now`] says.
    pub(crate) fn wall_time(&self) -> UnixMillis {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.now().max(UnixMillis(0).after(wall))
    }

    /// A clock as it is after the machine slept for so long.
    #[cfg(test)]
    pub(crate) fn after_sleep(sleep: std::time::Duration) -> Self {
        let mut clock = Self::new();
        let slept = u64::try_from(sleep.as_millis()).unwrap_or(u64::MAX);
        clock.wall = UnixMillis(clock.wall.0.saturating_sub(slept));
        clock
    }
}
