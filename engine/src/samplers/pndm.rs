//! `PNDMScheduler` of diffusers: pseudo numerical methods, Runge-Kutta steps (optional) and then linear multistep.

use super::params::{PredictionType, SamplerParams, Spacing};
use super::sampler::{Sampler, SamplerError, SamplerOptions, SamplerStep, blend, scaled};
use super::schedule::NoiseSchedule;
use super::spacing;
use candle_core::Tensor;

struct Pndm {
    schedule: NoiseSchedule,
    timesteps: Vec<f64>,
    /// The timesteps of the Runge-Kutta steps, which are the first of `timesteps`. Empty with `skip_prk_steps`.
    prk_timesteps: Vec<f64>,
    /// Training timesteps between two sampling steps.
    stride: i64,
    /// `alpha_cumprod` after the last step.
    final_alpha: f32,
    /// Steps made so far.
    counter: usize,
    /// Model outputs of the last steps, the newest last (`ets` of diffusers).
    outputs: Vec<Tensor>,
    /// The weighted sum of a Runge-Kutta step's outputs (`cur_model_output` of diffusers).
    accumulated_output: Option<Tensor>,
    /// The sample at the beginning of a step of several model calls (`cur_sample` of diffusers).
    current_sample: Option<Tensor>,
}

pub(super) fn make(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    // The diffusers class does not have this parameter.
    let params = SamplerParams {
        rescale_betas_zero_snr: None,
        ..params
    };
    let schedule = NoiseSchedule::new(&params)?;
    if schedule.prediction_type == PredictionType::Sample {
        return Err(SamplerError::Config(
            "sampler `pndm` does not support `prediction_type: sample`".into(),
        ));
    }
    let timestep_spacing = params.timestep_spacing.unwrap_or(Spacing::Leading);
    let stride = schedule.len() / options.steps;
    let base = spacing::timesteps(
        timestep_spacing,
        schedule.len(),
        options.steps,
        params.steps_offset.unwrap_or(0),
        true,
    );
    let (prk_timesteps, plms_timesteps) = if params.skip_prk_steps.unwrap_or(false) {
        // The second timestep is used twice: once to predict, once to correct.
        let mut plms_timesteps = base.clone();
        if let Some(second) = base.get(1) {
            plms_timesteps.insert(1, *second);
        }
        (Vec::new(), plms_timesteps)
    } else {
        if base.len() < 4 {
            return Err(SamplerError::Config(
                "sampler `pndm` with its Runge-Kutta steps (`skip_prk_steps: false`) needs at least 4 steps".into(),
            ));
        }
        let mut pairs = Vec::new();
        for t in base[..4].iter().rev() {
            pairs.extend([*t, *t + (stride / 2) as f64]);
        }
        pairs.pop();
        let doubled: Vec<f64> = pairs.iter().flat_map(|t| [*t, *t]).collect();
        let mut prk_timesteps = doubled[1..doubled.len() - 1].to_vec();
        prk_timesteps.reverse();
        (prk_timesteps, base[3..].to_vec())
    };
    let final_alpha = if params.set_alpha_to_one.unwrap_or(false) {
        1.0
    } else {
        schedule.alphas_cumprod[0]
    };
    Ok(Box::new(Pndm {
        timesteps: prk_timesteps.iter().chain(&plms_timesteps).copied().collect(),
        prk_timesteps,
        stride: stride as i64,
        final_alpha,
        schedule,
        counter: 0,
        outputs: Vec::new(),
        accumulated_output: None,
        current_sample: None,
    }))
}

impl Pndm {
    fn runge_kutta(&mut self, t: i64, output: &Tensor, sample: &Tensor) -> Result<Tensor, SamplerError> {
        let offset = if self.counter % 2 == 1 { 0 } else { self.stride / 2 };
        let previous = t - offset;
        let t = self.prk_timesteps[self.counter / 4 * 4] as i64;
        let add = |sum: Option<Tensor>, weight: f64| -> Result<Tensor, SamplerError> {
            let term = output.affine(weight, 0.0)?;
            Ok(match sum {
                Some(sum) => (sum + term)?,
                None => term,
            })
        };
        let mut combined = output.clone();
        match self.counter % 4 {
            0 => {
                self.accumulated_output = Some(add(self.accumulated_output.take(), 1.0 / 6.0)?);
                self.outputs.push(output.clone());
                self.current_sample = Some(sample.clone());
            }
            1 | 2 => self.accumulated_output = Some(add(self.accumulated_output.take(), 1.0 / 3.0)?),
            _ => combined = add(self.accumulated_output.take(), 1.0 / 6.0)?,
        }
        let from = self.current_sample.clone().unwrap_or_else(|| sample.clone());
        self.previous_sample(&from, t, previous, &combined)
    }

    fn multistep(&mut self, t: i64, output: &Tensor, sample: &Tensor) -> Result<Tensor, SamplerError> {
        let (mut t, mut previous) = (t, t - self.stride);
        if self.counter == 1 {
            (t, previous) = (t + self.stride, t);
        } else {
            let excess = self.outputs.len().saturating_sub(3);
            self.outputs.drain(..excess);
            self.outputs.push(output.clone());
        }
        let mut sample = sample.clone();
        let e: Vec<&Tensor> = self.outputs.iter().rev().collect();
        let combined = match (e.as_slice(), self.counter) {
            ([_], 0) => {
                self.current_sample = Some(sample.clone());
                output.clone()
            }
            ([last], 1) => {
                let mean = ((output + *last)? / 2.0)?;
                if let Some(current) = self.current_sample.take() {
                    sample = current;
                }
                mean
            }
            ([e1, e2], _) => (((*e1 * 3.0)? - *e2)? / 2.0)?,
            ([e1, e2, e3], _) => ((((*e1 * 23.0)? - (*e2 * 16.0)?)? + (*e3 * 5.0)?)? / 12.0)?,
            ([e1, e2, e3, e4, ..], _) => {
                let sum = ((((*e1 * 55.0)? - (*e2 * 59.0)?)? + (*e3 * 37.0)?)? - (*e4 * 9.0)?)?;
                sum.affine(1.0 / 24.0, 0.0)?
            }
            _ => output.clone(),
        };
        self.previous_sample(&sample, t, previous, &combined)
    }

    /// The sample at timestep `previous`: formula (9) of the PNDM paper.
    fn previous_sample(&self, sample: &Tensor, t: i64, previous: i64, output: &Tensor) -> Result<Tensor, SamplerError> {
        let alpha = self.schedule.alpha_cumprod(t)?;
        let alpha_previous = if previous >= 0 {
            self.schedule.alpha_cumprod(previous)?
        } else {
            self.final_alpha
        };
        let (beta, beta_previous) = (1.0 - alpha, 1.0 - alpha_previous);
        let epsilon = match self.schedule.prediction_type {
            PredictionType::VPrediction => blend(alpha.sqrt(), output, beta.sqrt(), sample)?,
            _ => output.clone(),
        };
        let sample_weight = (alpha_previous / alpha).sqrt();
        let divisor = alpha * beta_previous.sqrt() + (alpha * beta * alpha_previous).sqrt();
        let step = scaled(&scaled(&epsilon, alpha_previous - alpha)?, 1.0 / divisor)?;
        Ok((scaled(sample, sample_weight)? - step)?)
    }
}

impl Sampler for Pndm {
    fn timesteps(&self) -> &[f64] {
        &self.timesteps
    }

    fn step(&mut self, step: SamplerStep<'_>) -> Result<Tensor, SamplerError> {
        let t = self.timesteps[step.index] as i64;
        let next = if self.counter < self.prk_timesteps.len() {
            self.runge_kutta(t, step.output, step.sample)?
        } else {
            self.multistep(t, step.output, step.sample)?
        };
        self.counter += 1;
        Ok(next)
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        self.schedule
            .add_noise(original, noise, &[self.timesteps[index] as i64])
    }
}
