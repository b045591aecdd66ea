//! The control images of an adapter, in the conditioning.

use crate::error::Result;
use crate::families::conditioning::Conditioning;
use crate::image_adapters::ImageAdapter;
use crate::models::unet::{UNetInputs, UNetResiduals};
use candle_core::Tensor;

/// The control images, [b, 3, height, width] from 0 to 1.
const IMAGES: &str = "adapter_images";
/// The strength of the adapter for each item, [b, 1, 1, 1]. Missing: 1.
const SCALE: &str = "adapter_scale";
/// The beginning of the names of what the adapter made of the images.
const FEATURES: &str = "adapter_features";

/// Adds control images and the strength of the adapter.
pub(super) fn with_images(conditioning: Conditioning, images: &Tensor, scale: f64) -> Result<Conditioning> {
    let conditioning = conditioning.with(IMAGES, images.clone());
    if scale == 1.0 {
        return Ok(conditioning);
    }
    let scale = Tensor::full(scale as f32, (images.dim(0)?, 1, 1, 1), images.device())?;
    Ok(conditioning.with(SCALE, scale))
}

/// Replaces the control images by what the adapter makes of them, without gradients.
pub(super) fn encoded(adapter: &dyn ImageAdapter, conditioning: Conditioning) -> Result<Conditioning> {
    let Some(images) = conditioning.find(IMAGES).cloned() else {
        return Ok(conditioning);
    };
    let mut conditioning = conditioning.without(IMAGES);
    for (number, feature) in adapter.encode(&images)?.into_iter().enumerate() {
        conditioning = conditioning.with(format!("{FEATURES}_{number}"), feature.detach());
    }
    Ok(conditioning)
}

/// What the adapter adds to the U-Net's features: nothing without control images.
pub(super) fn residuals(
    adapter: &dyn ImageAdapter,
    conditioning: &Conditioning,
    inputs: &UNetInputs<'_>,
) -> Result<UNetResiduals> {
    let features: Vec<Tensor> = match conditioning.find(IMAGES) {
        Some(images) => adapter.encode(images)?,
        None => (0..)
            .map_while(|number: usize| conditioning.find(&format!("{FEATURES}_{number}")).cloned())
            .collect(),
    };
    if features.is_empty() {
        return Ok(UNetResiduals::default());
    }
    let mut residuals = adapter.residuals(&features, inputs)?;
    if let Some(scale) = conditioning.find(SCALE) {
        let all = residuals.in_blocks.iter_mut().chain(&mut residuals.skips);
        for residual in all.chain(&mut residuals.middle) {
            *residual = residual.broadcast_mul(scale)?;
        }
    }
    Ok(residuals)
}
