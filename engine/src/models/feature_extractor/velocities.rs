//! Version 2 of ai-toolkit's feature extractors (`DiffusionFeatureExtractor2` in `toolkit/models/diffusion_feature_extraction.py`,
//! 27a03a91): features of a velocity and its noise at five sizes, which imitate those that a VGG16 has of images.

use super::channels::channels_of;
use crate::error::Result;
use crate::nn::{Conv2d, GroupNorm, Interpolation, add, interpolate, silu};
use crate::weights::{Index, Weights};
use candle_core::{DType, Device, Tensor};

/// The tensor that tells a file of this version from others.
pub(super) const FIRST_TENSOR: &str = "up_path.0.weight";

const GROUPS: usize = 8;
const EPS: f64 = 1e-5;

/// A step of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Conv,
    Resnet,
    Upsample,
    Halve,
}

/// The paths: their names, and their steps in the order of the names of their tensors.
const PATHS: [(&str, &[Step]); 5] = {
    use Step::{Conv, Halve, Resnet, Upsample};
    [
        (
            "up_path",
            &[Conv, Upsample, Resnet, Upsample, Resnet, Upsample, Resnet, Conv],
        ),
        ("path2", &[Conv, Upsample, Resnet, Upsample, Resnet, Conv]),
        ("path3", &[Conv, Upsample, Resnet, Conv]),
        ("path4", &[Conv, Resnet, Resnet, Conv]),
        ("path5", &[Conv, Resnet, Halve, Resnet, Conv]),
    ]
};

/// Two convolutions with norms, plus the input.
#[derive(Clone, Debug)]
struct Resnet {
    conv1: Conv2d,
    norm1: GroupNorm,
    conv2: Conv2d,
    norm2: GroupNorm,
}

impl Resnet {
    fn new(weights: &Weights, channels: usize) -> Result<Self> {
        let conv = |name: &str| Conv2d::new(&weights.pp(name), channels, channels, 3, 1, 1);
        let norm = |name: &str| GroupNorm::new(&weights.pp(name), GROUPS, channels, EPS);
        Ok(Self {
            conv1: conv("conv1")?,
            norm1: norm("norm1")?,
            conv2: conv("conv2")?,
            norm2: norm("norm2")?,
        })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let h = self.norm1.forward_silu(&self.conv1.forward(x)?)?;
        silu(&add(&self.norm2.forward(&self.conv2.forward(&h)?)?, x)?)
    }
}

#[derive(Clone, Debug)]
enum Layer {
    Conv(Conv2d),
    Resnet(Box<Resnet>),
    Upsample,
    Halve,
}

impl Layer {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        match self {
            Self::Conv(conv) => conv.forward(x),
            Self::Resnet(resnet) => resnet.forward(x),
            Self::Upsample => {
                let size = (2 * x.dim(2)?, 2 * x.dim(3)?);
                interpolate(x, size, Interpolation::BilinearAligned)
            }
            Self::Halve => halved(x),
        }
    }
}

/// The means of 2 x 2 values of x [b, c, h, w], without a last odd row or column, as PyTorch's `AvgPool2d(2)`.
fn halved(x: &Tensor) -> candle_core::Result<Tensor> {
    let (_, _, height, width) = x.dims4()?;
    let even = x.narrow(2, 0, height - height % 2)?.narrow(3, 0, width - width % 2)?;
    even.contiguous()?.avg_pool2d(2)
}

/// The network. It computes in float32.
#[derive(Clone, Debug)]
pub struct VelocityFeatures {
    channels: usize,
    paths: Vec<Vec<Layer>>,
}

impl VelocityFeatures {
    /// Reads the network. Its sizes are those of its tensors: ai-toolkit's have 32 channels, twice those of the latents, and 64, 128, 256, 512
    /// and 512 in their paths.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape than its neighbours need, or the paths take different numbers of channels.
    pub fn new(index: &Index, device: &Device) -> Result<Self> {
        let weights = Weights::from_index(index.clone(), DType::F32, device);
        let (channels, _) = channels_of(index, FIRST_TENSOR)?;
        let path = |(name, steps): (&str, &[Step])| -> Result<Vec<Layer>> {
            let first = format!("{name}.0.weight");
            let (_, width) = channels_of(index, &first)?;
            if !width.is_multiple_of(GROUPS) {
                return Err(weights.config_error(format!(
                    "tensor `{first}` makes {width} channels, and a feature extractor of version 2 needs a multiple of {GROUPS}"
                )));
            }
            let of_path = weights.pp(name);
            let layers = steps.iter().enumerate().map(|(i, step)| {
                let weights = of_path.pp(i);
                Ok(match step {
                    Step::Conv => {
                        let inputs = if i == 0 { channels } else { width };
                        Layer::Conv(Conv2d::new(&weights, inputs, width, 3, 1, 1)?)
                    }
                    Step::Resnet => Layer::Resnet(Box::new(Resnet::new(&weights, width)?)),
                    Step::Upsample => Layer::Upsample,
                    Step::Halve => Layer::Halve,
                })
            });
            layers.collect()
        };
        Ok(Self {
            channels,
            paths: PATHS.into_iter().map(path).collect::<Result<_>>()?,
        })
    }

    /// Channels of the input: twice those of the latents.
    #[must_use]
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// The features of a velocity and its noise, [b, channels, h, w], float32, with the velocity first: one tensor for each path.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        let path = |layers: &Vec<Layer>| -> Result<Tensor> {
            let mut x = x.clone();
            for layer in layers {
                x = layer.forward(&x)?;
            }
            Ok(x)
        };
        self.paths.iter().map(path).collect()
    }
}
