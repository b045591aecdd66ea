//! Kernels for NVIDIA GPUs: one launch for what takes many of candle's operations.
//!
//! Each function returns `None` where it cannot be used: without CUDA, on other devices, in other dtypes, for tensors that candle
//! tracks for gradients. Then the caller computes the same with candle's operations. With `AITK_CUDA_KERNELS=0` in the environment
//! none is used. The kernels compute in f32. Tests run an emulation of them on the CPU
//! ([`emulated_kernels`](crate::device::portable::emulated_kernels)).

mod arguments;
mod convolution;
mod emulation;
mod launch;
mod norm;
mod optimizer;
mod pointwise;
mod softmax;

pub(crate) use convolution::{COLUMN_BYTES, Convolution, convolve, weight_gradient};
pub(crate) use launch::are_available;
pub(crate) use norm::{Norm, norm, norm_backward};
pub(crate) use optimizer::{AdamFactors, Moments8, adam_8bit, adam_f32, sum_of_squares};
pub(crate) use pointwise::{
    Rotation, activate, activate_backward, add_bias, gate, gate_backward, gated_residual, modulate, rotate, scale,
    swap_axes,
};
pub(crate) use softmax::{softmax, softmax_backward};
