//! Training. Every random decision is a function of (seed, step, micro-batch).
//!
//! - [`loss`]: the loss of one micro-batch. All inputs are arguments, so that tests can compare it with the reference.
//! - [`Trainer`]: gradient accumulation, clipping, optimizer, EMA; the state that a checkpoint stores.
//! - [`Objective`], [`Ddpm`], [`FlowMatch`]: what the model predicts; draws the timesteps and the noise of a micro-batch
//!   (`docs/randomness.md`).
//! - [`LatentStore`], [`LossMasks`], [`ConditioningCache`]: cached latents of images, loss masks and encoded captions.
//! - [`slider_loss`]: the loss of a slider.
//! - [`PairedBatch`]: the losses of image pairs.
//! - [`FeatureLoss`]: the loss of features of the predicted and of the true image.
//! - [`CachedTextEmbeddings`]: every prompt of a run, encoded before the model is loaded.

mod cached_text_embeddings;
mod cfg;
mod comparison;
mod conditioning_cache;
mod ddpm;
mod feature_loss;
mod flow_match;
mod flow_timesteps;
mod latent_options;
mod latents;
mod learned_snr;
mod loss;
mod loss_scale;
mod masks;
mod objective;
mod paired_images;
mod pixel_options;
mod random;
mod slider;
mod spectrum;
mod swapped_parameters;
mod trainer;

pub use cached_text_embeddings::CachedTextEmbeddings;
pub use cfg::TrainingCfg;
pub use conditioning_cache::ConditioningCache;
pub use ddpm::{Ddpm, SnrWeighting};
pub use feature_loss::FeatureLoss;
pub use flow_match::{FlowMatch, step_to};
pub use flow_timesteps::{FlowShift, FlowTimesteps, FlowWeighting};
pub use latent_options::{ChannelStatistics, LatentOptions};
pub use latents::LatentStore;
pub use learned_snr::{LEARNED_SNR_FILE, LearnedSnr, LearnedWeights, SharedLearnedSnr};
pub use loss::{GuidanceLoss, LossInputs, LossKind, LossOptions, MicroBatch, Predict, X0Loss, loss, noisy_latents};
pub use masks::LossMasks;
pub use objective::{DrawInputs, NoiseDraw, Objective};
pub use paired_images::{PairedBatch, paired_noise, paired_strength};
pub use pixel_options::PixelOptions;
pub use random::{NoiseLevelPreference, NoiseOptions, batch_generator, draw};
pub use slider::{SliderTarget, moved_prediction, slider_loss, with_statistics_of};
pub use swapped_parameters::SwappedParameters;
pub use trainer::optim_error;
pub use trainer::{StepReport, Trainer, TrainerOptions, TrainerState};

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
