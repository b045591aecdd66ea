//! `save`: what is saved, how often, and how many saves are kept.

use super::declare::{choices, section};
use super::dtype::DType;

choices! {
    /// Layout of full-model saves. LoRAs are always one safetensors file.
    pub enum SaveFormat("save format") {
        /// One file.
        Safetensors = "safetensors", Works;
        /// A diffusers folder.
        Diffusers = "diffusers", Works;
    }
}

section! {
    /// What is saved, how often, and how many saves are kept.
    pub struct SaveConfig("save") {
        /// Save when `step % save_every == 0`, never on the first step that runs; 0 or null: only at the end.
        save_every: Option<u64> = Some(1000), Works;
        /// Number format of saved tensors.
        dtype: DType = DType::F16, Works;
        /// Older step saves beyond this number are deleted; 0 keeps all.
        max_step_saves_to_keep: u64 = 5, Works;
        /// `safetensors` or `diffusers`; only matters when a full model is saved.
        save_format: SaveFormat = SaveFormat::Safetensors, Works;
        /// `aitk run`: upload saves, samples and a model card to Hugging Face at the end, as `aitk push` does. A job of `aitk submit` is not
        /// uploaded: use `aitk push`.
        push_to_hub: bool = false, Works;
        /// Repository to upload to: `USER/NAME`. Made if it does not exist.
        hf_repo_id: Option<String> = None, Works;
        /// Whether a new repository is private.
        hf_private: bool = false, Works;
    }
}

impl SaveConfig {
    /// Whether a save is due at `step`: never when periodic saves are off.
    #[must_use]
    pub fn is_due(&self, step: u64) -> bool {
        self.save_every
            .is_some_and(|every| every > 0 && step.is_multiple_of(every))
    }
}
