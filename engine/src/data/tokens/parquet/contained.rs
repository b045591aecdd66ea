//! Contains panics of the crate `parquet`, which has assertions and slices that a damaged file can reach.

use parquet::errors::ParquetError;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// Whether a panic of this thread is contained here, and so is not reported.
    static IS_CONTAINED: Cell<bool> = const { Cell::new(false) };
}

/// What reports the panics of a process.
type PanicHook = Box<dyn Fn(&PanicHookInfo<'_>) + Send + Sync>;

/// Returns a hook that calls `report` for the panics that are not contained.
fn skip_contained_panics(report: PanicHook) -> PanicHook {
    Box::new(move |panic| {
        if !IS_CONTAINED.get() {
            report(panic);
        }
    })
}

/// Runs a part of the reader. An error is its message; so is a panic, of which nothing is printed. What `read` changed must not be used after an
/// error.
pub(super) fn contained<T>(read: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| set_hook(skip_contained_panics(take_hook())));
    let before = IS_CONTAINED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(read));
    IS_CONTAINED.set(before);
    match result {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(ParquetError::General(message) | ParquetError::EOF(message) | ParquetError::NYI(message))) => {
            Err(message)
        }
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("its content contradicts what its headers say".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    thread_local! {
        /// The panics of this thread that were reported.
        static REPORTED: Cell<u32> = const { Cell::new(0) };
    }

    #[test]
    fn a_panic_is_an_error_and_a_later_one_is_reported() {
        // Afterwards no other thread replaces what reports panics.
        assert_eq!(contained(|| Ok(3)), Ok(3));
        let report = take_hook();
        set_hook(skip_contained_panics(Box::new(move |panic| {
            REPORTED.set(REPORTED.get() + 1);
            report(panic);
        })));
        let runs = Cell::new(0);
        let failed: Result<(), String> = contained(|| {
            runs.set(runs.get() + 1);
            panic!("in the crate")
        });
        assert!(failed.unwrap_err().contains("contradicts"));
        assert_eq!((runs.get(), REPORTED.get()), (1, 0));
        // A part of the reader may be within another one.
        let inner_failed = Cell::new(false);
        let outer: Result<(), String> = contained(|| {
            let inner: Result<(), String> = contained(|| panic!("in the crate"));
            inner_failed.set(inner.is_err());
            panic!("around it")
        });
        assert!(outer.is_err() && inner_failed.get() && !IS_CONTAINED.get());
        assert_eq!(REPORTED.get(), 0);
        let error: Result<(), String> = contained(|| Err(ParquetError::General("wrong".into())));
        assert_eq!(error.unwrap_err(), "wrong");
        let later: std::thread::Result<()> = catch_unwind(|| panic!("after it"));
        assert!(later.is_err());
        assert_eq!(REPORTED.get(), 1);
    }
}
