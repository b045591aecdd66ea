//! Noise schedules and samplers, named and parameterised as in diffusers 0.42.1 (which calls them schedulers).
//!
//! A sampler visits a list of time steps; at each it turns what the model predicted into a less noisy sample. All
//! samplers compute in f32, whatever the model computes in. A new one is a file and a line in `registry`.

mod ddim;
mod ddpm;
mod denoise;
mod dpm_multistep;
mod euler;
mod euler_ancestral;
mod levels;
mod lms;
mod noise;
mod params;
mod pndm;
mod schedule;
mod sigmas;
mod spacing;
#[cfg(test)]
mod tests;

pub use noise::NoiseSource;
pub use params::{BetaSchedule, PredictionType, SamplerParams, Spacing, parse_scheduler_config};
pub use schedule::NoiseSchedule;

use candle_core::{DType, Tensor};

/// Why a sampler could not be made, or could not make a step.
#[derive(Debug, thiserror::Error)]
pub enum SamplerError {
    /// No sampler has that name.
    #[error("unknown sampler `{name}`: use one of {}", names().join(", "))]
    Unknown {
        /// The name that was asked for.
        name: String,
    },
    /// ai-toolkit knows it, aitk does not yet.
    #[error("sampler `{name}` is not supported yet: use one of {}", names().join(", "))]
    NotYet {
        /// The name that was asked for.
        name: String,
    },
    /// A parameter is wrong or unsupported.
    #[error("{0}")]
    Config(String),
    /// More steps than the model was trained on, or none.
    #[error("{steps} sampling steps asked for: it must be between 1 and {train_steps}")]
    Steps {
        /// How many were asked for.
        steps: usize,
        /// How many the schedule has.
        train_steps: usize,
    },
    /// The sampler's arithmetic leads outside the noise schedule (for example 1000 steps with an offset of 1).
    #[error("time step {t} lies outside the noise schedule of {train_steps} steps: use fewer sampling steps")]
    TimeStep {
        /// The step.
        t: i64,
        /// How many the schedule has.
        train_steps: usize,
    },
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

/// A sampler with its time steps chosen. Made by [`build`].
pub trait Sampler: Send {
    /// The time steps in the order of the visits, as the model is told them. Some samplers visit one twice.
    fn timesteps(&self) -> &[f64];

    /// What pure noise is multiplied with before the first step.
    fn init_noise_sigma(&self) -> f64 {
        1.0
    }

    /// What the model sees at visit `index` (counted in [`Sampler::timesteps`]).
    ///
    /// # Errors
    /// A tensor error.
    fn scale_model_input(&self, sample: &Tensor, index: usize) -> Result<Tensor, SamplerError> {
        let _ = index;
        Ok(sample.clone())
    }

    /// The sample after this visit. Visits must be made in order; they may begin in the middle (image-to-image).
    ///
    /// # Errors
    /// A tensor error, or a time step outside the schedule.
    fn step(&mut self, visit: SamplerStep<'_>) -> Result<Tensor, SamplerError>;

    /// `original` with as much noise as there is before visit `index`.
    ///
    /// # Errors
    /// A tensor error, or a time step outside the schedule.
    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplerError>;
}

/// One visit of a time step.
#[derive(Debug)]
pub struct SamplerStep<'a> {
    /// Which, counted in [`Sampler::timesteps`].
    pub index: usize,
    /// What the model answered, f32.
    pub output: &'a Tensor,
    /// The sample before, f32.
    pub sample: &'a Tensor,
    /// Where random numbers come from.
    pub noise: &'a mut NoiseSource,
    /// The dtype of the model, in which diffusers draws most of them.
    pub dtype: DType,
}

impl SamplerStep<'_> {
    /// Noise of the sample's shape.
    fn noise(&mut self) -> Result<Tensor, SamplerError> {
        self.noise_as(self.dtype)
    }

    fn noise_as(&mut self, dtype: DType) -> Result<Tensor, SamplerError> {
        Ok(self.noise.randn(self.output.dims(), dtype, self.output.device())?)
    }
}

/// What a caller decides about a sampler beside its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplerOptions {
    /// How many steps.
    pub steps: usize,
    /// `eta` of ddim: 0 is deterministic.
    pub eta: f64,
}

impl SamplerOptions {
    /// That many steps, everything else as diffusers' pipelines have it.
    #[must_use]
    pub fn steps(steps: usize) -> Self {
        Self { steps, eta: 0.0 }
    }
}

type Make = fn(SamplerParams, SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError>;

/// Name, aliases, and what makes it.
fn registry() -> &'static [(&'static str, &'static [&'static str], Make)] {
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

/// Names that ai-toolkit accepts and that have no sampler here yet.
const NOT_YET: &[&str] = &[
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

/// Whether [`build`] knows the name.
///
/// # Errors
/// [`SamplerError::Unknown`] or [`SamplerError::NotYet`], which list the names that exist.
pub fn check_name(name: &str) -> Result<(), SamplerError> {
    find(name).map(|_| ())
}

fn find(name: &str) -> Result<(Make, bool), SamplerError> {
    let plain = name.trim().to_lowercase().replace([' ', '-'], "_");
    let exact = |wanted: &str| {
        registry()
            .iter()
            .find(|(n, aliases, _)| *n == wanted || aliases.contains(&wanted))
            .map(|(_, _, make)| *make)
    };
    if let Some(make) = exact(&plain) {
        return Ok((make, false));
    }
    let bare = plain.strip_prefix("k_").or_else(|| plain.strip_suffix("_karras"));
    if let Some(bare) = bare
        && let Some(make) = exact(bare)
        && !["ddim", "ddpm", "pndm", "plms", "euler_a", "euler_ancestral"].contains(&bare)
    {
        return Ok((make, true));
    }
    let name = name.to_owned();
    let known = NOT_YET.contains(&bare.unwrap_or(&plain));
    Err(if known {
        SamplerError::NotYet { name }
    } else {
        SamplerError::Unknown { name }
    })
}

/// Makes the sampler of that name.
///
/// # Errors
/// An unknown name, parameters that are wrong or unsupported, or an impossible number of steps.
pub fn build(name: &str, params: &SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    let (make, karras) = find(name)?;
    let mut params = params.clone();
    if karras {
        params.use_karras_sigmas = Some(true);
    }
    params.refuse_unsupported()?;
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
