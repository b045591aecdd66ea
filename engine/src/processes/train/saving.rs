//! How a run ends, and what it saves on the way.

use super::super::{Context, artifact_name};
use super::Run;
use super::write::files_of;
use crate::error::Result;
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::fsutil;
use std::path::Path;

impl Run<'_> {
    pub(super) fn stopped(&mut self, cx: &mut Context<'_>, step: u64) -> Result<Outcome> {
        if step > self.start && self.checkpointed != Some(step) {
            if cx.is_enclosed() && !self.process.save.is_due(step) {
                // Retention keeps what an undisturbed run would have kept.
                self.save_only(cx, step)?;
            } else {
                self.save(cx, step)?;
            }
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
        self.remove_interrupted(cx, Some(&path))?;
        Ok(Outcome::Completed)
    }

    pub(super) fn announce_final(&self, cx: &mut Context<'_>) {
        self.announce(cx, &self.folder.final_save(), self.process.train.steps);
    }

    /// A step save: the exact state, the LoRA or model, and then what retention removes. In this order, so that a kill in
    /// between leaves a state to go on from: from weights alone the run would go on without the optimizer's state.
    pub(super) fn save(&mut self, cx: &mut Context<'_>, step: u64) -> Result<()> {
        self.save_only(cx, step)?;
        self.retain(cx, step)
    }

    fn save_only(&mut self, cx: &mut Context<'_>, step: u64) -> Result<()> {
        cx.phase("saving");
        self.checkpoint(cx, step)?;
        let save = self.folder.step_save(step);
        self.write_save(cx, &save, step)?;
        self.remove_interrupted(cx, Some(&save))?;
        self.draw_losses(cx, step);
        Ok(())
    }

    /// A run that goes on from where another attempt was interrupted, between two saves, has no use for that attempt's step save:
    /// in the end the job has the files of an undisturbed run. A run in place keeps it, for whoever interrupted it.
    pub(super) fn note_interruption(&mut self, cx: &mut Context<'_>) -> Result<()> {
        let between = self.checkpointed == Some(self.start) && !self.process.save.is_due(self.start);
        self.interrupted = (between && cx.is_enclosed()).then_some(self.start);
        // At once where it is one file: what is announced before the next checkpoint cannot be lost with it.
        self.remove_interrupted(cx, None)
    }

    /// Removes the step save of an attempt that was interrupted. `like`: a save that has the same files, where a save is a
    /// folder, whose files this machine may never have seen.
    fn remove_interrupted(&mut self, cx: &mut Context<'_>, like: Option<&Path>) -> Result<()> {
        let Some(step) = self.interrupted else { return Ok(()) };
        let save = self.folder.step_save(step);
        let gone = match like {
            None if self.folder.saves_folders() => return Ok(()),
            Some(like) if like.is_dir() => files_of(like)
                .iter()
                .filter_map(|file| file.strip_prefix(like).ok())
                .map(|below| save.join(below))
                .collect(),
            _ => vec![save.clone()],
        };
        self.interrupted = None;
        fsutil::remove(&save)?;
        for removed in gone {
            let name = artifact_name(&self.folder.root, &removed);
            cx.events.emit(ChildEvent::ArtifactRemoved { name });
        }
        Ok(())
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
