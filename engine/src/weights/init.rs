//! Random weights for training from nothing.

use candle_core::{DType, Device, Tensor};
use sha2::{Digest, Sha256};

/// What a fresh weight is drawn from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Uniform in -bound ..= bound. PyTorch's default for linear layers and convolutions has 1 / sqrt(fan in).
    Uniform(f64),
    /// Normal with this standard deviation.
    Normal(f64),
    /// All 1.
    Ones,
    /// All 0.
    Zeros,
}

/// A tensor whose numbers depend on the seed and its own name only, not on what else is drawn.
pub(super) fn draw(seed: u64, name: &str, shape: &[usize], init: Init, device: &Device) -> candle_core::Result<Tensor> {
    let mut state = seed;
    for chunk in Sha256::digest(name.as_bytes()).as_chunks::<8>().0 {
        state ^= u64::from_le_bytes(*chunk);
        state = state.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    // SplitMix64, 24 bits per number.
    let mut unit = move || {
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
        Init::Uniform(bound) => (0..count).map(|_| ((2.0 * unit() - 1.0) * bound) as f32).collect(),
        Init::Normal(std) => (0..count)
            .map(|_| {
                let radius = (-2.0 * (1.0 - unit()).ln()).sqrt();
                (radius * (std::f64::consts::TAU * unit()).cos() * std) as f32
            })
            .collect(),
    };
    Tensor::from_vec(values, shape, device)?.to_dtype(DType::F32)
}
