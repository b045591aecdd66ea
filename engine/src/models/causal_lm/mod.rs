//! Decoder-only language models from Hugging Face folders and GGUF files: StarCoder (GPTBigCode), StarCoder2, Qwen2 and Llama.
//!
//! The four families share their blocks (a norm, attention, a norm, a feed-forward network); [`CausalLmConfig`] says which form each
//! part has. Names of tensors are those of transformers, so that a folder can be read and written without renaming.

mod attention_mask;
mod block;
mod cache;
mod config;
mod config_json;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod drawn_tests;
mod fim;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod fim_tests;
mod gguf;
mod layout;
mod model;
mod model_path;
mod new_model;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod padding_tests;
mod rope;
mod rope_json;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod rope_tests;
mod scored_vocabulary;
mod sentencepiece_tokenizer;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod tokenizer;
mod train_tokenizer;

pub use attention_mask::AttentionMask;
pub use cache::KeyValueCache;
pub use config::{CausalLmConfig, CausalLmFamily, FeedForwardKind, NormKind, PositionKind};
pub use fim::FimTokens;
pub use gguf::GgufExport;
pub use model::{CausalLm, CausalLmOptions};
pub use model_path::{open_tokenizer, read_config};
pub use rope::RotaryPositions;
pub use tokenizer::{TextTokenizer, eos_token_name};
pub use train_tokenizer::{END_TOKEN, train_tokenizer};
