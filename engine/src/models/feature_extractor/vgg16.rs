//! The network of version 10 of ai-toolkit's feature extractors (`DiffusionFeatureExtractor10` in
//! `toolkit/models/diffusion_feature_extraction.py`, 27a03a91): the convolutions of VGG16 (K. Simonyan and A. Zisserman, 2014) with the
//! normalised features of LPIPS (R. Zhang and others, 2018).

use super::channels::channels_of;
use crate::checkpointing::{BlockSequence, Checkpointing};
use crate::error::Result;
use crate::nn::{Conv2d, max_pool};
use crate::weights::{Index, Weights};
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;

/// The tensor that tells a file of this network from others, in torchvision's names.
pub(super) const FIRST_TENSOR: &str = "features.0.weight";

/// The numbers of the convolutions in torchvision's `features`, for each of the parts whose results are compared. A part after the first one
/// begins with a pooling.
const PARTS: [&[usize]; 5] = [&[0, 2], &[5, 7], &[10, 12, 14], &[17, 19, 21], &[24, 26, 28]];

/// What LPIPS subtracts from pixels from -1 to 1, and divides them by, for red, green and blue.
const SHIFT: [f32; 3] = [-0.030, -0.088, -0.188];
const SCALE: [f32; 3] = [0.458, 0.448, 0.450];

/// What LPIPS adds to the norm of the features at a position.
const EPSILON: f64 = 1e-10;

/// The network. It computes in float32.
#[derive(Clone, Debug)]
pub struct Vgg16Features {
    parts: Vec<Arc<Vec<Conv2d>>>,
    checkpointing: Checkpointing,
}

/// The names of torchvision for those of LPIPS' file (`net.slice1.0.weight`); other names stay.
pub(super) fn current_name(name: &str) -> String {
    let own = name.strip_prefix("net.slice").and_then(|rest| rest.split_once('.'));
    match own {
        Some((_, rest)) => format!("features.{rest}"),
        None => name.to_owned(),
    }
}

/// As [`current_name`], for [`Index::renamed`].
pub(super) fn renamed(name: &str, shape: &[usize]) -> Option<(String, Vec<usize>)> {
    Some((current_name(name), shape.to_vec()))
}

impl Vgg16Features {
    /// Reads the network. The channels of its convolutions are those of its tensors; VGG16 has 64, 128, 256, 512 and 512 in its parts.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape than the one before needs.
    pub fn new(index: &Index, device: &Device) -> Result<Self> {
        let weights = Weights::from_index(index.clone(), DType::F32, device);
        let mut channels = 3;
        let mut parts = Vec::with_capacity(PARTS.len());
        for numbers in PARTS {
            let mut convs = Vec::with_capacity(numbers.len());
            for number in numbers {
                let name = format!("features.{number}");
                let (_, outputs) = channels_of(index, &format!("{name}.weight"))?;
                convs.push(Conv2d::new(&weights.pp(&name), channels, outputs, 3, 1, 1)?);
                channels = outputs;
            }
            parts.push(Arc::new(convs));
        }
        Ok(Self {
            parts,
            checkpointing: Checkpointing::Off,
        })
    }

    /// Recomputes each part in the backward pass, or none.
    pub(super) fn set_checkpointing(&mut self, checkpointing: Checkpointing) {
        self.checkpointing = checkpointing;
    }

    /// The features of images [b, 3, height, width] from -1 to 1, float32: one tensor for each part, with a norm of 1 at each position.
    ///
    /// # Errors
    /// When the shapes do not match, or an image has a side of less than 16 pixels.
    pub fn forward(&self, images: &Tensor) -> Result<Vec<Tensor>> {
        let row = |values: &[f32; 3]| Tensor::new(values, images.device())?.reshape((1, 3, 1, 1));
        let normal = images.broadcast_sub(&row(&SHIFT)?)?.broadcast_div(&row(&SCALE)?)?;
        let mut sequence = BlockSequence::new();
        let mut x = sequence.input(normal);
        let mut features = Vec::with_capacity(self.parts.len());
        for (i, part) in self.parts.iter().enumerate() {
            let part = Arc::clone(part);
            x = sequence.add(format!("part {i} of VGG16"), [x], move |[x]| {
                let mut x = if i > 0 { max_pool(x)? } else { x.clone() };
                for conv in part.iter() {
                    x = conv.forward(&x)?.relu()?;
                }
                Ok(x)
            });
            features.push(x);
        }
        let features = sequence.run_all(self.checkpointing, &features)?;
        features.iter().map(|x| Ok(normalised(x)?)).collect()
    }
}

/// Features [b, c, h, w], divided by their norm at each position.
fn normalised(x: &Tensor) -> candle_core::Result<Tensor> {
    // The square of the summand keeps the derivative finite where all features are zero.
    let norm = (x.sqr()?.sum_keepdim(1)? + EPSILON * EPSILON)?.sqrt()?;
    x.broadcast_div(&(norm + EPSILON)?)
}
