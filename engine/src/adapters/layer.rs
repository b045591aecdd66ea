//! One LoRA layer: `y + up(dropout(down(x))) * alpha / rank * multiplier`.

use super::handle::LoraHandle;
use crate::families::LoraNames;
use crate::nn::{self, BaseLayer, LayerAdapter, LayerKind, LowRank, conv2d, linear};
use crate::rng::generator_from_text;
use candle_core::{DType, Result, Tensor, Var};
use std::sync::Arc;

/// The LoRA of one layer. The weights are float32, whatever the dtype of the base layer.
#[derive(Debug)]
pub struct LoraLayer {
    /// The name in LoRA files: `lora_unet_down_blocks_0_…`.
    pub name: String,
    /// [rank, in] or [rank, in, kh, kw] ([rank, in, 1, 1] when there is a `mid`).
    pub down: Var,
    /// [out, rank] or [out, rank, 1, 1].
    pub up: Var,
    /// LoCon's Tucker core [rank, rank, kh, kw]; only in files of other programs.
    pub mid: Option<Tensor>,
    /// The scale of the update is alpha / rank.
    pub alpha: f64,
    /// A number that is trained too and multiplies the update (LoCon).
    pub scalar: Option<Var>,
    /// The probability to drop an element between down and up during training.
    pub dropout: f64,
    /// How saved files name its tensors.
    pub(super) names: LoraNames,
    pub(super) handle: Arc<LoraHandle>,
}

impl LoraLayer {
    /// The rank: the rows of `down`.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.down.dims().first().copied().unwrap_or(1).max(1)
    }

    /// alpha / rank times the strength of the pass.
    fn strength(&self) -> f64 {
        self.handle.strength() * self.alpha / self.rank() as f64
    }

    /// `down` and `up`, which is multiplied by the scalar, tracked for gradients if `is_training`.
    fn weights(&self, is_training: bool) -> Result<[Tensor; 2]> {
        let tensor = |v: &Var| {
            if is_training {
                v.as_tensor().clone()
            } else {
                v.as_tensor().detach()
            }
        };
        let (down, up) = (tensor(&self.down), tensor(&self.up));
        let up = match &self.scalar {
            Some(scalar) => up.broadcast_mul(&tensor(scalar))?,
            None => up,
        };
        Ok([down, up])
    }

    /// A dropout mask for `like`: 0 or 1 / (1 - p) per element.
    fn dropout_mask(&self, dropout_seed: &str, like: &Tensor) -> Result<Tensor> {
        let keep = (1.0 / (1.0 - self.dropout)) as f32;
        let values: Vec<f32> = generator_from_text(&format!("{dropout_seed}/{}", self.name))
            .rand(like.elem_count())
            .into_iter()
            .map(|u| if f64::from(u) < self.dropout { 0.0 } else { keep })
            .collect();
        Tensor::from_vec(values, like.shape(), like.device())
    }
}

impl LayerAdapter for LoraLayer {
    fn apply(&self, layer: &BaseLayer<'_>, x: &Tensor, output: Tensor) -> Result<Tensor> {
        let strength = self.strength();
        if strength == 0.0 {
            return Ok(output);
        }
        let dropout_seed = self.handle.dropout_seed();
        let [down, up] = self.weights(dropout_seed.is_some())?;
        let x = x.to_dtype(DType::F32)?;
        let project = |x: &Tensor, w: &Tensor, stride: usize, padding: usize| match layer.kind {
            LayerKind::Linear => linear(x, w, None),
            LayerKind::Conv { .. } => conv2d(x, w, None, stride, padding),
        };
        let (stride, padding) = match layer.kind {
            LayerKind::Linear => (1, 0),
            LayerKind::Conv { stride, padding } => (stride, padding),
        };
        let mut h = match &self.mid {
            None => project(&x, &down, stride, padding)?,
            Some(mid) => project(&project(&x, &down, 1, 0)?, mid, stride, padding)?,
        };
        if let Some(dropout_seed) = dropout_seed.filter(|_| self.dropout > 0.0) {
            h = (&h * self.dropout_mask(&dropout_seed, &h)?)?;
        }
        let change = (project(&h, &up, 1, 0)? * strength)?;
        let change = change.to_dtype(output.dtype())?;
        nn::add(&output, &change)
    }

    fn low_rank(&self) -> Option<LowRank> {
        let (scale, is_training) = (self.strength(), self.handle.dropout_seed().is_some());
        if scale == 0.0 || self.mid.is_some() || (is_training && self.dropout > 0.0) {
            return None;
        }
        let [down, up] = self.weights(is_training).ok()?;
        Some(LowRank { down, up, scale })
    }
}
