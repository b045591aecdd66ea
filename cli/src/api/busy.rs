//! What is printed while a coordinator that is busy is asked again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

type Print = dyn Fn(&str) + Send + Sync;

/// Says once, however many calls wait, that the coordinator is asked again and why. Cheap to clone.
#[derive(Clone, Default)]
pub(super) struct WaitNotice {
    print: Option<Arc<Print>>,
    is_printed: Arc<AtomicBool>,
}

impl WaitNotice {
    pub(super) fn new(print: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self {
            print: Some(Arc::new(print)),
            is_printed: Arc::default(),
        }
    }

    /// Prints the reason, the first time.
    pub(super) fn show(&self, reason: &str) {
        if let Some(print) = &self.print
            && !self.is_printed.swap(true, Ordering::Relaxed)
        {
            print(&format!("{reason}; waiting, and trying again for about half a minute"));
        }
    }
}

impl std::fmt::Debug for WaitNotice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WaitNotice").finish_non_exhaustive()
    }
}
