//! Norms with candle's operations, in f32 whatever the dtype of the input.

use super::row_norm::RowNorm;
use crate::autograd::Input;
use crate::cuda_kernels::{self, Norm};
use crate::nn::activation::Activation;
use crate::nn::tensors::{sum_over, widen};
use candle_core::{D, Result, Tensor};

/// The rows of x, normalised, [rows, length]; and 1 / sqrt(variance + eps) of each, [rows, 1].
fn normalise(norm: &RowNorm, x: &Tensor) -> Result<(Tensor, Tensor)> {
    let rows = x.reshape(((), norm.length))?;
    let centred = match norm.subtract_mean {
        true => rows.broadcast_sub(&rows.mean_keepdim(D::Minus1)?)?,
        false => rows,
    };
    let scale = (centred.sqr()?.mean_keepdim(D::Minus1)? + norm.eps)?.sqrt()?.recip()?;
    Ok((centred.broadcast_mul(&scale)?, scale))
}

/// x as [.., channels, spatial], or [.., channels] if a channel is one number.
fn by_channel(norm: &RowNorm, x: &Tensor) -> Result<Tensor> {
    match norm.spatial {
        1 => x.reshape(((), norm.channels)),
        spatial => x.reshape(((), norm.channels, spatial)),
    }
}

/// A weight or bias [channels] in the shape that is multiplied with the result of [`by_channel`].
fn channel_vector(norm: &RowNorm, vector: &Tensor) -> Result<Tensor> {
    match norm.spatial {
        1 => widen(vector)?.reshape((1, norm.channels)),
        _ => widen(vector)?.reshape((1, norm.channels, 1)),
    }
}

/// `normalised * weight + bias`, by channel. Norms that do not subtract the mean have no bias.
fn affine(norm: &RowNorm, normalised: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let y = by_channel(norm, normalised)?.broadcast_mul(&channel_vector(norm, weight)?)?;
    match norm.subtract_mean {
        true => y.broadcast_add(&channel_vector(norm, bias)?),
        false => Ok(y),
    }
}

/// The norm as a kernel for GPUs computes it, if one does.
fn for_kernel(norm: &RowNorm) -> Option<Norm> {
    let with_silu = match norm.activation {
        None => false,
        Some(Activation::Silu) => true,
        Some(_) => return None,
    };
    Some(Norm {
        length: norm.length,
        channels: norm.channels,
        spatial: norm.spatial,
        eps: norm.eps,
        subtract_mean: norm.subtract_mean,
        with_silu,
    })
}

/// The tensor form of the forward pass.
pub(super) fn forward(norm: &RowNorm, x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    if x.elem_count() == 0 {
        return Ok(x.clone());
    }
    if let Some(kernel) = for_kernel(norm)
        && let Some(y) = cuda_kernels::norm(&kernel, x, weight, bias)?
    {
        return Ok(y);
    }
    let (normalised, _) = normalise(norm, &widen(x)?)?;
    let y = affine(norm, &normalised, weight, bias)?;
    let y = match norm.activation {
        Some(activation) => activation.value_tensors(&y)?,
        None => y,
    };
    y.reshape(x.shape())?.to_dtype(x.dtype())
}

/// The tensor form of the backward pass: dx = scale * (g - mean(g) - xhat * mean(g * xhat)) with g = dy * weight;
/// without mean(g) if the mean is not subtracted.
pub(super) fn backward(
    norm: &RowNorm,
    [x, weight, bias]: [&Input; 3],
    gradient: &Tensor,
) -> Result<[Option<Tensor>; 3]> {
    if gradient.elem_count() == 0 {
        return Ok([Some(gradient.clone()), None, None]);
    }
    if !weight.requires_grad()
        && !bias.requires_grad()
        && let Some(kernel) = for_kernel(norm)
    {
        // The bias is saved, and read, only where there is an activation.
        let weight = weight.tensor()?;
        let bias = bias.tensor().unwrap_or(weight);
        if let Some(dx) = cuda_kernels::norm_backward(&kernel, x.tensor()?, weight, bias, gradient)? {
            return Ok([Some(dx), None, None]);
        }
    }
    let (normalised, scale) = normalise(norm, &widen(x.tensor()?)?)?;
    let mut dy = by_channel(norm, &widen(gradient)?)?;
    if let Some(activation) = norm.activation {
        let y = affine(norm, &normalised, weight.tensor()?, bias.tensor()?)?;
        dy = (dy * activation.derivative_tensors(&y)?)?;
    }
    let axes: &[usize] = if norm.spatial == 1 { &[0] } else { &[0, 2] };
    let dw = match weight.requires_grad() {
        true => Some(sum_over(&(&dy * by_channel(norm, &normalised)?)?, axes)?),
        false => None,
    };
    let db = match bias.requires_grad() {
        true => Some(sum_over(&dy, axes)?),
        false => None,
    };
    if !x.requires_grad() {
        return Ok([None, dw, db]);
    }
    let g = dy.broadcast_mul(&channel_vector(norm, weight.tensor()?)?)?;
    let g = g.reshape(((), norm.length))?;
    let mean_gx = (&g * &normalised)?.mean_keepdim(D::Minus1)?;
    let centred = match norm.subtract_mean {
        true => g.broadcast_sub(&g.mean_keepdim(D::Minus1)?)?,
        false => g,
    };
    let dx = (centred - normalised.broadcast_mul(&mean_gx)?)?.broadcast_mul(&scale)?;
    Ok([Some(dx.reshape(x.shape())?), dw, db])
}
