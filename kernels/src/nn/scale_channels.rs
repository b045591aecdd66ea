//! Multiplies each channel of a layer's output or input: the magnitude of a DoRA.

use super::adapter::LayerKind;
use super::cpu;
use super::tensors::{sum_over, widen};
use crate::autograd::{Input, Operation, apply};
use crate::cuda_kernels;
use candle_core::{Device, Result, Shape, Tensor};
use rayon::prelude::*;

/// `x (1 + scale) + shift` over the channels of x, the output or the input of a layer of this kind: [.., c], or of a convolution
/// [b, c, ..]. `scale` [c] is float32 or of x's dtype; `shift` [c] has x's dtype and gets no gradient. x and `scale` get gradients.
///
/// # Errors
/// When the shapes do not match.
pub fn scale_channels(kind: LayerKind, x: &Tensor, scale: &Tensor, shift: Option<&Tensor>) -> Result<Tensor> {
    let shift = shift.map(|shift| shift.detach().contiguous()).transpose()?;
    apply([x, scale], ScaleChannels { kind, shift })
}

struct ScaleChannels {
    kind: LayerKind,
    /// [c].
    shift: Option<Tensor>,
}

/// The sizes of x as [outer, channels, inner].
fn sizes(kind: LayerKind, x: &Shape, scale: &Shape) -> Result<[usize; 3]> {
    let (dims, channels) = (x.dims(), scale.dims1()?);
    let axis = kind.channels_axis(dims.len());
    if dims.get(axis) != Some(&channels) {
        candle_core::bail!("scale_channels: a scale {scale:?} does not match x {x:?}");
    }
    Ok([
        dims[..axis].iter().product(),
        channels,
        dims[axis + 1..].iter().product(),
    ])
}

/// Calls `f(channel, elements)` for all runs of elements of one channel, in parallel; where channels are the last axis, each run is
/// one element.
fn for_each_run(y: &mut [f32], channels: usize, inner: usize, f: impl Fn(usize, usize, &mut [f32]) + Sync) {
    let row = (channels * inner).max(1);
    y.par_chunks_mut(row)
        .with_min_len(8)
        .enumerate()
        .for_each(|(outer, y)| {
            for (channel, run) in y.chunks_mut(inner.max(1)).enumerate() {
                f(channel, outer * row + channel * inner, run);
            }
        });
}

/// The sums of `a b` over each channel. One thread computes each sum, in f64.
fn sums([a, b]: [&[f32]; 2], [outer, channels, inner]: [usize; 3]) -> Vec<f32> {
    /// Channels of a task.
    const STRIP: usize = 64;
    let mut out = vec![0f32; channels];
    out.par_chunks_mut(STRIP).enumerate().for_each(|(strip, out)| {
        let mut sums = [0f64; STRIP];
        for row in 0..outer {
            let start = (row * channels + strip * STRIP) * inner;
            let range = start..start + out.len() * inner;
            let runs = a[range.clone()].chunks(inner.max(1)).zip(b[range].chunks(inner.max(1)));
            for (sum, (a, b)) in sums.iter_mut().zip(runs) {
                *sum += a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
            }
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = sum as f32;
        }
    });
    out
}

impl ScaleChannels {
    /// A vector [c] in the shape that broadcasts to x, in its dtype.
    fn over(&self, x: &Tensor, vector: &Tensor) -> Result<Tensor> {
        self.kind.over_channels(&vector.to_dtype(x.dtype())?)
    }

    /// `x (1 + scale)` with candle's operations. In 16 bits the sum `1 + scale` would be 1 for a small scale.
    fn scaled(&self, x: &Tensor, scale: &Tensor) -> Result<Tensor> {
        match x.dtype().size_in_bytes() < 4 {
            true => x + x.broadcast_mul(&self.over(x, scale)?)?,
            false => x.broadcast_mul(&self.over(x, &(scale + 1.0)?)?),
        }
    }

    /// `x (1 + scale) + shift` by the kernel of modulated tokens, if there is one: channels are the last axis.
    fn with_kernel(&self, x: &Tensor, scale: &Tensor, shift: Option<&Tensor>) -> Result<Option<Tensor>> {
        if self.kind.kernel_axes() > 0 {
            return Ok(None);
        }
        let channels = scale.dims1()?;
        let row = |vector: &Tensor| vector.to_dtype(x.dtype())?.reshape((1, channels));
        let shift = shift.map(row).transpose()?;
        let y = cuda_kernels::modulate(&x.reshape((1, (), channels))?, &row(scale)?, shift.as_ref())?;
        y.map(|y| y.reshape(x.shape())).transpose()
    }
}

impl Operation<2> for ScaleChannels {
    const NAME: &'static str = "scale-channels";

    fn saved_inputs(&self, [x, scale]: [bool; 2]) -> [bool; 2] {
        [scale, x]
    }

    fn has_slices(&self) -> bool {
        self.shift.as_ref().is_none_or(crate::autograd::is_cpu_f32)
    }

    fn forward(&self, [x, scale]: [&[f32]; 2], [shape, scales]: [&Shape; 2]) -> Result<(Vec<f32>, Shape)> {
        let [_, channels, inner] = sizes(self.kind, shape, scales)?;
        let shift = match &self.shift {
            Some(shift) => shift.to_vec1::<f32>()?,
            None => vec![0.0; channels],
        };
        let mut y = vec![0f32; x.len()];
        for_each_run(&mut y, channels, inner, |channel, at, y| {
            let (scale, shift) = (1.0 + scale[channel], shift[channel]);
            for (y, x) in y.iter_mut().zip(&x[at..]) {
                *y = x * scale + shift;
            }
        });
        Ok((y, shape.clone()))
    }

    fn backward(&self, [x, scale]: [&Input; 2], gradient: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let all @ [_, channels, inner] = sizes(self.kind, x.shape(), scale.shape())?;
        cpu::with_slice(gradient, |dy| {
            let dx = match x.requires_grad() {
                true => {
                    let mut dx = vec![0f32; dy.len()];
                    scale.with(|scale| {
                        for_each_run(&mut dx, channels, inner, |channel, at, dx| {
                            for (dx, dy) in dx.iter_mut().zip(&dy[at..]) {
                                *dx = dy * (1.0 + scale[channel]);
                            }
                        });
                    })?;
                    Some(Tensor::from_vec(dx, x.shape(), &Device::Cpu)?)
                }
                false => None,
            };
            let d_scale = match scale.requires_grad() {
                true => Some(Tensor::from_vec(
                    x.with(|x| sums([dy, x], all))?,
                    channels,
                    &Device::Cpu,
                )?),
                false => None,
            };
            Ok([dx, d_scale])
        })?
    }

    fn forward_tensors(&self, [x, scale]: [&Tensor; 2]) -> Result<Tensor> {
        sizes(self.kind, x.shape(), scale.shape())?;
        if let Some(y) = self.with_kernel(x, scale, self.shift.as_ref())? {
            return Ok(y);
        }
        let y = self.scaled(x, scale)?;
        match &self.shift {
            Some(shift) => y.broadcast_add(&self.over(x, shift)?),
            None => Ok(y),
        }
    }

    fn backward_tensors(&self, [x, scale]: [&Input; 2], gradient: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let all = sizes(self.kind, x.shape(), scale.shape())?;
        let dx = match x.requires_grad() {
            true => Some(match self.with_kernel(gradient, scale.tensor()?, None)? {
                Some(dx) => dx,
                None => self.scaled(gradient, scale.tensor()?)?,
            }),
            false => None,
        };
        let d_scale = match scale.requires_grad() {
            true => {
                let products = (widen(gradient)? * widen(x.tensor()?)?)?;
                Some(sum_over(&products.reshape(all.as_slice())?, &[0, 2])?)
            }
            false => None,
        };
        Ok([dx, d_scale])
    }
}
