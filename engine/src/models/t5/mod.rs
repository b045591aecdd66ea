//! T5's encoder (transformers' `T5EncoderModel`), with the gated feed-forward of T5 v1.1: the second or third text encoder
//! of FLUX.1, Stable Diffusion 3 and others.

mod bias;
mod encoder;
pub(crate) mod gguf_names;
mod spiece;
#[cfg(test)]
mod tests;
mod tokenizer;

pub use encoder::{T5Config, T5EncoderModel};
pub use tokenizer::T5Tokenizer;
