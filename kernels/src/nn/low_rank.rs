//! LoRA as a low-rank change of a layer's weight, and its fusion with the layer.

use super::adapter::{LayerAdapter, LowRank};
use super::cpu::{self, Mat, MatMut};
use crate::weights::Weight;
use candle_core::Tensor;
use std::sync::Arc;

/// A frozen layer and its first adapter, which are computed as one operation.
pub(super) struct FusedLora {
    pub(super) delta: LowRank,
    /// The frozen weight.
    pub(super) weight: Weight,
    /// The frozen bias.
    pub(super) bias: Option<Tensor>,
}

impl FusedLora {
    /// `None` where layer and adapter cannot be fused: the adapter is not a low-rank change, or the layer itself is
    /// trained.
    pub(super) fn try_new(
        weight: &Weight,
        bias: Option<&Tensor>,
        adapters: &[Arc<dyn LayerAdapter>],
    ) -> candle_core::Result<Option<Self>> {
        let Some(delta) = adapters.first().and_then(|adapter| adapter.low_rank()) else {
            return Ok(None);
        };
        if bias.is_some_and(Tensor::track_op) {
            return Ok(None);
        }
        let Some(weight) = weight.as_frozen()? else {
            return Ok(None);
        };
        let bias = bias.map(Tensor::contiguous).transpose()?;
        Ok(Some(Self { delta, weight, bias }))
    }
}

/// The matrix sizes of a layer with a low-rank change.
#[derive(Clone, Copy, Debug)]
pub(super) struct LowRankSizes {
    /// Rows of the input: tokens, or pixels of the result.
    pub(super) rows: usize,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) rank: usize,
    /// Whether products round the weight to bfloat16.
    pub(super) rounds_weight: bool,
}

impl LowRankSizes {
    /// Whether merging the change into the weight is less work than multiplying every row with `down` and `up`. It is not merged where the sum
    /// would be rounded to bfloat16: small changes would be lost. The products with `down` and `up` are in f32.
    pub(super) fn should_merge(self) -> bool {
        !self.rounds_weight && self.rows * (self.inputs + self.outputs) >= self.inputs * self.outputs
    }

    /// The weight [out, in] with the product of `down` [rank, in] and `up` [out, rank] added.
    pub(super) fn merged(
        self,
        mut weight: Vec<f32>,
        down: &[f32],
        up: &[f32],
        scale: f32,
    ) -> candle_core::Result<Vec<f32>> {
        let out = MatMut::new(&mut weight, self.outputs, self.inputs);
        let up = Mat::new(up, self.outputs, self.rank);
        let down = Mat::new(down, self.rank, self.inputs);
        cpu::gemm(out, up, down, scale, 1.0, cpu::threads())?;
        Ok(weight)
    }
}
