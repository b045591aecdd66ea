//! Tests of buckets: those that apply to every provider ([`contract`]), and those of single providers.

mod azure;
mod contract;
mod google;
mod proxy;
mod s3;
mod server;

use crate::support::Random;
use aitk_common::hash::ContentHash;
use aitk_common::storage::{ObjectBlobs, Options};
use bytes::Bytes;
use proxy::Proxy;
use std::time::Duration;

const MIB: usize = 1 << 20;

/// A bucket and its connection settings.
struct Bucket {
    /// As in `--storage`.
    address: String,
    /// `host:port` of the server, which uses plain HTTP.
    server: String,
    /// The client settings for a server at this `http://host:port`.
    settings: fn(&str) -> Vec<(&'static str, String)>,
}

impl Bucket {
    /// A store that is connected directly.
    fn direct(&self) -> ObjectBlobs {
        self.with_default_timeouts(&format!("http://{}", self.server))
    }

    /// A store with the default timeouts.
    fn with_default_timeouts(&self, endpoint: &str) -> ObjectBlobs {
        let Options {
            settings, part_bytes, ..
        } = self.short_timeouts(endpoint);
        self.open(&Options {
            settings,
            part_bytes,
            ..Options::default()
        })
    }

    /// A store behind a proxy, with short timeouts.
    fn through(&self, proxy: &Proxy) -> ObjectBlobs {
        self.open(&self.short_timeouts(&proxy.endpoint()))
    }

    fn open(&self, options: &Options) -> ObjectBlobs {
        ObjectBlobs::open_with(&self.address, options).unwrap()
    }

    /// Options with short timeouts: 1 s per request, 4 s in total.
    fn short_timeouts(&self, endpoint: &str) -> Options {
        let settings = (self.settings)(endpoint);
        Options {
            quick_timeout: Duration::from_millis(700),
            transfer_timeout: Duration::from_secs(1),
            budget: Duration::from_secs(4),
            first_delay: Duration::from_millis(20),
            max_delay: Duration::from_millis(200),
            part_bytes: 5 * MIB,
            settings: settings
                .into_iter()
                .map(|(key, value)| (key.to_owned(), value))
                .collect(),
            ..Options::default()
        }
    }
}

fn blob(seed: u64, length: usize) -> (ContentHash, Bytes) {
    // A repeated pseudo-random block with a counter: fast to generate, and all parts differ.
    let block = Random::new(seed).bytes(4096);
    let mut bytes = Vec::with_capacity(length);
    while bytes.len() < length {
        let at = (bytes.len() / 4096) as u64;
        bytes.extend_from_slice(&at.to_le_bytes());
        bytes.extend_from_slice(&block[8..]);
    }
    bytes.truncate(length);
    (ContentHash::of(&bytes), Bytes::from(bytes))
}
