//! Walks the steps of a model with shapes alone: the same steps that the engine runs with data, so that the peak of live
//! bytes is known before a job runs.
//!
//! The files follow the engine's: `tape` its `autograd`, `block_sequence` its `checkpointing`, `layers` and `tokens` its `nn`, the others
//! its `models`. A tensor here is a shape and a number of bytes that are live until it is dropped, so a local
//! variable that is held for too long counts here as it does there.

mod block_sequence;
pub(super) mod build;
mod chroma;
mod clip;
mod conditions;
mod decoder;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod decoder_tests;
mod denoiser;
mod dense;
mod dpt;
mod embedding;
mod features;
mod flux;
mod image_adapter;
mod kron;
mod language;
mod layers;
mod magnitude;
mod meter;
mod mmdit;
mod norm;
mod sd3;
mod tape;
mod tensors;
#[cfg(test)]
mod tests;
mod tokens;
#[cfg(test)]
mod transformer_tests;
mod tucker;
mod unet;
mod vae;
mod vision;
mod zimage;

pub(super) use clip::TextEncoder;
pub(super) use conditions::Conditions;
pub(super) use decoder::{Decoder, DecoderRows};
pub(super) use denoiser::Denoiser;
pub(super) use features::FeatureExtractor;
pub(super) use image_adapter::{ImageAdapter, ImageAdapterOptions, T2iKind, T2iOptions};
pub(super) use language::LanguageEncoder;
pub(super) use meter::MetaTensor;
pub(super) use tape::{Backend, Form, Walk};
#[cfg(test)]
use unet::{Residuals, UNet};
pub(super) use vae::Vae;
pub(super) use vision::{DINOV3_H_PLUS, SAPIENS2_1B, SIGLIP2_NAFLEX, SIGLIP2_SQUARE, TIPS_B14, VisionSizes};
