//! `train.ema_config` and `train.validation_config`.

use super::declare::section;
use super::limits::{MAX_SIDE, MAX_VALIDATION_ITEMS, MAX_VALIDATION_SIGMAS};
use super::schema::{PresentKeys, ReadContext};

section! {
    /// Exponential moving average of the trained weights.
    pub struct EmaConfig("ema_config") {
        /// On or off. Saves and samples use the averaged weights.
        use_ema: bool = false, Works;
        /// Share of the old average that is kept at each step.
        ema_decay: f64 = 0.999, Works;
        /// Move the weights towards their average too, ten times as far as the average moves.
        use_feedback: bool = false, Works;
        /// Multiply the weights by this at each update.
        param_multiplier: f64 = 1.0, Works;
    }
    finish = finish_ema;
}

/// The weights are multiplied at each step: above this, they grow without end.
const MAX_WEIGHT_FACTOR: f64 = 1.1;

fn finish_ema(ema: &mut EmaConfig, _present: &PresentKeys, cx: &mut ReadContext) {
    if !(0.0..=1.0).contains(&ema.ema_decay) {
        cx.error_at("ema_decay", "expected a share from 0 to 1");
    }
    cx.check_in_range("param_multiplier", ema.param_multiplier, 0.0..=MAX_WEIGHT_FACTOR);
    for (on, key) in [
        (ema.use_feedback, "use_feedback"),
        (ema.param_multiplier != 1.0, "param_multiplier"),
    ] {
        if on && !ema.use_ema {
            cx.warn_at(key, "has no effect without `use_ema`");
        }
    }
}

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
