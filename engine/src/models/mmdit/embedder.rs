//! Embedding of timesteps, guidance scales and pooled text.

use super::layers::Visitor;
use crate::error::Result;
use crate::nn::{LayerMut, Linear, join, silu, sinusoids};
use crate::weights::Weights;
use candle_core::{DType, Tensor};

/// Sinusoids of a timestep or a guidance scale.
pub(in crate::models) const SINUSOIDS: usize = 256;

/// Two linear layers with SiLU between them (diffusers' `TimestepEmbedding` and `PixArtAlphaTextProjection`).
#[derive(Clone, Debug)]
pub(in crate::models) struct Embedder {
    linear_1: Linear,
    linear_2: Linear,
}

impl Embedder {
    /// Loads the layers.
    pub(in crate::models) fn new(weights: &Weights, inputs: usize, width: usize) -> Result<Self> {
        Ok(Self {
            linear_1: Linear::new(&weights.pp("linear_1"), inputs, width, true)?,
            linear_2: Linear::new(&weights.pp("linear_2"), width, width, true)?,
        })
    }

    /// x [b, inputs] -> [b, width].
    pub(in crate::models) fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.linear_2.forward(&silu(&self.linear_1.forward(x)?)?)
    }

    /// Embeds numbers, [b] f32.
    pub(in crate::models) fn forward_numbers(&self, numbers: &Tensor, dtype: DType) -> candle_core::Result<Tensor> {
        self.forward(&sinusoids(numbers, SINUSOIDS, true, 0.0)?.to_dtype(dtype)?)
    }

    /// Calls `f` with both layers, by their names in diffusers below `path`.
    pub(in crate::models) fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        f(&join(path, "linear_1"), LayerMut::Linear(&mut self.linear_1))?;
        f(&join(path, "linear_2"), LayerMut::Linear(&mut self.linear_2))
    }
}
