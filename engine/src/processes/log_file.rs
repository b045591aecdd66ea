//! `log.txt` of a run folder: what a run said, with its time.

use super::EventSink;
use crate::error::{EngineError, Result};
use aitk_common::attempt::ChildEvent;
use aitk_common::step_metrics::{now, step_line};
use std::cell::RefCell;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::rc::Rc;

/// A log file that may not be open yet. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct LogFile(Rc<RefCell<Option<Open>>>);

#[derive(Debug)]
struct Open {
    file: File,
    total: Option<u64>,
}

impl LogFile {
    /// Writes to the end of this file from now on.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub(super) fn open(&self, path: &Path) -> Result<()> {
        let file = File::options().create(true).append(true).open(path);
        let file = file.map_err(|error| EngineError::io(path, error))?;
        *self.0.borrow_mut() = Some(Open { file, total: None });
        self.write("started");
        Ok(())
    }

    /// A line, or several, with the time in front. What cannot be written is lost: a log must not end a training.
    pub(super) fn write(&self, text: &str) {
        let mut open = self.0.borrow_mut();
        if let Some(open) = open.as_mut() {
            let time = now();
            let lines: String = text.lines().map(|line| format!("{time}  {line}\n")).collect();
            if let Err(error) = open.file.write_all(lines.as_bytes()) {
                tracing::debug!(%error, "a line of the log is lost");
            }
        }
    }

    /// How many steps the training has.
    pub(super) fn total(&self, steps: u64) {
        if let Some(open) = self.0.borrow_mut().as_mut() {
            open.total = Some(steps);
        }
    }

    fn event(&self, event: &ChildEvent) {
        let text = match event {
            ChildEvent::Log { level, message } if level == "info" => message.clone(),
            ChildEvent::Log { level, message } => format!("{level}: {message}"),
            ChildEvent::Phase { name } => name.clone(),
            ChildEvent::Metrics { step, values } => {
                let total = self.0.borrow().as_ref().and_then(|open| open.total);
                match step_line(*step, total, values) {
                    Some(line) => line,
                    None => return,
                }
            }
            ChildEvent::Artifact { name, .. } => format!("saved {name}"),
            ChildEvent::ArtifactRemoved { name } => format!("removed {name}"),
            ChildEvent::Checkpoint { step, .. } => format!("checkpoint at step {step}"),
            _ => return,
        };
        self.write(&text);
    }
}

/// Passes events on, and keeps them in a log file once there is one.
pub(super) struct Recording<'a> {
    pub(super) events: &'a mut dyn EventSink,
    pub(super) log: LogFile,
}

impl EventSink for Recording<'_> {
    fn emit(&mut self, event: ChildEvent) {
        self.log.event(&event);
        self.events.emit(event);
    }
}
