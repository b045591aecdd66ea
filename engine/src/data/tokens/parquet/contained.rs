//! Contains panics of the crate `parquet`, which has assertions and slices that a damaged file can reach.

use parquet::errors::ParquetError;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    /// Whether a panic of this thread is contained here, and so is not reported.
    static IS_CONTAINED: Cell<bool> = const { Cell::new(false) };
}

/// Runs a part of the reader. An error is its message; so is a panic, of which nothing is printed. What `read` changed must not be used after an
/// error.
pub(super) fn contained<T>(read: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !IS_CONTAINED.get() {
                report(panic);
            }
        }));
    });
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

    #[test]
    fn a_panic_is_an_error_and_a_later_one_is_reported() {
        let failed: Result<(), String> = contained(|| panic!("in the crate"));
        assert!(failed.unwrap_err().contains("contradicts"));
        assert!(!IS_CONTAINED.get());
        assert_eq!(contained(|| Ok(3)), Ok(3));
        let error: Result<(), String> = contained(|| Err(ParquetError::General("wrong".into())));
        assert_eq!(error.unwrap_err(), "wrong");
    }
}
