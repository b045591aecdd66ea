//! One of the four scales of a DPT head (R. Ranftl and others, 2021): tokens of the vision transformer become an image of features.

use super::super::channels::{channels_of, weights_error};
use crate::error::Result;
use crate::nn::{Activation, Conv2d, Linear, pixel_shuffle, to_image};
use crate::weights::{Index, Weights};
use candle_core::Tensor;

/// How the image of a scale changes its size.
#[derive(Clone, Debug)]
enum Resizing {
    /// Each pixel becomes a square of this side.
    Enlarged(Conv2d, usize),
    Kept,
    /// To half the size.
    Reduced(Conv2d),
}

/// A scale.
#[derive(Clone, Debug)]
pub(super) struct Scale {
    /// Tokens beside the class token -> tokens.
    readout: Linear,
    projection: Conv2d,
    resizing: Resizing,
    conv: Conv2d,
}

/// A convolution without a bias that keeps the size.
pub(super) fn conv_without_bias(weights: &Weights, inputs: usize, outputs: usize) -> Result<Conv2d> {
    Ok(Conv2d {
        weight: weights.get((outputs, inputs, 3, 3), "weight")?.into(),
        bias: None,
        stride: 1,
        padding: 1,
        adapters: Vec::new(),
    })
}

/// A transposed convolution whose kernel is as wide as its stride, as a convolution of single pixels that makes the numbers of a square.
fn enlarging(weights: &Weights, channels: usize, side: usize) -> Result<Resizing> {
    let weight = weights.get((channels, channels, side, side), "weight")?;
    let area = side * side;
    let weight = weight.reshape((channels, channels * area))?.t()?.contiguous()?;
    let bias = weights.get(channels, "bias")?.unsqueeze(1)?;
    let bias = bias.broadcast_as((channels, area))?.contiguous()?.flatten_all()?;
    let conv = Conv2d {
        weight: weight.reshape((channels * area, channels, 1, 1))?.into(),
        bias: Some(bias),
        stride: 1,
        padding: 0,
        adapters: Vec::new(),
    };
    Ok(Resizing::Enlarged(conv, side))
}

impl Scale {
    /// Reads a scale of a head (`index`, `weights`: the whole head, `prefix` its name). `width`: features of a token, `channels`: those of the head.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape than its neighbours need.
    pub(super) fn new(
        (index, prefix): (&Index, &str),
        weights: &Weights,
        number: usize,
        (width, channels): (usize, usize),
    ) -> Result<Self> {
        let reassemble = weights.pp("reassemble");
        let name = format!("{prefix}.reassemble.out_projections.{number}.weight");
        let (inputs, own) = channels_of(index, &name)?;
        if inputs != width {
            return Err(weights_error(
                index,
                format!("tensor `{name}` takes {inputs} channels, and the vision transformer has {width}"),
            ));
        }
        let resizing = reassemble.pp("resize_layers").pp(number);
        Ok(Self {
            readout: Linear::new(&reassemble.pp("readout_projects").pp(number), 2 * width, width, true)?,
            projection: Conv2d::new(&reassemble.pp("out_projections").pp(number), width, own, 1, 1, 0)?,
            resizing: match number {
                0 => enlarging(&resizing, own, 4)?,
                1 => enlarging(&resizing, own, 2)?,
                2 => Resizing::Kept,
                _ => Resizing::Reduced(Conv2d::new(&resizing, own, own, 3, 2, 1)?),
            },
            conv: conv_without_bias(&weights.pp("convs").pp(number), own, channels)?,
        })
    }

    /// class [b, width], patches [b, rows * columns, width] -> [b, channels, height, width].
    ///
    /// # Errors
    /// When the shapes do not match.
    pub(super) fn forward(
        &self,
        class: &Tensor,
        patches: &Tensor,
        (rows, columns): (usize, usize),
    ) -> candle_core::Result<Tensor> {
        let (batch, _, width) = patches.dims3()?;
        let class = class.unsqueeze(1)?.broadcast_as(patches.shape())?.contiguous()?;
        let tokens = self.readout.forward(&Tensor::cat(&[patches, &class], 2)?)?;
        let tokens = Activation::Gelu.forward(&tokens)?;
        let x = self
            .projection
            .forward(&to_image(&tokens, &[batch, width, rows, columns])?)?;
        let x = match &self.resizing {
            Resizing::Enlarged(conv, side) => pixel_shuffle(&conv.forward(&x)?, *side)?,
            Resizing::Kept => x,
            Resizing::Reduced(conv) => conv.forward(&x)?,
        };
        self.conv.forward(&x)
    }
}
