//! The JSON that is posted when a job has ended: fields for programs, and one line for chat services that show a field
//! `text` (Slack, Mattermost, Rocket.Chat) or `content` (Discord). It has no config and no log; the reason of a failure may name a file of
//! the config.

use crate::output::SCHEMA_VERSION;
use crate::output::format::{duration, printable, rfc3339};
use crate::output::table::shorten;
use crate::views::timestamp;
use aitk_common::control_plane::JobView;
use serde_json::{Value, json};

/// The largest width of a name and of a reason, because chat services refuse long lines.
const MAX_NAME_COLUMNS: usize = 200;
const MAX_REASON_COLUMNS: usize = 600;

/// Builds the message about this job.
#[must_use]
pub(super) fn build(job: &JobView) -> Value {
    let name = shorten(&printable(&job.name), MAX_NAME_COLUMNS);
    let reason = shorten(&printable(&job.reason), MAX_REASON_COLUMNS);
    let took = job.run_time();
    let mut line = format!("{name} ({}) {}", job.id, job.state);
    if let Some(took) = took {
        line.push_str(&format!(" after {}", duration(took)));
    }
    if !reason.is_empty() && reason != job.state.name() {
        line.push_str(&format!(": {reason}"));
    }
    let time = |time: Option<_>| time.map(|time| rfc3339(timestamp(time)));
    json!({
        "schema_version": SCHEMA_VERSION,
        // The zero-width space keeps names such as `@all` from notifying anybody on Mattermost and Rocket.Chat.
        "text": line.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('@', "@\u{200b}"),
        "content": line,
        // A name such as `@everyone` must not notify anybody on Discord.
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
    use aitk_common::control_plane::{JobState, UnixMillis};

    #[test]
    fn a_message_is_short_and_mentions_nobody() {
        let mut ended = job("j1", "<!everyone> & @all\u{1b}", JobState::Failed, 1000);
        ended.reason = "out of memory ".repeat(100);
        (ended.started, ended.ended) = (Some(UnixMillis(2000)), Some(UnixMillis(127_000)));
        ended.config_text = Some("secret".to_owned());
        let message = build(&ended);
        let text = message["text"].as_str().unwrap();
        assert!(
            text.starts_with("&lt;!everyone&gt; &amp; @\u{200b}all\u{fffd} (j1) failed after 2m 05s: out of memory"),
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
