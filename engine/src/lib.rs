//! The engine of aitk: models, adapters, optimizers, samplers, data, training and generation on candle.
//!
//! It uses no network and no async runtime. Imports run one way: `processes` -> `training`, `pipelines` ->
//! `adapters`, `optim`, `data` -> `families` -> `samplers`, `models` -> `checkpointing`, `nn` -> `autograd`, `weights`, `cuda_kernels` -> `quant`,
//! `image_io`, `svd`, `media`, `device`, `error`, `rng`. `training` is the mathematics of a step; `processes/train` is the run: folder, loop,
//! checkpoints, saves, samples.

pub mod adapters;
pub mod autograd;
pub mod bench;
pub mod checkpointing;
mod cuda_kernels;
pub mod data;
pub mod device;
pub mod error;
pub mod families;
pub mod image_io;
pub mod media;
pub mod models;
pub mod nn;
pub mod optim;
pub mod pipelines;
pub mod processes;
pub mod quant;
pub mod rng;
pub mod samplers;
pub mod svd;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod testing;
pub mod training;
pub mod weights;
