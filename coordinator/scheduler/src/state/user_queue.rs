//! Jobs of one user that wait behind each other.

use std::collections::BTreeSet;

/// The numbers of their submissions. Nobody keeps one that is empty.
#[derive(Clone, Debug)]
pub(crate) struct UserQueue {
    /// The first of them. At hand, because each placement asks for it, of every user.
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

    /// Whether this one waits here, and the line knows who is first.
    pub(crate) fn holds(&self, order: u64) -> bool {
        self.all.contains(&order) && self.all.first() == Some(&self.first)
    }

    pub(crate) fn add(&mut self, order: u64) {
        self.first = self.first.min(order);
        self.all.insert(order);
    }

    /// Whether it was here.
    pub(crate) fn take(&mut self, order: u64) -> bool {
        let was_here = self.all.remove(&order);
        if self.first == order
            && let Some(next) = self.all.first()
        {
            self.first = *next;
        }
        was_here
    }
}
