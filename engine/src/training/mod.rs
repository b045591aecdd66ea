//! Training: one optimizer step after another, every random decision a function of (seed, step, micro-batch).
//!
//! - [`loss`]: the loss of one micro-batch with all its inputs given, so that it can be compared with the reference.
//! - [`Trainer`]: accumulation, clipping, optimizer, EMA; what a checkpoint holds.
//! - [`draw`]: time steps and noise of a micro-batch (`docs/randomness.md`).
//! - [`Latents`], [`Masks`], [`Contexts`]: images, their masks and captions as model and loss see them, cached.

mod context;
mod latents;
mod loss;
mod masks;
mod random;
mod trainer;

pub use context::Contexts;
pub use latents::Latents;
pub use loss::{LossKind, LossOptions, MicroBatch, loss};
pub use masks::Masks;
pub use random::{Draw, NoiseOptions, Preference, batch_generator, draw};
pub(crate) use trainer::optim_error;
pub use trainer::{State, StepReport, Trainer, TrainerOptions};

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
