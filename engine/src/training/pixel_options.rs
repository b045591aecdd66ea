//! How the images of a batch are changed before they are encoded (`train.img_multiplier`, `train.standardize_images`).

use crate::data::ImageStatistics;
use crate::error::Result;
use candle_core::Tensor;

/// What is done with the images of a batch, in ai-toolkit's order (`process_general_training_batch` in
/// `jobs/process/BaseSDTrainProcess.py`). Images whose latents are cached stay as they are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PixelOptions {
    /// `img_multiplier`: the contrast around the mean of the batch, from 0 to 1. Not of regularisation sets.
    pub contrast: f64,
    /// `standardize_images`: the means and deviations that the channels of each image get.
    pub statistics: Option<ImageStatistics>,
}

impl PixelOptions {
    /// Whether images of a data set stay as they are.
    #[must_use]
    pub fn is_neutral(&self, regularisation: bool) -> bool {
        self.statistics.is_none() && (regularisation || self.contrast == 1.0)
    }

    /// Changes the images of a batch, each [3, h, w] from -1 to 1 or normalised, on the CPU. But for regularisation sets they are limited to
    /// -1 to 1 before `statistics`, also at a contrast of 1.
    ///
    /// # Errors
    /// When the arithmetic fails.
    pub fn apply(&self, images: Vec<Tensor>, regularisation: bool) -> Result<Vec<Tensor>> {
        let mut images = images;
        if !regularisation {
            let mut sum = 0.0;
            for image in &images {
                sum += f64::from(image.mean_all()?.to_scalar::<f32>()?);
            }
            // All images of a batch have the same size.
            let mean = sum / images.len().max(1) as f64;
            for image in &mut images {
                let reduced = image.affine(self.contrast, mean * (1.0 - self.contrast))?;
                *image = reduced.clamp(-1.0, 1.0)?;
            }
        }
        if let Some(statistics) = &self.statistics {
            for image in &mut images {
                *image = statistics.standardize_to(image)?;
            }
        }
        Ok(images)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn numbers(tensor: &Tensor) -> Vec<f64> {
        let flat = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        flat.into_iter().map(f64::from).collect()
    }

    /// Two images, [3, 2, 2].
    fn images() -> Vec<Tensor> {
        let image = |factor: f32| {
            let values: Vec<f32> = (0..12).map(|i| ((i * i % 7) as f32 / 3.5 - 0.9) * factor).collect();
            Tensor::from_vec(values, (3, 2, 2), &Device::Cpu).unwrap()
        };
        vec![image(1.0), image(-0.6)]
    }

    #[test]
    fn the_contrast_is_reduced_around_the_mean_of_the_batch() {
        let options = PixelOptions {
            contrast: 0.4,
            statistics: None,
        };
        let before: Vec<f64> = images().iter().flat_map(numbers).collect();
        let mean = before.iter().sum::<f64>() / before.len() as f64;
        let after: Vec<f64> = options
            .apply(images(), false)
            .unwrap()
            .iter()
            .flat_map(numbers)
            .collect();
        for (before, after) in before.iter().zip(&after) {
            assert!(((before - mean) * 0.4 + mean - after).abs() < 1e-6);
        }
        assert!(!options.is_neutral(false) && options.is_neutral(true));
        let regularisation: Vec<f64> = options
            .apply(images(), true)
            .unwrap()
            .iter()
            .flat_map(numbers)
            .collect();
        assert_eq!(regularisation, before);
    }

    /// ai-toolkit limits them at every contrast, also at 1.
    #[test]
    fn normalised_images_are_limited_but_for_regularisation_sets() {
        let options = PixelOptions {
            contrast: 1.0,
            statistics: None,
        };
        let white = Tensor::full(2.18_f32, (3, 2, 2), &Device::Cpu).unwrap();
        for (regularisation, expected) in [(false, 1.0_f32), (true, 2.18)] {
            let images = options.apply(vec![white.clone()], regularisation).unwrap();
            assert_eq!(numbers(&images[0]), [f64::from(expected); 12]);
        }
    }

    #[test]
    fn channels_get_the_means_and_deviations_of_the_table() {
        let options = PixelOptions {
            contrast: 1.0,
            statistics: Some(ImageStatistics::TRAINING),
        };
        let (means, deviations) = ([-0.0739, -0.1597, -0.2380], [0.5623, 0.5295, 0.5347]);
        for image in options.apply(images(), false).unwrap() {
            for (channel, (mean, deviation)) in means.into_iter().zip(deviations).enumerate() {
                let values = numbers(&image.get(channel).unwrap());
                let average = values.iter().sum::<f64>() / 4.0;
                let squares: f64 = values.iter().map(|value| (value - average).powi(2)).sum();
                assert!((average - mean).abs() < 1e-6, "{average} {mean}");
                assert!(((squares / 3.0).sqrt() - deviation).abs() < 1e-5);
            }
        }
        // A data set divides by fixed deviations instead: torchvision's `Normalize`.
        let image = &images()[0];
        let normal = numbers(&ImageStatistics::SDXL.normalize(image).unwrap());
        let expected = |index: usize, value: f64| match index / 4 {
            0 => (value - 0.0002) / 0.5436,
            1 => (value + 0.1034) / 0.5116,
            _ => (value + 0.1879) / 0.5033,
        };
        for (index, (value, normal)) in numbers(image).into_iter().zip(normal).enumerate() {
            assert!((expected(index, value) - normal).abs() < 1e-6);
        }
        let flat = Tensor::full(0.25_f32, (3, 2, 2), &Device::Cpu).unwrap();
        let standardized = numbers(&ImageStatistics::SDXL.standardize_to(&flat).unwrap());
        assert!((standardized[0] - 0.0002).abs() < 1e-6 && (standardized[11] + 0.1879).abs() < 1e-6);
    }
}
