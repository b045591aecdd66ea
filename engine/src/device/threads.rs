//! The thread pool for computation on the CPU.

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

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn work_runs_on_the_pool_and_its_panics_reach_the_caller() {
        assert!(on_pool(rayon::current_thread_index).is_some());
        let panicked = catch_unwind(AssertUnwindSafe(|| on_pool(|| panic!("expected"))));
        assert!(panicked.is_err());
        assert_eq!(on_pool(|| 7), 7, "the pool still works after a panic");
    }
}
