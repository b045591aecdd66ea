//! The timesteps and noise levels that a sampler uses, computed as numpy computes them.

use super::params::Spacing;

/// Timesteps in descending order, as most diffusers samplers choose them.
pub(super) fn timesteps(spacing: Spacing, train: usize, steps: usize, offset: i64, rounded: bool) -> Vec<f64> {
    match spacing {
        Spacing::Linspace => {
            let mut all = linspace(0.0, (train - 1) as f64, steps);
            if rounded {
                all.iter_mut().for_each(|t| *t = t.round_ties_even());
            }
            all.reverse();
            all
        }
        Spacing::Leading => (0..steps)
            .rev()
            .map(|i| (i * (train / steps)) as f64 + offset as f64)
            .collect(),
        Spacing::Trailing => trailing(train as f64, train as f64 / steps as f64),
    }
}

/// `np.arange(from, 0, -step).round() - 1`.
pub(super) fn trailing(from: f64, step: f64) -> Vec<f64> {
    let count = (from / step).ceil() as usize;
    let delta = (from - step) - from;
    (0..count)
        .map(|i| (from + i as f64 * delta).round_ties_even() - 1.0)
        .collect()
}

/// `np.linspace(start, stop, n)`.
pub(super) fn linspace(start: f64, stop: f64, n: usize) -> Vec<f64> {
    if n < 2 {
        return vec![start; n];
    }
    let step = (stop - start) / (n - 1) as f64;
    (0..n)
        .map(|i| if i == n - 1 { stop } else { i as f64 * step + start })
        .collect()
}

/// `np.interp(x, range(len(values)), values)`.
pub(super) fn interp(x: f64, values: &[f32]) -> f64 {
    let last = values.len() - 1;
    if x <= 0.0 {
        return f64::from(values[0]);
    }
    if x >= last as f64 {
        return f64::from(values[last]);
    }
    let low = x.floor() as usize;
    let (a, b) = (f64::from(values[low]), f64::from(values[low + 1]));
    (b - a) * (x - low as f64) + a
}

/// The noise levels of Karras et al. (2022) with rho = 7.
pub(super) fn karras(sigma_min: f64, sigma_max: f64, n: usize) -> Vec<f64> {
    let (low, high) = (sigma_min.powf(1.0 / 7.0), sigma_max.powf(1.0 / 7.0));
    linspace(0.0, 1.0, n)
        .into_iter()
        .map(|ramp| (high + ramp * (low - high)).powf(7.0))
        .collect()
}

/// Noise levels that decrease linearly in the logarithm.
pub(super) fn exponential(sigma_min: f64, sigma_max: f64, n: usize) -> Vec<f64> {
    linspace(sigma_max.ln(), sigma_min.ln(), n)
        .into_iter()
        .map(f64::exp)
        .collect()
}

/// The (fractional) training timestep whose noise level is `sigma`.
pub(super) fn sigma_to_t(sigma: f64, train_sigmas: &[f32]) -> f64 {
    let log_sigma = sigma.max(1e-10).ln();
    let log = |i: usize| train_sigmas[i].ln();
    // The last index whose level is below `sigma`, as numpy's cumsum/argmax finds it.
    let below = (0..train_sigmas.len())
        .rev()
        .find(|i| log_sigma - f64::from(log(*i)) >= 0.0)
        .unwrap_or(0);
    let low = below.min(train_sigmas.len().saturating_sub(2));
    let w = ((f64::from(log(low)) - log_sigma) / f64::from(log(low) - log(low + 1))).clamp(0.0, 1.0);
    (1.0 - w) * low as f64 + w * (low + 1) as f64
}
