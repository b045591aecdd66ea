//! The events of a job that `aitk watch --json` prints, one per line.

use serde_json::Value;

/// One event.
#[derive(Clone, Debug)]
pub struct Event(Value);

impl Event {
    /// Parses a line. Returns `None` for anything but an event.
    #[must_use]
    pub fn read(line: &str) -> Option<Self> {
        let value: Value = serde_json::from_str(line).ok()?;
        value.get("event")?.as_str()?;
        Some(Self(value))
    }

    fn text(&self, key: &str) -> &str {
        self.0.get(key).and_then(Value::as_str).unwrap_or_default()
    }

    /// The kind of event: `state`, `attempt`, `checkpoint`, ….
    #[must_use]
    pub fn kind(&self) -> &str {
        self.text("event")
    }

    /// The position in the job's log.
    #[must_use]
    pub fn cursor(&self) -> u64 {
        self.0.get("cursor").and_then(Value::as_u64).unwrap_or(0)
    }

    /// The id of the attempt; empty for events without one.
    #[must_use]
    pub fn attempt(&self) -> &str {
        self.text("attempt")
    }

    /// The new state of the job or the attempt.
    #[must_use]
    pub fn state(&self) -> &str {
        self.text("state")
    }

    /// The worker of an attempt.
    #[must_use]
    pub fn worker(&self) -> &str {
        self.text("worker_name")
    }

    /// The name of a phase or an artifact.
    #[must_use]
    pub fn name(&self) -> &str {
        self.text("name")
    }

    /// The step of a checkpoint.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.0.get("step").and_then(Value::as_u64).unwrap_or(0)
    }

    /// The time of the event, by the clock of the process that reported it.
    #[must_use]
    pub fn time(&self) -> Option<jiff::Timestamp> {
        self.text("time").parse().ok()
    }

    /// The message of a log line, or the reason why an attempt ended.
    #[must_use]
    pub fn message(&self) -> &str {
        self.text("message")
    }

    /// Whether the event is the assignment of a new attempt.
    #[must_use]
    pub fn is_assignment(&self) -> bool {
        self.kind() == "attempt" && self.state() == "assigned"
    }

    /// Whether the event is the end of an attempt.
    #[must_use]
    pub fn is_end_of_attempt(&self) -> bool {
        self.kind() == "attempt" && !matches!(self.state(), "assigned" | "running")
    }
}
