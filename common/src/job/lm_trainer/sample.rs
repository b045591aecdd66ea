//! `sample` of a training of a code model.

use crate::job::declare::section;
use crate::job::limits::{MAX_CONTEXT, MAX_LM_SAMPLES};
use crate::job::schema::{PresentKeys, ReadContext};

section! {
    /// Completions of prompts during the training, which show its progress: each time the most likely token.
    pub struct LmSampleConfig("sample") {
        /// The prompts. None: no completions.
        prompts: Vec<String> = Vec::new(), Works;
        /// Complete the prompts when `step % sample_every == 0`, and before the first and after the last step; 0: only then.
        sample_every: u64 = 100, Works;
        /// The longest completion in tokens.
        max_new_tokens: u32 = 64, Works;
    }
    finish = finish;
}

fn finish(sample: &mut LmSampleConfig, _present: &PresentKeys, cx: &mut ReadContext) {
    cx.check_item_count("prompts", sample.prompts.len(), MAX_LM_SAMPLES);
    if sample.prompts.iter().any(String::is_empty) {
        cx.error_at("prompts", "expected texts to complete, found an empty one");
    }
    cx.check_not_zero("max_new_tokens", sample.max_new_tokens);
    cx.check_at_most("max_new_tokens", sample.max_new_tokens, MAX_CONTEXT);
}

impl LmSampleConfig {
    /// Whether completions are due after `step` of `steps` steps.
    #[must_use]
    pub fn is_due(&self, step: u64, steps: u64) -> bool {
        let is_due = self.sample_every > 0 && step.is_multiple_of(self.sample_every);
        !self.prompts.is_empty() && (is_due || step == 0 || step == steps)
    }
}
