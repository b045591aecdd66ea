//! How many blobs are on their way at once, all together and of one user: whoever is slow holds up nobody else.

use aitk_common::id::UserName;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

/// See the module. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Transfers {
    all: Arc<Semaphore>,
    each: usize,
    /// By name; as many as have tokens.
    users: Arc<Mutex<HashMap<UserName, Arc<Semaphore>>>>,
}

/// The right to one transfer.
#[derive(Debug)]
pub(crate) struct TransferPermit {
    _of_user: OwnedSemaphorePermit,
    _of_all: OwnedSemaphorePermit,
}

impl Transfers {
    /// So many at once, and of one user three quarters of them.
    pub(crate) fn new(most: usize) -> Self {
        Self::with(most, (most * 3 / 4).max(1))
    }

    /// So many at once, and so many of one user.
    pub(crate) fn with(all: usize, each: usize) -> Self {
        Self {
            all: Arc::new(Semaphore::new(all)),
            each,
            users: Arc::default(),
        }
    }

    /// Waits for a turn: first among the user's own, so that nobody waits behind somebody who has many.
    pub(crate) async fn permit(&self, who: &UserName) -> Result<TransferPermit, AcquireError> {
        let of_user = {
            let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
            let each = self.each;
            users
                .entry(who.clone())
                .or_insert_with(|| Arc::new(Semaphore::new(each)))
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

/// What a user may send at once before they are held back.
const BURST: Duration = Duration::from_secs(1);

/// How fast one user may send, all their uploads together. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct UploadRate {
    /// Bytes a second; none: as fast as they can.
    most: Option<u64>,
    /// Until when what each has sent takes at that rate; as many as have tokens.
    until: Arc<Mutex<HashMap<UserName, Instant>>>,
}

impl UploadRate {
    pub(crate) fn new(most: Option<u64>) -> Self {
        Self {
            most,
            until: Arc::default(),
        }
    }

    /// Counts bytes that came. How long to wait before more is read of their sender.
    pub(crate) fn take(&self, who: &UserName, bytes: u64, now: Instant) -> Duration {
        let Some(most) = self.most else {
            return Duration::ZERO;
        };
        let takes = Duration::from_secs_f64(bytes as f64 / most.max(1) as f64);
        let mut until = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        let until = until.entry(who.clone()).or_insert(now);
        *until = (*until).max(now) + takes;
        until.saturating_duration_since(now + BURST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_user_leaves_some_for_the_others() {
        let transfers = Transfers::new(16);
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
    fn a_user_who_sends_faster_than_they_may_is_held_back_and_nobody_else() {
        let rate = UploadRate::new(Some(1000));
        let (eve, ada, start) = (UserName::new("eve"), UserName::new("ada"), Instant::now());
        let seconds = Duration::from_secs;
        assert_eq!(rate.take(&eve, 1000, start), Duration::ZERO, "a second's worth at once");
        // Several uploads share the rate.
        assert_eq!(rate.take(&eve, 2000, start), seconds(2));
        assert_eq!(rate.take(&eve, 1000, start), seconds(3));
        assert_eq!(rate.take(&ada, 500, start), Duration::ZERO);
        assert_eq!(rate.take(&eve, 1000, start + seconds(3)), seconds(1));
        // Time in which nothing was sent is not saved up.
        assert_eq!(rate.take(&eve, 3000, start + seconds(1000)), seconds(2));
        assert_eq!(UploadRate::new(None).take(&eve, u64::MAX, start), Duration::ZERO);
    }
}
