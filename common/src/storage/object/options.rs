//! Options of an object store.

use std::collections::BTreeMap;
use std::time::Duration;

/// Timeouts, retry limits and settings of a store.
#[derive(Clone)]
pub struct Options {
    /// The timeout of requests without a body, and of stalled downloads; they are retried. Default 30 s.
    pub quick_timeout: Duration,
    /// The timeout of a whole part of a body. Smaller bodies have a proportional timeout of at least
    /// [`Self::quick_timeout`]. Default 1,050 s: with the other defaults, 256 kbit/s are sufficient. It is not what ends a transfer that gets no
    /// further: the kernel closes a connection whose data nobody acknowledges for 30 s (Linux; `reqwest` sets `TCP_USER_TIMEOUT`), and a download
    /// without data ends after [`Self::quick_timeout`]. It ends a request that the server took and does not answer.
    pub transfer_timeout: Duration,
    /// The total time for a request and its retries. Of an attempt that broke, at most [`Self::quick_timeout`] counts, because it was sending or
    /// receiving before. Default 300 s.
    pub budget: Duration,
    /// The delay before the first retry, which doubles with each retry. Default 200 ms.
    pub first_delay: Duration,
    /// The longest delay. Default 10 s.
    pub max_delay: Duration,
    /// The part size of transfers; S3 requires at least 5 MiB. Default 8 MiB.
    pub part_bytes: usize,
    /// Number of concurrent part transfers over all calls. Each part is held in memory. Default 4.
    pub in_flight: usize,
    /// Settings that take precedence over the environment, with `object_store`'s names: `aws_endpoint`, `aws_access_key_id`, ….
    pub settings: BTreeMap<String, String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            quick_timeout: Duration::from_secs(30),
            transfer_timeout: Duration::from_secs(1050),
            budget: Duration::from_secs(300),
            first_delay: Duration::from_millis(200),
            max_delay: Duration::from_secs(10),
            part_bytes: 8 << 20,
            in_flight: 4,
            settings: BTreeMap::new(),
        }
    }
}

impl std::fmt::Debug for Options {
    /// Shows only the names of settings, because their values may be secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let settings: Vec<_> = self.settings.keys().collect();
        f.debug_struct("Options")
            .field("budget", &self.budget)
            .field("settings", &settings)
            .finish_non_exhaustive()
    }
}
