//! Single blocks of FLUX.1 at full size.

use super::Run;
use super::parts::{normal, watched};
use crate::device::Compute;
use crate::error::Result;
use crate::models::flux::{FluxSingleTransformerBlock, FluxSizes, FluxTransformerBlock, rotary};
use crate::weights::Weights;
use candle_core::Tensor;

const SIZES: FluxSizes = FluxSizes {
    heads: 24,
    head_width: 128,
};
/// An image of 512 x 512, in tokens of 16 x 16 pixels.
const IMAGE: (usize, usize) = (32, 32);
const WORDS: usize = 512;

fn weights(compute: &Compute, step: bool) -> Weights {
    let weights = Weights::init(1, &compute.device);
    if step { weights } else { weights.frozen() }
}

/// Image, text and conditioning vector.
fn inputs(compute: &Compute) -> Result<[Tensor; 3]> {
    let tokens = IMAGE.0 * IMAGE.1;
    Ok([
        normal(compute, &[1, tokens, SIZES.width()])?,
        normal(compute, &[1, WORDS, SIZES.width()])?,
        normal(compute, &[1, SIZES.width()])?,
    ])
}

pub(super) fn double(compute: &Compute, step: bool) -> Result<Run> {
    let block = FluxTransformerBlock::new(&weights(compute, step), SIZES)?;
    let positions = rotary(WORDS, IMAGE, [16, 56, 56])?;
    let [x, text, temb] = inputs(compute)?;
    Ok(Box::new(move || {
        let forward = || block.forward(&x, &text, &temb, &positions);
        if step {
            return watched(|| {
                let (x, text) = forward()?;
                Tensor::cat(&[text, x], 1)
            });
        }
        forward()?;
        Ok(())
    }))
}

pub(super) fn single(compute: &Compute, step: bool) -> Result<Run> {
    let block = FluxSingleTransformerBlock::new(&weights(compute, step), SIZES)?;
    let positions = rotary(WORDS, IMAGE, [16, 56, 56])?;
    let [x, text, temb] = inputs(compute)?;
    let x = Tensor::cat(&[text, x], 1)?;
    Ok(Box::new(move || {
        if step {
            return watched(|| block.forward(&x, &temb, &positions));
        }
        block.forward(&x, &temb, &positions)?;
        Ok(())
    }))
}
