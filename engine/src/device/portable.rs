//! Portable mode: computation on the CPU in the forms that CUDA and Metal use.
//!
//! An operation of the engine has two forms: kernels on slices, for f32 on the CPU, and candle's operations on tensors,
//! for every device. In portable mode only the second form is used, also on the CPU, so that a machine without a GPU
//! tests what GPUs run. The mode belongs to a thread. Operations, recomputed blocks and optimizers choose their form
//! on the thread that calls them.

use std::cell::Cell;

thread_local!(static PORTABLE: Cell<bool> = const { Cell::new(false) });

/// Whether this thread is in portable mode.
#[must_use]
pub fn is_portable() -> bool {
    PORTABLE.get()
}

/// Runs `f` in portable mode. The mode from before is restored afterwards, also after a panic.
pub fn portable<R>(f: impl FnOnce() -> R) -> R {
    run_in_mode(true, f)
}

/// Runs `f` outside portable mode: what portable mode is compared with.
pub fn not_portable<R>(f: impl FnOnce() -> R) -> R {
    run_in_mode(false, f)
}

fn run_in_mode<R>(is_portable: bool, f: impl FnOnce() -> R) -> R {
    /// Restores the mode when it is dropped.
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            PORTABLE.set(self.0);
        }
    }
    let _restore = Restore(PORTABLE.replace(is_portable));
    f()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mode_ends_with_the_call_and_after_a_panic() {
        let panicked = std::panic::catch_unwind(|| portable(|| panic!("expected")));
        assert!(panicked.is_err() && !is_portable());
        portable(|| {
            portable(|| assert!(is_portable()));
            not_portable(|| assert!(!is_portable()));
            assert!(is_portable(), "a nested call ends");
            std::thread::spawn(|| assert!(!is_portable(), "another thread"))
                .join()
                .unwrap();
        });
        assert!(!is_portable());
    }
}
