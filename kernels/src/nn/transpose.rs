//! Conversion between images and sequences of tokens: a transposition that is written to memory.

use super::cpu;
use crate::autograd::{Input, Operation, apply};
use candle_core::{Device, Shape, Tensor};
use rayon::prelude::*;

/// [b, c, h, w] -> [b, h * w, c]: a token for each pixel.
///
/// # Errors
/// When x does not have four dimensions.
pub fn to_tokens(x: &Tensor) -> candle_core::Result<Tensor> {
    let (batch, channels, height, width) = x.dims4()?;
    transposed(x, [batch, channels, height * width], &[batch, height * width, channels])
}

/// [b, h * w, c] -> `shape`, [b, c, h, w].
///
/// # Errors
/// When x has another size.
pub fn to_image(x: &Tensor, shape: &[usize]) -> candle_core::Result<Tensor> {
    let (batch, pixels, channels) = x.dims3()?;
    transposed(x, [batch, pixels, channels], shape)
}

/// Reshapes x to `from` = [b, n, m], transposes it to [b, m, n] and reshapes that to `to`.
fn transposed(x: &Tensor, from: [usize; 3], to: &[usize]) -> candle_core::Result<Tensor> {
    let to = Shape::from(to);
    apply([x], Transpose { from, to })
}

/// The side of a block. The cache lines of a block of input and output fit the L1 cache.
const BLOCK: usize = 32;

/// Copies the columns of x [n, m] from `first` on to the rows of y, of n elements each.
fn copy_columns(x: &[f32], m: usize, first: usize, y: &mut [f32], n: usize) {
    for start in (0..n).step_by(BLOCK) {
        let lines = &x[start * m..(start + BLOCK).min(n) * m];
        for (c, row) in y.chunks_exact_mut(n).enumerate() {
            let column = lines[first + c..].iter().step_by(m);
            row[start..].iter_mut().zip(column).for_each(|(to, from)| *to = *from);
        }
    }
}

/// Transposes x [b, n, m] to [b, m, n].
pub(super) fn transpose_slice(x: &[f32], [_, n, m]: [usize; 3]) -> Vec<f32> {
    let mut y = vec![0f32; x.len()];
    if !x.is_empty() {
        for (x, y) in x.chunks(n * m).zip(y.chunks_mut(n * m)) {
            y.par_chunks_mut(n * BLOCK)
                .enumerate()
                .for_each(|(i, y)| copy_columns(x, m, i * BLOCK, y, n));
        }
    }
    y
}

struct Transpose {
    from: [usize; 3],
    to: Shape,
}

impl Operation<1> for Transpose {
    const NAME: &'static str = "transpose";

    fn saved_inputs(&self, _: [bool; 1]) -> [bool; 1] {
        [false]
    }

    fn forward(&self, [x]: [&[f32]; 1], [shape]: [&Shape; 1]) -> candle_core::Result<(Vec<f32>, Shape)> {
        if self.from.iter().product::<usize>() != x.len() || self.to.elem_count() != x.len() {
            candle_core::bail!("{shape:?} cannot be transposed to {:?}", self.to);
        }
        Ok((transpose_slice(x, self.from), self.to.clone()))
    }

    fn backward(&self, [x]: [&Input; 1], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 1]> {
        let [b, n, m] = self.from;
        let dx = cpu::with_slice(gradient, |dy| transpose_slice(dy, [b, m, n]))?;
        Ok([Some(Tensor::from_vec(dx, x.shape(), &Device::Cpu)?)])
    }

    fn forward_tensors(&self, [x]: [&Tensor; 1]) -> candle_core::Result<Tensor> {
        x.reshape(&self.from)?.transpose(1, 2)?.contiguous()?.reshape(&self.to)
    }

    fn backward_tensors(&self, [x]: [&Input; 1], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 1]> {
        let [b, n, m] = self.from;
        let dx = gradient.reshape((b, m, n))?.transpose(1, 2)?.contiguous()?;
        Ok([Some(dx.reshape(x.shape())?)])
    }
}
