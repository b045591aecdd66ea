//! What becomes of memory that is given back.
//!
//! A step of training frees and takes gigabytes. The operating system has to fill with zeros each page that it hands out
//! again, one thread at a time: a third of a step's time (SD 1.5, 512 x 512). So pages are kept for the next step, unless
//! memory is what is short. The programs of this project allocate with mimalloc, whose setting this is; in a program
//! with another allocator it changes nothing.

use std::ffi::{c_int, c_long};

/// `mi_option_purge_delay` of mimalloc's `mi_option_t`.
const PURGE_DELAY: c_int = 15;

/// What mimalloc does with free pages, from now on and in the whole process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreePages {
    /// They stay with the process.
    Kept,
    /// The operating system gets them back at once.
    GivenBack,
}

impl FreePages {
    /// Makes it so.
    #[expect(unsafe_code, reason = "a foreign function that sets a number, from any thread")]
    pub fn set(self) {
        let milliseconds: c_long = match self {
            Self::Kept => -1,
            Self::GivenBack => 0,
        };
        unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, milliseconds) };
    }
}
