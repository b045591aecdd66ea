//! `train.lr_factors`: other learning rates for some of the trained tensors.

use super::declare::section;
use super::limits::{MAX_FACTOR, MAX_LR_FACTORS};
use super::optimizer::OptimizerName;
use super::schema::{PresentKeys, ReadContext};

section! {
    /// A factor of the learning rate of some tensors.
    pub struct LrFactor("lr_factors") {
        /// Part of the names of the tensors in the saved LoRA or model, such as `lora_te`, `down_blocks_0` or `lora_up`; `*` stands for any
        /// text.
        contains: String = String::new(), Works, shown "required";
        /// Their learning rate is `lr` times this number; 0 leaves them as they are.
        factor: f64 = 1.0, Works;
    }
    finish = finish;
}

fn finish(factor: &mut LrFactor, _present: &PresentKeys, cx: &mut ReadContext) {
    if factor.contains.is_empty() {
        cx.error_at(
            "contains",
            "needs a part of the names of the tensors, such as `lora_te`",
        );
    }
    cx.check_in_range("factor", factor.factor, 0.0..=MAX_FACTOR);
}

/// Checks the factors of a training with this optimizer.
pub(super) fn check(factors: &[LrFactor], optimizer: OptimizerName, trains_text: bool, cx: &mut ReadContext) {
    cx.check_item_count("lr_factors", factors.len(), MAX_LR_FACTORS);
    check_entries(factors, trains_text, cx);
    if !factors.is_empty() && optimizer.finds_learning_rate() {
        cx.error_at(
            "lr_factors",
            format!(
                "`{optimizer}` finds one learning rate for all tensors: use `adamw`, `adamw8bit`, `lion` or `adafactor`"
            ),
        );
    }
}

/// Reports entries that can be for no tensor, and entries that leave nothing to train.
fn check_entries(factors: &[LrFactor], trains_text: bool, cx: &mut ReadContext) {
    for (index, factor) in factors.iter().enumerate() {
        if factor.contains.starts_with("lora_te") && !trains_text {
            cx.error_at(
                &format!("lr_factors[{index}].contains"),
                format!(
                    "no trained tensor has `{}` in its name, because no text encoder is trained: set `train.train_text_encoder: true`, or remove \
                     the entry",
                    factor.contains
                ),
            );
        }
    }
    let all = factors.iter().take_while(|factor| factor.factor == 0.0);
    if all
        .into_iter()
        .any(|factor| factor.contains.bytes().all(|byte| byte == b'*'))
    {
        cx.error_at("lr_factors", "nothing is trained: all learning rates are 0");
    }
}

impl LrFactor {
    /// Whether the factor is for the tensor of this name.
    #[must_use]
    pub fn is_for(&self, name: &str) -> bool {
        let mut rest = name;
        self.contains.split('*').all(|part| match rest.split_once(part) {
            Some((_, after)) => {
                rest = after;
                true
            }
            None => false,
        })
    }
}

/// The factor of a tensor: that of the first entry whose text is in its name.
#[must_use]
pub fn lr_factor(factors: &[LrFactor], name: &str) -> f64 {
    let found = factors.iter().find(|factor| factor.is_for(name));
    found.map_or(1.0, |factor| factor.factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_any_text() {
        let is_for = |contains: &str, name: &str| {
            let contains = contains.to_owned();
            LrFactor {
                contains,
                ..LrFactor::default()
            }
            .is_for(name)
        };
        let name = "lora_te1_text_model_q_proj.lora_up.weight";
        for contains in ["lora_te1", "lora_te*lora_up", "lora_up", "*q_proj*", "*"] {
            assert!(is_for(contains, name), "{contains}");
        }
        for contains in ["lora_te2", "lora_up*lora_te", "lora_te*lora_te", "lora_unet*up"] {
            assert!(!is_for(contains, name), "{contains}");
        }
    }
}
