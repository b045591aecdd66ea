//! Buckets: what holds for all of them ([`contract`]), and for each kind what is its own.

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

/// A bucket and how it is reached.
struct Bucket {
    /// As in `--storage`.
    address: String,
    /// `host:port` of whoever serves it, over plain HTTP.
    server: String,
    /// What a client is told that talks to this `http://host:port`.
    settings: fn(&str) -> Vec<(&'static str, String)>,
}

impl Bucket {
    /// Straight.
    fn direct(&self) -> ObjectBlobs {
        self.patient(&format!("http://{}", self.server))
    }

    /// With the patience that users get.
    fn patient(&self, endpoint: &str) -> ObjectBlobs {
        let Options {
            settings, part_bytes, ..
        } = self.impatient(endpoint);
        self.open(&Options {
            settings,
            part_bytes,
            ..Options::default()
        })
    }

    /// Through a proxy, with little patience.
    fn through(&self, proxy: &Proxy) -> ObjectBlobs {
        self.open(&self.impatient(&proxy.endpoint()))
    }

    fn open(&self, options: &Options) -> ObjectBlobs {
        ObjectBlobs::open_with(&self.address, options).unwrap()
    }

    /// So that trouble without end ends soon: a request 1 s, everything 4 s.
    fn impatient(&self, endpoint: &str) -> Options {
        let settings = (self.settings)(endpoint);
        Options {
            quick_timeout: Duration::from_millis(700),
            transfer_timeout: Duration::from_secs(1),
            budget: Duration::from_secs(4),
            first_wait: Duration::from_millis(20),
            longest_wait: Duration::from_millis(200),
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
    // Pseudo-random in blocks: quick to make, and no two parts alike.
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
