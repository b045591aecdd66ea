//! The last two dimensions the other way round, written out: between pictures and sequences.

use super::cpu;
use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};
use rayon::prelude::*;

/// x [b, n, m] -> [b, m, n], contiguous.
///
/// # Errors
/// When x does not have three dimensions.
pub fn swap_last(x: &Tensor) -> candle_core::Result<Tensor> {
    x.dims3()?;
    if cpu::runs_here(x) {
        return x.contiguous()?.apply_op1(SwapLast);
    }
    x.transpose(1, 2)?.contiguous()
}

/// Elements along each side of a block: its lines of both sides fit the first cache.
const BLOCK: usize = 32;

/// Writes the columns from `first` on of x [n, m] as rows of n.
fn columns(x: &[f32], m: usize, first: usize, y: &mut [f32], n: usize) {
    for start in (0..n).step_by(BLOCK) {
        let lines = &x[start * m..(start + BLOCK).min(n) * m];
        for (c, row) in y.chunks_exact_mut(n).enumerate() {
            let column = lines[first + c..].iter().step_by(m);
            row[start..].iter_mut().zip(column).for_each(|(to, from)| *to = *from);
        }
    }
}

struct SwapLast;

impl CustomOp1 for SwapLast {
    fn name(&self) -> &'static str {
        "swap-last"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let (batch, n, m) = layout.shape().dims3()?;
        let x = cpu::slice(storage, layout)?;
        let mut y = vec![0f32; x.len()];
        if !x.is_empty() {
            for (x, y) in x.chunks(n * m).zip(y.chunks_mut(n * m)) {
                y.par_chunks_mut(n * BLOCK)
                    .enumerate()
                    .for_each(|(i, y)| columns(x, m, i * BLOCK, y, n));
            }
        }
        Ok((CpuStorage::F32(y), (batch, m, n).into()))
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(swap_last(grad)?))
    }
}
