//! How often one user may change what is there: every change is a line of the audit log, which is kept for ever.

use crate::access::Identity;
use aitk_common::id::UserName;
use aitk_common::security::role::Role;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tonic::Status;

/// Changes in a row: whoever removes all jobs of a big array does not notice this limit.
const IN_A_ROW: u32 = 10_000;
/// Over time, one change in so long.
const EACH: Duration = Duration::from_secs(1);

/// Counts changes. Administrators are not counted.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// When each has all changes in a row again; as many as have tokens.
    until: Mutex<HashMap<UserName, Instant>>,
}

impl Changes {
    /// Counts one change.
    ///
    /// # Errors
    /// When its user has made too many; says when there is one more.
    pub(super) fn count(&self, who: &Identity, now: Instant) -> Result<(), Status> {
        if who.role == Role::Admin {
            return Ok(());
        }
        let mut all = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        let until = all.entry(who.name.clone()).or_insert(now);
        let next = (*until).max(now) + EACH;
        let over = next.saturating_duration_since(now + EACH * IN_A_ROW);
        if over.is_zero() {
            *until = next;
            return Ok(());
        }
        Err(Status::resource_exhausted(format!(
            "user {} has changed jobs {IN_A_ROW} times in a short time, which is the limit (each change stays in the audit log); the next \
             change is taken in {} s, and one each {} s after it",
            who.name,
            over.as_secs().max(1),
            EACH.as_secs()
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::super::calls::tests::who;
    use super::*;

    #[test]
    fn whoever_changes_things_in_a_loop_fills_no_log() {
        let (changes, start) = (Changes::default(), Instant::now());
        let (eve, ada) = (who("eve"), who("ada"));
        for _ in 0..IN_A_ROW {
            changes.count(&eve, start).unwrap();
        }
        let refused = changes.count(&eve, start).unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        assert!(
            refused.message().contains("eve") && refused.message().contains("in 1 s"),
            "{refused}"
        );
        changes.count(&ada, start).unwrap();
        changes.count(&eve, start + EACH).unwrap();
        changes.count(&eve, start + EACH).unwrap_err();
        let admin = Identity {
            role: Role::Admin,
            ..who("root")
        };
        for _ in 0..=IN_A_ROW {
            changes.count(&admin, start).unwrap();
        }
        // Time in which nothing was changed is not saved up beyond that.
        for _ in 0..IN_A_ROW {
            changes.count(&eve, start + EACH * 10 * IN_A_ROW).unwrap();
        }
        changes.count(&eve, start + EACH * 10 * IN_A_ROW).unwrap_err();
    }
}
