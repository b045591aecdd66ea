//! The embedding of numbers by sines and cosines (diffusers' `Timesteps`).

use candle_core::{D, DType, Tensor};

/// timesteps [b] -> [b, width], f32: sines and cosines of t / 10000^(i / (width / 2 - shift)), cosines first if `flip`.
///
/// # Errors
/// When the device fails.
pub fn sinusoids(timesteps: &Tensor, width: usize, flip: bool, shift: f64) -> candle_core::Result<Tensor> {
    let half = width / 2;
    let frequencies: Vec<f32> = (0..half)
        .map(|i| {
            let exponent = -(10000f64.ln() as f32) * i as f32;
            (exponent / (half as f64 - shift) as f32).exp()
        })
        .collect();
    let frequencies = Tensor::from_vec(frequencies, (1, half), timesteps.device())?;
    let angles = timesteps
        .to_dtype(DType::F32)?
        .reshape(((), 1))?
        .broadcast_mul(&frequencies)?;
    let (sin, cos) = (angles.sin()?, angles.cos()?);
    let both = if flip {
        Tensor::cat(&[&cos, &sin], D::Minus1)?
    } else {
        Tensor::cat(&[&sin, &cos], D::Minus1)?
    };
    if width % 2 == 1 {
        both.pad_with_zeros(D::Minus1, 0, 1)
    } else {
        Ok(both)
    }
}
