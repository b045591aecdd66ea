//! What networks beside a U-Net get, and what they add to its features.

use super::additional::AdditionalConditions;
use candle_core::Tensor;

/// The inputs of a U-Net, which a network beside it may get too.
#[derive(Clone, Copy, Debug)]
pub struct UNetInputs<'a> {
    /// The noisy latents, [b, in, h, w].
    pub sample: &'a Tensor,
    /// [b], float32; may be fractional.
    pub timesteps: &'a Tensor,
    /// The encoded text, [b, n, cross attention width].
    pub context: &'a Tensor,
    /// SDXL: the pooled text and the sizes.
    pub conditions: Option<AdditionalConditions<'a>>,
}

/// What networks beside a U-Net add to its features. They are converted to the dtype of the features.
#[derive(Clone, Debug, Default)]
pub struct UNetResiduals {
    /// Of T2I-Adapters, one for each down block (diffusers' `down_intrablock_additional_residuals`): it is added to the output of the block's
    /// last layer before the downsampling; where the block has no attention after the downsampling. One more is added to the output of the
    /// middle block. There may be fewer.
    pub in_blocks: Vec<Tensor>,
    /// Of ControlNets, one for each skip connection (`down_block_additional_residuals`); none, or all.
    pub skips: Vec<Tensor>,
    /// Of ControlNets: added to the output of the middle block (`mid_block_additional_residual`).
    pub middle: Option<Tensor>,
}
