//! Draws the timesteps and the noise of a micro-batch, in the order that `docs/randomness.md` shows in Python.

use super::comparison::statistics;
use super::latent_options::item_channel_shape;
use super::objective::{DrawInputs, NoiseDraw};
use crate::error::{EngineError, Result};
use crate::image_io::interpolate_bilinear;
use crate::rng::{TorchGenerator, generator_for, generator_from_text};
use candle_core::{D, Device, Tensor};

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
    /// The smallest index of the timestep table (0 = most noise).
    pub min_index: u32,
    /// The largest index.
    pub max_index: u32,
    /// The length of the table.
    pub table_len: u32,
    /// How far the entries of a diffusion model's table, which ends with 0, are apart.
    pub table_spacing: u32,
    /// `noise_offset`: the strength of one additional noise value per item and channel.
    pub offset: f64,
    /// `noise_offset_random_strength`: that strength is the largest.
    pub random_offset: bool,
    /// `adaptive_noise_scale`: this many times the absolute mean of each channel of the latents is added to that strength.
    pub adaptive_offset: f64,
    /// The factor of the noise.
    pub multiplier: f64,
    /// `blended_blur_noise`: the difference between the blurred latents and the latents is added, times a random number from 0 to 2.
    pub blurred: bool,
    /// `dynamic_noise_offset`: half the mean of each channel of the latents is added.
    pub dynamic_offset: bool,
    /// `optimal_noise_pairing_samples`: of this many noise tensors per item, the one nearest to its latents is taken.
    pub pairing_samples: u32,
    /// `force_consistent_noise`: an item has the same noise each time.
    pub consistent: bool,
    /// `signal_correction_noise_scale`, if it is on: this many times the latents are added, times `randn` per item and channel.
    pub signal_correction: Option<f64>,
    /// `batch_noise_correction_scale`, if it is on: the same of another item's latents.
    pub batch_correction: Option<f64>,
    /// `multires_noise_iterations` and `multires_noise_discount`: this many coarser noise tensors are added, each this many times the one before.
    pub multires: Option<(u32, f64)>,
    /// `ip_noise_gamma`: this many times other noise is in the noisy latents alone.
    pub input: f64,
    /// `ip_noise_gamma_random_strength`: that number is the largest.
    pub random_input: bool,
    /// `random_noise_shift`: the standard deviation of a shift per item and channel.
    pub shift: f64,
    /// `random_noise_multiplier`: the standard deviation of the logarithm of a factor per item and channel.
    pub random_multiplier: f64,
}

impl Default for NoiseOptions {
    fn default() -> Self {
        Self {
            preference: NoiseLevelPreference::Balanced,
            min_index: 0,
            max_index: 999,
            table_len: 1000,
            table_spacing: 1,
            offset: 0.0,
            random_offset: false,
            adaptive_offset: 0.0,
            multiplier: 1.0,
            blurred: false,
            dynamic_offset: false,
            pairing_samples: 1,
            consistent: false,
            signal_correction: None,
            batch_correction: None,
            multires: None,
            input: 0.0,
            random_input: false,
            shift: 0.0,
            random_multiplier: 0.0,
        }
    }
}

/// The share of the difference that augmentations make in the latents that `loss_target: differential_noise` adds to the noise.
const DIFFERENTIAL_SHARE: f64 = 0.5;

/// The generator of a micro-batch: captions draw from it first, then [`draw`].
#[must_use]
pub fn batch_generator(seed: u64, step: u64, micro: u64) -> TorchGenerator {
    generator_for(seed, "step", step, micro)
}

/// Draws timesteps (`randint` or `rand`), then the noise. The noise is on the CPU.
///
/// # Errors
/// When the arithmetic fails.
pub fn draw(options: &NoiseOptions, generator: &mut TorchGenerator, inputs: &DrawInputs<'_>) -> Result<NoiseDraw> {
    let last = i64::from(options.table_len) - 1;
    let timesteps = draw_indices(options, generator, inputs.items())
        .into_iter()
        .map(|i| ((last - i).clamp(0, last) * i64::from(options.table_spacing)) as f32)
        .collect();
    let noise = draw_noise(options, generator, inputs)?;
    Ok(NoiseDraw {
        timesteps,
        input_noise: draw_input_noise(options, generator, &noise)?,
        has_stepped: false,
        noise,
    })
}

/// Draws the index of each item in the table of timesteps, where 0 is most noise.
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

/// Draws the noise of each latent tensor, and changes it in ai-toolkit's order (`get_noise` and `process_general_training_batch` in
/// `jobs/process/BaseSDTrainProcess.py`).
///
/// # Errors
/// When the arithmetic fails.
pub(super) fn draw_noise(
    options: &NoiseOptions,
    generator: &mut TorchGenerator,
    inputs: &DrawInputs<'_>,
) -> Result<Vec<Tensor>> {
    let mut all = Vec::with_capacity(inputs.latents.len());
    for (index, latents) in inputs.latents.iter().enumerate() {
        let mut noise = first_noise(options, generator, inputs, index, latents)?;
        if options.blurred {
            let strengths = Tensor::from_vec(generator.rand(inputs.items()), inputs.items(), &Device::Cpu)?;
            let strengths = (strengths.reshape((inputs.items(), 1, 1, 1))? * 2.0)?;
            noise = (noise + blur_difference(latents)?.broadcast_mul(&strengths)?)?;
        }
        if options.dynamic_offset && !inputs.regularisation {
            noise = noise.broadcast_add(&(channel_means(latents)? / 2.0)?)?;
        }
        let mut latents = latents;
        if let Some(unaugmented) = inputs.unaugmented.and_then(|all| all.get(index)) {
            noise = (noise + ((latents - unaugmented)? * DIFFERENTIAL_SHARE)?)?;
            latents = unaugmented;
        }
        if options.multiplier != 1.0 {
            noise = (noise * options.multiplier)?;
        }
        if let Some(scale) = options.signal_correction {
            let factors = (per_channel(generator, latents)? * scale)?;
            noise = (noise + latents.broadcast_mul(&factors)?)?;
        }
        let items = inputs.items();
        if let Some(scale) = options.batch_correction.filter(|_| items > 1) {
            let shift = generator.randint(1, items as i64, 1)[0] as usize;
            let others = Tensor::cat(
                &[
                    latents.narrow(0, items - shift, shift)?,
                    latents.narrow(0, 0, items - shift)?,
                ],
                0,
            )?;
            let factors = (per_channel(generator, latents)? * scale)?;
            noise = (noise + others.broadcast_mul(&factors)?)?;
        }
        if let Some((iterations, discount)) = options.multires {
            noise = multires(noise, generator, iterations, discount)?;
        }
        if options.shift > 0.0 {
            noise = noise.broadcast_add(&(per_channel(generator, latents)? * options.shift)?)?;
        }
        if options.random_multiplier > 0.0 {
            let factors = (per_channel(generator, latents)? * options.random_multiplier)?.exp()?;
            noise = noise.broadcast_mul(&factors)?;
        }
        all.push(noise);
    }
    Ok(all)
}

/// Latents [b, c, h, w] at a quarter of their size, scaled back, minus the latents (`toolkit/util/blended_blur_noise.py` of ai-toolkit).
///
/// # Errors
/// When they are not latents of images.
fn blur_difference(latents: &Tensor) -> Result<Tensor> {
    let (items, channels, height, width) = latents.dims4()?;
    let planes = latents.reshape((items * channels, height, width))?;
    let coarse = interpolate_bilinear(&planes, (height / 4).max(1), (width / 4).max(1))?;
    let blurred = interpolate_bilinear(&coarse, height, width)?;
    Ok((blurred - planes)?.reshape(latents.dims())?)
}

/// Noise with coarser noise on it, with a standard deviation of 1 (`pyramid_noise_like` in `library/custom_train_functions.py` of
/// sd-scripts; J. Whitaker, 2023). Draws `rand(1)` and `randn` for each of them.
///
/// # Errors
/// When the arithmetic fails.
fn multires(noise: Tensor, generator: &mut TorchGenerator, iterations: u32, discount: f64) -> Result<Tensor> {
    let dims = noise.dims().to_vec();
    let [planes @ .., height, width] = dims.as_slice() else {
        return Err(EngineError::Unsupported(
            "multires_noise_iterations needs latents of images".into(),
        ));
    };
    let planes: usize = planes.iter().product();
    let mut sum = noise.reshape((planes, *height, *width))?;
    for iteration in 0..iterations {
        let shrink = (f64::from(generator.rand(1)[0]) * 2.0 + 2.0).powi(iteration as i32);
        let side = |side: usize| ((side as f64 / shrink) as usize).max(1);
        let (rows, columns) = (side(*height), side(*width));
        let coarse = Tensor::from_vec(
            generator.randn(planes * rows * columns),
            (planes, rows, columns),
            &Device::Cpu,
        )?;
        let coarse = interpolate_bilinear(&coarse, *height, *width)?;
        sum = (sum + (coarse * discount.powi(iteration as i32))?)?;
        if rows == 1 || columns == 1 {
            break;
        }
    }
    let sum = sum.reshape(dims)?;
    let [_, deviation] = statistics(&sum)?;
    Ok(sum.broadcast_div(&deviation)?)
}

/// Draws the noise that only the noisy latents get: `rand(1)` for a random strength, then `randn` of each latent tensor.
///
/// # Errors
/// When the arithmetic fails.
pub(super) fn draw_input_noise(
    options: &NoiseOptions,
    generator: &mut TorchGenerator,
    noise: &[Tensor],
) -> Result<Vec<Tensor>> {
    if options.input == 0.0 {
        return Ok(Vec::new());
    }
    let strength = match options.random_input {
        true => options.input * f64::from(generator.rand(1)[0]),
        false => options.input,
    };
    let noise_draw = noise.iter().map(|noise| {
        let other = Tensor::from_vec(generator.randn(noise.elem_count()), noise.dims(), &Device::Cpu)?;
        other * strength
    });
    Ok(noise_draw.collect::<candle_core::Result<_>>()?)
}

/// The noise of a latent tensor before it is changed.
fn first_noise(
    options: &NoiseOptions,
    generator: &mut TorchGenerator,
    inputs: &DrawInputs<'_>,
    index: usize,
    latents: &Tensor,
) -> Result<Tensor> {
    if options.pairing_samples > 1 {
        let item = |i| nearest_noise(options.pairing_samples, generator, &latents.narrow(0, i, 1)?);
        let items = (0..inputs.items()).map(item).collect::<Result<Vec<_>>>()?;
        return Ok(Tensor::cat(&items, 0)?);
    }
    if options.consistent {
        let shape = latents.narrow(0, 0, 1)?.dims().to_vec();
        let mut items = Vec::with_capacity(inputs.items());
        for seed in inputs.noise_seeds {
            let mut own = generator_from_text(&format!("noise/{index}/{seed}"));
            let values = own.randn(shape.iter().product());
            items.push(Tensor::from_vec(values, shape.as_slice(), &Device::Cpu)?);
        }
        if items.len() != inputs.items() {
            return Err(EngineError::Internal(
                "noise that is the same each time needs a seed for each item".into(),
            ));
        }
        return Ok(Tensor::cat(&items, 0)?);
    }
    let noise = Tensor::from_vec(generator.randn(latents.elem_count()), latents.dims(), &Device::Cpu)?;
    if options.offset == 0.0 {
        return Ok(noise);
    }
    let offset = match options.random_offset {
        true => options.offset * f64::from(generator.rand(1)[0]),
        false => options.offset,
    };
    let values = per_channel(generator, latents)?;
    if options.adaptive_offset == 0.0 {
        return Ok(noise.broadcast_add(&(values * offset)?)?);
    }
    // As `apply_noise_offset` of sd-scripts.
    let strengths = ((channel_means(latents)?.abs()? * options.adaptive_offset)? + offset)?.relu()?;
    Ok(noise.broadcast_add(&(values * strengths)?)?)
}

/// Of `count` noise tensors, the one with the smallest mean squared difference from `latents`.
fn nearest_noise(count: u32, generator: &mut TorchGenerator, latents: &Tensor) -> Result<Tensor> {
    let (values, elements) = (latents.flatten_all()?.to_vec1::<f32>()?, latents.elem_count());
    let mut best: Option<(f64, Vec<f32>)> = None;
    for _ in 0..count {
        let noise = generator.randn(elements);
        let squares = noise.iter().zip(&values).map(|(a, b)| f64::from(a - b).powi(2));
        let distance = squares.sum::<f64>();
        if best.as_ref().is_none_or(|(min, _)| distance < *min) {
            best = Some((distance, noise));
        }
    }
    let (_, noise) = best.unwrap_or_default();
    Ok(Tensor::from_vec(noise, latents.dims(), &Device::Cpu)?)
}

/// One `randn` per item and channel, [b, channels, 1, …].
fn per_channel(generator: &mut TorchGenerator, latents: &Tensor) -> Result<Tensor> {
    let shape = item_channel_shape(latents);
    let values = generator.randn(shape.iter().product());
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}

/// The mean of each channel, [b, channels, 1, …].
fn channel_means(latents: &Tensor) -> Result<Tensor> {
    let means = latents.flatten_from(2)?.mean(D::Minus1)?;
    Ok(means.reshape(item_channel_shape(latents))?)
}
