//! The jobs, found by their ids. A job is shared with whoever was handed its record: it is copied when it changes while
//! somebody still holds it, and not each time that it changes.

use crate::model::Job;
use aitk_common::id::JobId;
use foldhash::fast::RandomState;
use indexmap::IndexMap;
use std::sync::Arc;

/// A hashed table in an order that the events alone decide, so that a replay is the same.
pub(crate) type Table<K, V> = IndexMap<K, V, RandomState>;

/// Where a job is in the table. Another one may have its index once somebody was forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JobIndex(u32);

/// All jobs. Hashed, because most of what a step does begins by finding a job; and because that is mostly one of the last
/// two that it changed, these are tried first. In a large table, each look into the hash waits for memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Jobs {
    all: Table<JobId, Arc<Job>>,
    last: [usize; 2],
}

impl Jobs {
    fn index(&self, id: &str) -> Option<usize> {
        let is_it = |at: &usize| self.all.get_index(*at).is_some_and(|(known, _)| known.as_str() == id);
        self.last.into_iter().find(is_it).or_else(|| self.all.get_index_of(id))
    }

    pub(crate) fn get(&self, id: &JobId) -> Option<&Job> {
        self.find(id.as_str())
    }

    /// By text that need not be an id.
    pub(crate) fn find(&self, id: &str) -> Option<&Job> {
        let (_, job) = self.all.get_index(self.index(id)?)?;
        Some(job)
    }

    pub(crate) fn get_mut(&mut self, id: &JobId) -> Option<&mut Job> {
        let at = self.index(id.as_str())?;
        self.remember(at);
        self.all.get_index_mut(at).map(|(_, job)| Arc::make_mut(job))
    }

    fn remember(&mut self, at: usize) {
        if self.last[0] != at {
            self.last = [at, self.last[0]];
        }
    }

    /// The job as it is now, for a record.
    pub(crate) fn share(&self, id: &JobId) -> Option<Arc<Job>> {
        let (_, job) = self.all.get_index(self.index(id.as_str())?)?;
        Some(job.clone())
    }

    pub(crate) fn insert(&mut self, job: Arc<Job>) {
        let (at, _) = self.all.insert_full(job.id.clone(), job);
        self.remember(at);
    }

    /// The job, and its index: whoever had the last one has this one now.
    pub(crate) fn remove(&mut self, id: &JobId) -> Option<(Arc<Job>, JobIndex)> {
        let (at, _, job) = self.all.swap_remove_full(id.as_str())?;
        Some((job, job_index(at)))
    }

    /// Where a job is.
    pub(crate) fn index_of(&self, id: &JobId) -> Option<JobIndex> {
        self.index(id.as_str()).map(job_index)
    }

    /// Who is there.
    pub(crate) fn at(&self, index: JobIndex) -> Option<&Job> {
        self.all.get_index(index.0 as usize).map(|(_, job)| &**job)
    }

    /// Who is there, and is about to change.
    pub(crate) fn visit(&mut self, index: JobIndex) -> Option<&Job> {
        self.remember(index.0 as usize);
        self.at(index)
    }

    pub(crate) fn contains_key(&self, id: &JobId) -> bool {
        self.index(id.as_str()).is_some()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&JobId, &Job)> {
        self.all.iter().map(|(id, job)| (id, &**job))
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &Job> {
        self.all.values().map(|job| &**job)
    }
}

/// Four billion jobs would be more than any memory holds.
fn job_index(at: usize) -> JobIndex {
    JobIndex(u32::try_from(at).unwrap_or(u32::MAX))
}

#[cfg(test)]
impl Jobs {
    pub(crate) fn keys(&self) -> impl Iterator<Item = &JobId> {
        self.all.keys()
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }
}

#[cfg(test)]
impl std::ops::Index<&JobId> for Jobs {
    type Output = Job;

    fn index(&self, id: &JobId) -> &Job {
        &self.all[id.as_str()]
    }
}
