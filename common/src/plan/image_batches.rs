//! The batches of images that a process reads, as far as the data sets were seen, and the largest image of a file of prompts.

use serde::{Deserialize, Serialize};

/// The most batches that are kept of a job.
pub const MAX_IMAGE_BATCHES: usize = 64;

/// A batch of images of one size that a process reads: a training, or `batch_img2img`, which changes one image at a time; or the largest
/// image that a process generates from a file of prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ImageBatch {
    /// The index of the process in `config.process`.
    pub process: u32,
    /// Width of the images in pixels, as they are trained on.
    pub width: u32,
    /// Height of the images in pixels.
    pub height: u32,
    /// Number of images.
    pub images: u32,
}

impl ImageBatch {
    /// Pixels of an image.
    #[must_use]
    pub fn pixels(&self) -> u64 {
        u64::from(self.width) * u64::from(self.height)
    }

    fn all_pixels(&self) -> u64 {
        self.pixels().saturating_mul(u64::from(self.images))
    }
}

/// The batches of one process that decide how much memory it needs: the one with the most pixels, and the one with the
/// largest images if that is another one.
#[must_use]
pub fn largest_batches(batches: impl IntoIterator<Item = ImageBatch>) -> Vec<ImageBatch> {
    let mut max: Option<[ImageBatch; 2]> = None;
    for batch in batches {
        let [whole, single] = max.unwrap_or([batch; 2]);
        max = Some([
            if batch.all_pixels() > whole.all_pixels() {
                batch
            } else {
                whole
            },
            if batch.pixels() > single.pixels() {
                batch
            } else {
                single
            },
        ]);
    }
    let mut largest = max.map_or_else(Vec::new, Vec::from);
    largest.dedup();
    largest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_batch_and_the_largest_image_are_kept() {
        let batch = |width: u32, images: u32| ImageBatch {
            process: 0,
            width,
            height: 100,
            images,
        };
        assert_eq!(largest_batches([]), []);
        assert_eq!(largest_batches([batch(64, 2), batch(32, 2)]), [batch(64, 2)]);
        let mixed = [batch(64, 4), batch(128, 1), batch(96, 2)];
        assert_eq!(largest_batches(mixed), [batch(64, 4), batch(128, 1)]);
        let extreme = ImageBatch {
            width: u32::MAX,
            height: u32::MAX,
            ..batch(1, u32::MAX)
        };
        assert_eq!(largest_batches([extreme, batch(1, 1)]), [extreme]);
    }
}
