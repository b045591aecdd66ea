//! Which kernel is started, how often, and with which arguments.

use candle_core::Tensor;

/// A file of kernels.
#[derive(Clone, Copy, Debug)]
pub(super) enum Module {
    Im2Col,
    Norm,
    Optimizer,
    Pointwise,
    Softmax,
}

/// An argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub(super) enum Arg<'a> {
    /// A pointer to the first element of a contiguous tensor.
    Tensor(&'a Tensor),
    /// A null pointer.
    Absent,
    I32(usize),
    I64(usize),
    F32(f64),
}

impl<'a> From<Option<&'a Tensor>> for Arg<'a> {
    fn from(tensor: Option<&'a Tensor>) -> Self {
        tensor.map_or(Self::Absent, Self::Tensor)
    }
}

/// The most threads of a block.
const MOST_THREADS: usize = 1024;
/// Threads of a block whose threads are independent of each other.
const THREADS: usize = 256;

/// Which kernel is started, and how often.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "read where kernels are started"))]
pub(super) struct Launch {
    pub(super) module: Module,
    pub(super) kernel: String,
    pub(super) blocks: usize,
    pub(super) threads: usize,
}

impl Launch {
    /// One block for each row of `length` elements, of which a thread takes `per_thread` at a time.
    pub(super) fn rows(module: Module, kernel: String, rows: usize, length: usize, per_thread: usize) -> Self {
        let threads = length.div_ceil(per_thread).next_multiple_of(32);
        Self {
            module,
            kernel,
            blocks: rows,
            threads: threads.clamp(32, MOST_THREADS),
        }
    }

    /// One thread for each `per_thread` of `count` elements.
    pub(super) fn elements(module: Module, kernel: String, count: usize, per_thread: usize) -> Self {
        Self {
            module,
            kernel,
            blocks: count.div_ceil(per_thread * THREADS),
            threads: THREADS,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_get_whole_warps() {
        let threads = |length, per_thread| Launch::rows(Module::Norm, String::new(), 3, length, per_thread).threads;
        assert_eq!(
            [threads(1, 1), threads(77, 1), threads(1024, 8), threads(1 << 20, 8)],
            [32, 96, 128, 1024]
        );
        assert_eq!(Launch::elements(Module::Norm, String::new(), 2049, 8).blocks, 2);
    }
}
