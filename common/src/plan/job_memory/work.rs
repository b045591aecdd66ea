//! The work of a process in FLOPs, from the same walk.

use super::{CAPTION_TOKENS, Job, MAX_SIDE, WorkKind, prompt_tokens};
use crate::plan::demand::evaluations;
use crate::plan::memory_options::MemoryOptions;
use crate::plan::parameter_counts::ParameterCounts;
use crate::plan::walk::Backend;
use serde_json::Value;

impl Job<'_> {
    /// The FLOPs of one image of a generation, or of one micro-batch of a training, in passes of the family's published denoiser
    /// over one image of 512 x 512.
    pub(in crate::plan) fn passes(&self) -> f64 {
        let options = MemoryOptions::default();
        let backend = Backend::CPU;
        let model = self.model(&options, backend);
        let flops = match self.kind {
            WorkKind::Training => {
                let checkpointed = self.is_checkpointed(&options);
                let step = self.step(&model, (&options, backend), false, checkpointed, &self.data());
                step.flops
            }
            WorkKind::Generation => {
                let all = self.generated_sizes();
                let prompt = prompt_tokens(&all);
                let evaluations = evaluations(self.body);
                let mut flops = 0.0;
                for guided in [false, true] {
                    let sizes = all.iter().filter(|size| self.is_guided(size) == guided);
                    let Some(largest) = sizes.clone().max_by(|a, b| a.area().total_cmp(&b.area())) else {
                        continue;
                    };
                    let side = [largest.height, largest.width].map(|side| side.min(MAX_SIDE));
                    let batch = if guided { 2.0 } else { 1.0 };
                    let pass = self.denoising(&model, backend, side, batch, guided, prompt).flops();
                    let one = evaluations * pass + self.decoding(&model, &options, backend, side).flops();
                    // One walk for all of them: the others by their pixels.
                    flops += one * sizes.map(|size| size.area() / largest.area()).sum::<f64>();
                }
                flops / all.len().max(1) as f64
            }
        };
        flops / self.published_pass()
    }

    /// The FLOPs of a pass of the family's published denoiser over one image of 512 x 512.
    pub(in crate::plan) fn published_pass(&self) -> f64 {
        let published = Job {
            kind: WorkKind::Generation,
            body: &Value::Null,
            family: self.family,
            shapes: self.family.shapes,
            counts: ParameterCounts::default(),
            is_full: false,
            optimizer: self.optimizer,
            batches: Vec::new(),
        };
        let model = published.model(&MemoryOptions::default(), Backend::CPU);
        published
            .denoising(&model, Backend::CPU, [512.0; 2], 1.0, false, CAPTION_TOKENS)
            .flops()
    }
}
