//! SDXL's additional embedding: of the pooled text, and of sizes and crops (diffusers' `addition_embed_type: text_time`;
//! D. Podell and others, "SDXL", 2023, section 2.2).

use super::config::{AdditionalWidths, UNetConfig};
use super::resnet::Visitor;
use crate::error::{EngineError, Result};
use crate::nn::{LayerMut, Linear, join, silu, sinusoids};
use crate::weights::Weights;
use candle_core::{D, Tensor};

/// What SDXL is conditioned on besides the text and the timestep.
#[derive(Clone, Copy, Debug)]
pub struct AdditionalConditions<'a> {
    /// The pooled text, [b, width].
    pub pooled: &'a Tensor,
    /// The original size, the crop's top left corner and the target size, [b, 6]: height, width, top, left, height,
    /// width. float32.
    pub time_ids: &'a Tensor,
}

#[derive(Clone, Debug)]
pub(super) struct AdditionalEmbedding {
    linear_1: Linear,
    linear_2: Linear,
    widths: AdditionalWidths,
}

impl AdditionalEmbedding {
    pub(super) fn new(weights: &Weights, widths: AdditionalWidths, time_width: usize) -> Result<Self> {
        Ok(Self {
            linear_1: Linear::new(&weights.pp("linear_1"), widths.inputs, time_width, true)?,
            linear_2: Linear::new(&weights.pp("linear_2"), time_width, time_width, true)?,
            widths,
        })
    }

    /// The embedding, [b, time width], in the dtype of the weights.
    pub(super) fn forward(&self, conditions: &AdditionalConditions<'_>, config: &UNetConfig) -> Result<Tensor> {
        let dtype = self.linear_1.weight.dtype();
        let (batch, count) = conditions.time_ids.dims2()?;
        let (pooled_batch, pooled_width) = conditions.pooled.dims2()?;
        let expected = pooled_width + count * self.widths.size;
        if pooled_batch != batch || expected != self.widths.inputs {
            return Err(EngineError::Unsupported(format!(
                "the U-Net's additional embedding takes {} features, and the pooled text ({pooled_width}) and {count} size \
                 numbers make {expected}: they belong to different models",
                self.widths.inputs
            )));
        }
        let sizes = conditions.time_ids.flatten_all()?;
        let sizes = sinusoids(&sizes, self.widths.size, config.flip_sin_to_cos, config.freq_shift)?;
        let sizes = sizes.reshape((batch, count * self.widths.size))?;
        let inputs = Tensor::cat(
            &[conditions.pooled, &sizes.to_dtype(conditions.pooled.dtype())?],
            D::Minus1,
        )?;
        let h = silu(&self.linear_1.forward(&inputs.to_dtype(dtype)?)?)?;
        Ok(self.linear_2.forward(&h)?)
    }

    pub(super) fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        f(&join(path, "linear_1"), LayerMut::Linear(&mut self.linear_1))?;
        f(&join(path, "linear_2"), LayerMut::Linear(&mut self.linear_2))
    }
}
