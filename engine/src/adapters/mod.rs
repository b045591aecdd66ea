//! LoRA: the layers, the trainable network, and the file formats of ai-toolkit, kohya's sd-scripts, diffusers, peft and ComfyUI.
//!
//! - [`LoraLayer`]: the computation, attached to a layer as a [`LayerAdapter`](crate::nn::LayerAdapter).
//! - [`LoraFile`]: reads files with the names of ai-toolkit, sd-scripts (diffusers or original paths), diffusers or
//!   peft.
//! - [`load_lora`]: attaches a file to a model for inference.
//! - [`LoraNetwork`]: the trainable layers of a model, and the tensors to save.

mod control;
mod file;
mod joined;
mod keys;
mod layer;
mod load;
mod names;
mod network;
mod origin;
mod save;
mod tensors;

pub use file::LoraFile;
pub use layer::{LoraHandle, LoraLayer, LoraPass, Multiplier};
pub use load::{LoadedLora, check_lora, is_of_text, load_lora, load_text_lora};
pub use names::{LayerIndex, LayerKey, NamedLayers, saved_since};
pub use network::{LoadReport, LoraConfig, LoraNetwork};
pub use save::{lora_file_bytes, python_json, safetensors_bytes};
pub use tensors::{LoraModule, LoraTensors};

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod flux_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod sd35_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
