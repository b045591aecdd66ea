//! Draws the time steps and the noise of a micro-batch, in the order that `docs/randomness.md` shows in Python.

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

/// The time steps and the noise of a micro-batch.
#[derive(Clone, Debug)]
pub struct NoiseDraw {
    /// One training time step per item, 0 = least noise.
    pub timesteps: Vec<i64>,
    /// [b, c, h, w].
    pub noise: Tensor,
}

/// The generator of a micro-batch: captions draw from it first, then [`draw`].
#[must_use]
pub fn batch_generator(seed: u64, step: u64, micro: u64) -> TorchGenerator {
    generator_for(seed, "step", step, micro)
}

/// Draws time steps (`randint` or `rand`), then noise (`randn` of the whole batch), then, if it is on, the offset
/// (`randn` of one number per item and channel).
///
/// # Errors
/// When the device fails.
pub fn draw(
    options: &NoiseOptions,
    generator: &mut TorchGenerator,
    (b, c, h, w): (usize, usize, usize, usize),
    device: &Device,
) -> Result<NoiseDraw> {
    let (low, high) = (
        i64::from(options.min_index),
        i64::from(options.max_index.max(options.min_index)),
    );
    let table_len = i64::from(options.table_len);
    let indices: Vec<i64> = match options.preference {
        NoiseLevelPreference::Balanced => generator.randint(low, high + 1, b),
        preference => generator
            .rand(b)
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
    };
    let timesteps = indices
        .into_iter()
        .map(|i| (table_len - 1 - i).clamp(0, table_len - 1))
        .collect();
    let mut noise = Tensor::from_vec(generator.randn(b * c * h * w), (b, c, h, w), &Device::Cpu)?;
    if options.offset != 0.0 {
        let offset = Tensor::from_vec(generator.randn(b * c), (b, c, 1, 1), &Device::Cpu)?;
        noise = noise.broadcast_add(&(offset * options.offset)?)?;
    }
    if options.multiplier != 1.0 {
        noise = (noise * options.multiplier)?;
    }
    Ok(NoiseDraw {
        timesteps,
        noise: noise.to_device(device)?,
    })
}
