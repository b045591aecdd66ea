//! A language model as a part of which a LoRA changes layers.

use crate::families::{AdapterNames, Part, PartRole};
use crate::models::causal_lm::CausalLm;

/// What peft puts before the name of a layer: its own model, and the model in it.
pub(super) const PEFT_PREFIX: &str = "base_model.model";

/// The model as a part whose layers a LoRA changes.
pub(super) fn language_model_part(model: &mut CausalLm) -> Part<'_> {
    Part {
        id: "language_model",
        role: PartRole::Denoiser,
        lora_prefix: PEFT_PREFIX,
        lora_names: AdapterNames::Peft,
        block_lists: &[],
        layers: model,
    }
}
