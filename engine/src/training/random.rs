//! Draws the time steps and the noise of a micro-batch, in the order that `docs/randomness.md` shows in Python.

use super::objective::NoiseDraw;
use crate::error::Result;
use crate::rng::{TorchGenerator, generator_for};
use candle_core::{Device, Tensor};

/// The noise levels that are trained most (`train.content_or_style`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoiseLevelPreference {
    /// All noise levels equally.
    Balanced,
    /// High noise levels.
    Content,
    /// Low noise levels.
    Style,
}

/// The options of [`draw`].
#[derive(Clone, Debug, PartialEq)]
pub struct NoiseOptions {
    /// The noise levels that are trained most.
    pub preference: NoiseLevelPreference,
    /// The smallest index of the time step table (0 = most noise).
    pub min_index: u32,
    /// The largest index.
    pub max_index: u32,
    /// The length of the table.
    pub table_len: u32,
    /// `noise_offset`: the strength of one additional noise value per item and channel.
    pub offset: f64,
    /// The factor of the noise.
    pub multiplier: f64,
}

impl Default for NoiseOptions {
    fn default() -> Self {
        Self {
            preference: NoiseLevelPreference::Balanced,
            min_index: 0,
            max_index: 999,
            table_len: 1000,
            offset: 0.0,
            multiplier: 1.0,
        }
    }
}

/// The generator of a micro-batch: captions draw from it first, then [`draw`].
#[must_use]
pub fn batch_generator(seed: u64, step: u64, micro: u64) -> TorchGenerator {
    generator_for(seed, "step", step, micro)
}

/// Draws time steps (`randint` or `rand`), then noise (`randn` of the whole batch), then, if it is on, the offset
/// (`randn` of one number per item and channel). With several latent tensors, noise and offset of each in turn.
///
/// # Errors
/// When the device fails.
pub fn draw(
    options: &NoiseOptions,
    generator: &mut TorchGenerator,
    shapes: &[Vec<usize>],
    device: &Device,
) -> Result<NoiseDraw> {
    let items = shapes.first().and_then(|shape| shape.first().copied()).unwrap_or(0);
    let last = i64::from(options.table_len) - 1;
    let timesteps = draw_indices(options, generator, items)
        .into_iter()
        .map(|i| (last - i).clamp(0, last) as f32)
        .collect();
    Ok(NoiseDraw {
        timesteps,
        noise: draw_noise(options, generator, shapes, device)?,
    })
}

/// Draws the index of each item in the table of time steps, where 0 is most noise.
pub(super) fn draw_indices(options: &NoiseOptions, generator: &mut TorchGenerator, items: usize) -> Vec<i64> {
    let (low, high) = (
        i64::from(options.min_index),
        i64::from(options.max_index.max(options.min_index)),
    );
    let table_len = i64::from(options.table_len);
    match options.preference {
        NoiseLevelPreference::Balanced => generator.randint(low, high + 1, items),
        preference => generator
            .rand(items)
            .into_iter()
            .map(|u| {
                let cube = u * u * u;
                let position = if preference == NoiseLevelPreference::Content {
                    cube
                } else {
                    1.0 - cube
                };
                // From 0..table to low..high.
                let scaled = f64::from(position) * table_len as f64 / (table_len - 1).max(1) as f64;
                ((low as f64 + scaled * (high - low) as f64) as i64).clamp(low, high)
            })
            .collect(),
    }
}

/// Draws the noise of each latent tensor.
///
/// # Errors
/// When the device fails.
pub(super) fn draw_noise(
    options: &NoiseOptions,
    generator: &mut TorchGenerator,
    shapes: &[Vec<usize>],
    device: &Device,
) -> Result<Vec<Tensor>> {
    let mut all = Vec::with_capacity(shapes.len());
    for shape in shapes {
        let count = shape.iter().product();
        let mut noise = Tensor::from_vec(generator.randn(count), shape.as_slice(), &Device::Cpu)?;
        if options.offset != 0.0 {
            let mut per_channel = vec![1; shape.len()];
            let leading = shape.len().min(2);
            per_channel[..leading].copy_from_slice(&shape[..leading]);
            let count = per_channel.iter().product();
            let offset = Tensor::from_vec(generator.randn(count), per_channel, &Device::Cpu)?;
            noise = noise.broadcast_add(&(offset * options.offset)?)?;
        }
        if options.multiplier != 1.0 {
            noise = (noise * options.multiplier)?;
        }
        all.push(noise.to_device(device)?);
    }
    Ok(all)
}
