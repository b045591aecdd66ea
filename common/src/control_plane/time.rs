//! Points in time.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A point in time: milliseconds since 1970-01-01 UTC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UnixMillis(pub u64);

impl UnixMillis {
    /// The point in time `time` later. Saturates.
    #[must_use]
    pub fn after(self, time: Duration) -> Self {
        Self(
            self.0
                .saturating_add(u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
        )
    }

    /// The time since `earlier`; zero if `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}
