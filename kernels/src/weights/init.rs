//! Random initial weights for training from scratch.

use candle_core::{DType, Device, Tensor};
use sha2::{Digest, Sha256};

/// The distribution of an initial weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Uniform in -bound ..= bound. PyTorch's default for linear layers and convolutions is 1 / sqrt(fan_in).
    Uniform(f64),
    /// Normal with mean 0 and this standard deviation.
    Normal(f64),
    /// All 1.
    Ones,
    /// All 0.
    Zeros,
}

/// Draws a tensor. The numbers depend only on the seed and the name, not on other draws.
pub(super) fn random_tensor(
    seed: u64,
    name: &str,
    shape: &[usize],
    init: Init,
    device: &Device,
) -> candle_core::Result<Tensor> {
    let mut state = seed;
    for chunk in Sha256::digest(name.as_bytes()).as_chunks::<8>().0 {
        state ^= u64::from_le_bytes(*chunk);
        state = state.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    // SplitMix64, 24 bits per number.
    let mut next_uniform = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f64 / (1u64 << 24) as f64
    };
    let count = shape.iter().product();
    let values: Vec<f32> = match init {
        Init::Ones => vec![1.0; count],
        Init::Zeros => vec![0.0; count],
        Init::Uniform(bound) => (0..count)
            .map(|_| ((2.0 * next_uniform() - 1.0) * bound) as f32)
            .collect(),
        Init::Normal(std) => (0..count)
            .map(|_| {
                let radius = (-2.0 * (1.0 - next_uniform()).ln()).sqrt();
                (radius * (std::f64::consts::TAU * next_uniform()).cos() * std) as f32
            })
            .collect(),
    };
    Tensor::from_vec(values, shape, device)?.to_dtype(DType::F32)
}
