//! The thread pool for computation on the CPU.

use std::sync::atomic::{AtomicBool, Ordering};

/// The stack of each thread. The backward pass walks the graph of a whole model recursively. Unused pages take no
/// memory.
const STACK_BYTES: usize = 64 << 20;

/// The address space of the stacks of all threads in the pool. Hardly any of it is ever backed by memory.
#[must_use]
pub fn stack_space() -> u64 {
    (STACK_BYTES as u64).saturating_mul(rayon::current_num_threads() as u64)
}

/// Runs `work` on a thread of the pool and waits for it.
///
/// A thread outside the pool would have to hand over each parallel operation and sleep until it is done; small models
/// have thousands of these per step. A panic of `work` is resumed in the caller.
pub fn on_pool<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    // An error means that the pool exists already, for example because another test ran before. Then that pool is used.
    let built = rayon::ThreadPoolBuilder::new()
        .stack_size(STACK_BYTES)
        .thread_name(|number| format!("compute-{number}"))
        .build_global();
    if let Err(error) = built {
        tracing::debug!(%error, "the pool of compute threads exists already");
    }
    rayon::scope(|_| work())
}

/// Runs `work` on this thread, while the other threads of the pool look for parallel operations without sleeping in between.
///
/// For work of many short operations, such as generating a text: waking a thread takes longer than one of them computes. A thread that finds
/// no operation lets other programs run before it looks again. Only one such work runs so at a time; others run as without this function. A
/// panic of `work` is resumed in the caller.
pub fn without_sleep<T>(work: impl FnOnce() -> T) -> T {
    static IN_USE: AtomicBool = AtomicBool::new(false);
    let Some(own) = rayon::current_thread_index() else {
        // The caller would hand over each operation and sleep itself.
        return work();
    };
    // Of two at once, each could look for operations on top of the other's work, and neither would end.
    if IN_USE.swap(true, Ordering::Acquire) {
        return work();
    }
    let _in_use = SetOnDrop(&IN_USE, false);
    let done = AtomicBool::new(false);
    rayon::in_place_scope(|scope| {
        let _done = SetOnDrop(&done, true);
        scope.spawn_broadcast(|_, context| {
            // This thread gets here when it waits for an operation, which it must not do for `work`.
            if context.index() == own {
                return;
            }
            while !done.load(Ordering::Relaxed) {
                if rayon::yield_now() != Some(rayon::Yield::Executed) {
                    std::thread::yield_now();
                }
            }
        });
        work()
    })
}

/// Sets a flag to a value when it is dropped.
struct SetOnDrop<'a>(&'a AtomicBool, bool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(self.1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rayon::prelude::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn work_runs_on_the_pool_and_its_panics_reach_the_caller() {
        assert!(on_pool(rayon::current_thread_index).is_some());
        let panicked = catch_unwind(AssertUnwindSafe(|| on_pool(|| panic!("expected"))));
        assert!(panicked.is_err());
        assert_eq!(on_pool(|| 7), 7, "the pool still works after a panic");
    }

    #[test]
    fn work_without_sleep_runs_its_operations_and_ends() {
        let sum = || (0..1000u64).into_par_iter().map(|n| n * n).sum::<u64>();
        let expected = sum();
        assert_eq!(without_sleep(sum), expected, "outside of the pool");
        // From several threads at once, and one inside another.
        let sums: Vec<u64> = std::thread::scope(|scope| {
            let run = || on_pool(|| without_sleep(|| without_sleep(sum) + sum()));
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(run)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or(0)).collect()
        });
        assert_eq!(sums, [2 * expected; 4]);
        let panicked = catch_unwind(AssertUnwindSafe(|| on_pool(|| without_sleep(|| panic!("expected")))));
        assert!(panicked.is_err());
        assert_eq!(on_pool(sum), expected, "the pool still works after a panic");
    }
}
