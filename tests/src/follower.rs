//! Follows a job with `aitk watch --json` while a test does other things.

use crate::UNREACHABLE;
use crate::chaos::events::Event;
use crate::cluster::TestCluster;
use crate::eventually;
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
    pub fn start(cluster: &TestCluster, job: &str) -> Self {
        let mut command = cluster.command("aitk");
        command.args(["watch", job, "--json"]);
        let process = Process::start(&format!("watch-{job}"), &cluster.setup().folder, &mut command);
        let lines = process.log_from_start();
        Self {
            process,
            lines,
            events: Vec::new(),
        }
    }

    /// All events so far.
    pub fn events(&mut self) -> &[Event] {
        self.new_events();
        &self.events
    }

    /// The events since the last call.
    pub fn new_events(&mut self) -> &[Event] {
        let before = self.events.len();
        let lines = self.lines.lines();
        self.events.extend(lines.iter().filter_map(|line| Event::read(line)));
        &self.events[before..]
    }

    /// Whether the job has ended. The next call of [`Self::new_events`] then returns the last events.
    pub fn has_ended(&mut self) -> bool {
        self.process.has_ended()
    }

    /// Whether it exited without an event because no coordinator could be reached when it started.
    pub fn was_unreachable(&mut self) -> bool {
        self.process.exit_code() == Some(UNREACHABLE) && self.events().is_empty()
    }

    /// The assignment of the newest attempt.
    pub fn newest_attempt(&mut self) -> Option<Event> {
        self.events().iter().rfind(|event| event.is_assignment()).cloned()
    }

    /// Waits for an event for which `matches` is true.
    ///
    /// # Panics
    /// After `limit`.
    pub fn wait(&mut self, what: &str, limit: Duration, logs: &[&Process], matches: impl Fn(&Event) -> bool) -> Event {
        eventually(what, limit, logs, || {
            self.events().iter().find(|event| matches(event)).cloned()
        })
    }
}
