//! The change that LoRA makes to a layer, as a change of its weight.

use super::cpu::{self, Mat, MatMut};
use super::{LayerAdapter, Weight};
use candle_core::{DType, Tensor};
use std::sync::Arc;

/// `weight + scale * up * down`, where both are thin (E. Hu and others, "LoRA: Low-Rank Adaptation of Large Language
/// Models", 2021).
#[derive(Clone, Debug)]
pub struct LowRank {
    /// [rank, in], or [rank, in, kernel height, kernel width].
    pub down: Tensor,
    /// [out, rank], or [out, rank, 1, 1].
    pub up: Tensor,
    /// alpha / rank times the strength.
    pub scale: f64,
}

/// What a layer is computed from together with its first adapter.
pub(super) struct FusedLora {
    pub(super) change: LowRank,
    /// Gets no gradient.
    pub(super) weight: Weight,
    /// Gets no gradient either.
    pub(super) bias: Option<Tensor>,
}

impl FusedLora {
    /// `None` where both are computed on their own: the adapter is no low-rank change, the layer is trained itself, or this
    /// is not float32 on the CPU.
    pub(super) fn of(
        x: &Tensor,
        weight: &Weight,
        bias: Option<&Tensor>,
        adapters: &[Arc<dyn LayerAdapter>],
    ) -> candle_core::Result<Option<Self>> {
        let Some(change) = adapters.first().and_then(|adapter| adapter.low_rank()) else {
            return Ok(None);
        };
        let here = [x, &change.down, &change.up]
            .into_iter()
            .chain(bias)
            .all(cpu::is_cpu_f32);
        if !here || weight.dtype() != DType::F32 || bias.is_some_and(Tensor::track_op) {
            return Ok(None);
        }
        let Some(weight) = weight.frozen()? else {
            return Ok(None);
        };
        let bias = bias.map(Tensor::contiguous).transpose()?;
        Ok(Some(Self { change, weight, bias }))
    }
}

/// The sizes of a layer with a low-rank change, as matrices.
#[derive(Clone, Copy, Debug)]
pub(super) struct LowRankSizes {
    /// Inputs that are multiplied: tokens, or pixels of the result.
    pub(super) rows: usize,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) rank: usize,
}

impl LowRankSizes {
    /// Whether it is less work to change the weight than to send every row through the thin matrices.
    pub(super) fn is_merged(self) -> bool {
        self.rows * (self.inputs + self.outputs) >= self.inputs * self.outputs
    }

    /// The changed weight [out, in], from `down` [rank, in] and `up` [out, rank].
    pub(super) fn merged(self, weight: &[f32], down: &[f32], up: &[f32], scale: f32) -> candle_core::Result<Vec<f32>> {
        let mut merged = weight.to_vec();
        let out = MatMut::new(&mut merged, self.outputs, self.inputs);
        let up = Mat::new(up, self.outputs, self.rank);
        let down = Mat::new(down, self.rank, self.inputs);
        cpu::gemm(out, up, down, 1.0, scale, cpu::threads())?;
        Ok(merged)
    }
}
