//! What is posted when a job has ended: fields for programs, and one line for those chat services that show a field called
//! `text` (Slack, Mattermost, Rocket.Chat) or `content` (Discord). No config, no log, no path of an input.

use crate::output::SCHEMA_VERSION;
use crate::output::format::{duration, printable, rfc3339};
use crate::output::table::shorten;
use crate::views::moment;
use aitk_common::control::JobView;
use serde_json::{Value, json};

/// Columns of a name, and of a reason: chat services refuse long lines.
const LONGEST_NAME: usize = 200;
const LONGEST_REASON: usize = 600;

/// The message about this job.
#[must_use]
pub(super) fn of(job: &JobView) -> Value {
    let name = shorten(&printable(&job.name), LONGEST_NAME);
    let reason = shorten(&printable(&job.reason), LONGEST_REASON);
    let took = job.run_time();
    let mut line = format!("{name} ({}) {}", job.id, job.state);
    if let Some(took) = took {
        line.push_str(&format!(" after {}", duration(took)));
    }
    if !reason.is_empty() && reason != job.state.name() {
        line.push_str(&format!(": {reason}"));
    }
    let time = |time: Option<_>| time.map(|time| rfc3339(moment(time)));
    json!({
        "schema_version": SCHEMA_VERSION,
        "text": line.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;"),
        "content": line,
        // Whoever is called @everyone in a name is not called.
        "allowed_mentions": { "parse": [] },
        "job": {
            "id": job.id,
            "name": name,
            "kind": job.kind,
            "owner": job.owner,
            "state": job.state.name(),
            "reason": reason,
            "created": time(Some(job.created)),
            "started": time(job.started),
            "ended": time(job.ended),
            "seconds": took.map(|took| took.as_secs()),
            "checkpoint_step": job.checkpoint_step,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::tests::job;
    use aitk_common::control::{JobState, UnixMillis};

    #[test]
    fn a_message_is_short_and_calls_nobody() {
        let mut ended = job("j1", "<!everyone> & co\u{1b}", JobState::Failed, 1000);
        ended.reason = "out of memory ".repeat(100);
        (ended.started, ended.ended) = (Some(UnixMillis(2000)), Some(UnixMillis(127_000)));
        ended.config_text = Some("secret".to_owned());
        let message = of(&ended);
        let text = message["text"].as_str().unwrap();
        assert!(
            text.starts_with("&lt;!everyone&gt; &amp; co\u{fffd} (j1) failed after 2m 05s: out of memory"),
            "{text}"
        );
        assert!(text.len() < 1000, "{}", text.len());
        assert_eq!(message["content"].as_str().unwrap().chars().next(), Some('<'));
        assert_eq!(message["job"]["state"], "failed");
        assert_eq!(message["job"]["seconds"], 125);
        assert_eq!(message["job"]["ended"], "1970-01-01T00:02:07.000Z");
        assert!(!message.to_string().contains("secret"));
    }
}
