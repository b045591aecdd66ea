//! The network of versions 7 and 8 of ai-toolkit's feature extractors (`DiffusionFeatureExtractor7` in
//! `toolkit/models/diffusion_feature_extraction.py` and `TIPSv2DPTModel` in `toolkit/models/tipsv2.py`, 27a03a91): the vision transformer of
//! TIPSv2 with its heads for depth, normals of surfaces and classes of objects.

mod encoder;
mod fusion;
mod head;
mod scale;

use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::weights::Index;
use candle_core::{DType, Device, Tensor};
use encoder::Encoder;
pub(super) use encoder::FIRST_TENSOR as ENCODER_TENSOR;
use head::{Head, Task};

/// The tensor that tells the file of the heads from others.
pub(super) const FIRST_TENSOR: &str = "depth_head.project.weight";

/// What the network finds in images. All tensors are float32.
#[derive(Clone, Debug)]
pub struct TipsOutputs {
    /// The patches after each quarter of the layers, [b, patches, width].
    pub patches: Vec<Tensor>,
    /// [b, 1, height, width] of the scaled images, in metres.
    pub depth: Tensor,
    /// [b, 3, height, width], of length 1 before they are scaled to that size.
    pub normals: Tensor,
    /// [b, classes, height, width].
    pub segmentation: Tensor,
}

/// The network.
#[derive(Clone, Debug)]
pub struct TipsFeatures {
    encoder: Encoder,
    /// Of depth, normals and classes.
    heads: [Head; 3],
    checkpointing: Checkpointing,
}

impl TipsFeatures {
    /// Reads the network. `heads`: the file of its heads; `encoder`: that of its vision transformer. Its sizes are those of its tensors:
    /// those of `google/tipsv2-b14-dpt` have 12 layers of 768 features, 256 depths and 150 classes.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape than its neighbours need.
    pub fn new(heads: &Index, encoder: &Index, dtype: DType, device: &Device) -> Result<Self> {
        let encoder = Encoder::new(encoder, dtype, device)?;
        let head = |task| Head::new(heads, task, encoder.width(), (dtype, device));
        Ok(Self {
            heads: [head(Task::Depth)?, head(Task::Normals)?, head(Task::Segmentation)?],
            encoder,
            checkpointing: Checkpointing::Off,
        })
    }

    /// Recomputes each layer in the backward pass, or none.
    pub(super) fn set_checkpointing(&mut self, checkpointing: Checkpointing) {
        self.checkpointing = checkpointing;
    }

    /// What the network finds in images [b, 3, height, width] from -1 to 1, float32.
    ///
    /// # Errors
    /// When the shapes do not match, or a side is smaller than a patch.
    pub fn forward(&self, images: &Tensor) -> Result<TipsOutputs> {
        let encoded = self.encoder.forward(images, self.checkpointing)?;
        let [depth, normals, segmentation] = &self.heads;
        let patches = encoded.taken.iter().map(|taken| taken.patches.to_dtype(DType::F32));
        Ok(TipsOutputs {
            patches: patches.collect::<candle_core::Result<_>>()?,
            depth: depth.forward(&encoded, self.checkpointing)?,
            normals: normals.forward(&encoded, self.checkpointing)?,
            segmentation: segmentation.forward(&encoded, self.checkpointing)?,
        })
    }
}
