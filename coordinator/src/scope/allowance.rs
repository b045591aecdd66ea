//! How much a worker may send that nothing names yet: a bound for one that fills the storage.

use aitk_common::id::AttemptId;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes: several checkpoints of the largest models with their optimizers.
pub(super) const MAX_BYTES: u64 = 1 << 40;

#[derive(Debug, Default)]
struct Usage {
    bytes: u64,
    /// What ran meanwhile: when that changes, counting begins anew. A worker has no say in what it is given.
    attempts: BTreeSet<AttemptId>,
}

/// By the name of the worker's owner; as many as have tokens.
#[derive(Clone, Debug, Default)]
pub(super) struct Allowance {
    usage: Arc<Mutex<HashMap<String, Usage>>>,
}

/// Bytes that are set aside for an upload. Given back unless it arrives.
#[derive(Debug)]
pub(crate) struct Reservation {
    usage: Arc<Mutex<HashMap<String, Usage>>>,
    name: String,
    bytes: u64,
}

impl Reservation {
    /// The bytes arrived.
    pub(super) fn commit(mut self) {
        self.bytes = 0;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(usage) = lock(&self.usage).get_mut(&self.name) {
            usage.bytes = usage.bytes.saturating_sub(self.bytes);
        }
    }
}

fn lock(usage: &Mutex<HashMap<String, Usage>>) -> MutexGuard<'_, HashMap<String, Usage>> {
    usage.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Allowance {
    /// Sets bytes aside; none when that is more than is allowed.
    pub(super) fn reserve(&self, name: &str, attempts: BTreeSet<AttemptId>, bytes: u64) -> Option<Reservation> {
        let mut all = lock(&self.usage);
        let usage = all.entry(name.to_owned()).or_default();
        if usage.attempts != attempts {
            *usage = Usage { bytes: 0, attempts };
        }
        let sum = usage.bytes.checked_add(bytes).filter(|sum| *sum <= MAX_BYTES)?;
        usage.bytes = sum;
        Some(Reservation {
            usage: self.usage.clone(),
            name: name.to_owned(),
            bytes,
        })
    }

    /// Something that was sent has a name now.
    pub(super) fn reset(&self, name: &str) {
        if let Some(usage) = lock(&self.usage).get_mut(name) {
            usage.bytes = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nothing_names_is_bounded_and_what_failed_does_not_count() {
        let allowance = Allowance::default();
        let runs = |id: &str| BTreeSet::from([AttemptId::new(id)]);
        assert!(allowance.reserve("a", runs("j1-1"), u64::MAX).is_none());
        drop(allowance.reserve("a", runs("j1-1"), MAX_BYTES).unwrap());
        allowance.reserve("a", runs("j1-1"), MAX_BYTES - 1).unwrap().commit();
        assert!(allowance.reserve("a", runs("j1-1"), 2).is_none());
        assert!(allowance.reserve("b", runs("j2-1"), 2).is_some());
        allowance.reset("a");
        allowance.reserve("a", runs("j1-1"), MAX_BYTES).unwrap().commit();
        assert!(allowance.reserve("a", runs("j1-2"), 1).is_some());
    }
}
