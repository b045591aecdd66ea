//! Benchmarks of single FLUX.1 blocks at full size.

use super::operations::{Iteration, forward_and_backward, normal};
use crate::device::Compute;
use crate::error::Result;
use crate::models::flux::{FluxSingleTransformerBlock, FluxSizes, FluxTransformerBlock, rotary};
use crate::weights::Weights;
use candle_core::Tensor;

const SIZES: FluxSizes = FluxSizes {
    heads: 24,
    head_width: 128,
};
/// Rows and columns of tokens of an image of 512 x 512 pixels; a token is 16 x 16 pixels.
const IMAGE_TOKENS: (usize, usize) = (32, 32);
/// Tokens of the prompt.
const TEXT_TOKENS: usize = 512;

fn weights(compute: &Compute, with_gradients: bool) -> Weights {
    let weights = Weights::init(1, &compute.device).in_dtype(compute.dtype);
    if with_gradients { weights } else { weights.frozen() }
}

/// Image tokens [1, 1024, width], text tokens [1, 512, width] and conditioning vector [1, width].
fn inputs(compute: &Compute) -> Result<[Tensor; 3]> {
    let tokens = IMAGE_TOKENS.0 * IMAGE_TOKENS.1;
    Ok([
        normal(compute, &[1, tokens, SIZES.width()])?,
        normal(compute, &[1, TEXT_TOKENS, SIZES.width()])?,
        normal(compute, &[1, SIZES.width()])?,
    ])
}

pub(super) fn double(compute: &Compute, with_gradients: bool) -> Result<Iteration> {
    let block = FluxTransformerBlock::new(&weights(compute, with_gradients), SIZES)?;
    let positions = rotary(TEXT_TOKENS, IMAGE_TOKENS, [16, 56, 56])?;
    let [x, text, temb] = inputs(compute)?;
    Ok(Box::new(move || {
        let forward = || block.forward(&x, &text, &temb, &positions, None);
        if with_gradients {
            return forward_and_backward(|| {
                let (x, text) = forward()?;
                Tensor::cat(&[text, x], 1)
            });
        }
        forward()?;
        Ok(())
    }))
}

pub(super) fn single(compute: &Compute, with_gradients: bool) -> Result<Iteration> {
    let block = FluxSingleTransformerBlock::new(&weights(compute, with_gradients), SIZES)?;
    let positions = rotary(TEXT_TOKENS, IMAGE_TOKENS, [16, 56, 56])?;
    let [x, text, temb] = inputs(compute)?;
    let x = Tensor::cat(&[text, x], 1)?;
    Ok(Box::new(move || {
        if with_gradients {
            return forward_and_backward(|| block.forward(&x, &temb, &positions, None));
        }
        block.forward(&x, &temb, &positions, None)?;
        Ok(())
    }))
}
