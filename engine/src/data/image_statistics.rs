//! Means and standard deviations of the channels of images, from -1 to 1. The numbers are those of ai-toolkit, which measured them.

use crate::error::Result;
use candle_core::{Device, Tensor};

/// Means and standard deviations of red, green and blue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ImageStatistics {
    /// What identifies them in the keys of cached latents.
    pub name: &'static str,
    means: [f32; 3],
    deviations: [f32; 3],
}

impl ImageStatistics {
    /// Those of SDXL.
    pub const SDXL: Self = Self {
        name: "sdxl",
        means: [0.0002, -0.1034, -0.1879],
        deviations: [0.5436, 0.5116, 0.5033],
    };
    /// Those that a data set's `standardize_images` divides by, for other models than SDXL.
    pub const DATASET: Self = Self {
        name: "sd",
        means: [-0.1600, -0.2450, -0.3227],
        deviations: [0.5319, 0.4997, 0.5139],
    };
    /// Those that images get with `train.standardize_images`, for other models than SDXL.
    pub const TRAINING: Self = Self {
        name: "training",
        means: [-0.0739, -0.1597, -0.2380],
        deviations: [0.5623, 0.5295, 0.5347],
    };

    /// Pixels [3, h, w] minus the means, divided by the deviations.
    ///
    /// # Errors
    /// When the arithmetic fails.
    pub fn normalize(&self, pixels: &Tensor) -> Result<Tensor> {
        let centred = pixels.broadcast_sub(&column(self.means)?)?;
        Ok(centred.broadcast_div(&column(self.deviations)?)?)
    }

    /// Pixels [3, h, w] whose channels get these means and deviations. A channel of one value gets the mean.
    ///
    /// # Errors
    /// When the arithmetic fails.
    pub fn standardize_to(&self, pixels: &Tensor) -> Result<Tensor> {
        let flat = pixels.flatten_from(1)?;
        let count = flat.dim(1)?.max(2);
        let centred = flat.broadcast_sub(&flat.mean_keepdim(1)?)?;
        let variance = (centred.sqr()?.sum_keepdim(1)? / (count - 1) as f64)?;
        let deviation = variance.sqrt()?.maximum(1e-6)?;
        let normal = centred.broadcast_div(&deviation)?.reshape(pixels.shape())?;
        let wide = normal.broadcast_mul(&column(self.deviations)?)?;
        Ok(wide.broadcast_add(&column(self.means)?)?)
    }
}

/// One number per channel, [3, 1, 1] on the CPU.
fn column(values: [f32; 3]) -> Result<Tensor> {
    Ok(Tensor::new(&values, &Device::Cpu)?.reshape((3, 1, 1))?)
}
