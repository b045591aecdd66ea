//! What the models of aitk are made of: devices, operations with gradients, layers, quantised weights, files of weights, optimizers,
//! and the pixels of images.
//!
//! It knows no model, no job and no adapter: those are in `aitk-engine`, which exports these modules as its own. It is a crate of its own
//! because it is compiled with full optimisation and seldom changes. Imports run one way: `optim`, `checkpointing`, `nn` -> `autograd`,
//! `weights`, `cuda_kernels` -> `quant`, `image_io`, `svd`, `device`, `error`, `rng`.

pub mod autograd;
pub mod checkpointing;
mod cuda_kernels;
pub mod device;
pub mod error;
pub mod image_io;
pub mod nn;
pub mod optim;
pub mod quant;
pub mod rng;
pub mod svd;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod testing;
pub mod weights;
