//! Qwen3 (transformers' `Qwen3Model`): a decoder-only language model, whose hidden states are the text of Z-Image.

mod chat_template;
pub(crate) mod gguf_names;
mod model;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod tokenizer;

pub use model::{Qwen3Config, Qwen3Model, RopeParameters};
pub use tokenizer::{Qwen3Tokenizer, TokenIds};
