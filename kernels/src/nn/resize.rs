//! Nearest-neighbour upsampling, for the up blocks of a U-Net.

use super::cpu;
use super::tensors::{sum_over, widen};
use crate::autograd::{Input, Operation, apply};
use candle_core::{Device, Shape, Tensor};
use rayon::prelude::*;

/// x [b, c * side^2, h, w] -> [b, c, h * side, w * side]: PyTorch's `pixel_shuffle`.
///
/// # Errors
/// When x has another rank, or its channels are not a multiple of `side^2`.
pub fn pixel_shuffle(x: &Tensor, side: usize) -> candle_core::Result<Tensor> {
    let (batch, channels, height, width) = x.dims4()?;
    let channels = channels / (side * side).max(1);
    x.reshape(vec![batch, channels, side, side, height, width])?
        .permute(vec![0, 1, 4, 2, 5, 3])?
        .contiguous()?
        .reshape((batch, channels, height * side, width * side))
}

/// x [b, c, h, w] -> [b, c, height, width], every pixel from the nearest one as in PyTorch
/// (`floor(i * in / out)`, in f32).
///
/// # Errors
/// When x has another rank.
pub fn upsample_nearest(x: &Tensor, height: usize, width: usize) -> candle_core::Result<Tensor> {
    let (_, _, h, w) = x.dims4()?;
    if (h, w) == (height, width) {
        return Ok(x.clone());
    }
    let (from, to) = ((h, w), (height, width));
    apply([x], Nearest { from, to })
}

struct Nearest {
    from: (usize, usize),
    to: (usize, usize),
}

/// The input index for each output index along an axis.
fn source_indices(from: usize, to: usize) -> Vec<usize> {
    let scale = from as f32 / to as f32;
    (0..to)
        .map(|i| ((i as f32 * scale) as usize).min(from.saturating_sub(1)))
        .collect()
}

impl Nearest {
    /// The factors of both axes, if they are whole numbers.
    fn factors(&self) -> Option<(usize, usize)> {
        let ((h, w), (height, width)) = (self.from, self.to);
        let whole = h > 0 && w > 0 && height.is_multiple_of(h) && width.is_multiple_of(w);
        whole.then(|| (height / h, width / w))
    }

    /// The input index for each output row and each output column.
    fn indices(&self, device: &Device) -> candle_core::Result<[Tensor; 2]> {
        let of = |from: usize, to: usize| {
            let indices: Vec<u32> = source_indices(from, to).into_iter().map(|i| i as u32).collect();
            Tensor::from_vec(indices, to, device)
        };
        Ok([of(self.from.0, self.to.0)?, of(self.from.1, self.to.1)?])
    }
}

impl Operation<1> for Nearest {
    const NAME: &'static str = "upsample-nearest";

    fn saved_inputs(&self, _: [bool; 1]) -> [bool; 1] {
        [false]
    }

    fn forward(&self, [x]: [&[f32]; 1], [shape]: [&Shape; 1]) -> candle_core::Result<(Vec<f32>, Shape)> {
        let (b, c, h, w) = shape.dims4()?;
        let (height, width) = self.to;
        let (ys, xs) = (source_indices(h, height), source_indices(w, width));
        let mut y = vec![0f32; b * c * height * width];
        if !y.is_empty() && !x.is_empty() {
            y.par_chunks_mut(height * width)
                .zip(x.par_chunks(h * w))
                .for_each(|(out, plane)| {
                    for (line, iy) in out.chunks_exact_mut(width).zip(&ys) {
                        let source = &plane[iy * w..(iy + 1) * w];
                        line.iter_mut().zip(&xs).for_each(|(value, ix)| *value = source[*ix]);
                    }
                });
        }
        Ok((y, (b, c, height, width).into()))
    }

    fn backward(&self, [x]: [&Input; 1], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 1]> {
        let ((h, w), (height, width)) = (self.from, self.to);
        let (ys, xs) = (source_indices(h, height), source_indices(w, width));
        let mut dx = vec![0f32; x.shape().elem_count()];
        if !dx.is_empty() && height * width > 0 {
            cpu::with_slice(gradient, |dy| {
                dx.par_chunks_mut(h * w)
                    .zip(dy.par_chunks(height * width))
                    .for_each(|(plane, dy)| {
                        for (line, iy) in dy.chunks_exact(width).zip(&ys) {
                            let target = &mut plane[iy * w..(iy + 1) * w];
                            line.iter().zip(&xs).for_each(|(value, ix)| target[*ix] += *value);
                        }
                    });
            })?;
        }
        Ok([Some(Tensor::from_vec(dx, x.shape(), &Device::Cpu)?)])
    }

    // candle's `upsample_nearest2d` has no gradient for other factors than one whole number for both axes, and its
    // gradient replaces other gradients of the same tensor instead of being added to them (0.11.1).
    fn forward_tensors(&self, [x]: [&Tensor; 1]) -> candle_core::Result<Tensor> {
        let ((b, c, h, w), (height, width)) = (x.dims4()?, self.to);
        if let Some((rows, columns)) = self.factors() {
            return x
                .reshape((b, c, h, 1, w, 1))?
                .broadcast_as((b, c, h, rows, w, columns))?
                .reshape((b, c, height, width));
        }
        let [rows, columns] = self.indices(x.device())?;
        x.contiguous()?.index_select(&rows, 2)?.index_select(&columns, 3)
    }

    fn backward_tensors(&self, [x]: [&Input; 1], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 1]> {
        let ((b, c, h, w), (height, _)) = (x.shape().dims4()?, self.to);
        if let Some((rows, columns)) = self.factors() {
            let blocks = gradient.reshape((b, c, h, rows, w, columns))?;
            return Ok([Some(sum_over(&blocks, &[3, 5])?)]);
        }
        let [rows, columns] = self.indices(gradient.device())?;
        let dy = widen(gradient)?;
        let zeros = |shape: [usize; 4]| Tensor::zeros(&shape, dy.dtype(), dy.device());
        let by_column = zeros([b, c, height, w])?.index_add(&columns, &dy, 3)?;
        Ok([Some(zeros([b, c, h, w])?.index_add(&rows, &by_column, 2)?)])
    }
}
