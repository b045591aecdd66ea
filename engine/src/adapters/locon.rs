//! `network.type: locon` (`lycoris`): the LoRA of ai-toolkit's `LycorisSpecialNetwork`, for U-Nets.
//!
//! It covers the layers in the attention blocks, residual blocks, downsamplers and upsamplers: not the first and the last convolution,
//! nor the embeddings of time and size. Each layer has a trained number, `scalar`, that multiplies its update. That starts at 0, so that
//! `up` need not.

use super::lora::new_layer;
use super::trained_layer::{AdapterType, NewLayer, TrainedLayer};
use crate::families::{AdapterNames, PartRole};
use crate::rng::TorchGenerator;
use candle_core::{DType, Result, Tensor, Var};
use std::sync::Arc;

/// The blocks of a U-Net whose layers get a LoCon: `Transformer2DModel`, `ResnetBlock2D`, `Downsample2D` and `Upsample2D` of diffusers.
const BLOCKS: [&str; 4] = ["attentions", "resnets", "downsamplers", "upsamplers"];

/// LoCon.
#[derive(Clone, Copy, Debug)]
pub struct Locon;

impl AdapterType for Locon {
    fn covers(&self, role: PartRole, path: &str) -> bool {
        role != PartRole::Denoiser || path.split('.').any(|part| BLOCKS.contains(&part))
    }

    fn check_names(&self, names: AdapterNames) -> std::result::Result<(), String> {
        match names {
            AdapterNames::Kohya => Ok(()),
            AdapterNames::Peft => Err(
                "`network.type: locon` trains U-Nets alone, as in ai-toolkit, and this model has a transformer: \
                                      use `type: lora` or `type: lokr`"
                    .to_owned(),
            ),
        }
    }

    /// `down` and `up` are Kaiming-uniform: `down` with a = sqrt(5), in ±1/sqrt(fan_in), `up` with a = 0, in ±sqrt(6/rank). The scalar
    /// is zero.
    fn create(&self, new: NewLayer<'_>, generator: &mut TorchGenerator) -> Result<Arc<dyn TrainedLayer>> {
        let device = new.device;
        let mut layer = new_layer(new, generator, |generator, rank, new, dims| {
            let bound = (6.0 / rank.max(1) as f64).sqrt() as f32;
            new.variable(generator.uniform(dims.iter().product(), -bound, bound), dims)
        })?;
        layer.scalar = Some(Var::from_tensor(&Tensor::zeros((), DType::F32, device)?)?);
        Ok(Arc::new(layer))
    }
}
