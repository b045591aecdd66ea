//! Norms on the CPU. One thread sums each row, in f64, so the result does not depend on the number of threads.

use super::row_norm::RowNorm;
use super::tensors;
use crate::autograd::{Input, Operation};
use crate::nn::activation::Activation;
use crate::nn::cpu::{self, Function, Kernel, Simd, map_serial, run_vectorised};
use candle_core::{Device, Shape, Tensor};
use rayon::prelude::*;
use std::array::from_fn;

/// `activation(mul * x + add)`.
#[derive(Clone, Copy)]
struct Affine {
    mul: f32,
    add: f32,
    activation: Option<Activation>,
}

impl Function<1> for Affine {
    #[inline(always)]
    fn eval<S: Simd>(self, [x]: [S::V; 1]) -> S::V {
        let y = S::mul_add(x, S::splat(self.mul), S::splat(self.add));
        match self.activation {
            Some(activation) => activation.value::<S>(y),
            None => y,
        }
    }
}

/// The gradient before the activation.
impl Function<2> for Affine {
    #[inline(always)]
    fn eval<S: Simd>(self, [x, dy]: [S::V; 2]) -> S::V {
        let y = S::mul_add(x, S::splat(self.mul), S::splat(self.add));
        match self.activation {
            Some(activation) => S::mul(dy, activation.derivative::<S>(y)),
            None => dy,
        }
    }
}

impl RowNorm {
    /// The function for the elements of a channel, from the mean of its row and 1 / sqrt(variance + eps).
    fn affine(&self, (mean, scale): (f32, f32), weight: f32, bias: f32) -> Affine {
        Affine {
            mul: scale * weight,
            add: bias - mean * scale * weight,
            activation: self.activation,
        }
    }

    /// The mean and 1 / sqrt(variance + eps) of a row.
    fn statistics(&self, row: &[f32]) -> (f32, f32) {
        run_vectorised(Statistics {
            row,
            eps: self.eps,
            subtract_mean: self.subtract_mean,
        })
    }

    /// The channel of the first element of row `r`.
    fn first_channel(&self, r: usize) -> usize {
        r * self.length / self.spatial % self.channels
    }
}

impl Operation<3> for RowNorm {
    const NAME: &'static str = "norm";

    fn saved_inputs(&self, _: [bool; 3]) -> [bool; 3] {
        [true, true, self.activation.is_some()]
    }

    fn forward(
        &self,
        [x, weight, bias]: [&[f32]; 3],
        [shape, ..]: [&Shape; 3],
    ) -> candle_core::Result<(Vec<f32>, Shape)> {
        let mut y = vec![0f32; x.len()];
        if !x.is_empty() {
            y.par_chunks_mut(self.length)
                .zip(x.par_chunks(self.length))
                .enumerate()
                .for_each(|(r, (y, x))| {
                    let (mean, scale) = self.statistics(x);
                    let first = self.first_channel(r);
                    if self.spatial == 1 && self.activation.is_none() {
                        let (weight, bias) = (&weight[first..], &bias[first..]);
                        for (((y, x), w), b) in y.iter_mut().zip(x).zip(weight).zip(bias) {
                            *y = (x - mean) * scale * w + b;
                        }
                        return;
                    }
                    for (i, (y, x)) in y.chunks_mut(self.spatial).zip(x.chunks(self.spatial)).enumerate() {
                        map_serial(self.affine((mean, scale), weight[first + i], bias[first + i]), [x], y);
                    }
                });
        }
        Ok((y, shape.clone()))
    }

    fn backward(&self, [x, weight, bias]: [&Input; 3], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 3]> {
        let affine = weight.requires_grad() || bias.requires_grad();
        let shape = x.shape();
        let mut dx = vec![0f32; shape.elem_count()];
        let (mut dw, mut db) = (vec![0f64; self.channels], vec![0f64; self.channels]);
        let biases = match self.activation {
            Some(_) => bias.with(<[f32]>::to_vec)?,
            None => Vec::new(),
        };
        x.with(|x| {
            weight.with(|weight| {
                cpu::with_slice(gradient, |dy| {
                    if x.is_empty() {
                        return;
                    }
                    let inputs = x.par_chunks(self.length).zip(dy.par_chunks(self.length));
                    dx.par_chunks_mut(self.length).zip(inputs).enumerate().for_each_init(
                        Vec::new,
                        |scratch, (r, (dx, (x, dy)))| {
                            let first = self.first_channel(r);
                            let dy = self.gradient_before_activation(first, x, dy, (weight, &biases), scratch);
                            self.backward_row(first, x, dy, weight, dx);
                        },
                    );
                    if affine {
                        let mut scratch = Vec::new();
                        for (r, (x, dy)) in x.chunks(self.length).zip(dy.chunks(self.length)).enumerate() {
                            let (mean, scale) = self.statistics(x);
                            let first = self.first_channel(r);
                            let dy = self.gradient_before_activation(first, x, dy, (weight, &biases), &mut scratch);
                            for (i, (x, dy)) in x.chunks(self.spatial).zip(dy.chunks(self.spatial)).enumerate() {
                                let (mut w, mut b) = (0f64, 0f64);
                                for (x, dy) in x.iter().zip(dy) {
                                    w += f64::from(dy * (x - mean) * scale);
                                    b += f64::from(*dy);
                                }
                                dw[first + i] += w;
                                db[first + i] += b;
                            }
                        }
                    }
                })
            })
        })???;
        let vector = |v: Vec<f64>| Tensor::from_vec(v.iter().map(|v| *v as f32).collect(), self.channels, &Device::Cpu);
        Ok([
            Some(Tensor::from_vec(dx, shape, &Device::Cpu)?),
            if affine { Some(vector(dw)?) } else { None },
            if affine { Some(vector(db)?) } else { None },
        ])
    }

    fn forward_tensors(&self, [x, weight, bias]: [&Tensor; 3]) -> candle_core::Result<Tensor> {
        tensors::forward(self, x, weight, bias)
    }

    fn backward_tensors(&self, inputs: [&Input; 3], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 3]> {
        tensors::backward(self, inputs, gradient)
    }
}

impl RowNorm {
    /// The gradient of a row before the activation; stored in `scratch` if there is an activation.
    fn gradient_before_activation<'a>(
        &self,
        first: usize,
        x: &[f32],
        dy: &'a [f32],
        (weight, bias): (&[f32], &[f32]),
        scratch: &'a mut Vec<f32>,
    ) -> &'a [f32] {
        if self.activation.is_none() {
            return dy;
        }
        let statistics = self.statistics(x);
        scratch.resize(x.len(), 0.0);
        let channels = scratch
            .chunks_mut(self.spatial)
            .zip(x.chunks(self.spatial))
            .zip(dy.chunks(self.spatial));
        for (i, ((to, x), dy)) in channels.enumerate() {
            map_serial(self.affine(statistics, weight[first + i], bias[first + i]), [x, dy], to);
        }
        scratch
    }

    /// dx = scale * (g - mean(g) - xhat * mean(g * xhat)) with g = dy * weight; without mean(g) if the mean is not
    /// subtracted.
    fn backward_row(&self, first: usize, x: &[f32], dy: &[f32], weight: &[f32], dx: &mut [f32]) {
        let (mean, scale) = self.statistics(x);
        run_vectorised(BackwardRow {
            x,
            dy,
            dx,
            weight: &weight[first..],
            spatial: self.spatial,
            subtract_mean: self.subtract_mean,
            mean,
            scale,
        });
    }
}

/// The number of partial sums, whose order is fixed: enough that the CPU does not wait for an addition before the next.
const ACCUMULATORS: usize = 16;

/// Adds `f` of the elements to the partial sums.
#[inline(always)]
fn accumulate<const N: usize>(inputs: [&[f32]; N], parts: &mut [f64; ACCUMULATORS], f: impl Fn([f32; N]) -> f32) {
    // `from_fn`, as `map` of an array is a call where the crate's codegen units are optimised apart.
    let length = inputs.iter().map(|x| x.len()).min().unwrap_or(0);
    let whole = length - length % ACCUMULATORS;
    for at in (0..whole).step_by(ACCUMULATORS) {
        let blocks: [&[f32]; N] = from_fn(|n| &inputs[n][at..at + ACCUMULATORS]);
        for (i, part) in parts.iter_mut().enumerate() {
            *part += f64::from(f(from_fn(|n| blocks[n][i])));
        }
    }
    for i in whole..length {
        parts[i - whole] += f64::from(f(from_fn(|n| inputs[n][i])));
    }
}

struct Statistics<'a> {
    row: &'a [f32],
    eps: f64,
    subtract_mean: bool,
}

impl Kernel for Statistics<'_> {
    type Output = (f32, f32);

    #[inline(always)]
    fn run<S: Simd>(self) -> (f32, f32) {
        let n = self.row.len().max(1) as f64;
        let (mut total, mut squares) = ([0f64; ACCUMULATORS], [0f64; ACCUMULATORS]);
        if self.subtract_mean {
            accumulate([self.row], &mut total, |[v]| v);
        }
        let mean = total.iter().sum::<f64>() / n;
        // The squares of the differences from the mean: a difference of sums of large squares would lose precision.
        let centre = mean as f32;
        accumulate([self.row], &mut squares, |[v]| (v - centre) * (v - centre));
        let variance = squares.iter().sum::<f64>() / n - (mean - f64::from(centre)).powi(2);
        (centre, (1.0 / (variance.max(0.0) + self.eps).sqrt()) as f32)
    }
}

struct BackwardRow<'a> {
    x: &'a [f32],
    dy: &'a [f32],
    dx: &'a mut [f32],
    /// The weights from the row's first channel on.
    weight: &'a [f32],
    spatial: usize,
    subtract_mean: bool,
    mean: f32,
    scale: f32,
}

impl Kernel for BackwardRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self {
            x,
            dy,
            dx,
            weight,
            spatial,
            subtract_mean,
            mean,
            scale,
        } = self;
        let (mut g_sum, mut gx_sum) = ([0f64; ACCUMULATORS], [0f64; ACCUMULATORS]);
        let n = x.len() as f64;
        let means = |g: [f64; ACCUMULATORS], gx: [f64; ACCUMULATORS]| {
            // Zero if the mean is not subtracted: then it has no gradient.
            let g = if subtract_mean { g.iter().sum::<f64>() / n } else { 0.0 };
            (g as f32, (gx.iter().sum::<f64>() / n) as f32)
        };
        if spatial == 1 {
            accumulate([dy, weight], &mut g_sum, |[dy, w]| dy * w);
            accumulate([dy, weight, x], &mut gx_sum, |[dy, w, x]| dy * w * (x - mean) * scale);
            let (mean_g, mean_gx) = means(g_sum, gx_sum);
            for (((dx, x), dy), w) in dx.iter_mut().zip(x).zip(dy).zip(weight) {
                *dx = scale * (dy * w - mean_g - (x - mean) * scale * mean_gx);
            }
            return;
        }
        let channels = || x.chunks(spatial).zip(dy.chunks(spatial)).zip(weight);
        for ((x, dy), w) in channels() {
            accumulate([dy], &mut g_sum, |[dy]| dy * w);
            accumulate([dy, x], &mut gx_sum, |[dy, x]| dy * w * (x - mean) * scale);
        }
        let (mean_g, mean_gx) = means(g_sum, gx_sum);
        for (((x, dy), w), dx) in channels().zip(dx.chunks_mut(spatial)) {
            for ((x, dy), dx) in x.iter().zip(dy).zip(dx) {
                *dx = scale * (dy * w - mean_g - (x - mean) * scale * mean_gx);
            }
        }
    }
}
