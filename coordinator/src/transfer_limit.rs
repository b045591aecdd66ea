//! Limits concurrent transfers in total and per user, and the upload rate per user.

use aitk_common::id::UserName;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

/// A semaphore in total and one per user. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct TransferLimiter {
    all: Arc<Semaphore>,
    per_user: usize,
    /// By user; bounded by the number of tokens.
    users: Arc<Mutex<HashMap<UserName, Arc<Semaphore>>>>,
}

/// Permit of one transfer.
#[derive(Debug)]
pub(crate) struct TransferPermit {
    _of_user: OwnedSemaphorePermit,
    _of_all: OwnedSemaphorePermit,
}

impl TransferLimiter {
    /// Allows `max` transfers in total, and three quarters of them per user.
    pub(crate) fn new(max: usize) -> Self {
        Self::with_limits(max, (max * 3 / 4).max(1))
    }

    /// Allows `all` transfers in total and `per_user` per user.
    pub(crate) fn with_limits(all: usize, per_user: usize) -> Self {
        Self {
            all: Arc::new(Semaphore::new(all)),
            per_user,
            users: Arc::default(),
        }
    }

    /// Waits for a permit: first for the user's own, so that no user waits behind another one with many transfers.
    pub(crate) async fn permit(&self, who: &UserName) -> Result<TransferPermit, AcquireError> {
        let of_user = {
            let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
            let per_user = self.per_user;
            users
                .entry(who.clone())
                .or_insert_with(|| Arc::new(Semaphore::new(per_user)))
                .clone()
        };
        let of_user = of_user.acquire_owned().await?;
        let of_all = self.all.clone().acquire_owned().await?;
        Ok(TransferPermit {
            _of_user: of_user,
            _of_all: of_all,
        })
    }
}

/// How much a user may send at once before being throttled, as the time that it takes at the maximum rate.
const BURST: Duration = Duration::from_secs(1);

/// Upload rate per user over all uploads. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct UploadRate {
    /// Bytes per second; `None`: no limit.
    max: Option<u64>,
    /// Per user: when the bytes sent so far are used up at that rate; bounded by the number of tokens.
    busy_until: Arc<Mutex<HashMap<UserName, Instant>>>,
}

impl UploadRate {
    pub(crate) fn new(max: Option<u64>) -> Self {
        Self {
            max,
            busy_until: Arc::default(),
        }
    }

    /// Counts received bytes. Returns how long to wait before reading more from their sender.
    pub(crate) fn delay_after(&self, who: &UserName, bytes: u64, now: Instant) -> Duration {
        let Some(max) = self.max else {
            return Duration::ZERO;
        };
        let takes = Duration::from_secs_f64(bytes as f64 / max.max(1) as f64);
        let mut busy_until = self.busy_until.lock().unwrap_or_else(PoisonError::into_inner);
        let busy_until = busy_until.entry(who.clone()).or_insert(now);
        *busy_until = (*busy_until).max(now) + takes;
        busy_until.saturating_duration_since(now + BURST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_user_cannot_take_all_permits() {
        let transfers = TransferLimiter::new(16);
        let (eve, ada) = (UserName::new("eve"), UserName::new("ada"));
        let mut held = Vec::new();
        for _ in 0..12 {
            held.push(transfers.permit(&eve).await.unwrap());
        }
        let waits = tokio::time::timeout(Duration::from_millis(20), transfers.permit(&eve)).await;
        assert!(waits.is_err(), "eve has as many as she may");
        for _ in 0..4 {
            held.push(transfers.permit(&ada).await.unwrap());
        }
        held.clear();
        transfers.permit(&eve).await.unwrap();
    }

    #[test]
    fn only_the_user_above_the_rate_is_throttled() {
        let rate = UploadRate::new(Some(1000));
        let (eve, ada, start) = (UserName::new("eve"), UserName::new("ada"), Instant::now());
        let seconds = Duration::from_secs;
        assert_eq!(
            rate.delay_after(&eve, 1000, start),
            Duration::ZERO,
            "a second's worth at once"
        );
        // Several uploads share the rate.
        assert_eq!(rate.delay_after(&eve, 2000, start), seconds(2));
        assert_eq!(rate.delay_after(&eve, 1000, start), seconds(3));
        assert_eq!(rate.delay_after(&ada, 500, start), Duration::ZERO);
        assert_eq!(rate.delay_after(&eve, 1000, start + seconds(3)), seconds(1));
        // Idle time is not saved up.
        assert_eq!(rate.delay_after(&eve, 3000, start + seconds(1000)), seconds(2));
        assert_eq!(UploadRate::new(None).delay_after(&eve, u64::MAX, start), Duration::ZERO);
    }
}
