//! Time for leases and expiry dates.

use aitk_common::control_plane::UnixMillis;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// A clock that never goes backwards during the life of the process.
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

    /// Time for leases and timeouts. It does not advance while the machine is suspended, and never goes backwards.
    pub(crate) fn now(&self) -> UnixMillis {
        self.wall.after(self.start.elapsed())
    }

    /// Wall-clock time for expiry dates of tokens and certificates, for the start times of jobs, and for times that are stored and
    /// shown. It advances while the machine is suspended; setting the clock back extends no lifetime beyond [`Self::now`].
    pub(crate) fn wall_time(&self) -> UnixMillis {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.now().max(UnixMillis(0).after(wall))
    }

    /// Returns a clock as it is after the machine was suspended for this time.
    #[cfg(test)]
    pub(crate) fn after_sleep(sleep: std::time::Duration) -> Self {
        let mut clock = Self::new();
        let slept = u64::try_from(sleep.as_millis()).unwrap_or(u64::MAX);
        clock.wall = UnixMillis(clock.wall.0.saturating_sub(slept));
        clock
    }
}
