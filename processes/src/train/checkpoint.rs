//! Writes checkpoints: exact states, from which a run resumes ([`super::resume`]).

use super::super::context::Context;
use super::super::run_folder::checkpoint_error;
use super::super::step_recorder;
use super::merging::MERGED_ROLE;
use super::run::Run;
use crate::error::{EngineError, Result};
use crate::weights::write_tensors;
use aitk_common::attempt::ChildEvent;
use aitk_common::checkpoint::{Checkpoint, CheckpointWriter};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// Version of the trainer's state in a manifest.
pub(super) const STATE_VERSION: u64 = 1;
/// Optional keys of the state: the number of last steps in a row that were not finite, the trained word, interrupted steps whose
/// saves are to be removed, steps whose saves are kept, those of them that the user asked for (written by earlier versions),
/// whether the loss on fixed images was not measured, because the run was told to stop, and the `train.start_step` of the run.
pub(super) const NON_FINITE_KEY: &str = "lost_steps";
pub(super) const WORD_KEY: &str = "word";
pub(super) const INTERRUPTED_KEY: &str = "interrupted_saves";
pub(super) const KEPT_KEY: &str = "kept_saves";
pub(super) const REQUESTED_KEY: &str = "requested_saves";
pub(super) const UNMEASURED_KEY: &str = "validation_missing";
pub(super) const START_KEY: &str = "start_step";
/// What may have made losses or weights infinite or NaN, for messages.
pub(super) const NON_FINITE_CAUSES: &str = "Possible causes: `train.lr` is too high; a factor of the config, such as `train.noise_multiplier` \
                                 or a data set's `loss_multiplier`, is too large; `train.dtype` has too small a range; the base \
                                 model or the LoRA that training started from is damaged";

impl Run<'_> {
    /// The seed, and hashes of the config and the data, which must be the same for the same result.
    pub(super) fn identity(&self) -> Map<String, Value> {
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
        if let (Some(adapter), Some(parts)) = (&self.process.adapter, config.as_array_mut()) {
            parts.push(json!(adapter));
        }
        if let (Some(decorator), Some(parts)) = (&self.process.decorator, config.as_array_mut()) {
            parts.push(json!(decorator));
        }
        if let (false, Some(parts)) = (self.negative_prompts.is_empty(), config.as_array_mut()) {
            parts.push(json!(self.negative_prompts));
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
            if let Some(guidance) = options.guidance {
                data.update(format!("guidance {guidance}\n"));
            }
            if let Some(controls) = &options.same_folder_controls {
                data.update(controls.identity() + "\n");
            }
            if let Some(statistics) = &options.normalization {
                data.update(format!("normalised {}\n", statistics.name));
            }
            if options.clamps_normalized() {
                data.update(b"clamped\n");
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
                .add_file("losses.safetensors", step_recorder::ROLE, |out| {
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
        self.remove_later_checkpoints(cx, step)
    }

    /// Removes the checkpoints of later steps than `step`, which has one now. They are of a training that went further before this one
    /// started at an earlier step (`train.start_step`, or a save). A run that resumes here would take them for the newest.
    fn remove_later_checkpoints(&self, cx: &mut Context<'_>, step: u64) -> Result<()> {
        // Then the checkpoint to resume from is named, whatever is in the folder.
        if cx.spec.resume_from.is_some() {
            return Ok(());
        }
        let removed = Checkpoint::remove_after(&self.folder.checkpoints(), step).map_err(checkpoint_error)?;
        for later in removed {
            let message = format!(
                "the checkpoint of step {later} was removed: this training started at an earlier step, and resumes from its own of step \
                 {step}"
            );
            cx.log("info", message);
        }
        Ok(())
    }
}
