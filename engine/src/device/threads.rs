//! The threads that arithmetic on the CPU runs on.

/// Stack of each thread: the backward pass walks the graph of a whole model recursively. Only what is used is real.
const STACK_BYTES: usize = 64 << 20;

/// Address space that the stacks of the pool's threads take, of which hardly anything is ever real.
#[must_use]
pub fn stack_space() -> u64 {
    (STACK_BYTES as u64).saturating_mul(rayon::current_num_threads() as u64)
}

/// Runs `work` on a thread of the pool that the arithmetic uses, and waits for it.
///
/// From a thread outside, each parallel operation would hand its work over and sleep until it is woken; small models
/// have thousands of them per step. A panic of `work` goes on in the caller.
pub fn on_pool<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    // An error says that the pool exists already, for example because a test ran before: it serves as well.
    let built = rayon::ThreadPoolBuilder::new()
        .stack_size(STACK_BYTES)
        .thread_name(|number| format!("compute-{number}"))
        .build_global();
    if let Err(error) = built {
        tracing::debug!(%error, "the compute threads were there before");
    }
    rayon::scope(|_| work())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn work_runs_on_the_pool_and_its_panics_come_back() {
        assert!(on_pool(rayon::current_thread_index).is_some());
        let panicked = catch_unwind(AssertUnwindSafe(|| on_pool(|| panic!("expected"))));
        assert!(panicked.is_err());
        assert_eq!(on_pool(|| 7), 7, "and the pool lives on");
    }
}
