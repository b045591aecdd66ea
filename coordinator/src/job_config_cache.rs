//! Cache of the configs of recently submitted jobs: most jobs are assigned soon after they are stored, and reading
//! each config back would cost a query per assignment.

use aitk_common::id::JobId;
use aitk_scheduler::Payload;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum bytes in the cache: thousands of usual configs.
const MAX_CACHED_BYTES: usize = 16 << 20;
/// Approximate overhead per config in bytes.
const OVERHEAD: usize = 512;

/// The newest configs, up to the maximum size; the others are in the store. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct JobConfigCache(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    by_job: HashMap<JobId, Arc<Payload>>,
    order: VecDeque<JobId>,
    bytes: usize,
}

impl JobConfigCache {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a config; the oldest ones are dropped.
    pub(crate) fn insert(&self, job: &JobId, payload: &Arc<Payload>) {
        self.inner().insert(job, payload);
    }

    /// Returns a config if it is in the cache.
    pub(crate) fn get(&self, job: &JobId) -> Option<Arc<Payload>> {
        self.inner().by_job.get(job).cloned()
    }
}

impl Inner {
    fn insert(&mut self, job: &JobId, payload: &Arc<Payload>) {
        if self.by_job.insert(job.clone(), payload.clone()).is_some() {
            return;
        }
        self.order.push_back(job.clone());
        self.bytes += size(payload);
        while self.bytes > MAX_CACHED_BYTES
            && let Some(oldest) = self.order.pop_front()
        {
            if let Some(gone) = self.by_job.remove(&oldest) {
                self.bytes -= size(&gone);
            }
        }
    }
}

fn size(payload: &Payload) -> usize {
    let inputs: usize = payload.inputs.keys().map(String::len).sum();
    OVERHEAD + payload.job_json.len() + payload.config_text.len() + inputs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payload(bytes: usize) -> Arc<Payload> {
        Arc::new(Payload {
            config_text: "x".repeat(bytes).into(),
            ..Payload::default()
        })
    }

    #[test]
    fn the_cache_keeps_the_newest_configs_up_to_its_size() {
        let payloads = JobConfigCache::default();
        let id = |n: u32| JobId::new(format!("j{n}"));
        for n in 0..40 {
            payloads.insert(&id(n), &payload(1 << 20));
            // The same config again takes no more space.
            payloads.insert(&id(n), &payload(1 << 20));
            let bytes = payloads.inner().bytes;
            assert!(bytes <= MAX_CACHED_BYTES, "{bytes}");
        }
        assert!(payloads.get(&id(0)).is_none() && payloads.get(&id(39)).is_some());
        let kept = |payloads: &JobConfigCache| {
            let inner = payloads.inner();
            (inner.bytes, inner.by_job.len(), inner.order.len())
        };
        let (_, jobs, order) = kept(&payloads);
        assert_eq!(jobs, order);
        // A config larger than the cache is not kept.
        payloads.insert(&id(99), &payload(MAX_CACHED_BYTES));
        assert!(payloads.get(&id(99)).is_none());
        let (bytes, jobs, _) = kept(&payloads);
        assert_eq!((bytes, jobs), (0, 0));
    }
}
