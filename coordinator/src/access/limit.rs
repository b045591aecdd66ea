//! Slows down whoever guesses.
//!
//! After [`TRIES`] failures within [`WINDOW`] from one address, nothing from there is looked at for the rest of the
//! window: a right guess then looks like a wrong one. Tokens that were right from that address before stay welcome, so
//! that a guesser behind the same router locks nobody out who is in already. With IPv6 a network of 64 bits counts as one
//! address: everybody has as many of them as they like.

use aitk_common::hash::ContentHash;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

/// Failures that are allowed.
pub(super) const TRIES: u32 = 20;
/// For how long they are counted.
pub(super) const WINDOW: Duration = Duration::from_secs(60);
/// Addresses that are remembered. When there are more, the oldest are forgotten: whoever has that many addresses is not
/// slowed down by counting them.
const ADDRESSES: usize = 10_000;
/// Tokens that are remembered for an address.
const WELCOME: usize = 64;

#[derive(Debug)]
struct From {
    since: Instant,
    failures: u32,
    welcome: Vec<ContentHash>,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Limit {
    addresses: HashMap<IpAddr, From>,
}

/// How a failure is to be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// One of the first: worth a line each.
    Counted,
    /// The one that closes the limiter: worth a line that says so.
    Last,
    /// The limiter is closed.
    Ignored,
}

/// What counts as one address.
pub(crate) fn place(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(six) => IpAddr::V6(Ipv6Addr::from_bits(six.to_bits() >> 64 << 64)),
        four => four,
    }
}

impl Limit {
    /// Whether a token from this address is looked at.
    pub(super) fn open(&self, now: Instant, address: IpAddr, token: &ContentHash) -> bool {
        self.addresses.get(&address).is_none_or(|from| {
            from.failures < TRIES || now.duration_since(from.since) >= WINDOW || from.welcome.contains(token)
        })
    }

    /// A token was right. Whether it is the first time that it came from there, as far as is remembered.
    pub(super) fn right(&mut self, now: Instant, address: IpAddr, token: ContentHash) -> bool {
        let from = self.from(now, address);
        if from.welcome.contains(&token) {
            return false;
        }
        if from.welcome.len() >= WELCOME {
            from.welcome.remove(0);
        }
        from.welcome.push(token);
        true
    }

    /// A token was wrong, or not looked at.
    pub(super) fn wrong(&mut self, now: Instant, address: IpAddr) -> Failure {
        let from = self.from(now, address);
        if now.duration_since(from.since) >= WINDOW {
            from.since = now;
            from.failures = 0;
        }
        from.failures = from.failures.saturating_add(1);
        match from.failures {
            failures if failures < TRIES => Failure::Counted,
            TRIES => Failure::Last,
            _ => Failure::Ignored,
        }
    }

    fn from(&mut self, now: Instant, address: IpAddr) -> &mut From {
        if self.addresses.len() >= ADDRESSES && !self.addresses.contains_key(&address) {
            self.addresses
                .retain(|_, from| now.duration_since(from.since) < WINDOW && from.failures > 0);
            if self.addresses.len() >= ADDRESSES
                && let Some(oldest) = self
                    .addresses
                    .iter()
                    .min_by_key(|(_, from)| from.since)
                    .map(|(ip, _)| *ip)
            {
                self.addresses.remove(&oldest);
            }
        }
        self.addresses.entry(address).or_insert_with(|| From {
            since: now,
            failures: 0,
            welcome: Vec::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guesser_is_shut_out_and_those_who_are_in_stay_in() {
        let (begin, here, there) = (Instant::now(), IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let (known, guess) = (ContentHash::of(b"known"), ContentHash::of(b"guess"));
        let mut limit = Limit::default();
        assert!(limit.right(begin, here, known) && !limit.right(begin, here, known));
        for _ in 1..TRIES {
            assert_eq!(limit.wrong(begin, here), Failure::Counted);
        }
        assert!(limit.open(begin, here, &guess));
        assert_eq!(limit.wrong(begin, here), Failure::Last);
        assert_eq!(limit.wrong(begin, here), Failure::Ignored);
        assert!(!limit.open(begin, here, &guess), "even if it is right");
        assert!(limit.open(begin, here, &known) && limit.open(begin, there, &guess));
        let later = begin + WINDOW;
        assert!(limit.open(later, here, &guess));
        assert_eq!(limit.wrong(later, here), Failure::Counted);
    }

    #[test]
    fn a_network_is_one_place() {
        let place = |text: &str| place(text.parse().unwrap());
        assert_eq!(place("2001:db8:1:2:3:4:5:6"), place("2001:db8:1:2:ffff::1"));
        assert_ne!(place("2001:db8:1:2::1"), place("2001:db8:1:3::1"));
        assert_eq!(place("::ffff:10.0.0.1"), place("10.0.0.1"));
        assert_ne!(place("10.0.0.1"), place("10.0.0.2"));
    }

    #[test]
    fn many_addresses_take_bounded_memory() {
        let mut limit = Limit::default();
        for number in 0..ADDRESSES as u32 + 100 {
            limit.wrong(Instant::now(), IpAddr::from(number.to_be_bytes()));
        }
        assert_eq!(limit.addresses.len(), ADDRESSES);
    }
}
