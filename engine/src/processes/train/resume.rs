//! Finds where a run resumes, and writes checkpoints (exact states).
//!
//! A run resumes from the first of these that exists: the checkpoint in the attempt's spec, the newest complete
//! checkpoint in the run folder, its newest save by step (of an unfinished ai-toolkit run),
//! `network.pretrained_lora_path`. Else it starts anew.

use super::super::context::Context;
use super::embedding::TrainedEmbedding;
use super::folder::{RunFolder, checkpoint_error};
use super::merging::MERGED_ROLE;
use super::record;
use super::run::Run;
use super::target::TrainedParameters;
use crate::adapters::{AdapterFile, saved_since};
use crate::error::{EngineError, Result};
use crate::families::saved_step;
use crate::training::Trainer;
use crate::weights::write_tensors;
use aitk_common::attempt::{AttemptSpec, ChildEvent};
use aitk_common::checkpoint::{Checkpoint, CheckpointWriter};
use candle_core::{Device, Tensor};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Version of the trainer's state in a manifest.
const STATE_VERSION: u64 = 1;
/// Optional keys of the state: the number of last steps in a row that were not finite, the trained word, interrupted steps whose
/// saves are to be removed, steps whose saves are kept, those of them that the user asked for (written by earlier versions),
/// whether the loss on fixed images was not measured, because the run was told to stop, and the `train.start_step` of the run.
const NON_FINITE_KEY: &str = "lost_steps";
const WORD_KEY: &str = "word";
const INTERRUPTED_KEY: &str = "interrupted_saves";
const KEPT_KEY: &str = "kept_saves";
const REQUESTED_KEY: &str = "requested_saves";
const UNMEASURED_KEY: &str = "validation_missing";
const START_KEY: &str = "start_step";
/// What may have made losses or weights infinite or NaN, for messages.
pub(super) const NON_FINITE_CAUSES: &str = "Possible causes: `train.lr` is too high; a factor of the config, such as `train.noise_multiplier` \
                                 or a data set's `loss_multiplier`, is too large; `train.dtype` has too small a range; the base \
                                 model or the LoRA that training started from is damaged";

/// The seed in the checkpoint from which the run resumes, if there is one.
pub(super) fn resumed_seed(spec: &AttemptSpec, folder: &RunFolder) -> Option<u64> {
    let checkpoint = match &spec.resume_from {
        Some(path) => Checkpoint::open(path).ok()?,
        None => Checkpoint::scan(&folder.checkpoints()).ok()?.newest?,
    };
    checkpoint.state().get("seed")?.as_u64()
}

/// Whether the run has reached its last step already.
pub(super) fn has_all_steps(spec: &AttemptSpec, folder: &RunFolder, steps: u64) -> bool {
    let newest = match &spec.resume_from {
        Some(path) => Checkpoint::open(path).ok(),
        None => Checkpoint::scan(&folder.checkpoints())
            .ok()
            .and_then(|scan| scan.newest),
    };
    folder.final_save().exists() && newest.is_none_or(|checkpoint| checkpoint.step() >= steps)
}

impl Run<'_> {
    /// Finds the state to resume from and restores it.
    pub(super) fn resume(&mut self, cx: &mut Context<'_>) -> Result<()> {
        self.start_learned_snr(cx)?;
        if let Some(folder) = &cx.spec.resume_from {
            let checkpoint = Checkpoint::open(folder).map_err(checkpoint_error)?;
            self.restore(&checkpoint).map_err(|e| {
                EngineError::bad_input(format!(
                    "the job's checkpoint of step {} cannot be used: {e}",
                    checkpoint.step()
                ))
            })?;
            self.warn_about_changes(&checkpoint, cx);
            cx.log(
                "info",
                format!("resuming from the checkpoint of step {}", self.start_step),
            );
        } else if !self.resume_from_run_folder(cx)?
            && let Some(path) = self
                .process
                .network
                .as_ref()
                .and_then(|n| n.pretrained_lora_path.as_deref())
        {
            let path = cx.local_path(path)?;
            self.load_lora(&path, cx)?;
            cx.log("info", format!("starting from the weights of {}", path.display()));
        }
        if let Some(step) = self.process.train.start_step
            && self.configured_start_step != Some(step)
        {
            if self.start_step > 0 {
                cx.log(
                    "info",
                    format!("`train.start_step`: these weights go on as if they were those of step {step}"),
                );
            }
            self.start_step = step;
        }
        Ok(())
    }

    /// Checks that a checkpoint is of the word that is trained. Checkpoints of earlier versions do not name it.
    fn check_word(&self, checkpoint: &Checkpoint) -> Result<()> {
        let word = self
            .process
            .embedding
            .as_ref()
            .map(|embedding| embedding.trigger.as_str());
        let earlier = checkpoint.state().get(WORD_KEY).and_then(Value::as_str);
        match (word, earlier) {
            (Some(word), Some(earlier)) if word != earlier => Err(EngineError::bad_input(format!(
                "embedding.trigger: the run folder {} has a checkpoint of the word `{earlier}`, and this training is of `{word}`: give \
                 the run another `config.name`, or move the folder away",
                self.folder.path.display()
            ))),
            _ => Ok(()),
        }
    }

    /// Resumes from the run folder. `false`: there is no state in it.
    fn resume_from_run_folder(&mut self, cx: &mut Context<'_>) -> Result<bool> {
        let scan = Checkpoint::scan(&self.folder.checkpoints()).map_err(checkpoint_error)?;
        for (folder, error) in &scan.rejected {
            cx.log("warn", format!("{}: {error}", folder.display()));
        }
        if let Some(checkpoint) = scan.newest {
            self.check_word(&checkpoint)?;
            let saved = self.folder.saves().iter().filter_map(|(step, _)| *step).max();
            if saved.is_some_and(|step| step > checkpoint.step()) {
                cx.log(
                    "info",
                    format!(
                        "there is a newer save, but only the checkpoint of step {} has the exact state",
                        checkpoint.step()
                    ),
                );
            }
            match self.restore(&checkpoint) {
                Ok(()) => {
                    self.warn_about_changes(&checkpoint, cx);
                    cx.log(
                        "info",
                        format!("resuming from step {}, with the optimizer's state", self.start_step),
                    );
                    return Ok(true);
                }
                Err(error) => cx.log(
                    "warn",
                    format!(
                        "the checkpoint of step {} does not fit this config ({error}); trying the newest save instead",
                        checkpoint.step()
                    ),
                ),
            }
        }
        let Some((step, path)) = self.newest_save(cx) else {
            return Ok(false);
        };
        let merges = self.process.merges_network();
        match &self.target {
            TrainedParameters::Adapter(_) if merges => {
                self.load_merged_save(&path).map_err(|error| {
                    EngineError::bad_input(format!(
                        "{error}. It is the newest save of the run folder, and with `train.merge_network_on_save` the training goes on \
                         with its weights: move it away, or give the run another `config.name`"
                    ))
                })?;
                self.trainer = self.new_trainer()?;
            }
            TrainedParameters::Adapter(_) => self.load_lora(&path, cx)?,
            TrainedParameters::Embedding(word) => {
                word.load(&path)?;
                self.trainer = self.new_trainer()?;
            }
            TrainedParameters::Model(_) => {
                self.model.load_trained(&path).map_err(|error| {
                    EngineError::bad_input(format!(
                        "{error}. It is the newest save of the run folder, and this full fine-tune cannot resume from it: move it \
                         away, or give the run another `config.name`"
                    ))
                })?;
                // A new trainer, so that the EMA starts from these weights too.
                self.trainer = self.new_trainer()?;
            }
        }
        self.start_step = step;
        cx.log(
            "info",
            format!("resuming from {} (step {step}), with a fresh optimizer", path.display()),
        );
        Ok(true)
    }

    /// The newest save of the run folder by step. The step in the file has precedence over the one in its name.
    fn newest_save(&self, cx: &mut Context<'_>) -> Option<(u64, PathBuf)> {
        let mut newest: Option<(u64, PathBuf)> = None;
        for (step_in_name, path) in self.folder.saves() {
            let step = match self.target {
                TrainedParameters::Adapter(_) if self.process.merges_network() => saved_step(&path),
                TrainedParameters::Adapter(_) => {
                    AdapterFile::open(&path).map(|file| file.training_info().map(|(step, _)| step))
                }
                TrainedParameters::Model(_) => saved_step(&path),
                TrainedParameters::Embedding(_) => TrainedEmbedding::saved_step(&path),
            };
            match step {
                Ok(step) => {
                    let step = step.or(step_in_name).unwrap_or(0);
                    if newest.as_ref().is_none_or(|(best, _)| step > *best) {
                        newest = Some((step, path));
                    }
                }
                Err(error) => cx.log("warn", format!("skipping a save that cannot be read: {error}")),
            }
        }
        newest
    }

    /// Loads the weights of a LoRA file and makes a new trainer.
    fn load_lora(&mut self, path: &Path, cx: &mut Context<'_>) -> Result<()> {
        let TrainedParameters::Adapter(network) = &self.target else {
            return Err(EngineError::Internal("a LoRA for a full fine-tune".into()));
        };
        let report = network.load(&AdapterFile::open(path)?)?;
        if report.resized > 0 {
            cx.log(
                "warn",
                format!(
                    "{} layers have another rank: their weights are truncated or extended with new rows",
                    report.resized
                ),
            );
        }
        if !report.missing.is_empty() {
            cx.log(
                "warn",
                format!(
                    "{} layers are not in the file and start with new weights",
                    report.missing.len()
                ),
            );
        }
        if let Some(first) = report.unknown.first() {
            let is_of_text = |name: &&String| name.starts_with("lora_te") || name.starts_with("text_encoder");
            let of_text = report.unknown.iter().filter(is_of_text).count();
            let cause = match of_text {
                0 => String::new(),
                _ if self.process.train.train_text_encoder => String::new(),
                count => format!(
                    ". {count} of them are of text encoders, which `train.train_text_encoder: true` would train too"
                ),
            };
            cx.log(
                "warn",
                format!(
                    "{} names in the file match no trained layer and are ignored, such as `{first}`{cause}",
                    report.unknown.len()
                ),
            );
        }
        // A new trainer, so that the EMA starts from these weights too.
        self.trainer = self.new_trainer()?;
        Ok(())
    }

    /// A trainer with a new optimizer, and with a new EMA of the weights as they are now.
    pub(super) fn new_trainer(&self) -> Result<Trainer> {
        let trainer = super::run::trainer(
            self.process,
            &self.target,
            &self.memory_options,
            self.compute.dtype,
            self.seed,
        )?;
        Ok(match &self.learned_snr {
            Some(learned) => trainer.with_learned_snr(learned.clone()),
            None => trainer,
        })
    }

    /// Restores the complete state of a checkpoint.
    fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let state = checkpoint.state();
        let number = |key: &str| state.get(key).and_then(Value::as_u64);
        if number("state_version") != Some(STATE_VERSION) {
            return Err(EngineError::bad_input("it was written by another version of aitk"));
        }
        let text = |key: &str| state.get(key).and_then(Value::as_str).unwrap_or_default();
        let optimizer = self.process.train.optimizer.name();
        if text("optimizer") != optimizer {
            return Err(EngineError::bad_input(format!(
                "its optimizer is {}, but the job uses {optimizer}",
                text("optimizer")
            )));
        }
        let read = |role: &str| -> Result<Option<BTreeMap<String, Tensor>>> {
            let Some(path) = checkpoint.file_with_role(role) else {
                return Ok(None);
            };
            let map = candle_core::safetensors::load(&path, &Device::Cpu)?.into_iter();
            let known = |name: String| saved_since(&name).unwrap_or(name);
            Ok(Some(map.map(|(name, tensor)| (known(name), tensor)).collect()))
        };
        // The weights are dropped before the rest is read, which is twice as large for a full fine-tune.
        match read("weights")? {
            Some(weights) => self.trainer.restore_weights(&weights)?,
            None => return Err(EngineError::bad_input("it has no weights")),
        }
        self.restore_merged(read(MERGED_ROLE)?.as_ref())?;
        let mut tensors = BTreeMap::new();
        for role in ["optimizer", "ema", "gradients"] {
            tensors.extend(read(role)?.map(|map| (role.to_owned(), map)));
        }
        // A new trainer, so that an EMA that is not in the checkpoint starts from these weights.
        self.trainer = self.new_trainer()?;
        self.trainer
            .restore_state(tensors, number("ema_updates").unwrap_or(0))?;
        self.start_step = checkpoint.step();
        self.last_checkpoint = Some(checkpoint.step());
        self.non_finite_steps = number(NON_FINITE_KEY).unwrap_or(0);
        let steps = |key: &str| -> Option<Vec<u64>> {
            let list = state.get(key).and_then(Value::as_array)?;
            Some(list.iter().filter_map(Value::as_u64).collect())
        };
        self.interrupted_saves = steps(INTERRUPTED_KEY).unwrap_or_default();
        self.kept_saves = match steps(KEPT_KEY) {
            Some(kept) => kept,
            None => self.saves_until(checkpoint.step(), &steps(REQUESTED_KEY).unwrap_or_default()),
        };
        self.configured_start_step = number(START_KEY);
        self.validation_is_pending = state.get(UNMEASURED_KEY).and_then(Value::as_bool).unwrap_or(false);
        self.metrics.load_checkpoint(checkpoint);
        Ok(())
    }

    /// The saves that a run without a list of them kept until a step. `requested`: those that the user asked for.
    fn saves_until(&self, step: u64, requested: &[u64]) -> Vec<u64> {
        let save = &self.process.save;
        let keep = usize::try_from(save.max_step_saves_to_keep).unwrap_or(usize::MAX);
        let every = save.save_every.filter(|every| *every > 0);
        let due = every
            .into_iter()
            .flat_map(|every| (1..=step / every).rev().map(move |k| k * every));
        let mut saves: Vec<u64> = due.filter(|step| save.is_due(*step)).take(keep).collect();
        saves.extend(requested);
        saves.sort_unstable_by(|a, b| b.cmp(a));
        saves.dedup();
        saves.truncate(keep);
        saves
    }

    /// Warns when the seed, the config or the data changed since the checkpoint.
    fn warn_about_changes(&self, checkpoint: &Checkpoint, cx: &mut Context<'_>) {
        let current = self.identity();
        for (key, what) in [("seed", "seed"), ("config", "training settings"), ("data", "data set")] {
            let (earlier, current) = (checkpoint.state().get(key), current.get(key));
            if earlier != current {
                cx.log(
                    "warn",
                    format!(
                        "the {what} changed since step {}: the run continues with the new one",
                        checkpoint.step()
                    ),
                );
            }
        }
    }

    /// The seed, and hashes of the config and the data, which must be the same for the same result.
    fn identity(&self) -> Map<String, Value> {
        let mut train = serde_json::to_value(&self.process.train).unwrap_or_default();
        // Users often raise `steps` to train longer, which does not change earlier steps unless the learning rate
        // schedule uses it.
        if let Some(map) = train.as_object_mut() {
            map.remove("steps");
        }
        let mut config = json!([train, &self.process.network, &self.process.model]);
        if let (true, Some(parts)) = (self.slider.is_some(), config.as_array_mut()) {
            parts.push(json!([self.process.kind, &self.process.slider]));
        }
        if let (Some(embedding), Some(parts)) = (&self.process.embedding, config.as_array_mut()) {
            parts.push(json!(embedding));
        }
        let mut data = Sha256::new();
        for batch in self.data.batches.iter().chain(&self.data.regularisation) {
            for index in &batch.items {
                let item = &self.data.datasets[batch.dataset].items[*index];
                data.update(format!(
                    "{}|{:?}|{}|{}|{}\n",
                    item.content, item.plan, item.flip_x, item.flip_y, item.caption
                ));
                if let Some(mask) = &item.mask {
                    data.update(mask.identity() + "\n");
                }
                if let Some(half) = item.half {
                    data.update(format!("{half:?}\n"));
                }
                if let Some(control) = &item.control {
                    let content = &control.content;
                    // As earlier versions wrote it where there is one.
                    let background = control
                        .background
                        .map_or_else(|| "none".to_owned(), |colour| format!("{colour:?}"));
                    data.update(format!("control {content} {background} {}\n", control.full_size));
                }
            }
            let options = &self.data.datasets[batch.dataset].options;
            if let Some(controls) = &options.augmented_controls {
                data.update(controls.identity() + "\n");
            }
            if let Some(statistics) = &options.normalization {
                data.update(format!("normalised {}\n", statistics.name));
            }
            if options.random_scale {
                data.update(b"random scale\n");
            }
            let augmentations = &options.augmentations;
            if !augmentations.is_empty() {
                data.update(format!("{augmentations:?}\n"));
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

    /// Writes a checkpoint after `step` steps and emits it.
    pub(super) fn checkpoint(&mut self, cx: &mut Context<'_>, step: u64) -> Result<()> {
        if !self.trainer.weights_are_finite()? {
            return Err(EngineError::bad_input(format!(
                "after step {step} the trained weights are not finite numbers, so they are not saved. {NON_FINITE_CAUSES}. Earlier saves are kept"
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
        if let Some(merged) = self.merged_tensors()?.filter(|_| self.has_merged) {
            writer
                .add_file("merged.safetensors", MERGED_ROLE, |out| {
                    write_tensors(out, &merged, &BTreeMap::new())
                })
                .map_err(checkpoint_error)?;
        }
        if !self.metrics.is_empty() {
            let losses = self.metrics.tensors()?;
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
        if let Some(embedding) = &self.process.embedding {
            state.insert(WORD_KEY.into(), embedding.trigger.as_str().into());
        }
        if self.non_finite_steps > 0 {
            state.insert(NON_FINITE_KEY.into(), self.non_finite_steps.into());
        }
        if !self.interrupted_saves.is_empty() {
            state.insert(INTERRUPTED_KEY.into(), self.interrupted_saves.clone().into());
        }
        state.insert(KEPT_KEY.into(), self.kept_saves.clone().into());
        if let Some(step) = self.process.train.start_step {
            state.insert(START_KEY.into(), step.into());
        }
        if self.validation_is_pending {
            state.insert(UNMEASURED_KEY.into(), true.into());
        }
        let path = writer.commit(state).map_err(checkpoint_error)?;
        self.last_checkpoint = Some(step);
        cx.events.emit(ChildEvent::Checkpoint { path, step });
        Ok(())
    }
}
