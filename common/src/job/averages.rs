//! `train.ema_config` and `train.validation_config`.

use super::declare::section;
use super::schema::{PresentKeys, ReadContext};

section! {
    /// Exponential moving average of the trained weights.
    pub struct EmaConfig("ema_config") {
        /// On or off. Saves and samples use the averaged weights.
        use_ema: bool = false, Works;
        /// Share of the old average that is kept at each step.
        ema_decay: f64 = 0.999, Works;
        /// Feed the difference back into the weights.
        use_feedback: bool = false, Refused("only the plain average");
        /// Multiply the weights at each update.
        param_multiplier: f64 = 1.0, Refused("only the plain average");
    }
    finish = finish_ema;
}

fn finish_ema(ema: &mut EmaConfig, _present: &PresentKeys, cx: &mut ReadContext) {
    if !(0.0..=1.0).contains(&ema.ema_decay) {
        cx.error_at("ema_decay", "expected a share from 0 to 1");
    }
}

section! {
    /// An image whose loss is measured repeatedly.
    pub struct ValidationItem("validation_items") {
        /// The image.
        image_path [required]: String = String::new(), Works, input ControlImages;
        /// Its caption.
        prompt: String = String::new(), Works;
    }
}

section! {
    /// Loss on fixed images with fixed noise.
    pub struct ValidationConfig("validation_config") {
        /// The images.
        validation_items: Vec<ValidationItem> = Vec::new(), Works;
        /// Pixel budget: resolution squared.
        resolution: u32 = 512, Works;
        /// Steps between measurements.
        validate_every_n_steps: u64 = 10, Works;
        /// Noise levels.
        validation_sigmas: Vec<f64> = vec![1.0, 0.75, 0.5, 0.25], Works;
    }
}
