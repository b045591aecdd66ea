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

    /// The exact state, the last images, and then the final save, which says that the run is complete: until it is
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
        // The images told their own progress.
        cx.events.emit(ChildEvent::Progress {
            done: steps,
            total: steps,
            seconds_per_step: None,
        });
        cx.phase("saving");
        self.draw_losses(cx, steps);
        let path = self.folder.final_save();
        self.write_save(cx, &path, steps)?;
        self.remove_interrupted(cx, &path)?;
        Ok(Outcome::Completed)
    }

    /// Tells of the final save of a run that was complete before this attempt, and removes what that had no time for.
    pub(super) fn announce_final(&mut self, cx: &mut Context<'_>) -> Result<()> {
        let path = self.folder.final_save();
        self.announce(cx, &path, self.process.train.steps);
        self.remove_interrupted(cx, &path)
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
        self.remove_interrupted(cx, &save)?;
        self.draw_losses(cx, step);
        Ok(())
    }

    /// A run that goes on from where another attempt was interrupted, between two saves, has no use for that attempt's step save
    /// once it has one of its own: in the end the job has the files of an undisturbed run. Before that it may be the newest that
    /// the job has. A run in place keeps it, for whoever interrupted it.
    pub(super) fn note_interruption(&mut self, cx: &Context<'_>) {
        if !cx.is_enclosed() {
            self.interrupted.clear();
            return;
        }
        // At the end there is a final save, and none of the step.
        let between = !self.process.save.is_due(self.start) && self.start != self.process.train.steps;
        if self.checkpointed == Some(self.start) && between && !self.interrupted.contains(&self.start) {
            self.interrupted.push(self.start);
        }
    }

    /// Removes the step saves of attempts that were interrupted. `like`: a save that is there now and has the same files, where a
    /// save is a folder, whose files this machine may never have seen.
    ///
    /// What is announced before the next checkpoint cannot be lost with it; what is lost with this one, the checkpoint knows.
    fn remove_interrupted(&mut self, cx: &mut Context<'_>, like: &Path) -> Result<()> {
        let files = files_of(like);
        for step in std::mem::take(&mut self.interrupted) {
            let save = self.folder.step_save(step);
            // A run that was sent back by `train.start_step` may have come there again.
            if save == like {
                continue;
            }
            fsutil::remove(&save)?;
            for below in files.iter().filter_map(|file| file.strip_prefix(like).ok()) {
                let removed = match below.as_os_str().is_empty() {
                    true => save.clone(),
                    false => save.join(below),
                };
                let name = artifact_name(&self.folder.root, &removed);
                cx.events.emit(ChildEvent::ArtifactRemoved { name });
            }
        }
        Ok(())
    }

    /// Removes what retention does not keep after the save of this step.
    fn retain(&self, cx: &mut Context<'_>, step: u64) -> Result<()> {
        for removed in self.folder.retain(self.process, step, &self.interrupted)? {
            let name = artifact_name(&self.folder.root, &removed);
            cx.events.emit(ChildEvent::ArtifactRemoved { name });
        }
        Ok(())
    }

    /// What follows the exact state of a step and was lost when the run was killed right after it: the step's save, the
    /// removal of older ones, and the step's images.
    pub(super) fn make_up(&mut self, cx: &mut Context<'_>) -> Result<()> {
        let step = self.start;
        let exact = self.checkpointed == Some(step);
        if exact && self.process.save.is_due(step) {
            let save = self.folder.step_save(step);
            if !save.exists() {
                self.write_save(cx, &save, step)?;
            }
            self.remove_interrupted(cx, &save)?;
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
