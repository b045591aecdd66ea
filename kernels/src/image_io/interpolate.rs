//! Scaling of tensors as PyTorch does it.

use crate::error::Result;
use candle_core::{Device, Tensor};

/// Scales [channels, h, w] as PyTorch's `interpolate(mode="bilinear")` does: without smoothing, also where it makes an image smaller.
///
/// # Errors
/// When the device fails.
pub fn interpolate_bilinear(pixels: &Tensor, height: usize, width: usize) -> Result<Tensor> {
    let (channels, old_height, old_width) = pixels.dims3()?;
    let values = pixels.flatten_all()?.to_vec1::<f32>()?;
    let (rows, columns) = (taps(old_height, height), taps(old_width, width));
    let mut out = Vec::with_capacity(channels * height * width);
    for channel in values.chunks_exact((old_height * old_width).max(1)) {
        for &(top, bottom, down) in &rows {
            for &(left, right, across) in &columns {
                let row = |row: usize| {
                    let (a, b) = (channel[row * old_width + left], channel[row * old_width + right]);
                    a + (b - a) * across
                };
                let (above, below) = (row(top), row(bottom));
                out.push(above + (below - above) * down);
            }
        }
    }
    Ok(Tensor::from_vec(out, (channels, height, width), &Device::Cpu)?)
}

/// For each of `new` positions along a side: the two of `old` that it lies between, and the share of the second.
fn taps(old: usize, new: usize) -> Vec<(usize, usize, f32)> {
    let scale = old as f32 / new as f32;
    let tap = |position: usize| {
        let at = ((position as f32 + 0.5) * scale - 0.5).max(0.0);
        let first = (at as usize).min(old - 1);
        (first, (first + 1).min(old - 1), at - first as f32)
    };
    (0..new).map(tap).collect()
}
