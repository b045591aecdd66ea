//! What the processor's own kernels share: plain slices out of tensors, and a checked matrix product.
//!
//! The operations of this folder run on `f32` on the processor; on CUDA and Metal, and for other dtypes, the same
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

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Shape, Storage, Tensor};

/// Whether the kernels of this folder can take this tensor.
pub(crate) fn runs_here(x: &Tensor) -> bool {
    x.device().is_cpu() && x.dtype() == DType::F32
}

/// Threads for one matrix product.
pub(crate) fn threads() -> usize {
    rayon::current_num_threads()
}

/// The elements of a contiguous f32 storage.
pub(crate) fn slice<'a>(storage: &'a CpuStorage, layout: &Layout) -> candle_core::Result<&'a [f32]> {
    let CpuStorage::F32(data) = storage else {
        candle_core::bail!("expected f32 on the processor");
    };
    match layout.contiguous_offsets() {
        Some((start, end)) => data
            .get(start..end)
            .ok_or_else(|| candle_core::Error::Msg("layout exceeds storage".into())),
        None => candle_core::bail!("expected a contiguous tensor"),
    }
}

/// Runs `f` on the elements of a contiguous f32 tensor on the processor.
pub(crate) fn with_slice<R>(x: &Tensor, f: impl FnOnce(&[f32]) -> R) -> candle_core::Result<R> {
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        candle_core::bail!("expected a tensor on the processor");
    };
    Ok(f(slice(storage, layout)?))
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

/// An operation of three contiguous f32 tensors on the processor.
pub(crate) trait Kernel3: Send + Sync + 'static {
    /// For messages.
    const NAME: &'static str;

    /// The result, from elements and shapes.
    fn forward(&self, inputs: [&[f32]; 3], shapes: [&Shape; 3]) -> candle_core::Result<(Vec<f32>, Shape)>;

    /// The gradients of the inputs that take part in one; `grad` is contiguous.
    fn backward(&self, inputs: [&Tensor; 3], grad: &Tensor) -> candle_core::Result<[Option<Tensor>; 3]>;
}

/// A [`Kernel3`] in candle's graph.
pub(crate) struct Op3<K>(pub(crate) K);

impl<K: Kernel3> CustomOp3 for Op3<K> {
    fn name(&self) -> &'static str {
        K::NAME
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        a_layout: &Layout,
        b: &CpuStorage,
        b_layout: &Layout,
        c: &CpuStorage,
        c_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let inputs = [slice(a, a_layout)?, slice(b, b_layout)?, slice(c, c_layout)?];
        let (y, shape) = self
            .0
            .forward(inputs, [a_layout.shape(), b_layout.shape(), c_layout.shape()])?;
        Ok((CpuStorage::F32(y), shape))
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        c: &Tensor,
        _y: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [a, b, c] = self.0.backward([a, b, c], &grad.contiguous()?)?;
        Ok((a, b, c))
    }
}
