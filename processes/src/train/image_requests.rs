//! What is read ahead for a micro-batch.

use super::data::TrainingData;
use super::images_ahead::{BatchNumber, Drawing, ImageRequest};
use crate::data::{Batch, Control, TrainingImage};
use std::borrow::Cow;

/// What is read for a batch, besides the images of which the latents are not known.
#[derive(Clone, Copy)]
pub(super) struct Needs {
    /// The images differ each time, or are changed together with those of their batch.
    pub(super) drawn: bool,
    /// The images before their augmentations.
    pub(super) unaugmented: bool,
}

impl TrainingData {
    /// What to read for a batch. `is_known`: whether the latents of an item, and those of its control image, are known without its pixels.
    pub(super) fn image_requests(
        &self,
        batch: &Batch,
        number: BatchNumber,
        needs: Needs,
        is_known: impl Fn(&TrainingImage, Option<&Control>) -> bool,
    ) -> Vec<ImageRequest> {
        let options = &self.datasets[batch.dataset].options;
        let items = self.items_of(batch).enumerate();
        items
            .map(|(place, item)| {
                let control = self.control_of((batch, place), item, number);
                let drawing = needs.drawn.then(|| Drawing {
                    options: options.clone(),
                    generator: self.image_generator(place, number),
                    unaugmented: needs.unaugmented && !options.augmentations.list.is_empty(),
                });
                ImageRequest {
                    image: !needs.drawn && (self.keeps_pixels() || !is_known(item, None)),
                    control: control
                        .filter(|control| needs.drawn || !is_known(item, Some(control)))
                        .map(Cow::into_owned),
                    drawing,
                    item: item.clone(),
                }
            })
            .collect()
    }
}
