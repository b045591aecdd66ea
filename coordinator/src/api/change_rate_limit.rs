//! Limits how often one user may change jobs: every change adds a line to the audit log, which is kept forever.

use crate::access::Identity;
use aitk_common::id::UserName;
use aitk_common::security::role::Role;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tonic::Status;

/// Changes allowed at once: enough to remove all jobs of a big array.
const BURST: u32 = 10_000;
/// One more change is allowed per interval.
const INTERVAL: Duration = Duration::from_secs(1);

/// A token bucket per user. Administrators are not limited.
#[derive(Debug, Default)]
pub(super) struct ChangeLimiter {
    /// When each user's bucket is full again; bounded by the number of users with tokens.
    until: Mutex<HashMap<UserName, Instant>>,
}

impl ChangeLimiter {
    /// Takes one change from the caller's bucket.
    ///
    /// # Errors
    /// When the bucket is empty; the message says when the next change is possible.
    pub(super) fn try_take(&self, who: &Identity, now: Instant) -> Result<(), Status> {
        if who.role == Role::Admin {
            return Ok(());
        }
        let mut all = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        let until = all.entry(who.name.clone()).or_insert(now);
        let next = (*until).max(now) + INTERVAL;
        let over = next.saturating_duration_since(now + INTERVAL * BURST);
        if over.is_zero() {
            *until = next;
            return Ok(());
        }
        Err(Status::resource_exhausted(format!(
            "user {} has changed jobs {BURST} times in a short time, which is the limit (each change stays in the audit log); the next \
             change is taken in {} s, and one each {} s after it",
            who.name,
            over.as_secs().max(1),
            INTERVAL.as_secs()
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::super::concurrent_call_limit::tests::who;
    use super::*;

    #[test]
    fn changes_of_one_user_are_rate_limited() {
        let (changes, start) = (ChangeLimiter::default(), Instant::now());
        let (eve, ada) = (who("eve"), who("ada"));
        for _ in 0..BURST {
            changes.try_take(&eve, start).unwrap();
        }
        let refused = changes.try_take(&eve, start).unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        assert!(
            refused.message().contains("eve") && refused.message().contains("in 1 s"),
            "{refused}"
        );
        changes.try_take(&ada, start).unwrap();
        changes.try_take(&eve, start + INTERVAL).unwrap();
        changes.try_take(&eve, start + INTERVAL).unwrap_err();
        let admin = Identity {
            role: Role::Admin,
            ..who("root")
        };
        for _ in 0..=BURST {
            changes.try_take(&admin, start).unwrap();
        }
        // Unused time is not saved beyond a full bucket.
        for _ in 0..BURST {
            changes.try_take(&eve, start + INTERVAL * 10 * BURST).unwrap();
        }
        changes.try_take(&eve, start + INTERVAL * 10 * BURST).unwrap_err();
    }
}
