//! The table of jobs. Each job is in an `Arc` that its record shares: a job is copied only when it changes while a record of
//! it still exists.

use crate::model::Job;
use aitk_common::id::JobId;
use foldhash::fast::RandomState;
use indexmap::IndexMap;
use std::sync::Arc;

/// A hash table whose order depends only on the events, so that a replay gives the same order.
pub(crate) type Table<K, V> = IndexMap<K, V, RandomState>;

/// The index of a job in the table. It may belong to another job after a job was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JobIndex(u32);

/// All jobs by id. The last two jobs that changed are tried before the hash table, because most look-ups are for one of them
/// and each look-up in a large hash table waits for memory.
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

    /// The job with this id. The text need not be a valid id.
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

    /// A shared copy of the job as it is now, for a record.
    pub(crate) fn share(&self, id: &JobId) -> Option<Arc<Job>> {
        let (_, job) = self.all.get_index(self.index(id.as_str())?)?;
        Some(job.clone())
    }

    pub(crate) fn insert(&mut self, job: Arc<Job>) {
        let (at, _) = self.all.insert_full(job.id.clone(), job);
        self.remember(at);
    }

    /// Removes a job. Returns it and its index, which now belongs to the job that was last in the table.
    pub(crate) fn remove(&mut self, id: &JobId) -> Option<(Arc<Job>, JobIndex)> {
        let (at, _, job) = self.all.swap_remove_full(id.as_str())?;
        Some((job, job_index(at)))
    }

    /// The index of a job.
    pub(crate) fn index_of(&self, id: &JobId) -> Option<JobIndex> {
        self.index(id.as_str()).map(job_index)
    }

    /// The job with this index.
    pub(crate) fn at(&self, index: JobIndex) -> Option<&Job> {
        self.all.get_index(index.0 as usize).map(|(_, job)| &**job)
    }

    /// The job with this index, which the caller is about to change: the next look-up finds it faster.
    pub(crate) fn select(&mut self, index: JobIndex) -> Option<&Job> {
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

/// An index as 32 bits: no memory holds four billion jobs.
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
