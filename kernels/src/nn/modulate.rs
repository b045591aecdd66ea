//! Modulation of the tokens of a diffusion transformer by a conditioning vector (adaLN: W. Peebles and S. Xie,
//! arXiv:2212.09748).

use super::cpu;
use super::tensors::{sum_over, widen};
use crate::autograd::{Input, Operation, apply};
use crate::cuda_kernels;
use candle_core::{Device, Shape, Tensor};
use rayon::prelude::*;

/// x (1 + scale) + shift: x [b, n, c], scale and shift [b, c] -> [b, n, c].
///
/// # Errors
/// When the shapes do not match.
pub fn modulate(x: &Tensor, scale: &Tensor, shift: &Tensor) -> candle_core::Result<Tensor> {
    apply([x, scale, shift], Modulate)
}

/// x + gate y: x and y [b, n, c], gate [b, c] -> [b, n, c].
///
/// # Errors
/// When the shapes do not match.
pub fn gated_residual(x: &Tensor, gate: &Tensor, y: &Tensor) -> candle_core::Result<Tensor> {
    apply([x, gate, y], GatedResidual)
}

/// Checks the shapes x [b, n, c] and vectors [b, c], and returns n and c.
fn sizes(x: &Shape, vectors: [&Shape; 2]) -> candle_core::Result<(usize, usize)> {
    let (batch, tokens, features) = x.dims3()?;
    if vectors.iter().any(|vector| vector.dims() != [batch, features]) {
        candle_core::bail!("modulation: vectors {vectors:?} do not match tokens {x:?}");
    }
    Ok((tokens, features))
}

/// Calls `f(token, row)` for every token in parallel; a row has `features` elements.
fn for_each_token(y: &mut [f32], features: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    y.par_chunks_mut(features.max(1))
        .with_min_len(16)
        .enumerate()
        .for_each(|(token, row)| f(token, row));
}

/// Sums `a * b`, or `a` if there is no `b`, over the tokens of each image: [b, c]. One thread computes each sum, in
/// f64.
fn sum_over_tokens(
    a: &[f32],
    b: Option<&[f32]>,
    (batch, tokens, features): (usize, usize, usize),
) -> candle_core::Result<Tensor> {
    /// Features per task.
    const STRIP: usize = 64;
    let mut out = vec![0f32; batch * features];
    if !a.is_empty() {
        for (image, out) in out.chunks_mut(features).enumerate() {
            let image_start = image * tokens * features;
            out.par_chunks_mut(STRIP).enumerate().for_each(|(strip, out)| {
                let mut sums = [0f64; STRIP];
                for token in 0..tokens {
                    let at = image_start + token * features + strip * STRIP;
                    let a = &a[at..at + out.len()];
                    match b {
                        Some(b) => {
                            let products = a.iter().zip(&b[at..]);
                            for (sum, (a, b)) in sums.iter_mut().zip(products) {
                                *sum += f64::from(a * b);
                            }
                        }
                        None => {
                            for (sum, a) in sums.iter_mut().zip(a) {
                                *sum += f64::from(*a);
                            }
                        }
                    }
                }
                for (out, sum) in out.iter_mut().zip(sums) {
                    *out = sum as f32;
                }
            });
        }
    }
    Tensor::from_vec(out, (batch, features), &Device::Cpu)
}

struct Modulate;

impl Operation<3> for Modulate {
    const NAME: &'static str = "modulate";

    fn saved_inputs(&self, [x, scale, _]: [bool; 3]) -> [bool; 3] {
        [scale, x, false]
    }

    fn forward(
        &self,
        [x, scale, shift]: [&[f32]; 3],
        [shape, scales, shifts]: [&Shape; 3],
    ) -> candle_core::Result<(Vec<f32>, Shape)> {
        let (tokens, features) = sizes(shape, [scales, shifts])?;
        let mut y = vec![0f32; x.len()];
        for_each_token(&mut y, features, |token, y| {
            let (at, image_start) = (token * features, token / tokens * features);
            let vectors = scale[image_start..].iter().zip(&shift[image_start..]);
            for ((y, x), (scale, shift)) in y.iter_mut().zip(&x[at..]).zip(vectors) {
                *y = x * (1.0 + scale) + shift;
            }
        });
        Ok((y, shape.clone()))
    }

    fn backward(&self, [x, scale, shift]: [&Input; 3], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 3]> {
        let (batch, tokens, features) = x.shape().dims3()?;
        let all = (batch, tokens, features);
        cpu::with_slice(gradient, |dy| {
            let dx = if x.requires_grad() {
                let mut dx = vec![0f32; dy.len()];
                scale.with(|scale| {
                    for_each_token(&mut dx, features, |token, dx| {
                        let scale = &scale[token / tokens * features..];
                        for ((dx, dy), scale) in dx.iter_mut().zip(&dy[token * features..]).zip(scale) {
                            *dx = dy * (1.0 + scale);
                        }
                    });
                })?;
                Some(Tensor::from_vec(dx, x.shape(), &Device::Cpu)?)
            } else {
                None
            };
            let d_scale = match scale.requires_grad() {
                true => Some(x.with(|x| sum_over_tokens(dy, Some(x), all))??),
                false => None,
            };
            let d_shift = match shift.requires_grad() {
                true => Some(sum_over_tokens(dy, None, all)?),
                false => None,
            };
            Ok([dx, d_scale, d_shift])
        })?
    }

    fn forward_tensors(&self, [x, scale, shift]: [&Tensor; 3]) -> candle_core::Result<Tensor> {
        sizes(x.shape(), [scale.shape(), shift.shape()])?;
        if let Some(y) = cuda_kernels::modulate(x, scale, Some(shift))? {
            return Ok(y);
        }
        x.broadcast_mul(&(scale + 1.0)?.unsqueeze(1)?)?
            .broadcast_add(&shift.unsqueeze(1)?)
    }

    fn backward_tensors(
        &self,
        [x, scale, shift]: [&Input; 3],
        gradient: &Tensor,
    ) -> candle_core::Result<[Option<Tensor>; 3]> {
        let dx = match x.requires_grad() {
            true => Some(match cuda_kernels::modulate(gradient, scale.tensor()?, None)? {
                Some(dx) => dx,
                None => gradient.broadcast_mul(&(scale.tensor()? + 1.0)?.unsqueeze(1)?)?,
            }),
            false => None,
        };
        let d_scale = match scale.requires_grad() {
            true => Some(sum_over(&(widen(gradient)? * widen(x.tensor()?)?)?, &[1])?),
            false => None,
        };
        let d_shift = match shift.requires_grad() {
            true => Some(sum_over(gradient, &[1])?),
            false => None,
        };
        Ok([dx, d_scale, d_shift])
    }
}

struct GatedResidual;

impl Operation<3> for GatedResidual {
    const NAME: &'static str = "gated-residual";

    fn saved_inputs(&self, [_, gate, y]: [bool; 3]) -> [bool; 3] {
        [false, y, gate]
    }

    fn forward(
        &self,
        [x, gate, y]: [&[f32]; 3],
        [shape, gates, other]: [&Shape; 3],
    ) -> candle_core::Result<(Vec<f32>, Shape)> {
        let (tokens, features) = sizes(shape, [gates, gates])?;
        if other != shape {
            candle_core::bail!("gated residual: the shapes {shape:?} and {other:?} differ");
        }
        let mut out = vec![0f32; x.len()];
        for_each_token(&mut out, features, |token, out| {
            let at = token * features;
            let gate = &gate[token / tokens * features..];
            let inputs = x[at..].iter().zip(&y[at..]).zip(gate);
            for (out, ((x, y), gate)) in out.iter_mut().zip(inputs) {
                *out = x + gate * y;
            }
        });
        Ok((out, shape.clone()))
    }

    fn backward(&self, [x, gate, y]: [&Input; 3], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 3]> {
        let (batch, tokens, features) = x.shape().dims3()?;
        cpu::with_slice(gradient, |d| {
            let d_gate = match gate.requires_grad() {
                true => Some(y.with(|y| sum_over_tokens(d, Some(y), (batch, tokens, features)))??),
                false => None,
            };
            let dy = if y.requires_grad() {
                let mut dy = vec![0f32; d.len()];
                gate.with(|gate| {
                    for_each_token(&mut dy, features, |token, dy| {
                        let gate = &gate[token / tokens * features..];
                        for ((dy, d), gate) in dy.iter_mut().zip(&d[token * features..]).zip(gate) {
                            *dy = d * gate;
                        }
                    });
                })?;
                Some(Tensor::from_vec(dy, y.shape(), &Device::Cpu)?)
            } else {
                None
            };
            Ok([Some(gradient.clone()), d_gate, dy])
        })?
    }

    fn forward_tensors(&self, [x, gate, y]: [&Tensor; 3]) -> candle_core::Result<Tensor> {
        sizes(x.shape(), [gate.shape(), gate.shape()])?;
        if let Some(sum) = cuda_kernels::gated_residual(x, gate, y)? {
            return Ok(sum);
        }
        x + y.broadcast_mul(&gate.unsqueeze(1)?)?
    }

    fn backward_tensors(
        &self,
        [_, gate, y]: [&Input; 3],
        gradient: &Tensor,
    ) -> candle_core::Result<[Option<Tensor>; 3]> {
        let d_gate = match gate.requires_grad() {
            true => Some(sum_over(&(widen(gradient)? * widen(y.tensor()?)?)?, &[1])?),
            false => None,
        };
        let dy = match y.requires_grad() {
            true => Some(match cuda_kernels::scale(gradient, gate.tensor()?)? {
                Some(dy) => dy,
                None => gradient.broadcast_mul(&gate.tensor()?.unsqueeze(1)?)?,
            }),
            false => None,
        };
        Ok([Some(gradient.clone()), d_gate, dy])
    }
}
