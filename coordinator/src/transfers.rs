//! How many blobs are on their way at once, all together and of one user: whoever is slow holds up nobody else.

use aitk_common::id::UserName;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
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
        Self {
            all: Arc::new(Semaphore::new(most)),
            each: (most * 3 / 4).max(1),
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

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
}
