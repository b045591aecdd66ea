//! The noise levels of flow matching: sigma is the share of noise, from 1 to 0, in `(1 - sigma) * latents + sigma * noise`.

use super::beta_quantile::beta_quantile;
use super::params::SamplerParams;
use super::sampler::{SamplerError, SamplerOptions};
use super::spacing;

/// How a schedule is moved towards more noise (P. Esser and others, "Scaling Rectified Flow Transformers", 2024, section
/// 5.3.2).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum FlowShift {
    /// `shift * s / (1 + (shift - 1) * s)`.
    Static(f64),
    /// From the number of image tokens: `mu` grows linearly with it, and the shift is e to the power of `mu`.
    Exponential {
        /// `mu` of this image.
        mu: f64,
    },
    /// The same with `mu` itself as the shift.
    Linear {
        /// `mu` of this image.
        mu: f64,
    },
}

impl FlowShift {
    /// The shift of `scheduler_config.json` for an image of this many tokens.
    ///
    /// # Errors
    /// When a value is missing or wrong.
    pub(super) fn new(params: &SamplerParams, image_tokens: usize) -> Result<Self, SamplerError> {
        if params.use_dynamic_shifting != Some(true) {
            return Ok(Self::Static(positive("shift", params.shift.unwrap_or(1.0))?));
        }
        let mu = dynamic_mu(params, image_tokens);
        if !mu.is_finite() {
            return Err(SamplerError::Config(
                "`base_image_seq_len` and `max_image_seq_len` of scheduler_config.json are equal, or a shift is not finite: they \
                 must be two numbers of tokens"
                    .into(),
            ));
        }
        match params.time_shift_type.as_deref() {
            None | Some("exponential") => Ok(Self::Exponential { mu }),
            Some("linear") => Ok(Self::Linear {
                mu: positive("mu", mu)?,
            }),
            Some(other) => Err(SamplerError::Config(format!(
                "`time_shift_type` of scheduler_config.json is `{other}`: use `exponential` or `linear`"
            ))),
        }
    }

    /// The shift of multistep solvers: as [`Self::new`], but `flow_shift`, if it is there, comes before `shift`.
    ///
    /// # Errors
    /// When a value is missing or wrong.
    pub(super) fn of_solver(params: &SamplerParams, image_tokens: usize) -> Result<Self, SamplerError> {
        match params.flow_shift {
            Some(shift) if params.use_dynamic_shifting != Some(true) => {
                Ok(Self::Static(positive("flow_shift", shift)?))
            }
            _ => Self::new(params, image_tokens),
        }
    }

    /// Moves a noise level.
    #[must_use]
    pub(super) fn apply(self, sigma: f64) -> f64 {
        let moved = |shift: f64| shift / (shift + (1.0 / sigma - 1.0));
        match self {
            Self::Static(shift) => shift * sigma / (1.0 + (shift - 1.0) * sigma),
            Self::Exponential { mu } => moved(mu.exp()),
            Self::Linear { mu } => moved(mu),
        }
    }
}

/// `calculate_shift` of diffusers' pipelines: linear between the two sequence lengths of the config.
#[must_use]
pub fn dynamic_mu(params: &SamplerParams, image_tokens: usize) -> f64 {
    let base_tokens = params.base_image_seq_len.unwrap_or(256) as f64;
    let max_tokens = params.max_image_seq_len.unwrap_or(4096) as f64;
    let (base, max) = (params.base_shift.unwrap_or(0.5), params.max_shift.unwrap_or(1.15));
    let slope = (max - base) / (max_tokens - base_tokens);
    image_tokens as f64 * slope + (base - slope * base_tokens)
}

fn positive(key: &str, value: f64) -> Result<f64, SamplerError> {
    match value.is_finite() && value > 0.0 {
        true => Ok(value),
        false => Err(SamplerError::Config(format!(
            "`{key}` of scheduler_config.json is {value}: it must be greater than 0"
        ))),
    }
}

/// The noise levels of a sampler, and the level at which sampling ends.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct FlowSigmas {
    /// From much noise to none; one more than there are steps. With `invert_sigmas` from 0 to 1.
    pub(super) sigmas: Vec<f32>,
    /// The timesteps that the model gets: sigma times the training steps.
    pub(super) timesteps: Vec<f64>,
}

impl FlowSigmas {
    /// The noise levels of `FlowMatchEulerDiscreteScheduler.set_timesteps` of diffusers.
    ///
    /// # Errors
    /// When a value of `scheduler_config.json` is wrong.
    pub(super) fn new(params: &SamplerParams, options: SamplerOptions) -> Result<Self, SamplerError> {
        let (steps, train_steps) = (options.steps, params.num_train_timesteps.unwrap_or(1000) as f64);
        let shift = FlowShift::new(params, options.image_tokens)?;
        // FLUX's pipeline gives the scheduler even levels. Without them, the scheduler takes its own, which its shift has
        // moved already, and moves them again (SD 3).
        let last = match (params.even_flow_sigmas, shift) {
            (true, _) => 1.0 / steps as f64,
            (false, FlowShift::Static(_)) => shift.apply(1.0 / train_steps),
            (false, _) => 1.0 / train_steps,
        };
        let even = spacing::linspace(1.0, last, steps);
        // f32, as in diffusers.
        let mut sigmas: Vec<f64> = even.iter().map(|sigma| shift.apply(f64::from(*sigma as f32))).collect();
        if let Some(terminal) = params.shift_terminal.filter(|terminal| *terminal != 0.0) {
            if !(0.0..1.0).contains(&terminal) {
                return Err(SamplerError::Config(format!(
                    "`shift_terminal` of scheduler_config.json is {terminal}: it must be at least 0 and less than 1"
                )));
            }
            // A single level is 1, and stays it.
            if steps > 1 {
                stretch_to(&mut sigmas, terminal);
            }
        }
        let (min, max) = (
            sigmas.last().copied().unwrap_or(0.0),
            sigmas.first().copied().unwrap_or(1.0),
        );
        if params.use_karras_sigmas == Some(true) {
            sigmas = spacing::karras(min, max, steps);
        } else if params.use_exponential_sigmas == Some(true) {
            sigmas = spacing::exponential(min, max, steps);
        } else if params.use_beta_sigmas == Some(true) {
            sigmas = beta_levels(min, max, steps);
        }
        let mut sigmas: Vec<f32> = sigmas.into_iter().map(|sigma| sigma as f32).collect();
        let is_inverted = params.invert_sigmas == Some(true);
        if is_inverted {
            sigmas.iter_mut().for_each(|sigma| *sigma = 1.0 - *sigma);
        }
        let timesteps = sigmas
            .iter()
            .map(|sigma| f64::from(sigma * train_steps as f32))
            .collect();
        sigmas.push(if is_inverted { 1.0 } else { 0.0 });
        Ok(Self { sigmas, timesteps })
    }
}

/// The timesteps of a sampler of this many steps, with the shift of `scheduler_config.json` for an image of this many tokens: what
/// training draws from with `timestep_type: shift`.
///
/// # Errors
/// When a value of `scheduler_config.json` is wrong.
pub fn shifted_timesteps(params: &SamplerParams, steps: usize, image_tokens: usize) -> Result<Vec<f32>, SamplerError> {
    let params = SamplerParams {
        even_flow_sigmas: false,
        invert_sigmas: None,
        ..params.clone()
    };
    let options = SamplerOptions {
        image_tokens,
        ..SamplerOptions::with_steps(steps)
    };
    let timesteps = FlowSigmas::new(&params, options)?.timesteps;
    Ok(timesteps.into_iter().map(|timestep| timestep as f32).collect())
}

/// Noise levels that are dense at both ends, as the quantiles of Beta(0.6, 0.6).
fn beta_levels(min: f64, max: f64, steps: usize) -> Vec<f64> {
    const SHAPE: f64 = 0.6;
    let shares = spacing::linspace(0.0, 1.0, steps).into_iter();
    shares
        .map(|share| min + beta_quantile(1.0 - share, SHAPE, SHAPE) * (max - min))
        .collect()
}

/// Stretches the levels so that the last one is `terminal` (`shift_terminal`; Lightricks' LTX-Video).
pub(super) fn stretch_to(sigmas: &mut [f64], terminal: f64) {
    let Some(last) = sigmas.last().copied() else { return };
    let scale = (1.0 - last) / (1.0 - terminal);
    for sigma in sigmas {
        *sigma = 1.0 - (1.0 - *sigma) / scale;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn larger_images_are_moved_to_more_noise() {
        let params = SamplerParams {
            use_dynamic_shifting: Some(true),
            ..SamplerParams::default()
        };
        assert!((dynamic_mu(&params, 256) - 0.5).abs() < 1e-12 && (dynamic_mu(&params, 4096) - 1.15).abs() < 1e-12);
        let middle = |tokens| FlowShift::new(&params, tokens).unwrap().apply(0.5);
        assert!(0.5 < middle(256) && middle(256) < middle(4096));
        let fixed = FlowShift::Static(3.0);
        assert_eq!([fixed.apply(0.0), fixed.apply(0.5), fixed.apply(1.0)], [0.0, 0.75, 1.0]);
        let wrong = SamplerParams {
            shift: Some(0.0),
            ..SamplerParams::default()
        };
        assert!(FlowShift::new(&wrong, 256).is_err());
    }

    #[test]
    fn values_that_would_give_nan_are_errors_that_name_the_key() {
        let sigmas = |change: fn(&mut SamplerParams), steps| {
            let mut params = SamplerParams {
                even_flow_sigmas: true,
                use_dynamic_shifting: Some(true),
                ..SamplerParams::default()
            };
            change(&mut params);
            FlowSigmas::new(&params, SamplerOptions::with_steps(steps))
        };
        let error = |change| sigmas(change, 4).unwrap_err().to_string();
        assert!(error(|params| params.max_image_seq_len = Some(256)).contains("max_image_seq_len"));
        assert!(error(|params| params.shift_terminal = Some(1.0)).contains("shift_terminal"));
        assert!(error(|params| params.time_shift_type = Some("cubic".into())).contains("cubic"));
        assert!(error(|params| (params.use_dynamic_shifting, params.shift) = (None, Some(-1.0))).contains("`shift`"));
        let one = sigmas(|params| params.shift_terminal = Some(0.1), 1).unwrap();
        assert_eq!(one.sigmas, [1.0, 0.0]);
    }
}
