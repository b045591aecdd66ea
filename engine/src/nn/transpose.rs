//! Between images and sequences of tokens: the last two dimensions the other way round, written out.

use super::cpu;
use crate::autograd::{Input, Operation, apply};
use candle_core::{Device, Shape, Tensor};
use rayon::prelude::*;

/// [b, c, h, w] -> [b, h * w, c]: a token for each place.
///
/// # Errors
/// When x does not have four dimensions.
pub fn to_tokens(x: &Tensor) -> candle_core::Result<Tensor> {
    let (batch, channels, height, width) = x.dims4()?;
    turned(x, [batch, channels, height * width], &[batch, height * width, channels])
}

/// [b, h * w, c] -> `shape`, [b, c, h, w].
///
/// # Errors
/// When x has another size.
pub fn to_image(x: &Tensor, shape: &[usize]) -> candle_core::Result<Tensor> {
    let (batch, places, channels) = x.dims3()?;
    turned(x, [batch, places, channels], shape)
}

/// x, taken as [b, n, m], turned to [b, m, n], taken as `to`.
fn turned(x: &Tensor, from: [usize; 3], to: &[usize]) -> candle_core::Result<Tensor> {
    if cpu::is_cpu_f32(x) {
        let to = Shape::from(to);
        return apply([x], Turned { from, to });
    }
    x.reshape(&from)?.transpose(1, 2)?.contiguous()?.reshape(to)
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

/// x [b, n, m] -> [b, m, n].
pub(super) fn turn(x: &[f32], [_, n, m]: [usize; 3]) -> Vec<f32> {
    let mut y = vec![0f32; x.len()];
    if !x.is_empty() {
        for (x, y) in x.chunks(n * m).zip(y.chunks_mut(n * m)) {
            y.par_chunks_mut(n * BLOCK)
                .enumerate()
                .for_each(|(i, y)| columns(x, m, i * BLOCK, y, n));
        }
    }
    y
}

struct Turned {
    from: [usize; 3],
    to: Shape,
}

impl Operation<1> for Turned {
    const NAME: &'static str = "turn";

    fn saved_inputs(&self, _: [bool; 1]) -> [bool; 1] {
        [false]
    }

    fn forward(&self, [x]: [&[f32]; 1], [shape]: [&Shape; 1]) -> candle_core::Result<(Vec<f32>, Shape)> {
        if self.from.iter().product::<usize>() != x.len() || self.to.elem_count() != x.len() {
            candle_core::bail!("{shape:?} cannot be turned into {:?}", self.to);
        }
        Ok((turn(x, self.from), self.to.clone()))
    }

    fn backward(&self, [x]: [&Input; 1], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 1]> {
        let [b, n, m] = self.from;
        let dx = cpu::with_slice(gradient, |dy| turn(dy, [b, m, n]))?;
        Ok([Some(Tensor::from_vec(dx, x.shape(), &Device::Cpu)?)])
    }
}
