//! BiRefNet, a network that finds the foreground of images (P. Zheng and others, arXiv:2401.03407), as `ZhengPeng7/BiRefNet_HR` has it: the features
//! of a Swin transformer for an image and for its half, and a decoder with deformable convolutions.
//!
//! The layers and the names of their tensors are those of the authors' code (github.com/ZhengPeng7/BiRefNet, `models/birefnet.py`, 25cb930) with
//! the defaults of its `config.py`. It computes in float32.

mod blocks;
mod conv;
mod deform;
mod swin;

use crate::error::{EngineError, Result};
use crate::models::feature_extractor::{channels_of, weights_error};
use crate::nn::{Conv2d, Interpolation, add, interpolate};
use crate::weights::{Index, Weights};
use blocks::{DecoderBlock, PatchConvs};
use candle_core::{DType, Device, Tensor};
use conv::conv;
use swin::{STAGES, Swin};

/// The tensor that tells a file of this network from others.
pub(super) const FIRST_TENSOR: &str = "decoder.gdt_convs_attn_4.0.weight";

/// The sides of images are multiples of this, so that the last stage of the half has whole pixels.
pub(super) const UNIT: usize = 64;

/// How large the gate of a pixel is.
#[derive(Clone, Debug)]
struct Gate([Conv2d; 2]);

impl Gate {
    fn new(index: &Index, decoder: &Weights, stage: usize, channels: usize) -> Result<Self> {
        let name = format!("gdt_convs_{stage}");
        let (_, inner) = channels_of(index, &format!("decoder.{name}.0.weight"))?;
        let weights = decoder.pp(name);
        let last = decoder.pp(format!("gdt_convs_attn_{stage}.0"));
        Ok(Self([
            conv(&weights.pp(0), (channels, inner, 3), true, Some(&weights.pp(1)))?,
            conv(&last, (inner, 1, 1), true, None)?,
        ]))
    }

    /// x [b, channels, h, w] -> the same shape.
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let [first, last] = &self.0;
        let logits = last.forward(&first.forward(x)?.relu()?)?;
        x.broadcast_mul(&(logits.neg()?.exp()? + 1.0)?.recip()?)
    }
}

/// A stage of the decoder.
#[derive(Clone, Debug)]
struct Stage {
    patches: PatchConvs,
    block: DecoderBlock,
    /// The gate, and the convolution of the features that the next stage adds. The last stage has neither.
    next: Option<(Gate, Conv2d)>,
}

/// The network.
#[derive(Clone, Debug)]
pub struct BiRefNet {
    backbone: Swin,
    squeeze: DecoderBlock,
    /// Those of the smallest features first.
    stages: Vec<Stage>,
    last_patches: PatchConvs,
    /// The two parts of the last convolution: of the last stage, and of `last_patches`.
    output: [Conv2d; 2],
}

/// Checks that a file is of the configuration that is computed here.
fn check_configuration(index: &Index) -> Result<()> {
    let has = |name: &str| index.contains(name);
    let expected = [
        (
            has("bb.layers.0.blocks.0.attn.relative_position_bias_table"),
            "its backbone is not a Swin transformer",
        ),
        (
            has("squeeze_module.0.conv_in.weight") && !has("squeeze_module.1.conv_in.weight"),
            "it does not have one `squeeze_module`",
        ),
        (
            !has("squeeze_module.0.conv_resi.weight") && !has("decoder.decoder_block4.conv_resi.weight"),
            "its blocks are `ResBlk`",
        ),
        (
            has("squeeze_module.0.dec_att.aspp1.atrous_conv.regular_conv.weight"),
            "its blocks have no deformable convolutions (`ASPPDeformable`)",
        ),
        (
            has("squeeze_module.0.bn_in.running_var"),
            "its blocks have no batch norms",
        ),
        (
            has("decoder.ipt_blk5.conv1.weight"),
            "its decoder does not get the image (`dec_ipt`)",
        ),
    ];
    match expected.into_iter().find(|(holds, _)| !holds) {
        None => Ok(()),
        Some((_, what)) => Err(weights_error(
            index,
            format!("this BiRefNet is of another kind: {what}; expected the layers of `ZhengPeng7/BiRefNet_HR`"),
        )),
    }
}

impl BiRefNet {
    /// Reads the network. Its sizes are those of its tensors.
    ///
    /// # Errors
    /// When it is of another configuration, or a tensor is missing or has another shape than its neighbours need.
    pub fn new(index: &Index, device: &Device) -> Result<Self> {
        check_configuration(index)?;
        let weights = Weights::from_index(index.clone(), DType::F32, device);
        let backbone = Swin::new(index, &weights)?;
        // The features of the image and of its half.
        let widths = backbone.widths().map(|width| 2 * width);
        let decoder = weights.pp("decoder");
        let squeeze = DecoderBlock::new(index, &weights, "squeeze_module.0", widths.iter().sum())?;
        let mut channels = squeeze.outputs();
        let mut stages = Vec::with_capacity(STAGES);
        for number in (1..=STAGES).rev() {
            let divisor = 2usize << number;
            let name = format!("decoder.ipt_blk{}", number + 1);
            let patches = PatchConvs::new(index, &weights, &name, 3 * divisor * divisor)?;
            let name = format!("decoder.decoder_block{number}");
            let block = DecoderBlock::new(index, &weights, &name, channels + patches.outputs())?;
            channels = block.outputs();
            let next = match number {
                1 => None,
                _ => {
                    let lateral = decoder.pp(format!("lateral_block{number}.conv"));
                    let lateral = Conv2d::new(&lateral, widths[number - 2], channels, 1, 1, 0)?;
                    Some((Gate::new(index, &decoder, number, channels)?, lateral))
                }
            };
            stages.push(Stage { patches, block, next });
        }
        let last_patches = PatchConvs::new(index, &weights, "decoder.ipt_blk1", 3)?;
        let inputs = channels + last_patches.outputs();
        let last = conv(&decoder.pp("conv_out1.0"), (inputs, 1, 1), true, None)?;
        let weight = last.weight.dense()?;
        let part = |first: usize, count: usize, bias: Option<Tensor>| -> Result<Conv2d> {
            Ok(Conv2d {
                weight: weight.narrow(1, first, count)?.contiguous()?.into(),
                bias,
                ..last.clone()
            })
        };
        let output = [
            part(0, channels, last.bias.clone())?,
            part(channels, last_patches.outputs(), None)?,
        ];
        Ok(Self {
            backbone,
            squeeze,
            stages,
            last_patches,
            output,
        })
    }

    /// The logits [b, 1, height, width] of the foreground in standardised images [b, 3, height, width], whose sides are multiples of 64.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let (_, _, height, width) = images.dims4()?;
        if !(height.is_multiple_of(UNIT) && width.is_multiple_of(UNIT)) {
            return Err(EngineError::Internal(format!(
                "an image of {width} x {height} for BiRefNet: expected sides that are multiples of {UNIT}"
            )));
        }
        let features = self.features(images)?;
        let smallest = size(&features[STAGES - 1])?;
        let mut all = Vec::with_capacity(STAGES);
        for features in &features {
            all.push(interpolate(features, smallest, Interpolation::BilinearAligned)?);
        }
        let mut x = self.squeeze.forward(&Tensor::cat(&all, 1)?)?;
        for (stage, number) in self.stages.iter().zip((0..STAGES).rev()) {
            let patches = stage.patches.forward(images, size(&features[number])?)?;
            x = stage.block.forward(&Tensor::cat(&[x, patches], 1)?)?;
            if let (Some((gate, lateral)), Some(next)) = (&stage.next, number.checked_sub(1)) {
                let enlarged = interpolate(
                    &gate.forward(&x)?,
                    size(&features[next])?,
                    Interpolation::BilinearAligned,
                )?;
                x = add(&lateral.forward(&features[next])?, &enlarged)?;
            }
        }
        // A convolution of single pixels may come before the interpolation: its result is much smaller.
        let [of_stage, of_patches] = &self.output;
        let x = interpolate(&of_stage.forward(&x)?, (height, width), Interpolation::BilinearAligned)?;
        let patches = self.last_patches.forward(images, (height, width))?;
        Ok(add(&of_patches.forward(&patches)?, &x)?)
    }

    /// The features of images and, beside them, those of their halves in the same size, after each stage of the backbone.
    fn features(&self, images: &Tensor) -> Result<Vec<Tensor>> {
        let (_, _, height, width) = images.dims4()?;
        let halves = interpolate(images, (height / 2, width / 2), Interpolation::BilinearAligned)?;
        let (of_images, of_halves) = (self.backbone.forward(images)?, self.backbone.forward(&halves)?);
        let both = of_images.iter().zip(&of_halves);
        let both = both.map(|(of_image, of_half)| {
            let of_half = interpolate(of_half, size(of_image)?, Interpolation::BilinearAligned)?;
            Ok(Tensor::cat(&[of_image, &of_half], 1)?)
        });
        both.collect()
    }
}

/// Height and width of x [b, c, h, w].
fn size(x: &Tensor) -> candle_core::Result<(usize, usize)> {
    let (_, _, height, width) = x.dims4()?;
    Ok((height, width))
}
