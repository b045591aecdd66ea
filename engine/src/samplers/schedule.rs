//! The noise schedule: how much noise an image has at each training timestep.

use super::params::{BetaSchedule, PredictionType, SamplerParams};
use super::sampler::SamplerError;
use candle_core::{DType, Tensor};

/// Betas and their cumulative products. Samplers and training use them. They are computed in the precision and order of
/// torch, so that the numbers are the same.
#[derive(Clone, Debug)]
pub struct NoiseSchedule {
    /// `beta_t` for each training timestep.
    pub betas: Vec<f32>,
    /// `prod_{s <= t} (1 - beta_s)`.
    pub alphas_cumprod: Vec<f32>,
    /// What the model predicts.
    pub prediction_type: PredictionType,
}

impl NoiseSchedule {
    /// Builds the schedule from parameters; absent ones have diffusers' defaults (linear betas from 0.0001 to 0.02,
    /// 1000 steps).
    ///
    /// # Errors
    /// [`SamplerError::Config`] when the betas are not numbers between 0 and 1.
    pub fn new(params: &SamplerParams) -> Result<Self, SamplerError> {
        let steps = params.num_train_timesteps.unwrap_or(1000);
        let start = params.beta_start.unwrap_or(0.0001);
        let end = params.beta_end.unwrap_or(0.02);
        let mut betas = match (
            &params.trained_betas,
            params.beta_schedule.unwrap_or(BetaSchedule::Linear),
        ) {
            (Some(trained), _) => trained.clone(),
            (None, BetaSchedule::Linear) => linspace(start, end, steps),
            (None, BetaSchedule::ScaledLinear) => linspace(start.sqrt(), end.sqrt(), steps)
                .into_iter()
                .map(|b| b * b)
                .collect(),
            (None, BetaSchedule::SquaredCosCapV2) => squared_cosine(steps),
        };
        if betas.len() < 2 || !betas.iter().all(|b| (0.0..=1.0).contains(b)) {
            return Err(SamplerError::Config(
                "scheduler_config.json must give at least two betas, all between 0 and 1".into(),
            ));
        }
        if betas.len() != steps && params.num_train_timesteps.is_some() {
            return Err(SamplerError::Config(format!(
                "scheduler_config.json has {} `trained_betas` but `num_train_timesteps` {steps}",
                betas.len()
            )));
        }
        if params.rescale_betas_zero_snr == Some(true) {
            betas = rescale_zero_terminal_snr(&betas);
        }
        let alphas_cumprod = cumprod(betas.iter().map(|b| 1.0 - b));
        let prediction_type = params.prediction_type.unwrap_or(PredictionType::Epsilon);
        Ok(Self {
            betas,
            alphas_cumprod,
            prediction_type,
        })
    }

    /// How many training timesteps there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.alphas_cumprod.len()
    }

    /// Never true: a schedule has at least one step.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.alphas_cumprod.is_empty()
    }

    /// `alphas_cumprod[t]`.
    ///
    /// # Errors
    /// [`SamplerError::TimeStep`] outside the schedule.
    pub fn alpha_cumprod(&self, t: i64) -> Result<f32, SamplerError> {
        let alpha = usize::try_from(t).ok().and_then(|i| self.alphas_cumprod.get(i));
        alpha.copied().ok_or(SamplerError::TimeStep {
            t,
            train_steps: self.len(),
        })
    }

    /// The signal-to-noise ratio `alpha / (1 - alpha)` at a timestep, as min-SNR weighting uses it.
    ///
    /// # Errors
    /// [`SamplerError::TimeStep`] outside the schedule.
    pub fn snr(&self, t: i64) -> Result<f32, SamplerError> {
        let alpha = self.alpha_cumprod(t)?;
        let ratio = alpha.sqrt() / (1.0 - alpha).sqrt();
        Ok(ratio * ratio)
    }

    /// `sqrt(alpha_t) * x + sqrt(1 - alpha_t) * noise`, one timestep per batch element.
    ///
    /// # Errors
    /// [`SamplerError::TimeStep`] outside the schedule, or a tensor error when shapes differ.
    pub fn add_noise(&self, x: &Tensor, noise: &Tensor, timesteps: &[i64]) -> Result<Tensor, SamplerError> {
        let (signal_scale, noise_scale) = self.coefficients(x, timesteps)?;
        Ok((x.broadcast_mul(&signal_scale)? + noise.broadcast_mul(&noise_scale)?)?)
    }

    /// The target of v prediction: `sqrt(alpha_t) * noise - sqrt(1 - alpha_t) * x`.
    ///
    /// # Errors
    /// As [`NoiseSchedule::add_noise`].
    pub fn velocity(&self, x: &Tensor, noise: &Tensor, timesteps: &[i64]) -> Result<Tensor, SamplerError> {
        let (signal_scale, noise_scale) = self.coefficients(x, timesteps)?;
        Ok((noise.broadcast_mul(&signal_scale)? - x.broadcast_mul(&noise_scale)?)?)
    }

    /// `sqrt(alpha_t)` and `sqrt(1 - alpha_t)` of each timestep, shaped to be broadcast over `x`.
    fn coefficients(&self, x: &Tensor, timesteps: &[i64]) -> Result<(Tensor, Tensor), SamplerError> {
        let alphas = timesteps
            .iter()
            .map(|t| self.alpha_cumprod(*t))
            .collect::<Result<Vec<_>, _>>()?;
        let mut shape = vec![1; x.rank()];
        shape[0] = timesteps.len();
        let column = |values: Vec<f32>| Tensor::from_vec(values, shape.clone(), x.device())?.to_dtype(x.dtype());
        let signal_scale = column(alphas.iter().map(|a| a.sqrt()).collect())?;
        let noise_scale = column(alphas.iter().map(|a| (1.0 - a).sqrt()).collect())?;
        debug_assert!(x.dtype() != DType::U8);
        Ok((signal_scale, noise_scale))
    }

    /// `sqrt((1 - alpha) / alpha)` for each training timestep.
    pub(super) fn sigmas(&self) -> Vec<f32> {
        self.alphas_cumprod.iter().map(|a| ((1.0 - a) / a).sqrt()).collect()
    }

    /// Sets the last `alphas_cumprod` of a zero-SNR schedule to 2^-24 instead of 0, so that its sigma is finite, as
    /// diffusers does.
    pub(super) fn avoid_infinite_sigma(&mut self) {
        if let Some(last) = self.alphas_cumprod.last_mut() {
            *last = 2f32.powi(-24);
        }
    }
}

/// `torch.linspace(start, end, n)` in f32, which computes the second half from the end.
fn linspace(start: f64, end: f64, n: usize) -> Vec<f32> {
    let (start, end) = (start as f32, end as f32);
    if n < 2 {
        return vec![start; n];
    }
    let step = (end - start) / (n - 1) as f32;
    let at = |i: usize| {
        if i < n / 2 {
            step.mul_add(i as f32, start)
        } else {
            (-step).mul_add((n - i - 1) as f32, end)
        }
    };
    (0..n).map(at).collect()
}

/// `torch.cumprod` on the CPU: it multiplies in f64 and rounds each product.
fn cumprod(alphas: impl Iterator<Item = f32>) -> Vec<f32> {
    let mut product = 1f64;
    alphas
        .map(|a| {
            product *= f64::from(a);
            product as f32
        })
        .collect()
}

/// Betas of `squaredcos_cap_v2`.
fn squared_cosine(n: usize) -> Vec<f32> {
    let alpha_bar = |t: f64| ((t + 0.008) / 1.008 * std::f64::consts::PI / 2.0).cos().powi(2);
    let beta = |i: usize| 1.0 - alpha_bar((i + 1) as f64 / n as f64) / alpha_bar(i as f64 / n as f64);
    (0..n).map(|i| beta(i).min(0.999) as f32).collect()
}

/// `rescale_zero_terminal_snr` of diffusers.
fn rescale_zero_terminal_snr(betas: &[f32]) -> Vec<f32> {
    let mut roots: Vec<f32> = cumprod(betas.iter().map(|b| 1.0 - b))
        .into_iter()
        .map(f32::sqrt)
        .collect();
    let (first, last) = (roots[0], roots[roots.len() - 1]);
    let scale = first / (first - last);
    for root in &mut roots {
        *root = (*root - last) * scale;
    }
    let bars: Vec<f32> = roots.iter().map(|r| r * r).collect();
    (0..bars.len())
        .map(|i| 1.0 - if i == 0 { bars[0] } else { bars[i] / bars[i - 1] })
        .collect()
}
