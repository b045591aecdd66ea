//! Group norm and layer norm.
//!
//! Both take the mean and the variance over a row (of all elements of a group, or of the last dimension), then scale
//! and shift. Sums run in f64, one row on one thread, so that the result does not depend on the number of threads.

use super::cpu::{self, Kernel3, Op3};
use crate::error::Result;
use crate::weights::{Init, Weights};
use candle_core::{D, DType, Device, Shape, Tensor};
use rayon::prelude::*;

/// Group normalisation over the channels of [b, c, ..].
#[derive(Clone, Debug)]
pub struct GroupNorm {
    weight: Tensor,
    bias: Tensor,
    groups: usize,
    eps: f64,
}

impl GroupNorm {
    /// Loads `weight` and `bias` ([channels]).
    ///
    /// # Errors
    /// When a tensor is missing or has another shape, or the groups do not divide the channels.
    pub fn new(weights: &Weights, groups: usize, channels: usize, eps: f64) -> Result<Self> {
        if !channels.is_multiple_of(groups) {
            return Err(weights.config_error(format!("{channels} channels cannot be split into {groups} groups")));
        }
        let weight = weights.get_with(channels, "weight", Init::Ones)?;
        let bias = weights.get_with(channels, "bias", Init::Zeros)?;
        Ok(Self {
            weight,
            bias,
            groups,
            eps,
        })
    }

    #[cfg(test)]
    pub(super) fn of(weight: Tensor, bias: Tensor, groups: usize, eps: f64) -> Self {
        Self {
            weight,
            bias,
            groups,
            eps,
        }
    }

    /// x [b, c, ..] -> the same shape.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let channels = x.dim(1)?;
        if channels != self.weight.elem_count() {
            candle_core::bail!(
                "group norm of {} channels: input {:?}",
                self.weight.elem_count(),
                x.dims()
            );
        }
        if cpu::runs_here(x) && self.weight.dtype() == DType::F32 {
            let spatial = x.elem_count() / (x.dim(0)? * channels).max(1);
            let rows = Rows {
                length: channels / self.groups * spatial,
                channels,
                spatial,
                eps: self.eps,
            };
            return x
                .contiguous()?
                .apply_op3(&self.weight.contiguous()?, &self.bias.contiguous()?, Op3(rows));
        }
        let dtype = x.dtype();
        let grouped = x.reshape((x.dim(0)?, self.groups, ()))?.to_dtype(DType::F32)?;
        let mut affine = vec![1; x.rank()];
        affine[1] = channels;
        normalise(&grouped, self.eps)?
            .to_dtype(dtype)?
            .reshape(x.shape())?
            .broadcast_mul(&self.weight.reshape(affine.as_slice())?)?
            .broadcast_add(&self.bias.reshape(affine.as_slice())?)
    }
}

/// Normalisation over the last dimension.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
}

impl LayerNorm {
    /// Loads `weight` and `bias` ([features]).
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub fn new(weights: &Weights, features: usize, eps: f64) -> Result<Self> {
        let weight = weights.get_with(features, "weight", Init::Ones)?;
        let bias = weights.get_with(features, "bias", Init::Zeros)?;
        Ok(Self { weight, bias, eps })
    }

    #[cfg(test)]
    pub(super) fn of(weight: Tensor, bias: Tensor, eps: f64) -> Self {
        Self { weight, bias, eps }
    }

    /// x [.., features] -> the same shape.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let features = x.dim(D::Minus1)?;
        if features != self.weight.elem_count() {
            candle_core::bail!(
                "layer norm of {} features: input {:?}",
                self.weight.elem_count(),
                x.dims()
            );
        }
        if cpu::runs_here(x) && self.weight.dtype() == DType::F32 {
            let rows = Rows {
                length: features,
                channels: features,
                spatial: 1,
                eps: self.eps,
            };
            return x
                .contiguous()?
                .apply_op3(&self.weight.contiguous()?, &self.bias.contiguous()?, Op3(rows));
        }
        normalise(&x.to_dtype(DType::F32)?, self.eps)?
            .to_dtype(x.dtype())?
            .broadcast_mul(&self.weight)?
            .broadcast_add(&self.bias)
    }
}

/// (x - mean) / sqrt(variance + eps) over the last dimension, by candle's operations.
fn normalise(x: &Tensor, eps: f64) -> candle_core::Result<Tensor> {
    let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
    centred.broadcast_div(&(variance + eps)?.sqrt()?)
}

/// Rows of `length` elements; element `i` of the whole tensor belongs to channel `i / spatial % channels`.
struct Rows {
    length: usize,
    channels: usize,
    spatial: usize,
    eps: f64,
}

impl Rows {
    /// Mean and 1 / sqrt(variance + eps).
    fn statistics(&self, row: &[f32]) -> (f32, f32) {
        let n = row.len().max(1) as f64;
        let mean = row.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
        let variance = row.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / n;
        (mean as f32, (1.0 / (variance + self.eps).sqrt()) as f32)
    }

    /// The channel of the first element of row `r`.
    fn first_channel(&self, r: usize) -> usize {
        r * self.length / self.spatial % self.channels
    }
}

impl Kernel3 for Rows {
    const NAME: &'static str = "norm";

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
                    for (i, (y, x)) in y.chunks_mut(self.spatial).zip(x.chunks(self.spatial)).enumerate() {
                        let (w, b) = (weight[first + i], bias[first + i]);
                        let (mul, add) = (scale * w, b - mean * scale * w);
                        y.iter_mut().zip(x).for_each(|(y, x)| *y = x * mul + add);
                    }
                });
        }
        Ok((y, shape.clone()))
    }

    fn backward(&self, [x, weight, bias]: [&Tensor; 3], grad: &Tensor) -> candle_core::Result<[Option<Tensor>; 3]> {
        let affine = weight.track_op() || bias.track_op();
        let mut dx = vec![0f32; x.elem_count()];
        let (mut dw, mut db) = (vec![0f64; self.channels], vec![0f64; self.channels]);
        cpu::with_slice(x, |x| {
            cpu::with_slice(weight, |weight| {
                cpu::with_slice(grad, |dy| {
                    if x.is_empty() {
                        return;
                    }
                    let inputs = x.par_chunks(self.length).zip(dy.par_chunks(self.length));
                    dx.par_chunks_mut(self.length)
                        .zip(inputs)
                        .enumerate()
                        .for_each(|(r, (dx, (x, dy)))| {
                            self.backward_row(self.first_channel(r), x, dy, weight, dx);
                        });
                    if affine {
                        for (r, (x, dy)) in x.chunks(self.length).zip(dy.chunks(self.length)).enumerate() {
                            let (mean, scale) = self.statistics(x);
                            let first = self.first_channel(r);
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
            Some(Tensor::from_vec(dx, x.shape(), &Device::Cpu)?),
            if affine { Some(vector(dw)?) } else { None },
            if affine { Some(vector(db)?) } else { None },
        ])
    }
}

impl Rows {
    /// dx = scale * (g - mean(g) - xhat * mean(g * xhat)) with g = dy * weight.
    fn backward_row(&self, first: usize, x: &[f32], dy: &[f32], weight: &[f32], dx: &mut [f32]) {
        let (mean, scale) = self.statistics(x);
        let (mut sum, mut sum_xhat) = (0f64, 0f64);
        for (i, (x, dy)) in x.chunks(self.spatial).zip(dy.chunks(self.spatial)).enumerate() {
            let w = weight[first + i];
            for (x, dy) in x.iter().zip(dy) {
                let g = dy * w;
                sum += f64::from(g);
                sum_xhat += f64::from(g * (x - mean) * scale);
            }
        }
        let n = x.len() as f64;
        let (mean_g, mean_gx) = ((sum / n) as f32, (sum_xhat / n) as f32);
        let parts = x
            .chunks(self.spatial)
            .zip(dy.chunks(self.spatial))
            .zip(dx.chunks_mut(self.spatial));
        for (i, ((x, dy), dx)) in parts.enumerate() {
            let w = weight[first + i];
            for ((x, dy), dx) in x.iter().zip(dy).zip(dx) {
                *dx = scale * (dy * w - mean_g - (x - mean) * scale * mean_gx);
            }
        }
    }
}
