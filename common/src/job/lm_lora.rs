//! `model.loras`: LoRAs of a language model, each with its strength.

use super::declare::section;
use super::limits::{MAX_FACTOR, MAX_LORAS};
use super::schema::{PresentKeys, ReadContext};

section! {
    /// A LoRA of a language model.
    pub struct LmLoraConfig("loras") {
        /// The LoRA: a folder as peft has it, or a `.safetensors` file.
        path [required]: String = String::new(), Works, input Lora;
        /// Its strength.
        weight: f64 = 1.0, Works;
    }
    finish = finish;
}

fn finish(lora: &mut LmLoraConfig, present: &PresentKeys, cx: &mut ReadContext) {
    if present.has("path") && lora.path.trim().is_empty() {
        cx.error_at("path", "needs the path of a LoRA");
    }
    cx.check_in_range("weight", lora.weight, -MAX_FACTOR..=MAX_FACTOR);
}

/// Checks the keys of a section with `lora_path`, `lora_weight` and `loras`.
pub(super) fn check_loras(lora_path: Option<&str>, lora_weight: f64, loras: &[LmLoraConfig], cx: &mut ReadContext) {
    cx.check_in_range("lora_weight", lora_weight, -MAX_FACTOR..=MAX_FACTOR);
    // The value is looked at and not whether the key is present: a job that was written by aitk has every key.
    if lora_path.is_none() && lora_weight != 1.0 {
        cx.error_at(
            "lora_weight",
            "has no effect without `lora_path`: set it, or remove this key. LoRAs of `loras` have a `weight` of their own",
        );
    }
    cx.check_item_count("loras", loras.len(), MAX_LORAS);
}

/// The paths of all LoRAs with their strengths: that of `lora_path`, then those of `loras`.
pub(super) fn all_loras<'a>(
    lora_path: Option<&'a str>,
    lora_weight: f64,
    loras: &'a [LmLoraConfig],
) -> Vec<(&'a str, f64)> {
    let first = lora_path.map(|path| (path, lora_weight));
    let others = loras.iter().map(|lora| (lora.path.as_str(), lora.weight));
    first.into_iter().chain(others).collect()
}
