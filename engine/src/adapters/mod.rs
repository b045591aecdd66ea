//! How a base layer is changed: LoRA layers, and key names in and out for every dialect.
//!
//! - [`LoraLayer`]: the arithmetic, hooked into a layer as a [`LayerAdapter`](crate::nn::LayerAdapter).
//! - [`LoraFile`]: reads ai-toolkit, sd-scripts (diffusers and original-checkpoint paths), diffusers and peft names.
//! - [`load_lora`]: puts a file on a model, for images.
//! - [`LoraNetwork`]: the trainable set of layers, and what it saves.

mod file;
mod keys;
mod layer;
mod load;
mod network;
mod save;

pub use file::{LoraFile, LoraModule, LoraTensors};
pub use keys::{Component, LayerIndex};
pub use layer::{LoraHandle, LoraLayer, Multiplier};
pub use load::{LoadedLora, load_lora};
pub use network::{LoadReport, LoraConfig, LoraNetwork};
pub use save::{python_json, safetensors_bytes, with_hashes};

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
