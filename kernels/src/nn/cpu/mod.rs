//! The basis of the kernels for the CPU: SIMD vectors, threads and matrix products.
//!
//! The kernels run on `f32` on the CPU, and layers may round the operands of their products ([`bf16`]); on CUDA and Metal, and for other
//! dtypes, the same functions are composed of candle's operations. The order of every sum is fixed and does not depend on the number of
//! threads, so that the same inputs give the same bits.

mod bf16;
mod elementwise;
mod extent;
mod lines;
mod mat;
mod product;
mod simd;
#[cfg(test)]
mod tests;
mod tile;
mod transposition;
mod widen;

#[cfg(test)]
pub(crate) use bf16::available_bf16_isas;
pub(crate) use bf16::{
    Bf16Isa, Bf16Kernel, Bf16Left, Bf16Mat, Bf16Product, Bf16Right, Bf16Simd, Bf16Tile, Bf16Transposed, PairPanel,
    bf16_isa, pack_left_by_lines, pack_lines, pack_right_by_lines, run_bf16_on,
};
pub(crate) use elementwise::{Function, map_parallel, map_serial};
pub(crate) use lines::{BrainHalf, Element, Half};
pub(crate) use mat::{Mat, StoredMat};
pub(crate) use product::{LeftOperand, Product, RightOperand, Sizes};
#[cfg(any(test, target_arch = "x86_64"))]
pub(crate) use simd::{Isa, best_isa};
pub(crate) use simd::{Kernel, Simd, run_vectorised};
#[cfg(test)]
pub(crate) use simd::{available_isas, run_on};
pub(crate) use tile::{InitialValue, LeftLayout, OutputTile, panel_width, tile};

pub(crate) use crate::autograd::{is_cpu_f32, with_slice};
use extent::extent;

/// The number of threads for a matrix product.
pub(crate) fn threads() -> usize {
    rayon::current_num_threads()
}

/// A mutable matrix in a slice.
pub(crate) struct MatMut<'a> {
    pub(crate) data: &'a mut [f32],
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}

impl<'a> MatMut<'a> {
    /// A row-major matrix.
    pub(crate) fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// A row-major matrix whose rows are `row_stride` elements apart.
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

/// Computes the product of a layer, `out = initial + a * b`, on `threads` threads: of operands that are rounded to bfloat16, or in f32. `adds`:
/// the initial value is what `out` contains, else zero.
///
/// # Errors
/// When the shapes do not match, or a slice is too short.
pub(crate) fn layer_product(
    isa: Option<Bf16Isa>,
    out: MatMut<'_>,
    a: Mat<'_>,
    b: Mat<'_>,
    adds: bool,
    threads: usize,
) -> candle_core::Result<()> {
    let fits = out.col_stride == 1 && a.cols == b.rows && out.rows == a.rows && out.cols == b.cols;
    let sizes = Sizes {
        rows: a.rows,
        cols: b.cols,
        depth: a.cols,
    };
    let initial = match adds {
        true => InitialValue::Output,
        false => InitialValue::Zero,
    };
    let (isa, [left, right]) = (isa.filter(|_| fits), [&a, &b]);
    if let Some(isa) = isa {
        let product = Bf16Product {
            sizes,
            a: left,
            b: right,
            initial,
        };
        return product.write(isa, out.data, out.row_stride, threads);
    }
    let has_slices = a.fits_slice()
        && b.fits_slice()
        && extent(out.rows, out.cols, out.row_stride, out.col_stride) <= out.data.len();
    if fits && has_slices && out.rows < ROWS_PER_COLUMN * out.cols {
        let product = Product {
            sizes,
            a: left,
            b: right,
            initial,
        };
        product.write(out.data, out.row_stride, threads);
        return Ok(());
    }
    gemm(out, a, b, 1.0, if adds { 1.0 } else { 0.0 }, threads)
}

/// From this number of rows for each column of the result on, the gemm crate is faster: the packed right operand is small, and what counts is
/// how the left one is packed. (With 4096 rows and 320 columns by a tenth; with 512 rows and 4096 columns it takes 1.5 times as long, because it
/// transposes the weight element by element.)
const ROWS_PER_COLUMN: usize = 4;

/// Computes `out = alpha * a * b + beta * out` on `threads` threads.
///
/// # Errors
/// When the shapes do not match, or a slice is too short.
pub(crate) fn gemm(
    out: MatMut<'_>,
    a: Mat<'_>,
    b: Mat<'_>,
    alpha: f32,
    beta: f32,
    threads: usize,
) -> candle_core::Result<()> {
    let fits = a.cols == b.rows
        && out.rows == a.rows
        && out.cols == b.cols
        && a.fits_slice()
        && b.fits_slice()
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
    #[expect(unsafe_code, reason = "the gemm crate takes raw pointers")]
    // SAFETY: `fits` checked that all three matrices lie inside their slices; `out` is borrowed mutably, so it overlaps
    // neither `a` nor `b`.
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
