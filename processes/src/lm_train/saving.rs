//! Saves during a run.

use super::super::context::{Context, artifact_name};
use super::super::run_folder::OtherSaves;
use super::super::save_dtype::save_dtype;
use super::super::save_files::files_in_save;
use super::model_folder;
use super::run::Run;
use super::target::TrainedParameters;
use crate::error::{EngineError, Result};
use crate::weights::Weight;
use aitk_common::attempt::ChildEvent;
use aitk_common::fsutil::{self, TemporaryFolder};
use aitk_common::job::dtype::DType;
use aitk_common::step_metrics::PLOT_FILE;
use std::io::Write as _;
use std::path::Path;

impl Run<'_> {
    /// Makes a step save: writes the checkpoint, then the folder, then applies retention. In this order, so that a kill in between leaves a
    /// checkpoint, which lists the save.
    pub(super) fn save(&mut self, cx: &mut Context<'_>, step: u64) -> Result<()> {
        if !self.kept_saves.contains(&step) {
            self.kept_saves.push(step);
        }
        cx.phase("saving");
        self.checkpoint(cx, step)?;
        self.write_save(cx, &self.folder.step_save(step), step)?;
        self.write_loss_plot(cx, step);
        self.apply_retention(cx, step)
    }

    /// Does what is missing after the last checkpoint because the run was killed right after it.
    pub(super) fn finish_last_checkpoint(&mut self, cx: &mut Context<'_>) -> Result<()> {
        let step = self.start_step;
        let save = self.folder.step_save(step);
        // One that is due was not made where the run ended at this step, and its `steps` were raised since.
        let is_wanted = self.process.save.is_due(step) || self.kept_saves.contains(&step);
        if is_wanted && !save.exists() {
            self.write_save(cx, &save, step)?;
        }
        self.apply_retention(cx, step)?;
        if self.process.sample.is_due(step, self.steps) && !self.has_completions(step) {
            let _complete = self.complete_prompts(cx, step)?;
        }
        Ok(())
    }

    fn apply_retention(&mut self, cx: &mut Context<'_>, step: u64) -> Result<()> {
        let saves = OtherSaves {
            interrupted: &[],
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

    /// Writes the trained weights after `step` steps into a folder, and emits its files. The bytes depend only on the weights and the config.
    pub(super) fn write_save(&mut self, cx: &mut Context<'_>, path: &Path, step: u64) -> Result<()> {
        let usual = match &self.target {
            TrainedParameters::Lora(_) => DType::F32,
            TrainedParameters::Model(_) => DType::BF16,
        };
        let dtype = save_dtype(self.process.save.dtype.unwrap_or(usual), "save.dtype")?;
        let unfinished = TemporaryFolder::new(fsutil::folder_of(path), "save")?;
        let inner = unfinished.path().join("model");
        fsutil::create_dir_all(&inner)?;
        match (&self.target, &self.process.network) {
            (TrainedParameters::Lora(lora), Some(network)) => {
                let adapter = model_folder::Adapter {
                    network,
                    layers: self.target.lora_layers(),
                    base_model: &self.process.model.name_or_path,
                };
                model_folder::write_adapter(&inner, &lora.tensors(dtype)?, &adapter)?;
            }
            _ => {
                let mut dense = |_: &str, weight: &Weight| Ok(weight.dense()?);
                model_folder::write_model(&inner, &self.model, &self.model_folder, dtype, &mut dense)?;
            }
        }
        // A save of the same step, if the run went back to an earlier step.
        fsutil::remove(path)?;
        std::fs::rename(&inner, path).map_err(|error| EngineError::io(path, error))?;
        fsutil::sync_dir(fsutil::folder_of(path))?;
        self.emit_save(cx, path, step);
        Ok(())
    }

    /// Emits the files of a save.
    pub(super) fn emit_save(&self, cx: &mut Context<'_>, path: &Path, step: u64) {
        let kind = match &self.target {
            TrainedParameters::Lora(_) => "lora",
            TrainedParameters::Model(_) => "model",
        };
        for file in files_in_save(path) {
            cx.artifact(kind, &self.folder.root, &file, Some(step), None);
        }
    }

    /// Writes the plot of the loss and emits it. An error is only logged.
    pub(super) fn write_loss_plot(&self, cx: &mut Context<'_>, step: u64) {
        let Some(png) = self.metrics.png(&format!("{}   {step} steps", cx.job.name)) else {
            return;
        };
        let path = self.folder.path.join(PLOT_FILE);
        match fsutil::write_atomic(&path, |out| out.write_all(&png)) {
            Ok(()) => cx.artifact("plot", &self.folder.root, &path, Some(step), None),
            Err(error) => cx.log("warn", format!("cannot write the plot of the loss: {error}")),
        }
    }
}
