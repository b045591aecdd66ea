//! The network of `sapiens2_mask`: the vision transformer of Sapiens 2 with a head that finds the opacity of people.
//!
//! The layers and the names of their tensors are those of `Sapiens2Matting` of ai-toolkit (`toolkit/models/sapiens2.py`, 27a03a91), whose head
//! is that of github.com/facebookresearch/sapiens2 (`matting_head.py`). It computes in float32.

use crate::error::Result;
use crate::models::feature_extractor::{SapiensFeatures, channels_of, weights_error};
use crate::nn::{Conv2d, GroupNorm, pixel_shuffle};
use crate::weights::{Index, Weights};
use candle_core::{DType, Device, Tensor};

/// The tensor that tells a file of this network from others.
pub(super) const FIRST_TENSOR: &str = "decode_head.conv_matting.weight";

/// The channels of the result: the colours of the foreground times its opacity, and the opacity.
const OUTPUTS: usize = 4;
/// The most channels of a step of the head: the published one has 1,536. The memory that it needs grows with them.
const MAX_CHANNELS: usize = 4096;
/// PyTorch's default for `InstanceNorm2d`.
const EPSILON: f64 = 1e-5;

/// A convolution of 3 x 3, the norm of each channel and SiLU. With `enlarges`, each pixel becomes a square of four before the norm.
#[derive(Clone, Debug)]
struct Step {
    conv: Conv2d,
    norm: GroupNorm,
    enlarges: bool,
}

impl Step {
    fn new(weights: &Weights, inputs: usize, channels: usize, enlarges: bool) -> Result<Self> {
        let outputs = if enlarges { 4 * channels } else { channels };
        Ok(Self {
            conv: Conv2d::new(weights, inputs, outputs, 3, 1, 1)?,
            norm: GroupNorm::of_each_channel(channels, EPSILON, DType::F32, weights.device())?,
            enlarges,
        })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let x = self.conv.forward(x)?;
        match self.enlarges {
            true => self.norm.forward_silu(&pixel_shuffle(&x, 2)?),
            false => self.norm.forward_silu(&x),
        }
    }
}

/// The network.
#[derive(Clone, Debug)]
pub struct SapiensMatting {
    backbone: SapiensFeatures,
    steps: Vec<Step>,
    output: Conv2d,
}

impl SapiensMatting {
    /// Reads the network. Its sizes are those of its tensors: those of `facebook/sapiens2-matting-1b` have 40 layers of 1,536 features, and a
    /// head of 768, 512, 256, 128, 64, 32 and 16 channels.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape than its neighbours need.
    pub fn new(index: &Index, device: &Device) -> Result<Self> {
        let of_backbone =
            |name: &str, shape: &[usize]| Some((name.strip_prefix("backbone.")?.to_owned(), shape.to_vec()));
        let backbone = SapiensFeatures::new(&index.renamed(of_backbone), DType::F32, device)?.with_float32_angles();
        let weights = Weights::from_index(index.clone(), DType::F32, device);
        let head = weights.pp("decode_head");
        let (_, width) = channels_of(index, "backbone.patch_embed.projection.weight")?;
        let mut steps = vec![Step::new(&head.pp("input_conv.0"), width, width, false)?];
        let mut channels = width;
        let mut scale = 1;
        for (part, stride, enlarges) in [("upsample_blocks", 1, true), ("conv_layers", 3, false)] {
            for number in 0.. {
                let name = match enlarges {
                    true => format!("{part}.{number}.0"),
                    false => format!("{part}.{}", stride * number),
                };
                let weight = format!("decode_head.{name}.weight");
                if !index.contains(&weight) {
                    break;
                }
                let (_, outputs) = channels_of(index, &weight)?;
                let outputs = if enlarges { outputs / 4 } else { outputs };
                if outputs > MAX_CHANNELS {
                    return Err(weights_error(
                        index,
                        format!("tensor `{weight}` makes {outputs} channels: expected at most {MAX_CHANNELS}"),
                    ));
                }
                steps.push(Step::new(&head.pp(&name), channels, outputs, enlarges)?);
                channels = outputs;
                scale *= if enlarges { 2 } else { 1 };
            }
        }
        if scale != backbone.patch_size() {
            return Err(weights_error(
                index,
                format!(
                    "`decode_head.upsample_blocks` enlarge {scale} times: expected {} times, the side of a patch",
                    backbone.patch_size()
                ),
            ));
        }
        Ok(Self {
            backbone,
            steps,
            output: Conv2d::new(&head.pp("conv_matting"), channels, OUTPUTS, 1, 1, 0)?,
        })
    }

    /// The side that the sides of images are multiples of.
    pub(super) fn patch_size(&self) -> usize {
        self.backbone.patch_size()
    }

    /// The opacities [b, 1, height, width], from 0 to 1, of the people in standardised images [b, 3, height, width], whose sides are multiples of
    /// the patch size.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let features = self.backbone.feature_map(images)?;
        let features = self.steps.iter().try_fold(features, |x, step| step.forward(&x))?;
        let logits = self.output.forward(&features)?.narrow(1, OUTPUTS - 1, 1)?;
        Ok((logits.neg()?.exp()? + 1.0)?.recip()?)
    }
}
