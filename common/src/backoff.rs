//! Growing delays between the attempts of an operation that fails for a while.

use std::time::{Duration, Instant};

/// Delays that double, within a limit on the total time. The time of the attempts counts too, because one attempt may take its
/// whole timeout.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    next: Duration,
    longest: Duration,
    deadline: Instant,
}

impl Backoff {
    /// Starts now: the first delay takes `first`, no delay more than `longest`, and none ends later than after `total`.
    #[must_use]
    pub fn new(first: Duration, longest: Duration, total: Duration) -> Self {
        Self {
            next: first,
            longest,
            deadline: Instant::now() + total,
        }
    }

    /// The delay before the next attempt; `None` when it would end after the limit.
    #[must_use]
    pub fn next_delay(&mut self) -> Option<Duration> {
        let delay = self.next;
        self.next = (delay * 2).min(self.longest);
        (Instant::now() + delay < self.deadline).then_some(delay)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_longest_and_end_with_the_limit() {
        let seconds = Duration::from_secs;
        let mut backoff = Backoff::new(seconds(1), seconds(5), seconds(1000));
        let delays: Vec<_> = std::iter::from_fn(|| backoff.next_delay()).take(5).collect();
        assert_eq!(delays, [1, 2, 4, 5, 5].map(seconds));
        let mut short = Backoff::new(seconds(1), seconds(5), seconds(3));
        assert_eq!(short.next_delay(), Some(seconds(1)));
        assert_eq!(short.next_delay(), Some(seconds(2)));
        assert_eq!(short.next_delay(), None);
    }
}
