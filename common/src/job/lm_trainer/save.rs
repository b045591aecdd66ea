//! `save` of a training of a code model.

use crate::job::declare::section;
use crate::job::dtype::DType;

section! {
    /// What is saved, how often, and how many saves are kept. A save is a folder: a LoRA as peft has it, a whole model as transformers has it.
    pub struct LmSaveConfig("save") {
        /// Save when `step % save_every == 0`; 0 or null: only at the end.
        save_every: Option<u64> = Some(500), Works;
        /// Number format of saved tensors.
        dtype: Option<DType> = None, Works, shown "float32 of a LoRA, bfloat16 of a model";
        /// Older step saves beyond this number are deleted; 0 keeps all.
        max_step_saves_to_keep: u64 = 5, Works;
    }
}

impl LmSaveConfig {
    /// Whether a save is due at `step`: never when periodic saves are off.
    #[must_use]
    pub fn is_due(&self, step: u64) -> bool {
        self.save_every
            .is_some_and(|every| every > 0 && step.is_multiple_of(every))
    }
}
