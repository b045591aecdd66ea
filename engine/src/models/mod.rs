//! The components that several model families share.

pub mod causal_lm;
pub mod chroma;
pub mod clip;
pub mod codec;
pub mod config;
mod config_value;
pub mod control_generator;
pub mod feature_extractor;
pub mod flux;
mod gguf_names;
mod mmdit;
pub mod original_layer;
pub mod qwen3;
pub mod sd3;
mod sentencepiece;
pub(crate) mod single_file;
mod special_tokens;
pub(crate) mod stored_types;
pub mod t2i_adapter;
pub mod t5;
mod tokenizer_file;
pub mod unet;
pub mod vae;
pub mod zimage;

#[cfg(test)]
mod tests;
