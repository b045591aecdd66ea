//! The embedding of the timestep.

use super::config::UNetConfig;
use super::resnet::Visitor;
use crate::error::Result;
use crate::nn::{LayerMut, Linear, silu, sinusoids};
use crate::weights::Weights;
use candle_core::Tensor;

#[derive(Clone, Debug)]
pub(super) struct TimeEmbedding {
    linear_1: Linear,
    linear_2: Linear,
}

impl TimeEmbedding {
    /// `first`: the channels of the first block.
    pub(super) fn new(weights: &Weights, first: usize) -> Result<Self> {
        let width = 4 * first;
        Ok(Self {
            linear_1: Linear::new(&weights.pp("linear_1"), first, width, true)?,
            linear_2: Linear::new(&weights.pp("linear_2"), width, width, true)?,
        })
    }

    /// timesteps [b], float32 -> [b, width], in the dtype of the weights.
    pub(super) fn forward(&self, timesteps: &Tensor, config: &UNetConfig) -> Result<Tensor> {
        let dtype = self.linear_1.weight.dtype();
        let width = self.linear_1.in_features();
        let x = sinusoids(timesteps, width, config.flip_sin_to_cos, config.freq_shift)?.to_dtype(dtype)?;
        let x = silu(&self.linear_1.forward(&x)?)?;
        Ok(self.linear_2.forward(&x)?)
    }

    pub(super) fn visit(&mut self, f: &mut Visitor<'_>) -> Result<()> {
        f("time_embedding.linear_1", LayerMut::Linear(&mut self.linear_1))?;
        f("time_embedding.linear_2", LayerMut::Linear(&mut self.linear_2))
    }
}
