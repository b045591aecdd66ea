//! How a run ends, and what it saves on the way.

use super::super::{Context, artifact_name};
use super::Run;
use crate::error::Result;
use aitk_common::attempt::{ChildEvent, Outcome};

impl Run<'_> {
    pub(super) fn stopped(&mut self, cx: &mut Context<'_>, step: u64) -> Result<Outcome> {
        if step > self.start && self.checkpointed != Some(step) {
            self.save(cx, step)?;
        }
        cx.log("info", format!("stopped after step {step}"));
        Ok(Outcome::stopped())
    }

    /// The exact state, the last pictures, and then the final save, which says that the run is complete: until it is
    /// there, the same command does the rest again.
    pub(super) fn finish(&mut self, cx: &mut Context<'_>) -> Result<Outcome> {
        let steps = self.process.train.steps;
        if self.checkpointed != Some(steps) {
            cx.phase("saving");
            self.checkpoint(cx, steps)?;
        }
        if !self.sample(cx, steps, false)? {
            return Ok(Outcome::stopped());
        }
        // The pictures told their own progress.
        cx.events.emit(ChildEvent::Progress {
            done: steps,
            total: steps,
            seconds_per_step: None,
        });
        cx.phase("saving");
        self.draw_losses(cx, steps);
        let path = self.folder.final_save();
        self.write_save(cx, &path, steps)?;
        Ok(Outcome::Completed)
    }

    pub(super) fn announce_final(&self, cx: &mut Context<'_>) {
        self.announce(cx, &self.folder.final_save(), self.process.train.steps);
    }

    /// A step save: the exact state, the LoRA or model, and then what retention removes. In this order, so that a kill in
    /// between leaves a state to go on from: from weights alone the run would go on without the optimizer's state.
    pub(super) fn save(&mut self, cx: &mut Context<'_>, step: u64) -> Result<()> {
        cx.phase("saving");
        self.checkpoint(cx, step)?;
        self.write_save(cx, &self.folder.step_save(step), step)?;
        self.draw_losses(cx, step);
        self.retain(cx, step)
    }

    /// Removes what retention does not keep after the save of this step.
    fn retain(&self, cx: &mut Context<'_>, step: u64) -> Result<()> {
        for removed in self.folder.retain(self.process, step)? {
            let name = artifact_name(&self.folder.root, &removed);
            cx.events.emit(ChildEvent::ArtifactRemoved { name });
        }
        Ok(())
    }

    /// What follows the exact state of a step and was lost when the run was killed right after it: the step's save, the
    /// removal of older ones, and the step's pictures.
    pub(super) fn make_up(&mut self, cx: &mut Context<'_>) -> Result<()> {
        let step = self.start;
        let exact = self.checkpointed == Some(step);
        if exact && self.process.save.is_due(step) && !self.folder.step_save(step).exists() {
            self.write_save(cx, &self.folder.step_save(step), step)?;
        }
        self.retain(cx, step)?;
        if self.process.sample.is_due(step) && !self.has_samples(step) {
            self.sample(cx, step, false)?;
        }
        Ok(())
    }

    /// Runs `f` with the EMA weights in place, where EMA is on.
    pub(super) fn with_averages<T>(&mut self, f: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if let Some(ema) = self.trainer.ema() {
            ema.swap_in().map_err(crate::training::optim_error)?;
        }
        let result = f(self);
        if let Some(ema) = self.trainer.ema() {
            ema.swap_out().map_err(crate::training::optim_error)?;
        }
        result
    }
}
