//! The waiting jobs of one user in one class.

use std::collections::BTreeSet;

/// The waiting jobs of one user, by submission number. Empty queues are removed by their owner.
#[derive(Clone, Debug)]
pub(crate) struct UserQueue {
    /// The first of them. Cached, because each placement reads it for every user.
    first: u64,
    all: BTreeSet<u64>,
}

impl UserQueue {
    pub(crate) fn of(order: u64) -> Self {
        Self {
            first: order,
            all: BTreeSet::from([order]),
        }
    }

    pub(crate) fn first(&self) -> u64 {
        self.first
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Whether this job waits here, and the cached first one is right.
    pub(crate) fn is_consistent_with(&self, order: u64) -> bool {
        self.all.contains(&order) && self.all.first() == Some(&self.first)
    }

    pub(crate) fn add(&mut self, order: u64) {
        self.first = self.first.min(order);
        self.all.insert(order);
    }

    /// Removes a job. Returns whether it was in the queue.
    pub(crate) fn remove(&mut self, order: u64) -> bool {
        let was_queued = self.all.remove(&order);
        if self.first == order
            && let Some(next) = self.all.first()
        {
            self.first = *next;
        }
        was_queued
    }
}
