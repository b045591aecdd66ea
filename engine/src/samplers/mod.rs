//! Noise schedules and samplers, named and parameterised as in diffusers 0.42.1 (which calls them schedulers).
//!
//! A sampler goes through a list of time steps; at each it computes a less noisy sample from what the model predicted.
//! All samplers compute in f32, whatever the model computes in. To add one, add a file and a line in `registry`.

mod ddim;
mod ddpm;
mod discrete;
mod dpm_multistep;
mod euler;
mod euler_ancestral;
mod lms;
mod noise;
mod params;
mod pndm;
mod schedule;
mod sigma_sampler;
mod sigmas;
mod spacing;
#[cfg(test)]
mod tests;

pub use noise::NoiseSource;
pub use params::{BetaSchedule, PredictionType, SamplerParams, Spacing, parse_scheduler_config};
pub use schedule::NoiseSchedule;

use candle_core::{DType, Tensor};

/// Why a sampler could not be built, or why a step failed.
#[derive(Debug, thiserror::Error)]
pub enum SamplerError {
    /// No sampler has that name.
    #[error("unknown sampler `{name}`: use one of {}", names().join(", "))]
    Unknown {
        /// The requested name.
        name: String,
    },
    /// ai-toolkit has this sampler, aitk does not yet.
    #[error("sampler `{name}` is not supported yet: use one of {}", names().join(", "))]
    NotImplemented {
        /// The requested name.
        name: String,
    },
    /// A parameter is wrong or unsupported.
    #[error("{0}")]
    Config(String),
    /// More steps than the model was trained on, or none.
    #[error("{steps} sampling steps: the number must be between 1 and {train_steps}")]
    Steps {
        /// The requested number.
        steps: usize,
        /// How many training time steps the schedule has.
        train_steps: usize,
    },
    /// The sampler needs a time step outside the noise schedule (for example with 1000 steps and an offset of 1).
    #[error("time step {t} is outside the noise schedule of {train_steps} steps: use fewer sampling steps")]
    TimeStep {
        /// The time step.
        t: i64,
        /// How many training time steps the schedule has.
        train_steps: usize,
    },
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

/// A sampler with its list of time steps. [`build`] makes one.
pub trait Sampler: Send {
    /// The time steps in sampling order, as the model gets them. Some samplers use one of them twice.
    fn timesteps(&self) -> &[f64];

    /// The factor that pure noise is multiplied by before the first step.
    fn init_noise_sigma(&self) -> f64 {
        1.0
    }

    /// The input of the model at step `index` (an index into [`Sampler::timesteps`]).
    ///
    /// # Errors
    /// A tensor error.
    fn scale_model_input(&self, sample: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        let _ = index;
        Ok(sample.clone())
    }

    /// The sample after this step. Steps must be made in order; they may begin in the middle (image-to-image).
    ///
    /// # Errors
    /// A tensor error, or a time step outside the schedule.
    fn step(&mut self, step: SamplerStep<'_>) -> Result<Tensor, SamplerError>;

    /// `original` with as much noise as a sample has before step `index`.
    ///
    /// # Errors
    /// A tensor error, or a time step outside the schedule.
    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplerError>;
}

/// The inputs of one sampling step.
#[derive(Debug)]
pub struct SamplerStep<'a> {
    /// The index of the step in [`Sampler::timesteps`].
    pub index: usize,
    /// The model's output, f32.
    pub output: &'a Tensor,
    /// The sample before the step, f32.
    pub sample: &'a Tensor,
    /// The source of random numbers.
    pub noise: &'a mut NoiseSource,
    /// The dtype of the model. diffusers draws most random numbers in it.
    pub dtype: DType,
}

impl SamplerStep<'_> {
    /// Normal noise of the sample's shape, drawn in the model's dtype.
    fn noise(&mut self) -> Result<Tensor, SamplerError> {
        self.noise_as(self.dtype)
    }

    /// Normal noise of the sample's shape, drawn in `dtype`.
    fn noise_as(&mut self, dtype: DType) -> Result<Tensor, SamplerError> {
        Ok(self.noise.randn(self.output.dims(), dtype, self.output.device())?)
    }
}

/// What a caller chooses about a sampler besides its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplerOptions {
    /// How many sampling steps.
    pub steps: usize,
    /// `eta` of ddim: 0 is deterministic.
    pub eta: f64,
}

impl SamplerOptions {
    /// Options with this many steps and diffusers' defaults for everything else.
    #[must_use]
    pub fn with_steps(steps: usize) -> Self {
        Self { steps, eta: 0.0 }
    }
}

/// The constructor of a sampler.
type Constructor = fn(SamplerParams, SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError>;

/// All samplers: name, aliases, constructor.
fn registry() -> &'static [(&'static str, &'static [&'static str], Constructor)] {
    &[
        ("ddim", &[], ddim::make),
        ("ddpm", &[], ddpm::make),
        ("pndm", &["plms"], pndm::make),
        ("euler", &["euler_discrete"], euler::make),
        ("euler_a", &["euler_ancestral", "k_euler_a"], euler_ancestral::make),
        ("lms", &[], lms::make),
        (
            "dpmsolver++",
            &["dpm++_2m", "dpmpp_2m", "dpm++2m", "dpmsolver_multistep"],
            dpm_multistep::make_plus_plus,
        ),
        ("dpmsolver", &[], dpm_multistep::make_plain),
    ]
}

/// Names that ai-toolkit accepts and that aitk does not implement yet.
const NOT_IMPLEMENTED: &[&str] = &[
    "dpmsingle",
    "heun",
    "dpm_2",
    "dpm_2_a",
    "lcm",
    "custom_lcm",
    "mean_flow",
    "flowmatch",
    "unipc",
];

/// The names of all samplers, without aliases. A `k_` prefix turns on Karras noise levels for euler, lms and dpmsolver.
#[must_use]
pub fn names() -> Vec<&'static str> {
    registry().iter().map(|(name, _, _)| *name).collect()
}

/// Checks that [`build`] knows the name.
///
/// # Errors
/// [`SamplerError::Unknown`] or [`SamplerError::NotImplemented`], which list the names that exist.
pub fn check_name(name: &str) -> Result<(), SamplerError> {
    find(name).map(|_| ())
}

/// The constructor of the sampler of that name, and whether the name asks for Karras noise levels.
fn find(name: &str) -> Result<(Constructor, bool), SamplerError> {
    let normalized = name.trim().to_lowercase().replace([' ', '-'], "_");
    let lookup = |name: &str| {
        registry()
            .iter()
            .find(|(n, aliases, _)| *n == name || aliases.contains(&name))
            .map(|(_, _, make)| *make)
    };
    if let Some(make) = lookup(&normalized) {
        return Ok((make, false));
    }
    let without_karras = normalized
        .strip_prefix("k_")
        .or_else(|| normalized.strip_suffix("_karras"));
    if let Some(without_karras) = without_karras
        && let Some(make) = lookup(without_karras)
        && !["ddim", "ddpm", "pndm", "plms", "euler_a", "euler_ancestral"].contains(&without_karras)
    {
        return Ok((make, true));
    }
    let name = name.to_owned();
    let in_ai_toolkit = NOT_IMPLEMENTED.contains(&without_karras.unwrap_or(&normalized));
    Err(if in_ai_toolkit {
        SamplerError::NotImplemented { name }
    } else {
        SamplerError::Unknown { name }
    })
}

/// Builds the sampler of that name.
///
/// # Errors
/// An unknown name, parameters that are wrong or unsupported, or an invalid number of steps.
pub fn build(name: &str, params: &SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    let (make, karras) = find(name)?;
    let mut params = params.clone();
    if karras {
        params.use_karras_sigmas = Some(true);
    }
    params.check_supported()?;
    let train_steps = params
        .trained_betas
        .as_ref()
        .map_or(params.num_train_timesteps.unwrap_or(1000), Vec::len);
    if options.steps == 0 || options.steps > train_steps {
        return Err(SamplerError::Steps {
            steps: options.steps,
            train_steps,
        });
    }
    make(params, options)
}

/// `a * x + b * y`.
fn blend(a: f32, x: &Tensor, b: f32, y: &Tensor) -> candle_core::Result<Tensor> {
    scaled(x, a)? + scaled(y, b)?
}

/// `a * x`.
fn scaled(x: &Tensor, a: f32) -> candle_core::Result<Tensor> {
    x.affine(f64::from(a), 0.0)
}
