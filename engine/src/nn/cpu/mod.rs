//! What the CPU's own kernels share: vectors, threads, matrix products.
//!
//! The operations of this folder run on `f32` on the CPU; on CUDA and Metal, and for other dtypes, the same
//! functions are composed from candle's operations. Every sum has a fixed order that does not depend on the number
//! of threads, so that the same inputs give the same bits.

mod lanes;
mod mat;
mod product;
mod simd;
#[cfg(test)]
mod tests;
mod tile;

pub(crate) use lanes::{Function, each, each_here};
pub(crate) use mat::Mat;
pub(crate) use product::{Columns, Product, Rows, Sizes};
pub(crate) use simd::{Simd, Work, vectorised};
#[cfg(any(test, target_arch = "x86_64"))]
pub(crate) use simd::{Unit, unit};
#[cfg(test)]
pub(crate) use simd::{on, units};
pub(crate) use tile::{Side, Start, Target, tile, width};

pub(crate) use crate::autograd::{is_cpu_f32, with_slice};

/// Threads for one matrix product.
pub(crate) fn threads() -> usize {
    rayon::current_num_threads()
}

/// A matrix to write.
pub(crate) struct MatMut<'a> {
    pub(crate) data: &'a mut [f32],
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}

impl<'a> MatMut<'a> {
    /// Row by row.
    pub(crate) fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// Row by row, each row that far from the one before.
    pub(crate) fn strided(data: &'a mut [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        Self {
            data,
            rows,
            cols,
            row_stride,
            col_stride: 1,
        }
    }
}

/// `out = beta * out + alpha * a * b`, on `threads` threads.
pub(crate) fn gemm(
    out: MatMut<'_>,
    a: Mat<'_>,
    b: Mat<'_>,
    beta: f32,
    alpha: f32,
    threads: usize,
) -> candle_core::Result<()> {
    use mat::extent;
    let fits = a.cols == b.rows
        && out.rows == a.rows
        && out.cols == b.cols
        && a.is_whole()
        && b.is_whole()
        && extent(out.rows, out.cols, out.row_stride, out.col_stride) <= out.data.len();
    if !fits {
        candle_core::bail!(
            "gemm: {}x{} by {}x{} into {}x{}",
            a.rows,
            a.cols,
            b.rows,
            b.cols,
            out.rows,
            out.cols
        );
    }
    let parallelism = if threads > 1 && out.rows * out.cols * a.cols > 1 << 16 {
        gemm::Parallelism::Rayon(threads)
    } else {
        gemm::Parallelism::None
    };
    #[expect(
        unsafe_code,
        reason = "gemm takes raw pointers; the extents of all three slices were checked above"
    )]
    unsafe {
        gemm::gemm(
            out.rows,
            out.cols,
            a.cols,
            out.data.as_mut_ptr(),
            out.col_stride as isize,
            out.row_stride as isize,
            beta != 0.0,
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            beta,
            alpha,
            false,
            false,
            false,
            parallelism,
        );
    }
    Ok(())
}
