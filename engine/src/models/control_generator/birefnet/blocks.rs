//! The blocks of BiRefNet's decoder.

use super::conv::{conv, kernel_of};
use super::deform::DeformableConv;
use crate::error::Result;
use crate::models::feature_extractor::weights_error;
use crate::nn::Conv2d;
use crate::weights::{Index, Weights};
use candle_core::Tensor;

/// Values around each pixel at several distances, and the mean of the image (`ASPPDeformable`).
#[derive(Clone, Debug)]
struct Context {
    /// Each with its part of the convolution of all branches.
    branches: Vec<(DeformableConv, Conv2d)>,
    mean: (Conv2d, Conv2d),
}

impl Context {
    /// Reads the branches, which take and make `channels`.
    fn new((index, prefix): (&Index, &str), weights: &Weights, channels: usize) -> Result<Self> {
        let mut names = vec!["aspp1".to_owned()];
        let others = (0..).map(|i| format!("aspp_deforms.{i}"));
        names.extend(
            others.take_while(|name| index.contains(&format!("{prefix}.{name}.atrous_conv.regular_conv.weight"))),
        );
        let (_, inner) = kernel_of(index, &format!("{prefix}.global_avg_pool.1"))?;
        let inputs = inner * (names.len() + 1);
        let merging = conv(
            &weights.pp("conv1"),
            (inputs, channels, 1),
            false,
            Some(&weights.pp("bn1")),
        )?;
        let all = merging.weight.dense()?;
        let part = |branch: usize, bias: Option<Tensor>| -> Result<Conv2d> {
            Ok(Conv2d {
                weight: all.narrow(1, branch * inner, inner)?.contiguous()?.into(),
                bias,
                ..merging.clone()
            })
        };
        let branch = |(number, name): (usize, &String)| {
            let weights = weights.pp(name);
            let prefix = format!("{prefix}.{name}.atrous_conv");
            let conv = DeformableConv::new(
                (index, &prefix),
                &weights.pp("atrous_conv"),
                channels,
                &weights.pp("bn"),
            )?;
            match kernel_of(index, &format!("{prefix}.regular_conv"))? {
                (_, outputs) if outputs == inner => Ok((conv, part(number, None)?)),
                (_, outputs) => Err(weights_error(
                    index,
                    format!(
                        "`{prefix}.regular_conv` makes {outputs} channels: expected {inner}, as `global_avg_pool.1` does"
                    ),
                )),
            }
        };
        let pool = weights.pp("global_avg_pool");
        let mean = conv(&pool.pp(1), (channels, inner, 1), false, Some(&pool.pp(2)))?;
        Ok(Self {
            branches: names.iter().enumerate().map(branch).collect::<Result<_>>()?,
            mean: (mean, part(names.len(), merging.bias.clone())?),
        })
    }

    /// x [b, channels, h, w] -> the same shape.
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let (mean, of_mean) = &self.mean;
        let pooled = x.mean_keepdim(3)?.mean_keepdim(2)?.contiguous()?;
        let mut sum = of_mean
            .forward(&mean.forward(&pooled)?.relu()?)?
            .broadcast_as(x.shape())?;
        for (conv, of_branch) in &self.branches {
            sum = (sum + of_branch.forward(&conv.forward(x)?.relu()?)?)?;
        }
        sum.relu()
    }
}

/// Convolutions to few channels and back, with the context between them (`BasicDecBlk`).
#[derive(Clone, Debug)]
pub(super) struct DecoderBlock {
    first: Conv2d,
    context: Context,
    last: Conv2d,
    outputs: usize,
}

impl DecoderBlock {
    /// Reads a block.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape than its neighbours need.
    pub(super) fn new(index: &Index, weights: &Weights, name: &str, inputs: usize) -> Result<Self> {
        let weights = weights.pp(name);
        let (_, inner) = kernel_of(index, &format!("{name}.conv_in"))?;
        let (_, outputs) = kernel_of(index, &format!("{name}.conv_out"))?;
        let prefix = format!("{name}.dec_att");
        Ok(Self {
            first: conv(
                &weights.pp("conv_in"),
                (inputs, inner, 3),
                true,
                Some(&weights.pp("bn_in")),
            )?,
            context: Context::new((index, &prefix), &weights.pp("dec_att"), inner)?,
            last: conv(
                &weights.pp("conv_out"),
                (inner, outputs, 3),
                true,
                Some(&weights.pp("bn_out")),
            )?,
            outputs,
        })
    }

    /// The channels of the result.
    pub(super) fn outputs(&self) -> usize {
        self.outputs
    }

    /// x [b, inputs, h, w] -> [b, outputs, h, w].
    ///
    /// # Errors
    /// When the shapes do not match.
    pub(super) fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let x = self.first.forward(x)?.relu()?;
        self.last.forward(&self.context.forward(&x)?)
    }
}

/// Two convolutions of the pixels of patches (`SimpleConvs`).
#[derive(Clone, Debug)]
pub(super) struct PatchConvs {
    first: Conv2d,
    last: Conv2d,
    outputs: usize,
}

impl PatchConvs {
    /// Reads the convolutions.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape than its neighbours need.
    pub(super) fn new(index: &Index, weights: &Weights, name: &str, inputs: usize) -> Result<Self> {
        let (_, inner) = kernel_of(index, &format!("{name}.conv1"))?;
        let (_, outputs) = kernel_of(index, &format!("{name}.conv_out"))?;
        let weights = weights.pp(name);
        Ok(Self {
            first: conv(&weights.pp("conv1"), (inputs, inner, 3), true, None)?,
            last: conv(&weights.pp("conv_out"), (inner, outputs, 3), true, None)?,
            outputs,
        })
    }

    /// The channels of the result.
    pub(super) fn outputs(&self) -> usize {
        self.outputs
    }

    /// images [b, 3, height, width] -> [b, outputs, h, w] for a size that divides theirs: each pixel has the pixels at its place in all patches of
    /// this size.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub(super) fn forward(&self, images: &Tensor, (height, width): (usize, usize)) -> candle_core::Result<Tensor> {
        let (batch, channels, full_height, full_width) = images.dims4()?;
        let (rows, columns) = (full_height / height.max(1), full_width / width.max(1));
        let patches = images
            .reshape(vec![batch, channels, rows, height, columns, width])?
            .permute(vec![0, 1, 2, 4, 3, 5])?
            .contiguous()?
            .reshape((batch, channels * rows * columns, height, width))?;
        self.last.forward(&self.first.forward(&patches)?)
    }
}
