//! The tensors of a LoRA, layer by layer.

use candle_core::Tensor;

/// The tensors of one layer, float32 on the CPU.
#[derive(Clone, Debug)]
pub struct LoraTensors {
    /// [rank, in] or [rank, in, kh, kw].
    pub down: Tensor,
    /// [out, rank] or [out, rank, 1, 1].
    pub up: Tensor,
    /// [rank, rank, kh, kw], LoCon only.
    pub mid: Option<Tensor>,
    /// The alpha in the file. Files of peft and of transformer models have none.
    pub alpha: Option<f64>,
    /// Multiplies the update (LyCORIS); 1 if absent.
    pub scalar: f64,
}

impl LoraTensors {
    /// The rank.
    pub(crate) fn rank(&self) -> usize {
        self.down.dims()[0]
    }
}

/// The LoRA of an embedding layer, float32 on the CPU.
#[derive(Clone, Debug)]
pub(in super::super) struct LoraEmbeddingTensors {
    /// [rank, count].
    pub(super) down: Tensor,
    /// [width, rank].
    pub(super) up: Tensor,
    /// The alpha in the file. Files of peft have none.
    pub(super) alpha: Option<f64>,
}

impl LoraEmbeddingTensors {
    pub(in super::super) fn rank(&self) -> usize {
        self.down.dims()[0]
    }
}
