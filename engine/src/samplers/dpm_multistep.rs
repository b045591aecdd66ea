//! `DPMSolverMultistepScheduler` of diffusers: DPM-Solver and DPM-Solver++ (`dpm++ 2m`) of orders 1 to 3, and their SDE
//! variants. For models that were trained by flow matching DPM-Solver++ only, as with `use_flow_sigmas` there.

use super::dpm_solver::{self, Algorithm, diffusion_levels};
use super::flow_sigmas::FlowShift;
use super::noise_level::NoiseLevel;
use super::params::{PredictionType, SamplerParams};
use super::sampler::{Sampler, SamplerError, SamplerOptions, SamplerStep, blend, scaled};
use super::schedule::NoiseSchedule;
use super::spacing;
use candle_core::{DType, Tensor};

struct DpmMultistep {
    timesteps: Vec<f64>,
    sigmas: Vec<f32>,
    prediction_type: PredictionType,
    /// The model predicts the flow, and sigmas are shares of noise.
    is_flow: bool,
    algorithm: Algorithm,
    heun: bool,
    order: usize,
    lower_order_final: bool,
    euler_at_final: bool,
    ends_at_zero: bool,
    /// Converted model outputs of the last steps, the newest last.
    outputs: Vec<Tensor>,
}

/// Makes `dpmsolver++`, or `sde-dpmsolver++` if `algorithm_type` says so; other algorithm types are ignored.
pub(super) fn make_plus_plus(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    let algorithm = match params.algorithm_type.as_deref() {
        Some("sde-dpmsolver++") => Algorithm::SdePlusPlus,
        _ => Algorithm::PlusPlus,
    };
    make(params, options, algorithm)
}

/// Makes `dpmsolver++`, or `sde-dpmsolver++`, for models that were trained by flow matching.
pub(super) fn make_flow(params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    let forms = [
        ("use_karras_sigmas", params.use_karras_sigmas),
        ("use_exponential_sigmas", params.use_exponential_sigmas),
        ("use_beta_sigmas", params.use_beta_sigmas),
    ];
    if let Some((key, _)) = forms.iter().find(|(_, value)| *value == Some(true)) {
        // diffusers' class would take the levels of diffusion models here, which are above 1.
        return Err(SamplerError::Config(format!(
            "`{key}: true` (or a `k_` name) and `dpmsolver++` cannot be combined for a model that was trained by flow matching: use \
             `flowmatch`"
        )));
    }
    make_plus_plus(params, options)
}

/// Makes `dpmsolver`, or `sde-dpmsolver` if `algorithm_type` says so. This first version cannot end at a noise level of
/// zero.
pub(super) fn make_plain(mut params: SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    let algorithm = match params.algorithm_type.as_deref() {
        Some("sde-dpmsolver") => Algorithm::SdePlain,
        _ => Algorithm::Plain,
    };
    params.final_sigmas_type = Some("sigma_min".into());
    make(params, options, algorithm)
}

fn make(
    params: SamplerParams,
    options: SamplerOptions,
    algorithm: Algorithm,
) -> Result<Box<dyn Sampler>, SamplerError> {
    let mut schedule = NoiseSchedule::new(&params)?;
    if params.rescale_betas_zero_snr == Some(true) {
        schedule.avoid_infinite_sigma();
    }
    let order = dpm_solver::order(&params)?;
    let heun = dpm_solver::is_heun(&params)?;
    let ends_at_zero = dpm_solver::ends_at_zero(&params)?;
    let (timesteps, levels) = match params.is_flow {
        true => flow_levels(&params, options, schedule.len())?,
        false => diffusion_levels(&params, &schedule, options.steps),
    };
    let last = if ends_at_zero { 0.0 } else { schedule.sigmas()[0] };
    Ok(Box::new(DpmMultistep {
        timesteps,
        sigmas: levels.iter().map(|s| *s as f32).chain([last]).collect(),
        prediction_type: schedule.prediction_type,
        is_flow: params.is_flow,
        algorithm,
        heun,
        order,
        lower_order_final: params.lower_order_final.unwrap_or(true),
        euler_at_final: params.euler_at_final.unwrap_or(false),
        ends_at_zero,
        outputs: Vec::new(),
    }))
}

/// The timesteps and shares of noise for models that were trained by flow matching.
fn flow_levels(
    params: &SamplerParams,
    options: SamplerOptions,
    train_steps: usize,
) -> Result<(Vec<f64>, Vec<f64>), SamplerError> {
    let shift = FlowShift::of_solver(params, options.image_tokens)?;
    let images = spacing::linspace(1.0, 1.0 / train_steps as f64, options.steps + 1);
    let levels: Vec<f64> = images[1..].iter().rev().map(|image| shift.apply(1.0 - image)).collect();
    let timesteps = levels
        .iter()
        .map(|level| (level * train_steps as f64).trunc())
        .collect();
    Ok((timesteps, levels))
}

impl DpmMultistep {
    /// The noise level before step `index`.
    fn level(&self, index: usize) -> NoiseLevel {
        match self.is_flow {
            true => NoiseLevel::from_flow_sigma(self.sigmas[index]),
            false => NoiseLevel::from_sigma(self.sigmas[index]),
        }
    }

    fn convert_model_output(&self, index: usize, output: &Tensor, sample: &Tensor) -> Result<Tensor, SamplerError> {
        let level = self.level(index);
        match self.is_flow {
            true => Ok(blend(1.0, sample, -level.sigma, output)?),
            false => self.algorithm.convert(self.prediction_type, level, output, sample),
        }
    }
}

impl Sampler for DpmMultistep {
    fn timesteps(&self) -> &[f64] {
        &self.timesteps
    }

    fn step(&mut self, mut step: SamplerStep<'_>) -> Result<Tensor, SamplerError> {
        let (index, sample, count) = (step.index, step.sample, self.timesteps.len());
        let noise = if self.algorithm.is_sde() {
            Some(step.noise_as(DType::F32)?)
        } else {
            None
        };
        let stored = self.outputs.len();
        self.outputs
            .push(self.convert_model_output(index, step.output, sample)?);
        let few_steps = self.lower_order_final && count < 15;
        let last = index + 1 == count && (self.euler_at_final || few_steps || self.ends_at_zero);
        let second_last = index + 2 == count && few_steps;
        let order = if self.order == 1 || stored < 1 || last {
            1
        } else if self.order == 2 || stored < 2 || second_last {
            2
        } else {
            3
        };
        if order == 3 && self.algorithm == Algorithm::SdePlain {
            return Err(SamplerError::Config(
                "`sde-dpmsolver` has no third order: use `solver_order: 2`".into(),
            ));
        }

        let at = |back: usize| self.level(index - back);
        let (to, from) = (self.level(index + 1), at(0));
        let (sample_weight, [w0, w1, w2], noise_weight) = self.algorithm.weights(order, self.heun, to, from);
        let m = |back: usize| &self.outputs[stored - back];
        let mut next = blend(sample_weight, sample, w0, m(0))?;
        if order >= 2 {
            let h = to.lambda - from.lambda;
            let h0 = from.lambda - at(1).lambda;
            let r0 = h0 / h;
            let mut d1 = scaled(&(m(0) - m(1))?, 1.0 / r0)?;
            if order == 3 {
                let r1 = (at(1).lambda - at(2).lambda) / h;
                let older_slope = scaled(&(m(1) - m(2))?, 1.0 / r1)?;
                let curvature = (&d1 - older_slope)?;
                next = (next + scaled(&curvature, w2 / (r0 + r1))?)?;
                d1 = blend(1.0, &d1, r0 / (r0 + r1), &curvature)?;
            }
            next = (next + scaled(&d1, w1)?)?;
        }
        if let Some(noise) = noise {
            next = (next + scaled(&noise, noise_weight)?)?;
        }
        if self.outputs.len() >= self.order {
            self.outputs.remove(0);
        }
        Ok(next)
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        let NoiseLevel { alpha, sigma, .. } = self.level(index);
        Ok(blend(alpha, original, sigma, noise)?)
    }
}
