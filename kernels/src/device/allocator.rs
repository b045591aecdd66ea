//! Whether the allocator returns free memory to the operating system.
//!
//! A training step frees and allocates gigabytes. The operating system fills every page that it hands out with zeros,
//! one thread at a time: a third of a step's time (SD 1.5, 512 x 512). The allocator therefore keeps free pages for the
//! next step, unless memory is short. This is a setting of mimalloc, which the programs of this project use; it has no
//! effect in a program with another allocator.

use std::ffi::{c_int, c_long};

/// `mi_option_purge_delay` of mimalloc's `mi_option_t`.
const PURGE_DELAY: c_int = 15;

/// What mimalloc does with free pages, in the whole process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreedMemory {
    /// They stay with the process.
    Retain,
    /// They are returned to the operating system at once.
    Release,
}

impl FreedMemory {
    /// Sets mimalloc's option.
    #[expect(unsafe_code, reason = "calls a function of mimalloc's C library")]
    pub fn apply(self) {
        let milliseconds: c_long = match self {
            Self::Retain => -1,
            Self::Release => 0,
        };
        // SAFETY: `mi_option_set` only stores a number in an option that exists, and may be called from any thread.
        unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, milliseconds) };
    }
}
