//! Where a run begins, and the exact states it leaves behind.
//!
//! Order: the checkpoint that the attempt was given, else the newest whole checkpoint of the run folder, else its
//! newest save by step (a half-finished folder of ai-toolkit), else `network.pretrained_lora_path`, else fresh.

use super::super::Context;
use super::Run;
use super::folder::{RunFolder, checkpoint_error};
use super::record;
use super::target::Target;
use crate::adapters::LoraFile;
use crate::error::{EngineError, Result};
use crate::models::sd::saved_step;
use crate::weights::write_tensors;
use aitk_common::attempt::{AttemptSpec, ChildEvent};
use aitk_common::checkpoint::{Checkpoint, CheckpointWriter};
use candle_core::{Device, Tensor};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Version of the trainer's part of a manifest.
const STATE_VERSION: u64 = 1;
/// Its keys for what a run has only where something happened: steps that were lost, and step saves to remove.
const LOST: &str = "lost_steps";
const INTERRUPTED: &str = "interrupted_saves";

/// The seed of the run that this one goes on from, if it goes on from an exact state.
pub(super) fn seed_so_far(spec: &AttemptSpec, folder: &RunFolder) -> Option<u64> {
    let checkpoint = match &spec.resume_from {
        Some(given) => Checkpoint::open(given).ok()?,
        None => Checkpoint::scan(&folder.checkpoints()).ok()?.newest?,
    };
    checkpoint.state().get("seed")?.as_u64()
}

impl Run<'_> {
    /// Finds the state to go on from and takes it.
    pub(super) fn resume(&mut self, cx: &mut Context<'_>) -> Result<()> {
        if let Some(folder) = &cx.spec.resume_from {
            let checkpoint = Checkpoint::open(folder).map_err(checkpoint_error)?;
            self.take(&checkpoint).map_err(|e| {
                EngineError::bad_input(format!(
                    "the job's checkpoint of step {} cannot be used: {e}",
                    checkpoint.step()
                ))
            })?;
            self.note_changes(&checkpoint, cx);
            cx.log("info", format!("going on from the checkpoint of step {}", self.start));
        } else if !self.resume_here(cx)?
            && let Some(path) = self
                .process
                .network
                .as_ref()
                .and_then(|n| n.pretrained_lora_path.as_deref())
        {
            let path = cx.local(path)?;
            self.take_lora(&path, cx)?;
            cx.log("info", format!("starting from the weights of {}", path.display()));
        }
        if let Some(step) = self.process.train.start_step {
            self.start = step;
        }
        Ok(())
    }

    /// Looks into the run folder. `false`: nothing to go on from.
    fn resume_here(&mut self, cx: &mut Context<'_>) -> Result<bool> {
        let scan = Checkpoint::scan(&self.folder.checkpoints()).map_err(checkpoint_error)?;
        for (folder, error) in &scan.rejected {
            cx.log("warn", format!("{}: {error}", folder.display()));
        }
        if let Some(checkpoint) = scan.newest {
            let saved = self.folder.saves().iter().filter_map(|(step, _)| *step).max();
            if saved.is_some_and(|step| step > checkpoint.step()) {
                cx.log(
                    "info",
                    format!(
                        "there is a newer save, but only the checkpoint of step {} is exact",
                        checkpoint.step()
                    ),
                );
            }
            match self.take(&checkpoint) {
                Ok(()) => {
                    self.note_changes(&checkpoint, cx);
                    cx.log(
                        "info",
                        format!("going on from step {}, with the optimizer's state", self.start),
                    );
                    return Ok(true);
                }
                Err(error) => cx.log(
                    "warn",
                    format!(
                        "the checkpoint of step {} does not fit this config ({error}); trying its last save",
                        checkpoint.step()
                    ),
                ),
            }
        }
        let Some((step, path)) = self.newest_save(cx) else {
            return Ok(false);
        };
        match self.target {
            Target::Lora(_) => self.take_lora(&path, cx)?,
            Target::Model(_) => {
                self.model.load_trained(&path).map_err(|error| {
                    EngineError::bad_input(format!(
                        "{error}. It is the newest save of the run folder, and this full fine-tune cannot go on from it: move it \
                         away, or give the run another `config.name`"
                    ))
                })?;
                // The average starts from these weights too.
                self.trainer = super::trainer(self.process, &self.target, &self.choices)?;
            }
        }
        self.start = step;
        cx.log(
            "info",
            format!("going on from {} (step {step}), with a fresh optimizer", path.display()),
        );
        Ok(true)
    }

    /// The newest save of the run folder by step, the step as it says itself.
    fn newest_save(&self, cx: &mut Context<'_>) -> Option<(u64, PathBuf)> {
        let mut newest: Option<(u64, PathBuf)> = None;
        for (named, path) in self.folder.saves() {
            let step = match self.target {
                Target::Lora(_) => LoraFile::open(&path).map(|file| file.training_info().map(|(step, _)| step)),
                Target::Model(_) => saved_step(&path),
            };
            match step {
                Ok(step) => {
                    let step = step.or(named).unwrap_or(0);
                    if newest.as_ref().is_none_or(|(best, _)| step > *best) {
                        newest = Some((step, path));
                    }
                }
                Err(error) => cx.log("warn", format!("passing over a save that cannot be read: {error}")),
            }
        }
        newest
    }

    fn take_lora(&mut self, path: &Path, cx: &mut Context<'_>) -> Result<()> {
        let Target::Lora(network) = &self.target else {
            return Err(EngineError::Internal("a LoRA for a full fine-tune".into()));
        };
        let report = network.load(&LoraFile::open(path)?)?;
        if report.resized > 0 {
            cx.log(
                "warn",
                format!(
                    "{} layers have another rank: filled up with fresh rows or cut",
                    report.resized
                ),
            );
        }
        if !report.missing.is_empty() {
            cx.log(
                "warn",
                format!("{} layers are not in the file and start fresh", report.missing.len()),
            );
        }
        if let Some(first) = report.unknown.first() {
            cx.log(
                "warn",
                format!(
                    "{} names in the file fit nothing here, such as `{first}`",
                    report.unknown.len()
                ),
            );
        }
        // The average starts from these weights too.
        self.trainer = super::trainer(self.process, &self.target, &self.choices)?;
        Ok(())
    }

    /// Takes a whole state, or nothing of it.
    fn take(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let state = checkpoint.state();
        let number = |key: &str| state.get(key).and_then(Value::as_u64);
        if number("state_version") != Some(STATE_VERSION) {
            return Err(EngineError::bad_input("it was written by another version of aitk"));
        }
        let text = |key: &str| state.get(key).and_then(Value::as_str).unwrap_or_default();
        let optimizer = self.process.train.optimizer.name();
        if text("optimizer") != optimizer {
            return Err(EngineError::bad_input(format!(
                "its optimizer is {}, the job's is {optimizer}",
                text("optimizer")
            )));
        }
        let read = |role: &str| -> Result<Option<BTreeMap<String, Tensor>>> {
            let Some(path) = checkpoint.file_with_role(role) else {
                return Ok(None);
            };
            let map = candle_core::safetensors::load(&path, &Device::Cpu)?;
            Ok(Some(map.into_iter().collect()))
        };
        // Gone before the rest is read, which for a whole model is twice as large.
        match read("weights")? {
            Some(weights) => self.trainer.restore_weights(&weights)?,
            None => return Err(EngineError::bad_input("it has no weights")),
        }
        let mut tensors = BTreeMap::new();
        for role in ["optimizer", "ema", "gradients"] {
            tensors.extend(read(role)?.map(|map| (role.to_owned(), map)));
        }
        // Made anew, so that a moving average which the checkpoint lacks begins with these weights.
        self.trainer = super::trainer(self.process, &self.target, &self.choices)?;
        self.trainer
            .restore_state(tensors, number("ema_updates").unwrap_or(0))?;
        self.start = checkpoint.step();
        self.checkpointed = Some(checkpoint.step());
        self.lost = number(LOST).unwrap_or(0);
        let interrupted = state.get(INTERRUPTED).and_then(Value::as_array);
        self.interrupted = interrupted.into_iter().flatten().filter_map(Value::as_u64).collect();
        self.record.take(checkpoint);
        Ok(())
    }

    /// Says when the run goes on with another seed, config or data than it began with.
    fn note_changes(&self, checkpoint: &Checkpoint, cx: &mut Context<'_>) {
        let now = self.identity();
        for (key, what) in [("seed", "seed"), ("config", "training settings"), ("data", "data set")] {
            let (then, now) = (checkpoint.state().get(key), now.get(key));
            if then != now {
                cx.log(
                    "warn",
                    format!(
                        "the {what} changed since step {}: the run goes on with the new one",
                        checkpoint.step()
                    ),
                );
            }
        }
    }

    /// What must be the same for the same result.
    fn identity(&self) -> Map<String, Value> {
        let mut train = serde_json::to_value(&self.process.train).unwrap_or_default();
        // More steps are the usual wish, and change nothing before them unless the schedule counts them.
        if let Some(map) = train.as_object_mut() {
            map.remove("steps");
        }
        let config = json!([train, &self.process.network, &self.process.model]);
        let mut data = Sha256::new();
        for batch in self.data.batches.iter().chain(&self.data.regularisation) {
            for index in &batch.items {
                let item = &self.data.datasets[batch.dataset].items[*index];
                data.update(format!(
                    "{}|{:?}|{}|{}|{}\n",
                    item.content, item.plan, item.flip_x, item.flip_y, item.caption
                ));
                if let Some(mask) = &item.mask {
                    data.update(format!("{mask:?}\n"));
                }
            }
            data.update(b"--");
        }
        let mut map = Map::new();
        map.insert("seed".into(), self.seed.into());
        map.insert(
            "config".into(),
            hex::encode(&Sha256::digest(config.to_string())[..16]).into(),
        );
        map.insert("data".into(), hex::encode(&data.finalize()[..16]).into());
        map
    }

    /// Writes the exact state after `step` steps and announces it.
    pub(super) fn checkpoint(&mut self, cx: &mut Context<'_>, step: u64) -> Result<()> {
        if !self.trainer.weights_are_finite()? {
            return Err(EngineError::bad_input(format!(
                "after step {step} the trained weights are not finite numbers, so they are not saved; what was saved before stays. \
                 `train.lr` is too high, or the base model or the LoRA that it started from is damaged"
            )));
        }
        let (parts, ema_updates) = self.trainer.state()?;
        let mut writer = CheckpointWriter::new(&self.folder.checkpoints(), step)
            .map_err(checkpoint_error)?
            .job(cx.job.name.clone())
            .data_epoch(self.data.epoch(step, self.process));
        for (role, tensors) in &parts {
            writer
                .add_file(&format!("{role}.safetensors"), role, |out| {
                    write_tensors(out, tensors, &BTreeMap::new())
                })
                .map_err(checkpoint_error)?;
        }
        if !self.record.is_empty() {
            let losses = self.record.tensors()?;
            writer
                .add_file("losses.safetensors", record::ROLE, |out| {
                    write_tensors(out, &losses, &BTreeMap::new())
                })
                .map_err(checkpoint_error)?;
        }
        let mut state = self.identity();
        state.insert("state_version".into(), STATE_VERSION.into());
        state.insert("optimizer".into(), self.process.train.optimizer.name().into());
        state.insert("ema_updates".into(), ema_updates.into());
        if self.lost > 0 {
            state.insert(LOST.into(), self.lost.into());
        }
        if !self.interrupted.is_empty() {
            state.insert(INTERRUPTED.into(), self.interrupted.clone().into());
        }
        let path = writer.commit(state).map_err(checkpoint_error)?;
        self.checkpointed = Some(step);
        cx.events.emit(ChildEvent::Checkpoint { path, step });
        Ok(())
    }
}
