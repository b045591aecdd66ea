//! The bytes of each phase by itself.

use super::{CAPTION_TOKENS, Job, MAX_SIDE, WorkKind, prompt_tokens};
use crate::plan::json::config_options;
use crate::plan::memory_options::MemoryOptions;
use crate::plan::phases::PhaseBytes;
use crate::plan::profile::MemoryProfile;
use crate::plan::walk::Backend;

impl Job<'_> {
    /// The bytes of live tensors in each phase.
    pub(in crate::plan) fn phases(&self, profile: MemoryProfile, backend: Backend) -> PhaseBytes {
        let options = MemoryOptions::of(profile).merge(config_options(self.body));
        let model = self.model(&options, backend);
        if self.kind == WorkKind::Generation {
            let sizes = self.generated_sizes();
            let prompt = prompt_tokens(&sizes);
            let largest = sizes.iter().max_by(|a, b| a.area().total_cmp(&b.area()));
            let Some(size) = largest else {
                return PhaseBytes::default();
            };
            let side = [size.height, size.width].map(|side| side.min(MAX_SIDE));
            let guided = self.is_guided(size);
            let batch = if guided && !options.sequential_cfg { 2.0 } else { 1.0 };
            return PhaseBytes {
                text: self.text_pass(&model, backend, prompt),
                encoding: match self.changes_images() {
                    true => self.encoding(&model, &options, backend, side),
                    false => 0.0,
                },
                denoising: self.denoising(&model, backend, side, batch, guided, prompt).peak(),
                decoding: self.decoding(&model, &options, backend, side).peak(),
                ..PhaseBytes::default()
            };
        }
        let data = self.data();
        let encoding = data
            .iter()
            .map(|batch| self.encoding(&model, &options, backend, batch.size));
        let fused = options.fused_backward && self.is_full && self.optimizer.is_separable;
        let checkpointed = self.is_checkpointed(&options);
        let step = self.step(&model, (&options, backend), fused, checkpointed, &data);
        PhaseBytes {
            text: self.text_pass(&model, backend, CAPTION_TOKENS),
            encoding: encoding.fold(0.0, f64::max),
            step: step.peak,
            ..PhaseBytes::default()
        }
    }
}
