//! Adapters (LoRA, LoCon, LoKr, LoHa, DoRA, OFT, whole differences): the layers, the trainable network, and the file formats of ai-toolkit,
//! kohya's sd-scripts, diffusers, peft, LyCORIS and ComfyUI.
//!
//! - [`LoraLayer`]: the computation of a LoRA, attached to a layer as a [`LayerAdapter`](crate::nn::LayerAdapter).
//! - [`AdapterType`]: a type of adapter that can be trained, [`FileLayer`]: what a file of any type holds for a layer.
//! - [`AdapterFile`]: reads files with the names of ai-toolkit, sd-scripts (diffusers or original paths), diffusers or
//!   peft.
//! - [`load_lora`]: attaches a file to a model for inference; [`load_changes`]: to merge it.
//! - [`AdapterNetwork`]: the trainable layers of a model, and the tensors to save.
//! - [`model_layers`]: the layers of a model with their own weights, for LoRAs that are extracted.
//! - [`rescale_lora`]: changes the strength of a file.
//! - [`convert_lora`]: writes a file with the names of another program.

mod adapter_config;
mod adapter_file;
mod control;
mod convert;
mod difference;
mod dora;
mod dropout;
mod file_layer;
mod file_readers;
mod handle;
mod joined;
mod keys;
mod load;
mod locon;
mod loha;
mod lokr;
mod lora;
mod merge;
mod model_layers;
mod names;
mod network;
mod oft;
mod origin;
mod ranks;
mod rescale;
mod save;
mod stored_matrix;
mod trained_layer;
mod weight_adapter;
mod whole_layer;

pub use adapter_config::AdapterConfig;
pub use adapter_file::AdapterFile;
pub use convert::{Conversion, ConvertedAdapter, Dialect, convert_lora};
pub use difference::Difference;
pub use dora::{Dora, WeightDecomposed};
pub use dropout::Dropout;
pub use file_layer::{AdapterModule, FileLayer, Site};
pub use handle::{AdapterHandle, AdapterPass, Multiplier};
pub use load::{
    LoadedAdapter, LoadedChanges, adapted_layers, check_denoiser_lora, check_lora, is_of_text, is_text_lora,
    load_changes, load_denoiser_lora, load_lora, load_text_lora,
};
pub use locon::Locon;
pub use loha::Loha;
pub use lokr::{Lokr, LokrSplits};
pub use lora::{Lora, LoraLayer, LoraTensors};
pub use model_layers::{ModelLayer, model_layers};
pub use names::{LayerIndex, LayerKey, NamedLayers, saved_since};
pub use network::{AdapterNetwork, LoadReport};
pub use ranks::{LayerRank, Rank};
pub use rescale::{RescaledLora, Rescaling, Underflow, rescale_lora};
pub use save::{copied_lora_file_bytes, is_finite, lora_file_bytes, python_json, safetensors_bytes, write_lora_file};
pub use trained_layer::{AdapterType, ChangeFactors, NewLayer, TrainedLayer, Values};
pub use weight_adapter::WeightAdapter;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod conv_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod embedding_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod flux_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod lycoris_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod ranks_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod sd35_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod test_helpers;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod trained_network_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod trained_types_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod types_tests;
