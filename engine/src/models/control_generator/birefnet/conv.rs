//! Convolutions that keep the size of an image.

use crate::error::Result;
use crate::models::feature_extractor::{channels_of, weights_error};
use crate::nn::Conv2d;
use crate::weights::{Index, Weights};

/// PyTorch's default for `BatchNorm2d`.
const EPSILON: f64 = 1e-5;

/// The largest kernel and the most results of a convolution: the published ones have 7 x 7 and 3,072. The memory that they need grows with both.
const MAX_SIDE: usize = 15;
const MAX_OUTPUTS: usize = 8192;

/// A convolution that keeps the size of an image, with the batch norm that follows in its weight and its bias.
///
/// # Errors
/// When a tensor is missing or has another shape.
pub(super) fn conv(
    weights: &Weights,
    (inputs, outputs, side): (usize, usize, usize),
    has_bias: bool,
    norm: Option<&Weights>,
) -> Result<Conv2d> {
    let mut weight = weights.get((outputs, inputs, side, side), "weight")?;
    let mut bias = has_bias.then(|| weights.get(outputs, "bias")).transpose()?;
    if let Some(norm) = norm {
        let of_norm = |name: &str| norm.get(outputs, name);
        let scale = (of_norm("weight")? / (of_norm("running_var")? + EPSILON)?.sqrt()?)?;
        let mean = match &bias {
            Some(bias) => (of_norm("running_mean")? - bias)?,
            None => of_norm("running_mean")?,
        };
        weight = weight.broadcast_mul(&scale.reshape((outputs, 1, 1, 1))?)?;
        bias = Some((of_norm("bias")? - (mean * scale)?)?);
    }
    Ok(Conv2d {
        weight: weight.into(),
        bias,
        stride: 1,
        padding: side / 2,
        adapters: Vec::new(),
    })
}

/// The side of a convolution's kernel and its results, by the shape of its weight.
///
/// # Errors
/// When there is no such tensor, or it is not the weight of a convolution with at most [`MAX_OUTPUTS`] results and an odd kernel of at most
/// [`MAX_SIDE`].
pub(super) fn kernel_of(index: &Index, name: &str) -> Result<(usize, usize)> {
    let name = format!("{name}.weight");
    let (_, outputs) = channels_of(index, &name)?;
    let side = index.shape(&name).map_or(0, |shape| shape[2]);
    if side.is_multiple_of(2) || side > MAX_SIDE || outputs > MAX_OUTPUTS {
        return Err(weights_error(
            index,
            format!(
                "tensor `{name}` has {outputs} results of {side} x {side} values: expected at most {MAX_OUTPUTS}, and an odd side of at most {MAX_SIDE}"
            ),
        ));
    }
    Ok((side, outputs))
}
