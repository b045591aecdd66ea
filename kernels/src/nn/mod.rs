//! Layers and operations with a backward pass.
//!
//! On the CPU they are kernels of this crate (`f32`, deterministic for any number of threads); on CUDA and Metal they
//! are composed of candle's operations, with a backward pass of their own ([`crate::autograd`]). candle's backward pass
//! would compute and keep gradients of frozen weights, and keep every intermediate result. candle-nn's fused softmax and
//! norms are not used because they have no backward pass.

mod activation;
mod adapter;
#[cfg(test)]
mod adapter_tests;
mod attention;
#[cfg(test)]
mod bf16_tests;
mod conv1d;
mod conv2d;
mod conv3d;
pub(crate) mod cpu;
mod decomposed_weight;
mod embedding;
mod forward_layer;
mod hadamard;
mod interpolate;
mod kron;
mod linear;
mod low_rank;
mod max_pool;
mod modulate;
mod norm;
#[cfg(test)]
mod portable_tests;
#[cfg(test)]
mod reference_tests;
mod resize;
mod rotary;
mod scale_channels;
mod sinusoids;
mod sum;
mod tensors;
#[cfg(test)]
mod tests;
mod token_loss;
mod transpose;
mod visit_layers;

pub use activation::{Activation, geglu, gelu, quick_gelu, silu, swiglu};
pub use adapter::{BaseLayer, LayerAdapter, LayerKind, LowRank, NormAdapter};
pub use attention::{Attention, key_bias, padding_bias, softmax};
pub use conv1d::{Conv1d, conv1d};
pub use conv2d::{Conv2d, conv2d};
pub use conv3d::{Conv3d, conv3d};
pub use decomposed_weight::{ChangeForm, Decomposition, decomposed_weight};
pub use embedding::{Embedding, lookup};
pub use forward_layer::forward_layer;
pub use hadamard::{add_hadamard_of_products, hadamard_of_products};
pub use interpolate::{Interpolation, interpolate};
pub use kron::kron;
pub use linear::linear_with_weight;
pub use linear::{Linear, linear};
pub use max_pool::max_pool;
pub use modulate::{gated_residual, modulate};
pub use norm::{GroupNorm, LayerNorm, NormParams, RmsNorm};
pub use resize::{pixel_shuffle, upsample_nearest};
pub use rotary::{Rotary, RotaryPairs};
pub use scale_channels::scale_channels;
pub use sinusoids::sinusoids;
pub use sum::{add, add_channels, cat_channels};
pub use tensors::matmul;
pub use token_loss::token_loss;
pub use transpose::{to_image, to_tokens};
pub use visit_layers::join;
pub use visit_layers::{LayerMut, VisitLayers};
