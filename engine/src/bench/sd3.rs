//! Benchmarks of a single block of Stable Diffusion 3.5 medium at full size.

use super::operations::{Iteration, forward_and_backward, normal};
use crate::device::Compute;
use crate::error::Result;
use crate::models::sd3::{BlockKind, JointTransformerBlock, Sd3Sizes};
use crate::weights::Weights;
use candle_core::Tensor;

const SIZES: Sd3Sizes = Sd3Sizes {
    heads: 24,
    head_width: 64,
    qk_norm: true,
};
/// Tokens of an image of 512 x 512 pixels; a token is 16 x 16 pixels.
const IMAGE_TOKENS: usize = 1024;
/// Tokens of the prompt: 77 of CLIP, 256 of T5.
const TEXT_TOKENS: usize = 333;

/// A block with the second attention between image tokens.
pub(super) fn block(compute: &Compute, with_gradients: bool) -> Result<Iteration> {
    let weights = Weights::init(1, &compute.device).in_dtype(compute.dtype);
    let weights = if with_gradients { weights } else { weights.frozen() };
    let kind = BlockKind {
        dual_attention: true,
        last: false,
    };
    let block = JointTransformerBlock::new(&weights, SIZES, kind)?;
    let x = normal(compute, &[1, IMAGE_TOKENS, SIZES.width()])?;
    let text = normal(compute, &[1, TEXT_TOKENS, SIZES.width()])?;
    let temb = normal(compute, &[1, SIZES.width()])?;
    Ok(Box::new(move || {
        let forward = || block.forward(&x, &text, &temb);
        if with_gradients {
            return forward_and_backward(|| {
                let (x, text) = forward()?;
                match text {
                    Some(text) => Tensor::cat(&[text, x], 1),
                    None => Ok(x),
                }
            });
        }
        forward()?;
        Ok(())
    }))
}
