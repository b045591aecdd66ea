//! An allocator that counts, for tests that are programs of their own.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The system's allocator, with the bytes in use and their peak.
struct CountingAllocator;

/// The bytes in use.
pub(crate) static IN_USE: AtomicUsize = AtomicUsize::new(0);
/// Their peak; a measurement sets it to the bytes in use first.
pub(crate) static PEAK: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn add(bytes: usize) {
    let in_use = IN_USE.fetch_add(bytes, Relaxed) + bytes;
    PEAK.fetch_max(in_use, Relaxed);
}

#[expect(unsafe_code, reason = "the trait of allocators is unsafe")]
// SAFETY: every call is passed on to the system's allocator.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller's promises are those that the system's allocator needs.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add(size);
        IN_USE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// The peak of the bytes in use while `run` runs and its result exists, beyond those before.
#[allow(dead_code, reason = "not every program uses it")]
pub(crate) fn measure<R>(run: impl Fn() -> R) -> f64 {
    // Buffers that threads keep for later products are not counted.
    drop(run());
    let before = IN_USE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let result = run();
    let peak = PEAK.load(Relaxed);
    drop(result);
    peak.saturating_sub(before) as f64
}
