//! The engine of aitk: models, adapters, optimizers, samplers, data, training and generation on candle.
//!
//! It uses no network and no async runtime. Imports run one way: `training`, `pipelines` ->
//! `adapters`, `data` -> `families` -> `image_adapters`, `samplers` -> `models` -> `media`, and the modules of `aitk-kernels`. `training` is the
//! mathematics of a step; the run (folder, loop, checkpoints, saves, samples) is in `aitk-processes`.

pub use aitk_kernels::{autograd, checkpointing, device, error, image_io, nn, optim, quant, rng, svd, weights};

pub mod adapters;
pub mod bench;
pub mod data;
pub mod families;
pub mod image_adapters;
pub mod media;
pub mod models;
pub mod pipelines;
pub mod samplers;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod testing;
pub mod training;
