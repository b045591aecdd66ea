//! `train.ema_config`: the average of the trained weights.

use super::declare::section;
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
