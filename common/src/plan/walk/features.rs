//! Networks whose features are compared (`train.latent_feature_extractor_path`), as `engine/src/models/feature_extractor`.

use super::block_sequence::BlockSequence;
use super::build::{Builder, LayerSizes};
use super::dpt::DptHead;
use super::layers::Layer;
use super::meter::MetaTensor;
use super::norm::Norm;
use super::tape::Walk;
use super::tensors::Activation;
use super::unet::{norm, norm_silu};
use super::vision::{VisionSizes, VisionTransformer};
use std::rc::Rc;

/// Channels of the parts of VGG16, and how many convolutions they have.
const VGG_PARTS: [(f64, usize); 5] = [(64.0, 2), (128.0, 2), (256.0, 3), (512.0, 3), (512.0, 3)];

/// The most pixels of the images that TIPSv2 sees.
const TIPS_PIXELS: f64 = 1024.0 * 1024.0;

/// The paths of version 2: their channels, their residual blocks, and how often they double the size before each of these.
const PATHS: [(f64, usize, f64); 5] = [
    (64.0, 3, 2.0),
    (128.0, 2, 2.0),
    (256.0, 1, 2.0),
    (512.0, 2, 1.0),
    (512.0, 2, 0.5),
];

/// A network whose features are compared. A vision transformer computes in the dtype of the model, the others in float32.
pub(in crate::plan) enum FeatureExtractor {
    /// Version 2.
    Velocities(Vec<Path>),
    /// Version 3.
    VisionAndVgg16(VisionTransformer, Vgg16),
    /// Versions 4, 5 and 6.
    Vision(VisionTransformer),
    /// Versions 7 and 8.
    VisionAndHeads(VisionTransformer, Vec<DptHead>),
    /// Version 10.
    Vgg16(Vgg16),
}

/// The parts of VGG16.
type Vgg16 = Vec<Rc<Vec<Layer>>>;

/// A path of version 2.
pub(in crate::plan) struct Path {
    conv_in: Layer,
    resnets: Vec<([Layer; 2], [Norm; 2])>,
    /// The factor of the size before each residual block; below 1 before the last one alone.
    factor: f64,
    conv_out: Layer,
}

impl FeatureExtractor {
    /// Version 2 for latents with this many channels.
    pub(in crate::plan) fn velocities(b: &mut Builder, latent_channels: f64) -> Self {
        let paths = PATHS.map(|(width, resnets, factor)| {
            let conv = |b: &mut Builder, inputs: f64| b.layer("path.conv", LayerSizes::conv(inputs, width, 3.0));
            let conv_in = conv(b, 2.0 * latent_channels);
            let resnets = (0..resnets).map(|_| {
                (
                    [conv(b, width), conv(b, width)],
                    [0, 1].map(|_| b.norm("path.norm", width)),
                )
            });
            let resnets = resnets.collect();
            Path {
                conv_in,
                resnets,
                factor,
                conv_out: conv(b, width),
            }
        });
        Self::Velocities(paths.into())
    }

    pub(in crate::plan) fn vgg16(b: &mut Builder) -> Self {
        Self::Vgg16(vgg16_parts(b))
    }

    pub(in crate::plan) fn vision(b: &mut Builder, sizes: VisionSizes) -> Self {
        Self::Vision(VisionTransformer::new(b, sizes))
    }

    /// A vision transformer beside a VGG16.
    pub(in crate::plan) fn vision_and_vgg16(b: &mut Builder, sizes: VisionSizes) -> Self {
        let vision = VisionTransformer::new(b, sizes);
        Self::VisionAndVgg16(vision, b.with_width_of(Some(4.0), vgg16_parts))
    }

    /// A vision transformer with the heads of TIPSv2.
    pub(in crate::plan) fn vision_and_heads(b: &mut Builder, sizes: VisionSizes) -> Self {
        let vision = VisionTransformer::new(b, sizes);
        Self::VisionAndHeads(vision, DptHead::all(b, sizes.width))
    }

    /// Whether it sees images, and not latents.
    pub(in crate::plan) fn sees_pixels(&self) -> bool {
        !matches!(self, Self::Velocities(_))
    }

    /// The loss of the features of `predicted` and of those of `expected`, which have no gradients: latents, or images.
    pub(in crate::plan) fn loss(
        &self,
        walk: &Walk,
        [predicted, expected]: [&MetaTensor; 2],
        checkpointed: bool,
    ) -> Option<MetaTensor> {
        let expected = self.features(walk, expected, checkpointed)?;
        let predicted = self.features(walk, predicted, checkpointed)?;
        let mut total: Option<MetaTensor> = None;
        for (predicted, expected) in predicted.iter().zip(&expected) {
            let difference = walk.add(predicted, expected);
            let squares = walk.activation(&difference, Activation::Silu);
            let mean = walk.rearranged(&squares, [1.0; 4]);
            total = Some(match total {
                Some(total) => walk.add(&total, &mean),
                None => mean,
            });
        }
        total
    }

    fn features(&self, walk: &Walk, x: &MetaTensor, checkpointed: bool) -> Option<Vec<MetaTensor>> {
        match self {
            Self::Velocities(paths) => {
                let x = wide(walk, x);
                let beside_noise = walk.cat(&x, &x);
                Some(paths.iter().map(|path| path.forward(walk, &beside_noise)).collect())
            }
            Self::Vision(network) => Some(vec![wide(walk, &network.forward(walk, x, checkpointed)?)]),
            Self::VisionAndVgg16(vision, parts) => {
                let mut features = vec![wide(walk, &vision.forward(walk, x, checkpointed)?)];
                features.extend(vgg16_features(parts, walk, x, checkpointed)?);
                Some(features)
            }
            Self::VisionAndHeads(vision, heads) => {
                let taken = vision.after_parts(walk, x, checkpointed, heads.len() + 1)?;
                let taken: Vec<_> = taken.iter().map(|x| vision.normalised(walk, x)).collect();
                let mut features: Vec<_> = taken.iter().map(|x| wide(walk, x)).collect();
                let [_, _, height, width] = x.dims;
                let scale = (TIPS_PIXELS / (height * width)).sqrt().min(1.0);
                for head in heads {
                    features.push(head.forward(walk, &taken, [height * scale, width * scale], checkpointed)?);
                }
                Some(features)
            }
            Self::Vgg16(parts) => vgg16_features(parts, walk, x, checkpointed),
        }
    }
}

fn vgg16_parts(b: &mut Builder) -> Vgg16 {
    let mut inputs = 3.0;
    let parts = VGG_PARTS.map(|(width, convs)| {
        let convs = (0..convs).map(|_| {
            let conv = b.layer("features", LayerSizes::conv(inputs, width, 3.0));
            inputs = width;
            conv
        });
        Rc::new(convs.collect())
    });
    parts.into()
}

fn vgg16_features(parts: &Vgg16, walk: &Walk, x: &MetaTensor, checkpointed: bool) -> Option<Vec<MetaTensor>> {
    let mut sequence = BlockSequence::default();
    let mut x = sequence.input(wide(walk, x));
    let mut results = Vec::new();
    for (i, part) in parts.iter().enumerate() {
        let part = Rc::clone(part);
        x = sequence.add(&[x], move |walk, inputs| {
            let mut x = match i {
                0 => inputs[0].clone(),
                _ => scaled(walk, &inputs[0], 0.5),
            };
            for conv in part.iter() {
                // The activation needs its input and its result.
                x = walk.activation(&walk.conv(conv, &x), Activation::Silu);
            }
            x
        });
        results.push(x);
    }
    let results = sequence.run_all(walk, checkpointed, &results)?;
    // The squares, and the features divided by their norm.
    let normalised = results.iter().map(|x| {
        let squares = walk.activation(x, Activation::Silu);
        let sums = walk.rearranged(&squares, [x.dims[0], 1.0, x.dims[2], x.dims[3]]);
        drop(sums);
        walk.activation(x, Activation::Silu)
    });
    Some(normalised.collect())
}

impl Path {
    fn forward(&self, walk: &Walk, x: &MetaTensor) -> MetaTensor {
        let mut x = walk.conv(&self.conv_in, x);
        let last = self.resnets.len().saturating_sub(1);
        for (i, ([first, second], [norm1, norm2])) in self.resnets.iter().enumerate() {
            if self.factor > 1.0 || (self.factor < 1.0 && i == last) {
                x = scaled(walk, &x, self.factor);
            }
            let h = norm_silu(walk, *norm1, &walk.conv(first, &x));
            let h = norm(walk, *norm2, &walk.conv(second, &h));
            x = walk.activation(&walk.add(&h, &x), Activation::Silu);
        }
        walk.conv(&self.conv_out, &x)
    }
}

/// Images of another size.
fn scaled(walk: &Walk, x: &MetaTensor, factor: f64) -> MetaTensor {
    let [batch, channels, height, width] = x.dims;
    let side = |side: f64| (side * factor).floor().max(1.0);
    walk.rearranged(x, [batch, channels, side(height), side(width)])
}

/// The same numbers in float32: a walk has one width, so they count as more items where it is another.
fn wide(walk: &Walk, x: &MetaTensor) -> MetaTensor {
    let [batch, channels, height, width] = x.dims;
    walk.rearranged(x, [batch * 4.0 / walk.backend.width, channels, height, width])
}
