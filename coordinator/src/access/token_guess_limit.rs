//! Limits guesses of tokens per address.
//!
//! After [`MAX_FAILURES`] failures within [`WINDOW`] from one address, unknown tokens from there are not checked for
//! the rest of the window: a correct guess then looks like a wrong one. Tokens that were valid from that address
//! before are still accepted, so that a guesser behind the same router locks out no other user. With IPv6, a /64
//! network counts as one address, because every client can use as many addresses of its network as it likes.

use aitk_common::hash::ContentHash;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

/// Failures allowed within [`WINDOW`].
pub(super) const MAX_FAILURES: u32 = 20;
/// How long failures are counted.
pub(super) const WINDOW: Duration = Duration::from_secs(60);
/// Addresses kept in memory. Beyond that, the oldest is dropped: a client with that many addresses is not slowed down
/// by counting.
const MAX_ADDRESSES: usize = 10_000;
/// Valid tokens kept per address.
const MAX_KNOWN_TOKENS: usize = 64;

#[derive(Debug)]
struct AddressRecord {
    since: Instant,
    failures: u32,
    known_tokens: Vec<ContentHash>,
}

/// Counts failures per address; see the module.
#[derive(Debug, Default)]
pub(super) struct TokenGuessLimiter {
    addresses: HashMap<IpAddr, AddressRecord>,
}

/// How a failure is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// Below the limit: logged individually.
    Counted,
    /// Reaches the limit: logged as such.
    Last,
    /// Beyond the limit: not logged.
    Ignored,
}

/// Returns the network that counts as one address: an IPv4 address, or the /64 network of an IPv6 address.
pub(crate) fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(six) => IpAddr::V6(Ipv6Addr::from_bits(six.to_bits() >> 64 << 64)),
        four => four,
    }
}

impl TokenGuessLimiter {
    /// Whether a token from this address may be checked.
    pub(super) fn allows(&self, now: Instant, address: IpAddr, token: &ContentHash) -> bool {
        self.addresses.get(&address).is_none_or(|record| {
            record.failures < MAX_FAILURES
                || now.duration_since(record.since) >= WINDOW
                || record.known_tokens.contains(token)
        })
    }

    /// Records a valid token. Returns whether it is the first use from this address, as far as is known.
    pub(super) fn record_success(&mut self, now: Instant, address: IpAddr, token: ContentHash) -> bool {
        let record = self.record(now, address);
        if record.known_tokens.contains(&token) {
            return false;
        }
        if record.known_tokens.len() >= MAX_KNOWN_TOKENS {
            record.known_tokens.remove(0);
        }
        record.known_tokens.push(token);
        true
    }

    /// Records an invalid or unchecked token.
    pub(super) fn record_failure(&mut self, now: Instant, address: IpAddr) -> Failure {
        let record = self.record(now, address);
        if now.duration_since(record.since) >= WINDOW {
            record.since = now;
            record.failures = 0;
        }
        record.failures = record.failures.saturating_add(1);
        match record.failures {
            failures if failures < MAX_FAILURES => Failure::Counted,
            MAX_FAILURES => Failure::Last,
            _ => Failure::Ignored,
        }
    }

    fn record(&mut self, now: Instant, address: IpAddr) -> &mut AddressRecord {
        if self.addresses.len() >= MAX_ADDRESSES && !self.addresses.contains_key(&address) {
            self.addresses
                .retain(|_, record| now.duration_since(record.since) < WINDOW && record.failures > 0);
            if self.addresses.len() >= MAX_ADDRESSES
                && let Some(oldest) = self
                    .addresses
                    .iter()
                    .min_by_key(|(_, record)| record.since)
                    .map(|(ip, _)| *ip)
            {
                self.addresses.remove(&oldest);
            }
        }
        self.addresses.entry(address).or_insert_with(|| AddressRecord {
            since: now,
            failures: 0,
            known_tokens: Vec::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_too_many_failures_only_known_tokens_are_accepted() {
        let (begin, here, there) = (Instant::now(), IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let (known, guess) = (ContentHash::of(b"known"), ContentHash::of(b"guess"));
        let mut limit = TokenGuessLimiter::default();
        assert!(limit.record_success(begin, here, known) && !limit.record_success(begin, here, known));
        for _ in 1..MAX_FAILURES {
            assert_eq!(limit.record_failure(begin, here), Failure::Counted);
        }
        assert!(limit.allows(begin, here, &guess));
        assert_eq!(limit.record_failure(begin, here), Failure::Last);
        assert_eq!(limit.record_failure(begin, here), Failure::Ignored);
        assert!(!limit.allows(begin, here, &guess), "even if it is right");
        assert!(limit.allows(begin, here, &known) && limit.allows(begin, there, &guess));
        let later = begin + WINDOW;
        assert!(limit.allows(later, here, &guess));
        assert_eq!(limit.record_failure(later, here), Failure::Counted);
    }

    #[test]
    fn an_ipv6_64_network_counts_as_one_address() {
        let network = |text: &str| network_of(text.parse().unwrap());
        assert_eq!(network("2001:db8:1:2:3:4:5:6"), network("2001:db8:1:2:ffff::1"));
        assert_ne!(network("2001:db8:1:2::1"), network("2001:db8:1:3::1"));
        assert_eq!(network("::ffff:10.0.0.1"), network("10.0.0.1"));
        assert_ne!(network("10.0.0.1"), network("10.0.0.2"));
    }

    #[test]
    fn many_addresses_take_bounded_memory() {
        let mut limit = TokenGuessLimiter::default();
        for number in 0..MAX_ADDRESSES as u32 + 100 {
            limit.record_failure(Instant::now(), IpAddr::from(number.to_be_bytes()));
        }
        assert_eq!(limit.addresses.len(), MAX_ADDRESSES);
    }
}
