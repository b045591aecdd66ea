//! The timesteps that flow matching trains (`train.timestep_type`): a table from much noise to little, of which each item of a
//! batch gets one. As in ai-toolkit (`toolkit/samplers/custom_flowmatch_sampler.py`), whose formulas these are.

use crate::error::{EngineError, Result};
use crate::rng::TorchGenerator;
use crate::samplers::{SamplerParams, dynamic_mu, shifted_timesteps};

/// Timesteps from all noise to none.
pub(super) const TRAIN_TIMESTEPS: f64 = 1000.0;
/// The share of log-normal entries in the table of [`FlowTimesteps::LognormBlend`], and the standard deviation of their
/// logarithm.
const LOGNORMAL_SHARE: f64 = 0.75;
const LOGNORMAL_DEVIATION: f64 = 0.333;

/// How the table of timesteps is made.
#[derive(Clone, Debug, PartialEq)]
pub enum FlowTimesteps {
    /// The sigmoids of normal numbers of this standard deviation, drawn anew for each micro-batch.
    Sigmoid(f64),
    /// Even, from 1000 to 1.
    Linear,
    /// Those of a sampler, which the scheduler's config shifts, by the number of image tokens if it says so.
    Shift(Box<SamplerParams>),
    /// Three quarters log-normal, drawn anew for each micro-batch, and a quarter even. Whole numbers.
    LognormBlend,
    /// Those of a sampler of this many steps, shifted as the scheduler's config says. Each item takes one step of it with the model
    /// before its loss is computed, so that it is trained on what sampling gives (`next_sample`).
    NextSample(Box<SamplerParams>, u32),
    /// The entries of a table, shifted.
    Shifted(Box<Self>, FlowShift),
    /// The even table, of which only the entries where a sampler of this many steps would be are trained: 1, 2, 4 or 8.
    FewSteps(u32),
}

/// How noise levels are shifted towards more noise: the level `s` becomes `shift s / (1 + (shift - 1) s)`, as in sd-scripts
/// (`library/flux_train_utils.py`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FlowShift {
    /// By this factor.
    Constant(f64),
    /// By `exp(mu)`, where `mu` grows with the number of image tokens, as in sampling with FLUX.1: 0.5 at 256 of them, 1.15 at 4096.
    BySize,
}

impl FlowShift {
    fn factor(self, image_tokens: usize) -> f64 {
        match self {
            Self::Constant(factor) => factor,
            Self::BySize => dynamic_mu(&SamplerParams::default(), image_tokens).exp(),
        }
    }
}

impl FlowTimesteps {
    /// The table, of `length` entries, in descending order.
    ///
    /// # Errors
    /// When the scheduler's config is wrong.
    pub(super) fn table(&self, generator: &mut TorchGenerator, length: usize, image_tokens: usize) -> Result<Vec<f32>> {
        let mut table: Vec<f32> = match self {
            Self::Linear | Self::FewSteps(_) => return Ok(linear(length)),
            Self::Shift(params) => return shifted(params, length, image_tokens),
            Self::NextSample(params, steps) => return shifted(params, *steps as usize, image_tokens),
            Self::Shifted(of, shift) => {
                let factor = shift.factor(image_tokens);
                let shifted = |timestep: f32| {
                    let level = f64::from(timestep) / TRAIN_TIMESTEPS;
                    (factor * level / (1.0 + (factor - 1.0) * level) * TRAIN_TIMESTEPS) as f32
                };
                let table = of.table(generator, length, image_tokens)?;
                return Ok(table.into_iter().map(shifted).collect());
            }
            Self::Sigmoid(deviation) => {
                let normal = generator.randn(length).into_iter();
                let level = |x: f32| 1.0 - sigmoid(x * *deviation as f32);
                normal.map(|x| level(x) * TRAIN_TIMESTEPS as f32).collect()
            }
            Self::LognormBlend => {
                let share = |share: f64| (length as f64 * share) as usize;
                let drawn: Vec<f32> = generator
                    .randn(share(LOGNORMAL_SHARE))
                    .into_iter()
                    .map(|x| (x * LOGNORMAL_DEVIATION as f32).exp())
                    .collect();
                let largest = drawn.iter().copied().fold(f32::MIN_POSITIVE, f32::max);
                let drawn = drawn.into_iter().map(|x| (1.0 - x / largest) * TRAIN_TIMESTEPS as f32);
                drawn
                    .chain(linear(length - share(LOGNORMAL_SHARE)))
                    .map(f32::trunc)
                    .collect()
            }
        };
        table.sort_by(|a, b| b.total_cmp(a));
        Ok(table)
    }

    /// The only entries of the table that are trained; `None`: any.
    pub(super) fn choices(&self, length: usize) -> Option<Vec<usize>> {
        let steps = match self {
            Self::FewSteps(steps) => steps,
            Self::Shifted(of, _) => return of.choices(length),
            // A step can be taken from each, and neither the last entry nor the last but one is reached, as in ai-toolkit.
            Self::NextSample(_, steps) => return Some((0..(*steps as usize).saturating_sub(2).max(1)).collect()),
            _ => return None,
        };
        // ai-toolkit's second of two entries is 499, the others are at eighths and quarters.
        Some(match steps {
            2 => vec![0, (length / 2).saturating_sub(1)],
            &steps => (0..steps as usize).map(|step| step * length / steps as usize).collect(),
        })
    }
}

/// The table of a sampler.
pub(super) fn shifted(params: &SamplerParams, length: usize, image_tokens: usize) -> Result<Vec<f32>> {
    shifted_timesteps(params, length, image_tokens)
        .map_err(|error| EngineError::bad_input(format!("scheduler_config.json: {error}")))
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Even timesteps from 1000 to 1, computed as `torch.linspace` does: from both ends to the middle.
fn linear(length: usize) -> Vec<f32> {
    let (first, last) = (TRAIN_TIMESTEPS as f32, 1.0f32);
    let step = (last - first) / (length.saturating_sub(1).max(1)) as f32;
    (0..length)
        .map(|i| match i < length / 2 {
            true => first + step * i as f32,
            false if length == 1 => first,
            false => last - step * (length - 1 - i) as f32,
        })
        .collect()
}

/// How the loss is weighted by the timestep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FlowWeighting {
    /// Not at all.
    #[default]
    Even,
    /// A bell around the middle with a mean of 1 (`train.linear_timesteps`).
    Bell,
    /// The same bell for high noise, and its maximum for low noise (`train.linear_timesteps2`).
    HalfBell,
    /// The relative size of the losses that ai-toolkit measured on Flex.1-alpha (`timestep_type: weighted`).
    Measured,
}

impl FlowWeighting {
    /// The weight of an item's loss.
    pub(super) fn weight(self, timestep: f32) -> f64 {
        // The entry of the even table: 0 is timestep 1000.
        let index = TRAIN_TIMESTEPS - f64::from(timestep);
        match self {
            Self::Even => 1.0,
            Self::Bell => bell(index),
            Self::HalfBell => bell(index.min(TRAIN_TIMESTEPS / 2.0)),
            Self::Measured => measured(index),
        }
    }
}

/// `exp(-2 ((x - 500) / 1000)^2)` minus its smallest value, divided by the mean over the 1000 entries.
fn bell(index: f64) -> f64 {
    let value = |index: f64| (-2.0 * (index / TRAIN_TIMESTEPS - 0.5).powi(2)).exp();
    let lowest = value(0.0);
    let mean = (0..TRAIN_TIMESTEPS as u32)
        .map(|i| value(f64::from(i)) - lowest)
        .sum::<f64>()
        / TRAIN_TIMESTEPS;
    (value(index) - lowest) / mean
}

/// Entries of the even table, and the weight there. Between them it is interpolated, which is within 3 % of ai-toolkit's
/// table of 1000 numbers (`toolkit/timestep_weighing/default_weighing_scheme.py`).
const MEASURED: [(f64, f64); 15] = [
    (0.0, 0.906),
    (20.0, 1.176),
    (42.0, 1.344),
    (81.0, 1.487),
    (124.0, 1.523),
    (151.0, 1.509),
    (497.0, 0.93),
    (569.0, 0.837),
    (636.0, 0.772),
    (742.0, 0.716),
    (870.0, 0.733),
    (904.0, 0.711),
    (934.0, 0.639),
    (986.0, 0.458),
    (999.0, 0.447),
];

fn measured(index: f64) -> f64 {
    let after = MEASURED.iter().position(|(at, _)| *at >= index);
    let (from, to) = match after {
        Some(0) => return MEASURED[0].1,
        Some(after) => (MEASURED[after - 1], MEASURED[after]),
        None => return MEASURED[MEASURED.len() - 1].1,
    };
    from.1 + (to.1 - from.1) * (index - from.0) / (to.0 - from.0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn weights_have_a_mean_of_one() {
        let mean = |weighting: FlowWeighting| {
            let weights = linear(1000).into_iter().map(|t| weighting.weight(t));
            weights.sum::<f64>() / 1000.0
        };
        assert!((mean(FlowWeighting::Bell) - 1.0).abs() < 1e-9);
        assert!((mean(FlowWeighting::Measured) - 1.0).abs() < 0.01);
        assert_eq!(mean(FlowWeighting::Even), 1.0);
        let half = |t| FlowWeighting::HalfBell.weight(t);
        assert_eq!(half(1.0), FlowWeighting::Bell.weight(500.0));
        assert_eq!(half(900.0), FlowWeighting::Bell.weight(900.0));
        assert_eq!(FlowWeighting::Measured.weight(1000.0), 0.906);
        assert_eq!(FlowWeighting::Measured.weight(0.5), 0.447);
    }

    /// Against the formulas of sd-scripts' `timestep_sampling` `shift` and `flux_shift`, on the same normal numbers.
    #[test]
    fn shifted_levels_are_those_of_sd_scripts() {
        let table = |timesteps: &FlowTimesteps| {
            let mut generator = TorchGenerator::manual_seed(3);
            timesteps.table(&mut generator, 100, 1024).unwrap()
        };
        let expected = |factor: f64, deviation: f64| {
            let normal = TorchGenerator::manual_seed(3).randn(100).into_iter();
            // Minus: the table is that of `1 - sigmoid(x)`.
            let level = normal.map(|x| 1.0 / (1.0 + (deviation * f64::from(x)).exp()));
            let mut levels: Vec<f64> = level
                .map(|s| 1000.0 * (s * factor) / (1.0 + (factor - 1.0) * s))
                .collect();
            levels.sort_by(|a, b| b.total_cmp(a));
            levels
        };
        let mu: f64 = 0.5 + (1.15 - 0.5) / (4096.0 - 256.0) * (1024.0 - 256.0);
        for (shift, factor, deviation) in [
            (FlowShift::Constant(3.1582), 3.1582, 1.0),
            (FlowShift::Constant(0.5), 0.5, 2.0),
            (FlowShift::BySize, mu.exp(), 0.7),
        ] {
            let got = table(&FlowTimesteps::Shifted(
                Box::new(FlowTimesteps::Sigmoid(deviation)),
                shift,
            ));
            for (got, expected) in got.iter().zip(expected(factor, deviation)) {
                assert!((f64::from(*got) - expected).abs() < 1e-2, "{shift:?}: {got} {expected}");
            }
        }
        let even = table(&FlowTimesteps::Shifted(
            Box::new(FlowTimesteps::Linear),
            FlowShift::Constant(3.0),
        ));
        assert_eq!(even[0], 1000.0);
        // 0.001 * 3 / (1 + 2 * 0.001)
        assert!((even[99] - 2.994).abs() < 1e-3, "{}", even[99]);
    }

    #[test]
    fn few_steps_are_those_of_samplers() {
        let choices = |steps| FlowTimesteps::FewSteps(steps).choices(1000).unwrap();
        assert_eq!(choices(1), [0]);
        assert_eq!(choices(2), [0, 499]);
        assert_eq!(choices(4), [0, 250, 500, 750]);
        assert_eq!(choices(8)[7], 875);
        assert_eq!(FlowTimesteps::Linear.choices(1000), None);
    }
}
