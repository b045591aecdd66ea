//! How much a worker may send that nothing names yet: a bound for one that fills the storage.

use aitk_common::id::AttemptId;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes: several checkpoints of the largest models with their optimizers.
pub(super) const MOST: u64 = 1 << 40;

#[derive(Debug, Default)]
struct Spent {
    bytes: u64,
    /// What ran meanwhile: when that changes, counting begins anew. A worker has no say in what it is given.
    attempts: BTreeSet<AttemptId>,
}

/// By the name of the worker's owner; as many as have tokens.
#[derive(Clone, Debug, Default)]
pub(super) struct Allowance {
    spent: Arc<Mutex<HashMap<String, Spent>>>,
}

/// Bytes that are set aside for an upload. Given back unless it arrives.
#[derive(Debug)]
pub(crate) struct Spending {
    spent: Arc<Mutex<HashMap<String, Spent>>>,
    name: String,
    bytes: u64,
}

impl Spending {
    /// The bytes arrived.
    pub(super) fn arrived(mut self) {
        self.bytes = 0;
    }
}

impl Drop for Spending {
    fn drop(&mut self) {
        if let Some(spent) = lock(&self.spent).get_mut(&self.name) {
            spent.bytes = spent.bytes.saturating_sub(self.bytes);
        }
    }
}

fn lock(spent: &Mutex<HashMap<String, Spent>>) -> MutexGuard<'_, HashMap<String, Spent>> {
    spent.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Allowance {
    /// Sets bytes aside; none when that is more than is allowed.
    pub(super) fn spend(&self, name: &str, attempts: BTreeSet<AttemptId>, bytes: u64) -> Option<Spending> {
        let mut all = lock(&self.spent);
        let spent = all.entry(name.to_owned()).or_default();
        if spent.attempts != attempts {
            *spent = Spent { bytes: 0, attempts };
        }
        let sum = spent.bytes.checked_add(bytes).filter(|sum| *sum <= MOST)?;
        spent.bytes = sum;
        Some(Spending {
            spent: self.spent.clone(),
            name: name.to_owned(),
            bytes,
        })
    }

    /// Something that was sent has a name now.
    pub(super) fn named(&self, name: &str) {
        if let Some(spent) = lock(&self.spent).get_mut(name) {
            spent.bytes = 0;
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
        assert!(allowance.spend("a", runs("j1-1"), u64::MAX).is_none());
        drop(allowance.spend("a", runs("j1-1"), MOST).unwrap());
        allowance.spend("a", runs("j1-1"), MOST - 1).unwrap().arrived();
        assert!(allowance.spend("a", runs("j1-1"), 2).is_none());
        assert!(allowance.spend("b", runs("j2-1"), 2).is_some());
        allowance.named("a");
        allowance.spend("a", runs("j1-1"), MOST).unwrap().arrived();
        assert!(allowance.spend("a", runs("j1-2"), 1).is_some());
    }
}
