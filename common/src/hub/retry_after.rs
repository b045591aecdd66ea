//! How long a hub asks its clients to wait.

use jiff::Timestamp;
use jiff::fmt::rfc2822::DateTimeParser;
use reqwest::header::{HeaderMap, RETRY_AFTER};
use std::time::Duration;

/// The longest wait that a hub may ask for. Its limits count the requests of 5 minutes.
pub const MAX_RETRY_AFTER: Duration = Duration::from_secs(300);

/// The wait that a response asks for in its header `Retry-After`, in seconds or as a date.
#[must_use]
pub fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    parse(headers.get(RETRY_AFTER)?.to_str().ok()?, Timestamp::now())
}

fn parse(text: &str, now: Timestamp) -> Option<Duration> {
    let text = text.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = DateTimeParser::new().parse_timestamp(text).ok()?;
    // A date in the past: at once.
    Some(Duration::try_from(date.duration_since(now)).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_and_dates_are_read() {
        let now: Timestamp = "2015-10-21T07:27:00Z".parse().unwrap();
        let parse = |text| parse(text, now).map(|wait| wait.as_secs());
        assert_eq!(parse(" 17 "), Some(17));
        assert_eq!(parse("Wed, 21 Oct 2015 07:28:00 GMT"), Some(60));
        assert_eq!(parse("Wed, 21 Oct 2015 07:26:00 GMT"), Some(0));
        for wrong in ["", "-1", "1.5", "soon", "21 Oct"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
