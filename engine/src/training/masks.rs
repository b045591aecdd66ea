//! Loss masks: the weight of each latent position in the loss.

use crate::data::{TrainingImage, load_mask};
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
    /// item without a mask has weight 1 everywhere before this scaling. A latent position gets the upper left pixel of
    /// its square, as with ai-toolkit's nearest-neighbour scaling.
    ///
    /// # Errors
    /// When a mask cannot be read or its shape differs from its image's.
    pub fn get<'a>(
        &mut self,
        items: impl Iterator<Item = &'a TrainingImage>,
        codec: &dyn Codec,
    ) -> Result<Option<Tensor>> {
        let (mut masks, mut any) = (Vec::new(), false);
        for item in items {
            any |= item.mask.is_some();
            masks.push(self.mask_weights(item, codec.pixels_per_latent())?);
        }
        if !any {
            return Ok(None);
        }
        let weights = Tensor::stack(&masks, 0)?.unsqueeze(1)?;
        let mean = weights.mean_all()?.to_scalar::<f32>()?;
        // All masks are black: the loss of this batch is 0.
        let factor = if mean > 0.0 { 1.0 / f64::from(mean) } else { 0.0 };
        Ok(Some((weights * factor)?))
    }

    fn mask_weights(&mut self, item: &TrainingImage, scale: usize) -> Result<Tensor> {
        let (width, height) = (item.plan.bucket.0 as usize / scale, item.plan.bucket.1 as usize / scale);
        let Some(mask) = &item.mask else {
            return Ok(Tensor::ones((height, width), DType::F32, &Device::Cpu)?);
        };
        let key = format!("{} {:?} {} {}", mask.identity(), item.plan, item.flip_x, item.flip_y);
        if let Some(tensor) = self.cache.get(&key) {
            return Ok(tensor.clone());
        }
        let (pixels, stride) = (load_mask(item, mask)?, item.plan.bucket.0 as usize);
        let sampled: Vec<f32> = (0..height * width)
            .map(|i| pixels[(i / width * scale) * stride + i % width * scale])
            .collect();
        let tensor = Tensor::from_vec(sampled, (height, width), &Device::Cpu)?;
        self.cache.insert(key, tensor.clone());
        Ok(tensor)
    }
}
