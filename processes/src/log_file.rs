//! `log.txt` of a run folder: the log messages of a run with their times.

use super::events::EventSink;
use crate::error::{EngineError, Result};
use aitk_common::attempt::ChildEvent;
use aitk_common::step_metrics::{now, step_line};
use std::cell::RefCell;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::rc::Rc;

/// A log file that may not be open yet. Clones share the file.
#[derive(Clone, Debug, Default)]
pub struct LogFile(Rc<RefCell<Option<OpenFile>>>);

#[derive(Debug)]
struct OpenFile {
    file: File,
    /// Total number of training steps.
    total: Option<u64>,
}

impl LogFile {
    /// Opens a file, to which the log is appended from now on.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub(super) fn open(&self, path: &Path) -> Result<()> {
        let file = File::options().create(true).append(true).open(path);
        let file = file.map_err(|error| EngineError::io(path, error))?;
        *self.0.borrow_mut() = Some(OpenFile { file, total: None });
        self.write("started");
        Ok(())
    }

    /// Writes one or more lines, each with the time in front. A write error is only logged, because it must not fail
    /// the training.
    pub(super) fn write(&self, text: &str) {
        let mut open = self.0.borrow_mut();
        if let Some(open) = open.as_mut() {
            let time = now();
            let lines: String = text.lines().map(|line| format!("{time}  {line}\n")).collect();
            if let Err(error) = open.file.write_all(lines.as_bytes()) {
                tracing::debug!(%error, "cannot write to the log file");
            }
        }
    }

    /// Sets the total number of training steps.
    pub(super) fn set_total(&self, steps: u64) {
        if let Some(open) = self.0.borrow_mut().as_mut() {
            open.total = Some(steps);
        }
    }

    /// Writes the line of an event, if it has one.
    fn write_event(&self, event: &ChildEvent) {
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

/// Forwards events and writes them to the log file once it is open.
pub(super) struct LoggingSink<'a> {
    pub(super) events: &'a mut dyn EventSink,
    pub(super) log: LogFile,
}

impl EventSink for LoggingSink<'_> {
    fn emit(&mut self, event: ChildEvent) {
        self.log.write_event(&event);
        self.events.emit(event);
    }
}
