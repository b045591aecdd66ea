//! When a command connects to its coordinator again, and when it gives up.

use std::time::{Duration, Instant};

/// The first delay before reconnecting; it doubles up to [`MAX_DELAY`].
const FIRST_DELAY: Duration = Duration::from_millis(250);
const MAX_DELAY: Duration = Duration::from_secs(5);
/// How long to try to reconnect. A restart of the coordinator takes less time.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Whether to try again to reach a coordinator that has been unreachable since then.
#[must_use]
pub fn may_reconnect(unreachable_since: Option<Instant>) -> bool {
    unreachable_since.is_none_or(|since| since.elapsed() < TIMEOUT)
}

/// The attempts to open an event stream again. Each method gets the time at which it is called.
#[derive(Clone, Debug)]
pub struct Reconnection {
    delay: Duration,
    disconnected_since: Option<Instant>,
    /// When the open stream was opened.
    opened: Option<Instant>,
}

impl Default for Reconnection {
    fn default() -> Self {
        Self {
            delay: FIRST_DELAY,
            disconnected_since: None,
            opened: None,
        }
    }
}

impl Reconnection {
    /// Whether a stream was closed and none has proved to work since.
    #[must_use]
    pub fn is_disconnected(&self) -> bool {
        self.disconnected_since.is_some()
    }

    /// A stream was opened. That alone proves nothing: a proxy may close it at once.
    pub fn stream_opened(&mut self, now: Instant) {
        self.opened = Some(now);
    }

    /// An event came.
    pub fn event_received(&mut self) {
        (self.delay, self.disconnected_since) = (FIRST_DELAY, None);
    }

    /// The coordinator answered a call, so that it is reachable. The delay stays, because it closed a stream.
    pub fn call_answered(&mut self) {
        self.disconnected_since = None;
    }

    /// The stream was closed, or could not be opened. A stream without an event worked if it was open for a while: a job that waits has none.
    pub fn stream_closed(&mut self, now: Instant) {
        let opened = self.opened.take();
        if opened.is_some_and(|opened| now.saturating_duration_since(opened) >= MAX_DELAY) {
            self.event_received();
        }
    }

    /// How long to wait before the next attempt. `None`: the coordinator was unreachable for too long.
    pub fn next_delay(&mut self, now: Instant) -> Option<Duration> {
        let since = *self.disconnected_since.get_or_insert(now);
        if now.saturating_duration_since(since) >= TIMEOUT {
            return None;
        }
        let delay = self.delay;
        self.delay = (delay * 2).min(MAX_DELAY);
        Some(delay)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    /// A job that waits has no event for hours, and its coordinator is restarted twice.
    #[test]
    fn a_stream_that_was_open_for_a_while_ends_an_outage() {
        let (mut reconnection, start) = (Reconnection::default(), Instant::now());
        reconnection.stream_opened(start);
        for restart in [600, 2400] {
            reconnection.stream_closed(after(start, restart));
            assert_eq!(reconnection.next_delay(after(start, restart)), Some(FIRST_DELAY));
            // The first attempt comes too early.
            reconnection.stream_closed(after(start, restart + 1));
            assert_eq!(
                reconnection.next_delay(after(start, restart + 1)),
                Some(FIRST_DELAY * 2)
            );
            reconnection.stream_opened(after(start, restart + 2));
        }
    }

    #[test]
    fn an_answer_ends_an_outage_and_streams_that_close_at_once_do_not() {
        let (mut reconnection, start) = (Reconnection::default(), Instant::now());
        let mut last = None;
        for second in (0..=300).step_by(20) {
            reconnection.stream_opened(after(start, second));
            reconnection.stream_closed(after(start, second + 1));
            last = reconnection.next_delay(after(start, second + 1));
            assert_eq!(last.is_none(), second == 300, "{second}");
        }
        assert_eq!(last, None);
        // A proxy closes streams without events, and passes calls on.
        reconnection.call_answered();
        assert!(!reconnection.is_disconnected());
        assert_eq!(reconnection.next_delay(after(start, 400)), Some(MAX_DELAY));
        reconnection.event_received();
        assert_eq!(reconnection.next_delay(after(start, 900)), Some(FIRST_DELAY));
    }
}
