//! The batches of images that a training reads.

use crate::v1;
use aitk_common::plan::image_batches::{ImageBatch, MAX_IMAGE_BATCHES};

pub(super) fn wire(batches: &[ImageBatch]) -> Vec<v1::ImageBatch> {
    let batches = batches.iter().take(MAX_IMAGE_BATCHES).map(|batch| v1::ImageBatch {
        process: batch.process,
        width: batch.width,
        height: batch.height,
        images: batch.images,
    });
    batches.collect()
}

/// The batches, without empty ones. They only refine a prediction, so surplus ones are ignored.
pub(super) fn batches(wire: &[v1::ImageBatch]) -> Vec<ImageBatch> {
    let batches = wire.iter().take(MAX_IMAGE_BATCHES).map(|batch| ImageBatch {
        process: batch.process,
        width: batch.width,
        height: batch.height,
        images: batch.images,
    });
    batches.filter(|batch| batch.pixels() > 0 && batch.images > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_survive_the_wire_and_surplus_ones_are_ignored() {
        let batch = |width: u32| ImageBatch {
            process: 1,
            width,
            height: 512,
            images: 4,
        };
        let mut sent = wire(&[batch(768), batch(512)]);
        assert_eq!(batches(&sent), [batch(768), batch(512)]);
        sent[0].height = 0;
        assert_eq!(batches(&sent), [batch(512)]);
        sent.resize(1000, v1::ImageBatch::default());
        assert_eq!(batches(&sent), [batch(512)]);
        assert_eq!(wire(&[batch(1); 100]).len(), MAX_IMAGE_BATCHES);
    }
}
