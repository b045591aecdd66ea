//! Somebody who follows a job with `aitk watch --json` while a test does other things.

use crate::UNREACHABLE;
use crate::chaos::events::Event;
use crate::eventually;
use crate::pool::Pool;
use crate::processes::{LogTail, Process};
use std::time::Duration;

/// A running `aitk watch --json`.
pub struct Follower {
    process: Process,
    lines: LogTail,
    events: Vec<Event>,
}

impl Follower {
    /// Follows the job from its beginning.
    #[must_use]
    pub fn start(pool: &Pool, job: &str) -> Self {
        let mut command = pool.command("aitk");
        command.args(["watch", job, "--json"]);
        let process = Process::start(&format!("watch-{job}"), &pool.setup().folder, &mut command);
        let lines = process.log_from_start();
        Self {
            process,
            lines,
            events: Vec::new(),
        }
    }

    /// Everything so far.
    pub fn events(&mut self) -> &[Event] {
        self.news();
        &self.events
    }

    /// What came since the last look.
    pub fn news(&mut self) -> &[Event] {
        let before = self.events.len();
        let lines = self.lines.lines();
        self.events.extend(lines.iter().filter_map(|line| Event::read(line)));
        &self.events[before..]
    }

    /// Whether the job has ended: what comes with the next look is the last.
    pub fn is_ended(&mut self) -> bool {
        self.process.ended()
    }

    /// Whether it ended because it never reached anybody: the addresses were all away when it began.
    pub fn found_nobody(&mut self) -> bool {
        self.process.exit_code() == Some(UNREACHABLE) && self.events().is_empty()
    }

    /// The newest attempt.
    pub fn attempt(&mut self) -> Option<Event> {
        self.events().iter().rfind(|event| event.is_assignment()).cloned()
    }

    /// Waits for an event.
    ///
    /// # Panics
    /// When it does not come in time.
    pub fn wait(&mut self, what: &str, limit: Duration, logs: &[&Process], wanted: impl Fn(&Event) -> bool) -> Event {
        eventually(what, limit, logs, || {
            self.events().iter().find(|event| wanted(event)).cloned()
        })
    }
}
