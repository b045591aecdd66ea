//! DoRA: the weight with the low-rank change of a LoRA is normalised, and multiplied with a trained magnitude (S.-Y. Liu and others,
//! "DoRA: Weight-Decomposed Low-Rank Adaptation", arXiv:2402.09353).
//!
//! Files have the tensors of the LoRA and the magnitude of each layer, under the name of the program that made them. What a strength
//! k other than 1 means is that program's, too; W is the weight, D the change of the adapter at strength 1, m the magnitude:
//!
//! | tensor | programs | shape | weight at strength k |
//! |---|---|---|---|
//! | `lora_magnitude_vector` | peft, diffusers | [out], or [1, out, 1, 1] | m (W + k D) / norm(W + k D) |
//! | `magnitude` | ai-toolkit | [out] | the same |
//! | `dora_scale` | LyCORIS, ComfyUI | [out, 1, ..], or [1, in, ..] | (W + D) (1 + k (m / norm(W + D) - 1)) |
//!
//! Norms are over all axes but that of the magnitude. At strength 0 the layer is as without the file.

mod decomposition;
mod file;
mod layer;
mod norms;
mod trained;

pub use decomposition::WeightDecomposed;
pub(super) use file::{has_magnitude_of_inputs, joined, read_decomposed};
pub use trained::Dora;
