//! Training. Every random decision is a function of (seed, step, micro-batch).
//!
//! - [`loss`]: the loss of one micro-batch. All inputs are arguments, so that tests can compare it with the reference.
//! - [`Trainer`]: gradient accumulation, clipping, optimizer, EMA; the state that a checkpoint stores.
//! - [`draw`]: draws the time steps and the noise of a micro-batch (`docs/randomness.md`).
//! - [`LatentStore`], [`LossMasks`], [`ContextCache`]: cached latents of images, loss masks and encoded captions.

mod context;
mod latents;
mod loss;
mod loss_scale;
mod masks;
mod random;
mod trainer;

pub use context::ContextCache;
pub use latents::LatentStore;
pub use loss::{LossKind, LossOptions, MicroBatch, loss};
pub use masks::LossMasks;
pub use random::{NoiseDraw, NoiseLevelPreference, NoiseOptions, batch_generator, draw};
pub(crate) use trainer::optim_error;
pub use trainer::{StepReport, Trainer, TrainerOptions, TrainerState};

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
