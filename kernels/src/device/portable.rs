//! Portable mode: computation on the CPU in the forms that CUDA and Metal use.
//!
//! An operation of the engine has two forms: kernels on slices, for f32 on the CPU, and candle's operations on tensors,
//! for every device. In portable mode only the second form is used, also on the CPU, so that a machine without a GPU
//! tests what GPUs run. The mode belongs to a thread. Operations, recomputed blocks and optimizers choose their form
//! on the thread that calls them.
//!
//! Where CUDA would start one of the engine's kernels, portable mode composes candle's operations, as Metal does.
//! [`emulated_kernels`] starts an emulation of the kernel instead, which is slow.

use std::cell::Cell;

/// The forms in which a thread computes on the CPU.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// The kernels for CPUs.
    Slices,
    /// candle's operations.
    Portable,
    /// candle's operations, and emulated kernels for CUDA.
    EmulatedKernels,
}

thread_local!(static MODE: Cell<Mode> = const { Cell::new(Mode::Slices) });

/// Whether this thread is in portable mode.
#[must_use]
pub fn is_portable() -> bool {
    MODE.get() != Mode::Slices
}

/// Whether this thread is in portable mode with emulated kernels for CUDA.
pub(crate) fn emulates_kernels() -> bool {
    MODE.get() == Mode::EmulatedKernels
}

/// Runs `f` in portable mode. The mode from before is restored afterwards, also after a panic.
pub fn portable<R>(f: impl FnOnce() -> R) -> R {
    run_in_mode(Mode::Portable, f)
}

/// Runs `f` in portable mode, with an emulation of each kernel for CUDA: what CUDA runs, but for the kernels themselves.
pub fn emulated_kernels<R>(f: impl FnOnce() -> R) -> R {
    run_in_mode(Mode::EmulatedKernels, f)
}

/// Runs `f` outside portable mode: what portable mode is compared with.
pub fn not_portable<R>(f: impl FnOnce() -> R) -> R {
    run_in_mode(Mode::Slices, f)
}

fn run_in_mode<R>(mode: Mode, f: impl FnOnce() -> R) -> R {
    /// Restores the mode when it is dropped.
    struct Restore(Mode);
    impl Drop for Restore {
        fn drop(&mut self) {
            MODE.set(self.0);
        }
    }
    let _restore = Restore(MODE.replace(mode));
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
            emulated_kernels(|| assert!(is_portable() && emulates_kernels()));
            assert!(!emulates_kernels());
            assert!(is_portable(), "a nested call ends");
            std::thread::spawn(|| assert!(!is_portable(), "another thread"))
                .join()
                .unwrap();
        });
        assert!(!is_portable());
    }
}
