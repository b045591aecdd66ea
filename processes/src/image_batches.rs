//! The images of an attempt's data sets, for the prediction of its memory.

use super::{img2img, train};
use aitk_common::attempt::AttemptSpec;
use aitk_common::plan::image_batches::ImageBatch;

/// The largest batches of each process of an attempt that trains on images or changes them. Headers are read, and nothing is written. A
/// process whose data cannot be read has none.
#[must_use]
pub fn image_batches(spec: &AttemptSpec) -> Vec<ImageBatch> {
    let mut batches = train::image_batches(spec);
    batches.extend(img2img::image_batches(spec));
    batches
}
