//! The state of the conversation with a program: checks every message, without IO and without a clock.

use super::message::{ProgramMessage, VERSION, parse, shorten};
use serde_json::Value;
use std::time::Duration;

/// The most messages at once, and per second on average.
pub(super) const MESSAGES_AT_ONCE: f64 = 10_000.0;
/// Messages per second that a program may send for long.
pub(super) const MESSAGES_PER_SECOND: f64 = 1_000.0;
/// The most steps.
const MAX_STEPS: u64 = 1_000_000_000_000;
/// The most different files that a program may announce.
const MAX_ARTIFACTS: usize = 1_000;
/// The longest message of a log line or an error, in characters.
const MAX_TEXT: usize = 4_000;

/// A message that was checked.
#[derive(Debug, PartialEq)]
pub(super) enum Received {
    /// The first message: its name, and the schema of its config.
    Hello(Option<String>, Option<Value>),
    /// Step, total and loss.
    Progress(u64, u64, Option<f64>),
    /// Level and text.
    Log(&'static str, String),
    /// The path of a file, and its number among the announced files. The path itself is not checked here.
    Artifact(String, u64),
    /// All work is done.
    Done,
    /// The program says that it failed.
    Error(String),
}

/// The state of the conversation.
#[derive(Debug)]
pub(super) struct Session {
    has_hello: bool,
    has_ended: bool,
    progress: Option<(u64, u64)>,
    artifacts: Vec<String>,
    /// How many messages may come now, and when that was computed.
    allowance: f64,
    counted_at: Duration,
}

impl Session {
    /// A conversation that has just begun.
    pub(super) fn new() -> Self {
        Self {
            has_hello: false,
            has_ended: false,
            progress: None,
            artifacts: Vec::new(),
            allowance: MESSAGES_AT_ONCE,
            counted_at: Duration::ZERO,
        }
    }

    /// Whether the first message came.
    pub(super) fn has_hello(&self) -> bool {
        self.has_hello
    }

    /// The last step and the total.
    pub(super) fn progress(&self) -> Option<(u64, u64)> {
        self.progress
    }

    /// Checks a line that came at the time `now` since the start.
    ///
    /// # Errors
    /// What the program did wrong; the rest of a sentence that begins with the extension's name.
    pub(super) fn receive(&mut self, line: &[u8], now: Duration) -> Result<Received, String> {
        self.count_message(now)?;
        let message = parse(line)?;
        if self.has_ended {
            return Err("sent a message after `done` or `error`, which must be its last".to_owned());
        }
        match (&message, self.has_hello) {
            (ProgramMessage::Hello { .. }, true) => return Err("sent `hello` twice".to_owned()),
            (ProgramMessage::Hello { .. } | ProgramMessage::Error { .. }, false) | (_, true) => {}
            (_, false) => return Err("sent another message before `hello`, which must be its first".to_owned()),
        }
        match message {
            ProgramMessage::Hello {
                version,
                name,
                config_schema,
            } => {
                if version != VERSION {
                    return Err(format!(
                        "speaks version {version} of the protocol, but this aitk speaks version {VERSION}: install a version of the \
                         extension for it"
                    ));
                }
                self.has_hello = true;
                Ok(Received::Hello(name.map(|name| shorten(&name, 100)), config_schema))
            }
            ProgramMessage::Progress { step, total, loss } => {
                self.check_progress(step, total)?;
                Ok(Received::Progress(step, total, loss))
            }
            ProgramMessage::Log { level, message } => {
                let level = match level.as_str() {
                    "info" => "info",
                    "warn" => "warn",
                    "error" => "error",
                    other => {
                        return Err(format!(
                            "sent a log line of the level `{}`; expected `info`, `warn` or `error`",
                            shorten(other, 40)
                        ));
                    }
                };
                Ok(Received::Log(level, shorten(&message, MAX_TEXT)))
            }
            ProgramMessage::Artifact { path } => {
                let number = match self.artifacts.iter().position(|known| *known == path) {
                    Some(number) => number,
                    None if self.artifacts.len() >= MAX_ARTIFACTS => {
                        return Err(format!("announced more than {MAX_ARTIFACTS} files"));
                    }
                    None => {
                        self.artifacts.push(path.clone());
                        self.artifacts.len() - 1
                    }
                };
                Ok(Received::Artifact(path, number as u64))
            }
            ProgramMessage::Done => match self.progress {
                Some((step, total)) if step < total => Err(format!(
                    "sent `done` at step {step} of {total}: its progress or its end is wrong"
                )),
                _ => {
                    self.has_ended = true;
                    Ok(Received::Done)
                }
            },
            ProgramMessage::Error { message } => {
                self.has_ended = true;
                Ok(Received::Error(shorten(&message, MAX_TEXT)))
            }
        }
    }

    fn check_progress(&mut self, step: u64, total: u64) -> Result<(), String> {
        if total == 0 || total > MAX_STEPS {
            return Err(format!("reported a total of {total} steps; expected 1 to {MAX_STEPS}"));
        }
        if step > total {
            return Err(format!("reported step {step} of {total}, which is beyond the total"));
        }
        if let Some((before, total_before)) = self.progress {
            if total != total_before {
                return Err(format!("reported a total of {total} steps, but {total_before} before"));
            }
            if step < before {
                return Err(format!(
                    "reported step {step} of {total} after step {before}: progress went backwards"
                ));
            }
        }
        self.progress = Some((step, total));
        Ok(())
    }

    fn count_message(&mut self, now: Duration) -> Result<(), String> {
        let passed = now.saturating_sub(self.counted_at);
        self.counted_at = now;
        self.allowance = (self.allowance + passed.as_secs_f64() * MESSAGES_PER_SECOND).min(MESSAGES_AT_ONCE) - 1.0;
        match self.allowance < 0.0 {
            true => Err(format!(
                "floods the attempt with messages; at most {MESSAGES_AT_ONCE} at once and {MESSAGES_PER_SECOND} per second are \
                 accepted"
            )),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    const HELLO: &str = r#"{"type":"hello","version":1,"name":"x","config_schema":{"type":"object"}}"#;

    /// Sends lines to a new session. Returns the result of the last one.
    fn send(lines: &[&str]) -> Result<Received, String> {
        let mut session = Session::new();
        let mut last = Err("no line".to_owned());
        for line in lines {
            last = session.receive(line.as_bytes(), Duration::ZERO);
        }
        last
    }

    #[test]
    fn a_usual_conversation_is_accepted() {
        let mut session = Session::new();
        let mut receive = |line: &str| session.receive(line.as_bytes(), Duration::ZERO).unwrap();
        assert!(matches!(receive(HELLO), Received::Hello(Some(_), Some(_))));
        let progress = receive(r#"{"type":"progress","step":1,"total":2,"loss":0.5,"more":[]}"#);
        assert_eq!(progress, Received::Progress(1, 2, Some(0.5)));
        assert_eq!(
            receive(r#"{"type":"log","level":"warn","message":"a\nb"}"#),
            Received::Log("warn", "a b".into())
        );
        assert_eq!(
            receive(r#"{"type":"artifact","path":"a"}"#),
            Received::Artifact("a".into(), 0)
        );
        assert_eq!(
            receive(r#"{"type":"artifact","path":"b"}"#),
            Received::Artifact("b".into(), 1)
        );
        assert_eq!(
            receive(r#"{"type":"artifact","path":"a"}"#),
            Received::Artifact("a".into(), 0)
        );
        receive(r#"{"type":"progress","step":2,"total":2}"#);
        assert_eq!(receive(r#"{"type":"done"}"#), Received::Done);
    }

    #[test]
    fn wrong_messages_end_the_conversation_with_a_reason() {
        let step = |step: u64, total: u64| format!(r#"{{"type":"progress","step":{step},"total":{total}}}"#);
        for (lines, expected) in [
            (vec![r#"{"type":"hello","version":2}"#], "speaks version 2"),
            (vec![HELLO, HELLO], "twice"),
            (vec![&*step(1, 2)], "before `hello`"),
            (vec![HELLO, &*step(3, 2)], "beyond the total"),
            (vec![HELLO, &*step(3, 9), &*step(2, 9)], "went backwards"),
            (vec![HELLO, &*step(3, 9), &*step(4, 10)], "but 9 before"),
            (vec![HELLO, &*step(0, 0)], "a total of 0"),
            (vec![HELLO, &*step(3, 9), r#"{"type":"done"}"#], "`done` at step 3 of 9"),
            (vec![HELLO, r#"{"type":"done"}"#, &*step(1, 2)], "after `done`"),
            (
                vec![HELLO, r#"{"type":"log","level":"loud","message":""}"#],
                "level `loud`",
            ),
            (
                vec![HELLO, r#"{"type":"progress","step":-1,"total":2}"#],
                "not a message of the protocol",
            ),
            (
                vec![HELLO, r#"{"type":"progress","step":1,"total":2,"loss":1e999}"#],
                "not a message of the protocol",
            ),
            (vec![HELLO, r#"{"type":"surprise"}"#], "not a message of the protocol"),
            (vec!["print"], "standard error"),
            (vec![""], "not a message of the protocol"),
        ] {
            let error = send(&lines).unwrap_err();
            assert!(error.contains(expected), "{lines:?}: {error}");
        }
        let error = Session::new()
            .receive(b"{\"type\":\"hello\xff\"}", Duration::ZERO)
            .unwrap_err();
        assert!(error.contains("not UTF-8"), "{error}");
    }

    #[test]
    fn a_flood_is_refused_and_a_steady_stream_is_not() {
        let mut session = Session::new();
        let log = br#"{"type":"log","level":"info","message":"x"}"#;
        session.receive(HELLO.as_bytes(), Duration::ZERO).unwrap();
        let flooded = (0..20_000).find_map(|_| session.receive(log, Duration::ZERO).err());
        assert!(flooded.unwrap().contains("floods"));
        let mut session = Session::new();
        session.receive(HELLO.as_bytes(), Duration::ZERO).unwrap();
        for milliseconds in 0..30_000 {
            session.receive(log, Duration::from_millis(milliseconds)).unwrap();
        }
    }

    #[test]
    fn the_number_of_files_is_limited() {
        let mut session = Session::new();
        session.receive(HELLO.as_bytes(), Duration::ZERO).unwrap();
        let mut announce = |number: usize| {
            let line = format!(r#"{{"type":"artifact","path":"f{number}"}}"#);
            session.receive(line.as_bytes(), Duration::ZERO)
        };
        for number in 0..MAX_ARTIFACTS {
            announce(number).unwrap();
        }
        assert!(announce(0).is_ok());
        assert!(announce(MAX_ARTIFACTS).is_err());
    }

    fn any_line() -> impl Strategy<Value = Vec<u8>> {
        let kinds = vec!["hello", "progress", "log", "artifact", "done", "error", "x"];
        let message = (proptest::sample::select(kinds), any::<i32>(), any::<u8>(), ".{0,20}").prop_map(
            |(kind, step, total, text)| {
                serde_json::json!({"type": kind, "version": step % 3, "step": step, "total": total, "level": "info",
                    "message": text, "path": text})
                .to_string()
                .into_bytes()
            },
        );
        prop_oneof![proptest::collection::vec(any::<u8>(), 0..200), message]
    }

    proptest! {
        #[test]
        fn any_lines_give_a_message_or_an_error(lines in proptest::collection::vec(any_line(), 0..20), greet in any::<bool>()) {
            let mut session = Session::new();
            if greet {
                prop_assert!(session.receive(HELLO.as_bytes(), Duration::ZERO).is_ok());
            }
            for line in lines {
                if let Err(error) = session.receive(&line, Duration::ZERO) {
                    prop_assert!(!error.is_empty() && error.len() < 2_000);
                }
                if let Some((step, total)) = session.progress() {
                    prop_assert!(step <= total);
                }
            }
        }
    }
}
