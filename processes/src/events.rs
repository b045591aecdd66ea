//! Where an attempt sends its events, how it is told to stop, and how it is asked for outputs.

use aitk_common::attempt::ChildEvent;
use aitk_common::requested_outputs::RequestedOutputs;
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

/// The outputs that a running training is asked for. Clones share them. Each output is pending once at most, however often it is
/// asked for.
#[derive(Clone, Debug, Default)]
pub struct OutputRequests(Arc<PendingOutputs>);

#[derive(Debug, Default)]
struct PendingOutputs {
    save: AtomicBool,
    samples: AtomicBool,
}

impl OutputRequests {
    /// Nothing is asked for.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks for outputs, in addition to those that are pending.
    pub fn request(&self, outputs: RequestedOutputs) {
        let PendingOutputs { save, samples } = &*self.0;
        save.fetch_or(outputs.save, Ordering::Relaxed);
        samples.fetch_or(outputs.samples, Ordering::Relaxed);
    }

    /// Takes what is asked for; afterwards nothing is pending.
    #[must_use]
    pub fn take(&self) -> RequestedOutputs {
        RequestedOutputs {
            save: self.0.save.swap(false, Ordering::Relaxed),
            samples: self.0.samples.swap(false, Ordering::Relaxed),
        }
    }
}
