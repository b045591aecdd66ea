//! Saves during a run, and the end of a run.

use super::super::context::{Context, artifact_name};
use super::super::run_folder::OtherSaves;
use super::super::save_files::files_in_save;
use super::run::Run;
use crate::error::Result;
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::fsutil;
use aitk_common::requested_outputs::RequestedOutputs;
use std::path::Path;

impl Run<'_> {
    /// Saves the state of an interrupted run, if it is not saved yet.
    pub(super) fn save_and_stop(&mut self, cx: &mut Context<'_>, step: u64) -> Result<Outcome> {
        if step > self.start_step && self.last_checkpoint != Some(step) {
            if cx.has_staged_inputs() && !self.is_wanted_save(step) {
                // No retention here, so that the kept saves are those of a run without interruption.
                self.save_without_retention(cx, step)?;
            } else {
                // Merged after the checkpoint, so that the run goes on as if it had not been interrupted.
                self.checkpoint_then_save(cx, step)?;
            }
        }
        cx.log("info", format!("stopped after step {step}"));
        Ok(Outcome::stopped())
    }

    /// Writes the last checkpoint, the last samples and the final save, in this order. The final save marks the run as
    /// complete: until it exists, running the same job again repeats the rest.
    pub(super) fn finish(&mut self, cx: &mut Context<'_>) -> Result<Outcome> {
        let steps = self.process.train.steps;
        // A run whose `steps` were lowered has gone further.
        let reached = steps.max(self.start_step);
        if self.last_checkpoint != Some(reached) {
            cx.phase("saving");
            self.checkpoint(cx, reached)?;
        }
        if self.validation_is_pending || !self.sample(cx, reached, false)? {
            return Ok(Outcome::stopped());
        }
        // Sampling emitted its own progress.
        cx.events.emit(ChildEvent::Progress {
            done: steps,
            total: steps,
            seconds_per_step: None,
        });
        cx.phase("saving");
        self.write_loss_plot(cx, reached);
        self.write_event_file(cx, reached);
        self.write_learned_snr(cx, reached)?;
        let path = self.folder.final_save();
        self.merge_network(cx, reached)?;
        self.write_save(cx, &path, reached)?;
        self.remove_interrupted_saves(cx, &path)?;
        // Requests that came after the last step: the final save and the samples have just been made.
        let _served = cx.requests.take();
        Ok(Outcome::Completed)
    }

    /// Emits the final save of a run that was complete before this attempt, and removes interrupted saves that are
    /// left.
    pub(super) fn emit_final_save(&mut self, cx: &mut Context<'_>) -> Result<()> {
        let path = self.folder.final_save();
        self.emit_save(cx, &path, self.process.train.steps.max(self.start_step));
        self.remove_interrupted_saves(cx, &path)
    }

    /// Takes the outputs that the user asks for after `step` steps, and logs that samples will be made.
    pub(super) fn take_requests(&mut self, cx: &mut Context<'_>, step: u64) -> RequestedOutputs {
        let requested = cx.requests.take();
        if requested.samples && self.makes_samples() {
            cx.log("info", format!("sampling at step {step}, as requested"));
        } else if requested.samples {
            cx.log(
                "warn",
                "samples were requested, but the section `sample` of the config has no prompts, or `train.disable_sampling` is \
                 true: nothing is sampled",
            );
        }
        requested
    }

    /// As [`Self::save`], because the user asked for it.
    pub(super) fn save_as_requested(&mut self, cx: &mut Context<'_>, step: u64) -> Result<()> {
        cx.log("info", format!("saving at step {step}, as requested"));
        self.save(cx, step)
    }

    /// Whether the save of a step is made by the config or was requested, and not only because an attempt was interrupted.
    fn is_wanted_save(&self, step: u64) -> bool {
        self.process.save.is_due(step) || self.kept_saves.contains(&step)
    }

    /// Makes a step save: writes the checkpoint, then the LoRA or model, then applies retention. In this order, so that
    /// a kill in between leaves a checkpoint; from weights alone the run would resume without the optimizer's state. The
    /// checkpoint lists the save: a later attempt neither takes it for that of an interrupted one, nor forgets to remove it.
    ///
    /// If the network is merged at saves, it is merged first: the checkpoint has the merged layers.
    pub(super) fn save(&mut self, cx: &mut Context<'_>, step: u64) -> Result<()> {
        self.merge_network(cx, step)?;
        self.checkpoint_then_save(cx, step)
    }

    /// As [`Self::save`], but the checkpoint has the network beside the model: it is merged after the checkpoint, for the save alone.
    fn checkpoint_then_save(&mut self, cx: &mut Context<'_>, step: u64) -> Result<()> {
        if !self.kept_saves.contains(&step) {
            self.kept_saves.push(step);
        }
        self.save_without_retention(cx, step)?;
        self.apply_retention(cx, step)
    }

    /// Writes the checkpoint of a step, then its save and the plot of the loss.
    fn save_without_retention(&mut self, cx: &mut Context<'_>, step: u64) -> Result<()> {
        cx.phase("saving");
        self.checkpoint(cx, step)?;
        let save = self.folder.step_save(step);
        // Does nothing after [`Self::save`], which merged it already.
        self.merge_network(cx, step)?;
        self.write_save(cx, &save, step)?;
        self.remove_interrupted_saves(cx, &save)?;
        self.write_learned_snr(cx, step)?;
        self.write_loss_plot(cx, step);
        self.write_event_file(cx, step);
        Ok(())
    }

    /// Records the step save of an interrupted attempt, to remove it after the next save. At the end the job has the
    /// same files as a run without interruption; until the next save it may be the newest save of the job. A run in
    /// place keeps it for the user who interrupted the run.
    pub(super) fn record_interruption(&mut self, cx: &Context<'_>) {
        if !cx.has_staged_inputs() {
            self.interrupted_saves.clear();
            return;
        }
        // At the last step there is a final save and no step save.
        let is_extra_save = !self.is_wanted_save(self.start_step) && self.start_step != self.process.train.steps;
        if self.last_checkpoint == Some(self.start_step)
            && is_extra_save
            && !self.interrupted_saves.contains(&self.start_step)
        {
            self.interrupted_saves.push(self.start_step);
        }
    }

    /// Removes the step saves of interrupted attempts. `like`: an existing save. If saves are folders, it tells the
    /// names of the files, which may not be on this machine.
    ///
    /// The removals are emitted before the next checkpoint, so they cannot be lost: if this attempt is killed earlier,
    /// the last checkpoint still lists these saves.
    fn remove_interrupted_saves(&mut self, cx: &mut Context<'_>, like: &Path) -> Result<()> {
        let files = files_in_save(like);
        for step in std::mem::take(&mut self.interrupted_saves) {
            let save = self.folder.step_save(step);
            // A run that went back with `train.start_step` may have reached this step again.
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

    /// Applies retention after the save of this step.
    fn apply_retention(&mut self, cx: &mut Context<'_>, step: u64) -> Result<()> {
        let saves = OtherSaves {
            interrupted: &self.interrupted_saves,
            // A run in place has all of them on its disk, unless the user removed some.
            existing: if cx.has_staged_inputs() { &self.kept_saves } else { &[] },
        };
        let expired = self
            .folder
            .apply_retention(self.process.save.max_step_saves_to_keep, step, saves)?;
        self.kept_saves.retain(|save| !expired.steps.contains(save));
        for removed in expired.files {
            let name = artifact_name(&self.folder.root, &removed);
            cx.events.emit(ChildEvent::ArtifactRemoved { name });
        }
        Ok(())
    }

    /// Does what is missing after the last checkpoint because the run was killed right after it: the step's save,
    /// retention, and the step's samples.
    pub(super) fn finish_last_checkpoint(&mut self, cx: &mut Context<'_>) -> Result<()> {
        let step = self.start_step;
        let from_checkpoint = self.last_checkpoint == Some(step);
        if from_checkpoint && self.is_wanted_save(step) {
            let save = self.folder.step_save(step);
            // The save of an interrupted attempt would be merged into a run that goes on.
            if !save.exists() && self.has_nothing_to_merge()? {
                // Layers that are trained themselves.
                self.merge_network(cx, step)?;
                self.write_save(cx, &save, step)?;
            }
            self.remove_interrupted_saves(cx, &save)?;
        }
        self.apply_retention(cx, step)?;
        if self.process.sample.is_due(step) && !self.has_samples(step) {
            self.sample(cx, step, false)?;
        }
        Ok(())
    }

    /// Runs `f` with the EMA weights swapped in, if EMA is on.
    pub(super) fn with_ema_weights<T>(&mut self, f: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
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
