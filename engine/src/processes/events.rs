//! Where an attempt sends its events, and how it is told to stop.

use aitk_common::attempt::ChildEvent;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Receives the events of an attempt.
pub trait EventSink {
    /// Receives one event.
    fn emit(&mut self, event: ChildEvent);
}

impl EventSink for Vec<ChildEvent> {
    fn emit(&mut self, event: ChildEvent) {
        self.push(event);
    }
}

/// A flag that tells a process to save and stop. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct StopSignal(Arc<AtomicBool>);

impl StopSignal {
    /// A signal that is not set.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the flag.
    pub fn stop(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether the flag is set.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
