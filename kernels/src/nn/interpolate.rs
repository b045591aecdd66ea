//! Interpolation of images, as PyTorch's `interpolate`.

use super::cpu;
use crate::autograd::{Input, Operation, apply};
use candle_core::{DType, Device, Result, Shape, Tensor};
use rayon::prelude::*;

/// How an image is interpolated along each axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interpolation {
    /// Between two values. The edges of both images are the edges of their first and last values.
    Bilinear,
    /// As [`Self::Bilinear`]; where the image becomes smaller, with the mean of all values that a result covers (`antialias=True`).
    BilinearAntialiased,
    /// Between two values. The first and the last values of both images are at the same places (`align_corners=True`).
    BilinearAligned,
    /// Between four values, with `a` = -0.75. The edges are those of [`Self::Bilinear`].
    Bicubic,
}

/// x [b, c, h, w] -> [b, c, height, width].
///
/// # Errors
/// When x has another rank, or a side of 0.
pub fn interpolate(x: &Tensor, (height, width): (usize, usize), interpolation: Interpolation) -> Result<Tensor> {
    let (_, _, h, w) = x.dims4()?;
    if (h, w) == (height, width) {
        return Ok(x.clone());
    }
    if [h, w, height, width].contains(&0) {
        candle_core::bail!("an image of {w} x {h} cannot be interpolated to {width} x {height}");
    }
    let axes = [interpolation.axis(h, height), interpolation.axis(w, width)];
    apply([x], Interpolate { axes })
}

/// Where the values along an axis come from.
struct Axis {
    from: usize,
    to: usize,
    /// For each result, the places of the values that it is made of and their weights.
    taps: Vec<Vec<(usize, f64)>>,
}

impl Interpolation {
    fn axis(self, from: usize, to: usize) -> Axis {
        let taps = (0..to).map(|i| self.taps(i, from, to)).collect();
        Axis { from, to, taps }
    }

    fn taps(self, i: usize, from: usize, to: usize) -> Vec<(usize, f64)> {
        let last = from.saturating_sub(1);
        let centre = (i as f64 + 0.5) * from as f64 / to as f64 - 0.5;
        let between = |place: f64| {
            let first = (place as usize).min(last);
            let share = place - first as f64;
            vec![(first, 1.0 - share), ((first + 1).min(last), share)]
        };
        match self {
            Self::Bilinear => between(centre.max(0.0)),
            Self::BilinearAntialiased => {
                let scale = (from as f64 / to as f64).max(1.0);
                let (first, last) = (centre + 0.5 - scale, centre + 0.5 + scale);
                let (first, end) = ((first + 0.5).max(0.0) as usize, ((last + 0.5) as usize).min(from));
                let weight = |place: usize| (1.0 - ((place as f64 - centre) / scale).abs()).max(0.0);
                let total: f64 = (first..end).map(weight).sum();
                (first..end).map(|place| (place, weight(place) / total)).collect()
            }
            Self::BilinearAligned if to == 1 => between(0.0),
            Self::BilinearAligned => between(i as f64 * last as f64 / (to - 1) as f64),
            Self::Bicubic => {
                let (first, share) = (centre.floor(), centre - centre.floor());
                let place = |offset: f64| (first + offset).clamp(0.0, last as f64) as usize;
                let weights = [far(share + 1.0), near(share), near(1.0 - share), far(2.0 - share)];
                let places = [-1.0, 0.0, 1.0, 2.0].map(place);
                places.into_iter().zip(weights).collect()
            }
        }
    }
}

/// `a` of the cubic kernel (R. Keys, 1981).
const CUBIC: f64 = -0.75;

/// The cubic kernel at a distance of at most 1.
fn near(x: f64) -> f64 {
    ((CUBIC + 2.0) * x - (CUBIC + 3.0)) * x * x + 1.0
}

/// The cubic kernel at a distance of 1 to 2.
fn far(x: f64) -> f64 {
    ((CUBIC * x - 5.0 * CUBIC) * x + 8.0 * CUBIC) * x - 4.0 * CUBIC
}

impl Axis {
    /// The weights as a matrix, [to, from].
    fn matrix(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        let mut weights = vec![0f64; self.to * self.from];
        for (row, taps) in weights.chunks_exact_mut(self.from.max(1)).zip(&self.taps) {
            for (place, weight) in taps {
                row[*place] += weight;
            }
        }
        Tensor::from_vec(weights, (self.to, self.from), &Device::Cpu)?
            .to_dtype(dtype)?
            .to_device(device)
    }
}

struct Interpolate {
    /// Of the rows, and of the columns.
    axes: [Axis; 2],
}

impl Interpolate {
    /// `matrices`: of the rows and of the columns, each [new side, side].
    fn multiply(x: &Tensor, [rows, columns]: [&Tensor; 2]) -> Result<Tensor> {
        let (b, c, h, w) = x.dims4()?;
        let (height, width) = (rows.dim(0)?, columns.dim(0)?);
        let wide = x.contiguous()?.reshape((b * c * h, w))?.matmul(&columns.t()?)?;
        let turned = wide.reshape((b * c, h, width))?.transpose(1, 2)?.contiguous()?;
        let both = turned.reshape((b * c * width, h))?.matmul(&rows.t()?)?;
        let back = both.reshape((b * c, width, height))?.transpose(1, 2)?.contiguous()?;
        back.reshape((b, c, height, width))
    }
}

impl Operation<1> for Interpolate {
    const NAME: &'static str = "interpolate";

    fn saved_inputs(&self, _: [bool; 1]) -> [bool; 1] {
        [false]
    }

    fn forward(&self, [x]: [&[f32]; 1], [shape]: [&Shape; 1]) -> Result<(Vec<f32>, Shape)> {
        let (b, c, h, w) = shape.dims4()?;
        let [rows, columns] = &self.axes;
        let (height, width) = (rows.to, columns.to);
        let mut y = vec![0f32; b * c * height * width];
        y.par_chunks_mut(height * width)
            .zip(x.par_chunks(h * w))
            .for_each(|(out, plane)| {
                let mut wide = vec![0f32; h * width];
                for (line, source) in wide.chunks_exact_mut(width).zip(plane.chunks_exact(w)) {
                    for (value, taps) in line.iter_mut().zip(&columns.taps) {
                        *value = taps.iter().map(|(place, weight)| source[*place] * *weight as f32).sum();
                    }
                }
                for (line, taps) in out.chunks_exact_mut(width).zip(&rows.taps) {
                    for (place, weight) in taps {
                        let source = &wide[place * width..(place + 1) * width];
                        let weight = *weight as f32;
                        line.iter_mut().zip(source).for_each(|(value, x)| *value += x * weight);
                    }
                }
            });
        Ok((y, (b, c, height, width).into()))
    }

    fn backward(&self, [x]: [&Input; 1], gradient: &Tensor) -> Result<[Option<Tensor>; 1]> {
        let [rows, columns] = &self.axes;
        let (h, w, height, width) = (rows.from, columns.from, rows.to, columns.to);
        let mut dx = vec![0f32; x.shape().elem_count()];
        cpu::with_slice(gradient, |dy| {
            dx.par_chunks_mut(h * w)
                .zip(dy.par_chunks(height * width))
                .for_each(|(plane, dy)| {
                    let mut wide = vec![0f32; h * width];
                    for (line, taps) in dy.chunks_exact(width).zip(&rows.taps) {
                        for (place, weight) in taps {
                            let target = &mut wide[place * width..(place + 1) * width];
                            let weight = *weight as f32;
                            target
                                .iter_mut()
                                .zip(line)
                                .for_each(|(value, dy)| *value += dy * weight);
                        }
                    }
                    for (target, line) in plane.chunks_exact_mut(w).zip(wide.chunks_exact(width)) {
                        for (dy, taps) in line.iter().zip(&columns.taps) {
                            for (place, weight) in taps {
                                target[*place] += dy * *weight as f32;
                            }
                        }
                    }
                });
        })?;
        Ok([Some(Tensor::from_vec(dx, x.shape(), &Device::Cpu)?)])
    }

    fn forward_tensors(&self, [x]: [&Tensor; 1]) -> Result<Tensor> {
        let [rows, columns] = &self.axes;
        let matrix = |axis: &Axis| axis.matrix(x.dtype(), x.device());
        Self::multiply(x, [&matrix(rows)?, &matrix(columns)?])
    }

    fn backward_tensors(&self, _: [&Input; 1], gradient: &Tensor) -> Result<[Option<Tensor>; 1]> {
        let [rows, columns] = &self.axes;
        let matrix = |axis: &Axis| axis.matrix(gradient.dtype(), gradient.device())?.t()?.contiguous();
        Ok([Some(Self::multiply(gradient, [&matrix(rows)?, &matrix(columns)?])?)])
    }
}
