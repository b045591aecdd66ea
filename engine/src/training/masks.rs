//! Loss masks: the weight of each latent position in the loss.

use crate::data::{Mask, SpatialChange, TrainingImage, load_mask};
use crate::error::Result;
use crate::models::codec::Codec;
use candle_core::{DType, Device, Tensor};
use std::collections::HashMap;

/// The loss masks of a run in the size of the latents, cached in memory.
#[derive(Default)]
pub struct LossMasks {
    cache: HashMap<String, Tensor>,
}

impl LossMasks {
    /// Returns the loss weights of a batch, [b, 1, h, w] on the CPU, with a mean of 1; `None` if no item has a mask. An
    /// item without a mask has weight 1 everywhere before this scaling. A latent position gets the upper left pixel of its
    /// square, as with ai-toolkit's nearest-neighbour scaling. `items`: with the moves of their pixels, which masks follow.
    ///
    /// # Errors
    /// When a mask cannot be read or its shape differs from its image's.
    pub fn get<'a>(
        &mut self,
        items: impl Iterator<Item = (&'a TrainingImage, &'a [SpatialChange])>,
        codec: &dyn Codec,
    ) -> Result<Option<Tensor>> {
        // Where all masks are black, the loss of this batch is 0.
        with_mean_1(items, |item, moves| {
            self.mask_weights(item, moves, codec.pixels_per_latent())
        })
    }

    /// Returns the weights of the loss outside of the masks (`train.inverted_mask_prior`), as [`Self::get`]: 1 minus the mask, which is
    /// scaled to the size of the latents with cubic interpolation, as ai-toolkit scales it here.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub fn outside<'a>(
        &mut self,
        items: impl Iterator<Item = (&'a TrainingImage, &'a [SpatialChange])>,
        codec: &dyn Codec,
    ) -> Result<Option<Tensor>> {
        with_mean_1(items, |item, moves| {
            self.outside_weights(item, moves, codec.pixels_per_latent())
        })
    }

    fn outside_weights(&mut self, item: &TrainingImage, moves: &[SpatialChange], scale: usize) -> Result<Tensor> {
        let (bucket_width, bucket_height) = (item.plan.bucket.0 as usize, item.plan.bucket.1 as usize);
        let (width, height) = (bucket_width / scale, bucket_height / scale);
        let Some(mask) = &item.mask else {
            return Ok(Tensor::zeros((height, width), DType::F32, &Device::Cpu)?);
        };
        let key = format!("outside {}", cache_key(item, mask));
        if let Some(tensor) = self.cache.get(&key).filter(|_| moves.is_empty()) {
            return Ok(tensor.clone());
        }
        let pixels = load_mask(item, mask, moves)?;
        let (columns, rows) = (cubic_taps(width, bucket_width), cubic_taps(height, bucket_height));
        let at = |y: usize, x: usize| f64::from(pixels.get(y * bucket_width + x).copied().unwrap_or_default());
        let mut values = Vec::with_capacity(width * height);
        for row in &rows {
            for column in &columns {
                let line = |y: usize| -> f64 { column.iter().map(|(x, weight)| weight * at(y, *x)).sum() };
                let mask: f64 = row.iter().map(|(y, weight)| weight * line(*y)).sum();
                values.push((1.0 - mask) as f32);
            }
        }
        let tensor = Tensor::from_vec(values, (height, width), &Device::Cpu)?;
        // Others move each time.
        if moves.is_empty() {
            self.cache.insert(key, tensor.clone());
        }
        Ok(tensor)
    }

    fn mask_weights(&mut self, item: &TrainingImage, moves: &[SpatialChange], scale: usize) -> Result<Tensor> {
        let (width, height) = (item.plan.bucket.0 as usize / scale, item.plan.bucket.1 as usize / scale);
        let Some(mask) = &item.mask else {
            return Ok(Tensor::ones((height, width), DType::F32, &Device::Cpu)?);
        };
        let key = cache_key(item, mask);
        if let Some(tensor) = self.cache.get(&key).filter(|_| moves.is_empty()) {
            return Ok(tensor.clone());
        }
        let (pixels, stride) = (load_mask(item, mask, moves)?, item.plan.bucket.0 as usize);
        let sampled: Vec<f32> = (0..height * width)
            .map(|i| pixels[(i / width * scale) * stride + i % width * scale])
            .collect();
        let tensor = Tensor::from_vec(sampled, (height, width), &Device::Cpu)?;
        // Others move each time.
        if moves.is_empty() {
            self.cache.insert(key, tensor.clone());
        }
        Ok(tensor)
    }
}

/// What a mask in the size of the latents depends on.
fn cache_key(item: &TrainingImage, mask: &Mask) -> String {
    format!("{} {:?} {} {}", mask.identity(), item.plan, item.flip_x, item.flip_y)
}

/// The weights of a batch, [b, 1, h, w], of those of its items, [h, w], scaled to a mean of 1; zeros stay zeros. `None`: no item has a mask.
fn with_mean_1<'a>(
    items: impl Iterator<Item = (&'a TrainingImage, &'a [SpatialChange])>,
    mut weights_of: impl FnMut(&TrainingImage, &[SpatialChange]) -> Result<Tensor>,
) -> Result<Option<Tensor>> {
    let (mut all, mut any) = (Vec::new(), false);
    for (item, moves) in items {
        any |= item.mask.is_some();
        all.push(weights_of(item, moves)?);
    }
    if !any {
        return Ok(None);
    }
    let weights = Tensor::stack(&all, 0)?.unsqueeze(1)?;
    let mean = weights.mean_all()?.to_scalar::<f32>()?;
    let factor = if mean > 0.0 { 1.0 / f64::from(mean) } else { 0.0 };
    Ok(Some((weights * factor)?))
}

/// For each position of a side of `count`, the four pixels of a side of `size` that it is interpolated from, with their weights:
/// `torch.nn.functional.interpolate(mode="bicubic", align_corners=False)`.
fn cubic_taps(count: usize, size: usize) -> Vec<[(usize, f64); 4]> {
    // R. Keys, 1981, with the parameter that PyTorch uses.
    const A: f64 = -0.75;
    let weight = |distance: f64| match distance.abs() {
        d if d <= 1.0 => ((A + 2.0) * d - (A + 3.0)) * d * d + 1.0,
        d if d < 2.0 => ((A * d - 5.0 * A) * d + 8.0 * A) * d - 4.0 * A,
        _ => 0.0,
    };
    let taps = |i: usize| {
        let centre = (i as f64 + 0.5) * size as f64 / count as f64 - 0.5;
        let first = centre.floor();
        std::array::from_fn(|tap| {
            let position = first + tap as f64 - 1.0;
            let pixel = position.clamp(0.0, size as f64 - 1.0) as usize;
            (pixel, weight(centre - position))
        })
    };
    (0..count).map(taps).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn cubic_taps_are_those_of_torch() {
        // torch.nn.functional.interpolate(torch.eye(5)[None, None], size=(5, 3), mode="bicubic")[0, 0].T
        let row = |taps: &[(usize, f64); 4], size: usize| {
            let mut row = vec![0.0; size];
            taps.iter().for_each(|(pixel, weight)| row[*pixel] += weight);
            row
        };
        let half = [-0.09375, 0.59375, 0.59375, -0.09375];
        let taps = cubic_taps(2, 8);
        assert_eq!(row(&taps[0], 8), [&half[..], &[0.0; 4]].concat());
        assert_eq!(row(&taps[1], 8), [&[0.0; 4], &half[..]].concat());
        let uneven = cubic_taps(3, 5);
        let expected = [
            [0.6852, 0.3704, -0.0556, 0.0, 0.0],
            [0.0, 0.0, 1.0, 0.0, 0.0],
            [0.0, 0.0, -0.0556, 0.3704, 0.6852],
        ];
        for (taps, expected) in uneven.iter().zip(expected) {
            for (ours, theirs) in row(taps, 5).iter().zip(expected) {
                assert!((ours - theirs).abs() < 1e-4, "{ours} {theirs}");
            }
        }
    }
}
