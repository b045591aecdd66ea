//! What diffusion transformers with joint attention of text and image (MMDiT: P. Esser et al., arXiv:2403.03206) have in common: those of
//! Stable Diffusion 3 and FLUX.1.

mod embedder;
mod layers;

pub(super) use embedder::{Embedder, SINUSOIDS};
pub(super) use layers::{AdaLayerNorm, AdaLayerNormContinuous, EPS, FeedForward, Projections, Visitor};
