//! `train.validation_config`: the loss on images that are not trained on.

use super::declare::section;
use super::limits::{MAX_SIDE, MAX_VALIDATION_ITEMS, MAX_VALIDATION_SIGMAS};
use super::schema::{PresentKeys, ReadContext};

section! {
    /// An image whose loss is measured repeatedly.
    pub struct ValidationItem("validation_items") {
        /// The image.
        image_path [required]: String = String::new(), Works, input ControlImages;
        /// Its caption; `[trigger]` is replaced.
        prompt: String = String::new(), Works;
    }
}

section! {
    /// Loss on fixed images with fixed noise, which the metric `val/loss` has.
    pub struct ValidationConfig("validation_config") {
        /// The images.
        validation_items: Vec<ValidationItem> = Vec::new(), Works;
        /// Pixel budget: resolution squared.
        resolution: u32 = 512, Works;
        /// Steps between measurements; it is measured after the first and the last step too. 0: only then.
        validate_every_n_steps: u64 = 10, Works;
        /// Noise levels.
        validation_sigmas: Vec<f64> = vec![1.0, 0.75, 0.5, 0.25], Works;
    }
    finish = finish_validation;
}

fn finish_validation(validation: &mut ValidationConfig, _present: &PresentKeys, cx: &mut ReadContext) {
    cx.check_item_count(
        "validation_items",
        validation.validation_items.len(),
        MAX_VALIDATION_ITEMS,
    );
    cx.check_item_count(
        "validation_sigmas",
        validation.validation_sigmas.len(),
        MAX_VALIDATION_SIGMAS,
    );
    cx.check_not_zero("resolution", validation.resolution);
    cx.check_at_most("resolution", validation.resolution, MAX_SIDE);
    if validation.validation_items.is_empty() {
        cx.warn_at("validation_items", "is empty: nothing is measured");
    }
    if validation.validation_sigmas.is_empty() {
        cx.error_at("validation_sigmas", "expected at least one noise level from 0 to 1");
    }
    if validation
        .validation_sigmas
        .iter()
        .any(|level| !(0.0..=1.0).contains(level))
    {
        cx.error_at("validation_sigmas", "expected noise levels from 0 to 1");
    }
}
