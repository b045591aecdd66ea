//! Walks the steps of a model with shapes alone: the same steps that the engine runs with data, so that the peak of live
//! bytes is known before a job runs.
//!
//! The files follow the engine's: `tape` its `autograd`, `stack` its `residency`, `layers` its `nn`, `unet`, `clip` and
//! `vae` its `models`. A tensor here is a shape and a number of bytes that are live until it is dropped, so a local
//! variable that is held for too long counts here as it does there.

pub(super) mod build;
mod clip;
mod layers;
mod meter;
mod stack;
mod tape;
mod tensors;
#[cfg(test)]
mod tests;
mod unet;
mod vae;

pub(super) use clip::TextEncoder;
pub(super) use meter::Shaped;
pub(super) use tape::{Backend, Form, Walk};
pub(super) use unet::UNet;
pub(super) use vae::Vae;
