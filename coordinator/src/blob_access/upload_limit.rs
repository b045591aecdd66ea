//! Limits how much a worker may upload before a job refers to it.

use super::uploads::counted_bytes;
use aitk_common::id::AttemptId;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum bytes: several checkpoints of the largest models with their optimizers.
pub(super) const MAX_BYTES: u64 = 1 << 40;

#[derive(Debug, Default)]
struct Usage {
    bytes: u64,
    /// The worker's running attempts: when they change, the count restarts. A worker does not choose its attempts.
    attempts: BTreeSet<AttemptId>,
    /// How often the count restarted.
    restarts: u64,
}

impl Usage {
    fn restart(&mut self) {
        (self.bytes, self.restarts) = (0, self.restarts + 1);
    }
}

/// Usage by the name of the worker's owner; bounded by the number of tokens.
#[derive(Clone, Debug, Default)]
pub(super) struct UnreferencedUploadLimiter {
    usage: Arc<Mutex<HashMap<String, Usage>>>,
}

/// Bytes reserved for an upload. Released when dropped, unless committed.
#[derive(Debug)]
pub(crate) struct Reservation {
    usage: Arc<Mutex<HashMap<String, Usage>>>,
    name: String,
    bytes: u64,
    /// [`Usage::restarts`] when it was made: a later count does not have these bytes.
    restarts: u64,
}

impl Reservation {
    /// The upload is complete: keeps the bytes counted.
    pub(super) fn commit(mut self) {
        self.bytes = 0;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(usage) = lock(&self.usage).get_mut(&self.name)
            && usage.restarts == self.restarts
        {
            usage.bytes = usage.bytes.saturating_sub(self.bytes);
        }
    }
}

fn lock(usage: &Mutex<HashMap<String, Usage>>) -> MutexGuard<'_, HashMap<String, Usage>> {
    usage.lock().unwrap_or_else(PoisonError::into_inner)
}

impl UnreferencedUploadLimiter {
    /// Reserves bytes; `None` when that exceeds the limit. A small blob counts with the least size, so their number is limited, too.
    pub(super) fn reserve(&self, name: &str, attempts: BTreeSet<AttemptId>, bytes: u64) -> Option<Reservation> {
        let bytes = counted_bytes(bytes);
        let mut all = lock(&self.usage);
        let usage = all.entry(name.to_owned()).or_default();
        if usage.attempts != attempts {
            usage.attempts = attempts;
            usage.restart();
        }
        let sum = usage.bytes.checked_add(bytes).filter(|sum| *sum <= MAX_BYTES)?;
        usage.bytes = sum;
        Some(Reservation {
            usage: self.usage.clone(),
            name: name.to_owned(),
            bytes,
            restarts: usage.restarts,
        })
    }

    /// Restarts the count, because a job refers to an upload now.
    pub(super) fn reset(&self, name: &str) {
        if let Some(usage) = lock(&self.usage).get_mut(name) {
            usage.restart();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::uploads::MIN_COUNTED_BYTES;
    use super::*;

    #[test]
    fn unreferenced_uploads_are_limited_and_failed_ones_do_not_count() {
        let allowance = UnreferencedUploadLimiter::default();
        let runs = |id: &str| BTreeSet::from([AttemptId::new(id)]);
        assert!(allowance.reserve("a", runs("j1-1"), u64::MAX).is_none());
        drop(allowance.reserve("a", runs("j1-1"), MAX_BYTES).unwrap());
        let most = MAX_BYTES - MIN_COUNTED_BYTES;
        allowance.reserve("a", runs("j1-1"), most).unwrap().commit();
        // Blobs without bytes take space, too.
        allowance.reserve("a", runs("j1-1"), 0).unwrap().commit();
        assert!(allowance.reserve("a", runs("j1-1"), 0).is_none());
        assert!(allowance.reserve("b", runs("j2-1"), 2).is_some());
        allowance.reset("a");
        allowance.reserve("a", runs("j1-1"), MAX_BYTES).unwrap().commit();
        assert!(allowance.reserve("a", runs("j1-2"), 1).is_some());
    }

    /// A broken upload is kept for minutes with its reservation, and the worker may get another attempt meanwhile.
    #[test]
    fn a_reservation_of_an_earlier_count_is_not_released_from_a_later_one() {
        let allowance = UnreferencedUploadLimiter::default();
        let runs = |id: &str| BTreeSet::from([AttemptId::new(id)]);
        let earlier = allowance.reserve("a", runs("j1-1"), MAX_BYTES).unwrap();
        let _later = allowance.reserve("a", runs("j2-1"), MAX_BYTES).unwrap();
        drop(earlier);
        assert!(allowance.reserve("a", runs("j2-1"), 1).is_none());
    }
}
