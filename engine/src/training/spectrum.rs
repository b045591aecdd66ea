//! The spectrum of latents, as `torch.fft.rfft2(x, norm="ortho").abs()` computes it.

use crate::error::Result;
use candle_core::{Device, Tensor};

/// Keeps the gradient of an absolute value finite at 0, where it is 0.
const LEAST_SQUARE: f64 = 1e-20;

/// The absolute values of the two-dimensional Fourier transform of `x` [b, channels, h, w], float32: [b, channels, h, w / 2 + 1],
/// scaled so that the transform keeps sums of squares.
///
/// It is computed as products with matrices of sines and cosines: latents have few rows and columns.
///
/// # Errors
/// When the arithmetic fails.
pub(super) fn spectrum(x: &Tensor) -> Result<Tensor> {
    let (items, channels, height, width) = x.dims4()?;
    let half = width / 2 + 1;
    let [cos_w, sin_w] = waves(width, half, x.device())?;
    let [cos_h, sin_h] = waves(height, height, x.device())?;
    let rows = x.reshape((items * channels * height, width))?;
    // exp(-i a) = cos(a) - i sin(a), over the rows, then over the columns of the result.
    let columns = |y: Tensor| -> Result<Tensor> {
        let y = y
            .reshape((items * channels, height, half))?
            .transpose(1, 2)?
            .contiguous()?;
        Ok(y.reshape((items * channels * half, height))?)
    };
    let (real, imaginary) = (columns(rows.matmul(&cos_w)?)?, columns(rows.matmul(&sin_w)?.neg()?)?);
    let square = |a: Tensor| a.sqr();
    let real_squares = square((real.matmul(&cos_h)? + imaginary.matmul(&sin_h)?)?)?;
    let imaginary_squares = square((imaginary.matmul(&cos_h)? - real.matmul(&sin_h)?)?)?;
    let absolute = ((real_squares + imaginary_squares)? + LEAST_SQUARE)?.sqrt()?;
    let absolute = absolute.reshape((items * channels, half, height))?.transpose(1, 2)?;
    Ok(absolute.reshape((items, channels, height, half))?)
}

/// Cosines and sines of `2 pi j k / length` for j below `length` and k below `count`, divided by the square root of `length`.
fn waves(length: usize, count: usize, device: &Device) -> Result<[Tensor; 2]> {
    let scale = 1.0 / (length as f64).sqrt();
    let wave = |function: fn(f64) -> f64| -> Result<Tensor> {
        let angle = |i: usize| {
            // The product modulo the length, so that large angles keep their precision.
            let turns = (i / count) * (i % count) % length;
            std::f64::consts::TAU * turns as f64 / length as f64
        };
        let values: Vec<f32> = (0..length * count)
            .map(|i| (function(angle(i)) * scale) as f32)
            .collect();
        Ok(Tensor::from_vec(values, (length, count), device)?)
    };
    Ok([wave(f64::cos)?, wave(f64::sin)?])
}
