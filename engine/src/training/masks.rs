//! Masks of the loss: which parts of an image are learned, as the loss sees them.

use crate::data::{Item, load_mask};
use crate::error::Result;
use crate::models::vae::AutoencoderKl;
use candle_core::{DType, Device, Tensor};
use std::collections::HashMap;

/// The masks of a run in the size of the latents, read once.
#[derive(Default)]
pub struct Masks {
    known: HashMap<String, Tensor>,
}

impl Masks {
    /// The weights of a batch's loss, [b, 1, h, w] on the CPU, 1 on average; `None` where no image of it has a mask.
    /// An image without one counts in full. Of every latent's square of pixels the upper left one decides, as
    /// ai-toolkit's nearest-neighbour scaling has it.
    ///
    /// # Errors
    /// When a mask cannot be read or has another shape than its image.
    pub fn get<'a>(&mut self, items: impl Iterator<Item = &'a Item>, vae: &AutoencoderKl) -> Result<Option<Tensor>> {
        let (mut rows, mut any) = (Vec::new(), false);
        for item in items {
            any |= item.mask.is_some();
            rows.push(self.one(item, vae.scale_factor())?);
        }
        if !any {
            return Ok(None);
        }
        let weights = Tensor::stack(&rows, 0)?.unsqueeze(1)?;
        let mean = weights.mean_all()?.to_scalar::<f32>()?;
        // Black everywhere: nothing of this batch is learned.
        let factor = if mean > 0.0 { 1.0 / f64::from(mean) } else { 0.0 };
        Ok(Some((weights * factor)?))
    }

    fn one(&mut self, item: &Item, scale: usize) -> Result<Tensor> {
        let (width, height) = (item.plan.bucket.0 as usize / scale, item.plan.bucket.1 as usize / scale);
        let Some(mask) = &item.mask else {
            return Ok(Tensor::ones((height, width), DType::F32, &Device::Cpu)?);
        };
        let key = format!("{mask:?} {:?} {} {}", item.plan, item.flip_x, item.flip_y);
        if let Some(known) = self.known.get(&key) {
            return Ok(known.clone());
        }
        let (pixels, stride) = (load_mask(item, mask)?, item.plan.bucket.0 as usize);
        let chosen: Vec<f32> = (0..height * width)
            .map(|i| pixels[(i / width * scale) * stride + i % width * scale])
            .collect();
        let tensor = Tensor::from_vec(chosen, (height, width), &Device::Cpu)?;
        self.known.insert(key, tensor.clone());
        Ok(tensor)
    }
}
