//! `network` of a training of a code model.

use crate::job::declare::{choices, section};
use crate::job::limits::{MAX_FACTOR, MAX_RANK};
use crate::job::schema::{PresentKeys, ReadContext};
use crate::job::values::OneOrMany;

choices! {
    /// What is trained beside the frozen model.
    pub enum LmNetworkType("network type") {
        /// Low-rank changes of linear layers and embedding layers, saved as peft saves them.
        Lora = "lora", Works;
    }
}

/// The largest chance of a dropped input: with 1 nothing is left.
const MAX_DROPOUT: f64 = 0.99;

section! {
    /// The LoRA that is trained while the model is frozen.
    pub struct LmNetworkConfig("network") {
        /// Kind of network.
        kind as "type": LmNetworkType = LmNetworkType::Lora, Works;
        /// Rank.
        linear: u32 = 16, Works;
        /// The LoRA's output is scaled by `linear_alpha / linear`.
        linear_alpha: Option<f64> = None, Works, shown "`linear`";
        /// Chance that an input of the down projection is dropped while training, as in peft.
        dropout: f64 = 0.0, Works;
        /// Only layers whose name (`model.layers.0.self_attn.q_proj`) contains one of these. An embedding layer has a LoRA only if its whole name
        /// (`embed_tokens`, `wte`, `wpe`) is in one of these. Absent: all linear layers of the blocks.
        only_if_contains: OneOrMany<String> = OneOrMany(Vec::new()), Works;
        /// No layers whose name contains one of these; wins over `only_if_contains`.
        ignore_if_contains: OneOrMany<String> = OneOrMany(Vec::new()), Works;
    }
    finish = finish;
}

fn finish(network: &mut LmNetworkConfig, _present: &PresentKeys, cx: &mut ReadContext) {
    cx.check_not_zero("linear", network.linear);
    cx.check_at_most("linear", network.linear, MAX_RANK);
    cx.check_in_range("dropout", network.dropout, 0.0..=MAX_DROPOUT);
    if let Some(alpha) = network.linear_alpha {
        cx.check_in_range("linear_alpha", alpha, 0.0..=MAX_FACTOR);
        if alpha == 0.0 {
            cx.error_at("linear_alpha", "expected a number above 0: with 0 nothing is trained");
        }
    }
}

impl LmNetworkConfig {
    /// The alpha: `linear_alpha`, or the rank.
    #[must_use]
    pub fn alpha(&self) -> f64 {
        self.linear_alpha.unwrap_or(f64::from(self.linear))
    }
}
