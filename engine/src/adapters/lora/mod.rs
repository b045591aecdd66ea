//! `network.type: lora`: low-rank changes of the layers' weights.
//!
//! "LoRA: Low-Rank Adaptation of Large Language Models" (E. Hu and others, arXiv:2106.09685).

mod embedding;
mod embedding_file;
mod file;
mod layer;
mod tensors;
mod trained;

pub(super) use embedding_file::read_lora_embedding;
pub(super) use file::read_lora;
pub use layer::LoraLayer;
pub(super) use tensors::LoraEmbeddingTensors;
pub use tensors::LoraTensors;
pub use trained::Lora;
pub(super) use trained::new_layer;
