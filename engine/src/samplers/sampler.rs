//! What every sampler shares: the trait, its inputs and its errors.

use super::noise::NoiseSource;
use candle_core::{DType, Tensor};

/// Why a sampler could not be built, or why a step failed.
#[derive(Debug, thiserror::Error)]
pub enum SamplerError {
    /// No sampler has that name.
    #[error("unknown sampler `{name}`: use one of {known}")]
    Unknown {
        /// The requested name.
        name: String,
        /// The names that exist.
        known: String,
    },
    /// ai-toolkit has this sampler, aitk does not yet.
    #[error("sampler `{name}` is not supported yet: use one of {known}")]
    NotImplemented {
        /// The requested name.
        name: String,
        /// The names that exist.
        known: String,
    },
    /// A sampler for the other kind of models: flow matching, or diffusion.
    #[error("sampler `{name}` is not one for this kind of model: use one of {known}")]
    OtherKind {
        /// The given name.
        name: String,
        /// The known names, separated by commas.
        known: String,
    },
    /// `scheduler_config.json` has a wrong or unsupported value.
    #[error("{0}")]
    Config(String),
    /// More steps than the model was trained on, or none.
    #[error("{steps} sampling steps: the number must be between 1 and {train_steps}")]
    Steps {
        /// The requested number.
        steps: usize,
        /// How many training timesteps the schedule has.
        train_steps: usize,
    },
    /// The sampler needs a timestep outside the noise schedule (for example with 1000 steps and an offset of 1).
    #[error("timestep {t} is outside the noise schedule of {train_steps} steps: use fewer sampling steps")]
    TimeStep {
        /// The timestep.
        t: i64,
        /// How many training timesteps the schedule has.
        train_steps: usize,
    },
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

/// A sampler with its list of timesteps. [`build`](super::build) makes one.
pub trait Sampler: Send {
    /// The timesteps in sampling order, as the model gets them. Some samplers use one of them twice.
    fn timesteps(&self) -> &[f64];

    /// How many entries of [`Sampler::timesteps`] one sampling step has: 2 for Heun's method and KDPM2, whose last step has one.
    /// diffusers calls it `order`.
    fn evaluations_per_step(&self) -> usize {
        1
    }

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
    /// A tensor error, or a timestep outside the schedule.
    fn step(&mut self, step: SamplerStep<'_>) -> Result<Tensor, SamplerError>;

    /// `original` with as much noise as a sample has before step `index`.
    ///
    /// # Errors
    /// A tensor error, or a timestep outside the schedule.
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
    pub(super) fn noise(&mut self) -> Result<Tensor, SamplerError> {
        self.noise_as(self.dtype)
    }

    /// Normal noise of the sample's shape, drawn in `dtype`.
    pub(super) fn noise_as(&mut self, dtype: DType) -> Result<Tensor, SamplerError> {
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
    /// Tokens of the image in the model, which dynamic shifts of flow matching follow; 0 for other models.
    pub image_tokens: usize,
}

impl SamplerOptions {
    /// Options with this many steps and diffusers' defaults for everything else.
    #[must_use]
    pub fn with_steps(steps: usize) -> Self {
        Self {
            steps,
            eta: 0.0,
            image_tokens: 0,
        }
    }
}

/// `a * x + b * y`.
pub(super) fn blend(a: f32, x: &Tensor, b: f32, y: &Tensor) -> candle_core::Result<Tensor> {
    scaled(x, a)? + scaled(y, b)?
}

/// `a * x`.
pub(super) fn scaled(x: &Tensor, a: f32) -> candle_core::Result<Tensor> {
    x.affine(f64::from(a), 0.0)
}
