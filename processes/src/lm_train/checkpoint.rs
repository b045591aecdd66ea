//! Exact states: writing checkpoints, and resuming from them. A run resumes from the checkpoint in the attempt's spec, or the newest complete
//! one in the run folder; else it starts anew.

use super::super::context::Context;
use super::super::run_folder::{RunFolder, checkpoint_error};
use super::super::step_recorder;
use super::fit::{STATE_KEY, StoredChoice};
use super::run::{Run, trainer};
use crate::error::{EngineError, Result};
use crate::weights::{read_tensors, write_tensors};
use aitk_common::attempt::{AttemptSpec, ChildEvent};
use aitk_common::checkpoint::{Checkpoint, CheckpointWriter};
use candle_core::Tensor;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// Version of the state in a manifest.
const STATE_VERSION: u64 = 1;
/// What may have made losses or weights infinite or NaN, for messages.
pub(super) const NON_FINITE_CAUSES: &str = "Possible causes: `train.lr` is too high; `model.dtype` has too small a range (use bfloat16 or float32); the \
                                 base model is damaged";
const NON_FINITE_KEY: &str = "lost_steps";
const KEPT_KEY: &str = "kept_saves";
const UNMEASURED_KEY: &str = "validation_missing";

/// The checkpoint from which an attempt resumes.
fn newest(spec: &AttemptSpec, folder: &RunFolder) -> Result<Option<Checkpoint>> {
    match &spec.resume_from {
        Some(path) => Checkpoint::open(path).map(Some).map_err(checkpoint_error),
        None => Ok(Checkpoint::scan(&folder.checkpoints())
            .map_err(checkpoint_error)?
            .newest),
    }
}

/// The seed in the checkpoint from which the run resumes, if there is one.
pub(super) fn resumed_seed(spec: &AttemptSpec, folder: &RunFolder) -> Option<u64> {
    newest(spec, folder).ok()??.state().get("seed")?.as_u64()
}

/// What was left to the machine in the checkpoint from which the run resumes, if there is one.
pub(super) fn resumed_choice(spec: &AttemptSpec, folder: &RunFolder) -> Option<StoredChoice> {
    StoredChoice::of(newest(spec, folder).ok()??.state())
}

impl Run<'_> {
    /// Finds the state to resume from and restores it.
    pub(super) fn resume(&mut self, cx: &mut Context<'_>) -> Result<()> {
        if cx.spec.resume_from.is_none() {
            let scan = Checkpoint::scan(&self.folder.checkpoints()).map_err(checkpoint_error)?;
            for (folder, error) in &scan.rejected {
                cx.log("warn", format!("{}: {error}", folder.display()));
            }
        }
        let Some(checkpoint) = newest(cx.spec, &self.folder)? else {
            return Ok(());
        };
        self.restore(&checkpoint, cx).map_err(|error| {
            EngineError::bad_input(format!(
                "the checkpoint of step {} cannot be used: {error}. To start anew, give the run another `config.name`, or move {} away",
                checkpoint.step(),
                self.folder.path.display()
            ))
        })?;
        let current = self.identity();
        for (key, what) in [("seed", "seed"), ("config", "training settings"), ("data", "data")] {
            if checkpoint.state().get(key) != current.get(key) {
                let step = checkpoint.step();
                cx.log(
                    "warn",
                    format!("the {what} changed since step {step}: the run continues with the new one"),
                );
            }
        }
        cx.log(
            "info",
            format!("resuming from step {}, with the optimizer's state", self.start_step),
        );
        Ok(())
    }

    fn restore(&mut self, checkpoint: &Checkpoint, cx: &mut Context<'_>) -> Result<()> {
        let state = checkpoint.state();
        let number = |key: &str| state.get(key).and_then(Value::as_u64);
        if number("state_version") != Some(STATE_VERSION) || state.get("process") != Some(&json!("lm_trainer")) {
            return Err(EngineError::bad_input(
                "it was written by another version of aitk or another type of process",
            ));
        }
        let optimizer = self.process.train.optimizer.name();
        let written = state.get("optimizer").and_then(Value::as_str).unwrap_or_default();
        if written != optimizer {
            return Err(EngineError::bad_input(format!(
                "its optimizer is {written}, but the job uses {optimizer}"
            )));
        }
        let read = |role: &str| -> Result<Option<BTreeMap<String, Tensor>>> {
            let Some(path) = checkpoint.file_with_role(role) else {
                return Ok(None);
            };
            Ok(Some(read_tensors(&path)?))
        };
        // The weights are dropped before the rest is read, which is twice as large for a full training.
        match read("weights")? {
            Some(weights) => self.trainer.restore_weights(&weights)?,
            None => return Err(EngineError::bad_input("it has no weights")),
        }
        let tensors = read("optimizer")?.map(|tensors| BTreeMap::from([("optimizer".to_owned(), tensors)]));
        let settings = (self.compute.dtype, self.steps, self.seed);
        self.trainer = trainer(self.process, &self.target, settings, &self.memory_options, cx)?;
        self.trainer.restore_state(tensors.unwrap_or_default(), 0)?;
        self.start_step = checkpoint.step();
        self.last_checkpoint = Some(checkpoint.step());
        self.non_finite_steps = number(NON_FINITE_KEY).unwrap_or(0);
        let kept = state.get(KEPT_KEY).and_then(Value::as_array);
        self.kept_saves = kept.into_iter().flatten().filter_map(Value::as_u64).collect();
        self.validation_is_pending = state.get(UNMEASURED_KEY).and_then(Value::as_bool).unwrap_or(false);
        self.metrics.load_checkpoint(checkpoint);
        Ok(())
    }

    /// The seed, and hashes of the config and the data, which must be the same for the same result.
    fn identity(&self) -> Map<String, Value> {
        let process = self.process;
        let mut train = serde_json::to_value(&process.train).unwrap_or_default();
        // Users often train longer, which does not change earlier steps unless the schedule of the learning rate uses the number of steps.
        if let Some(map) = train.as_object_mut() {
            map.remove("steps");
            map.remove("epochs");
        }
        let config = json!([
            train,
            &process.network,
            &process.model,
            process.context,
            process.packing
        ]);
        let mut map = Map::new();
        map.insert("seed".into(), self.seed.into());
        map.insert(
            "config".into(),
            hex::encode(&Sha256::digest(config.to_string())[..16]).into(),
        );
        map.insert("data".into(), self.data.fingerprint().into());
        map
    }

    /// Writes a checkpoint after `step` steps and emits it.
    pub(super) fn checkpoint(&mut self, cx: &mut Context<'_>, step: u64) -> Result<()> {
        if !self.trainer.weights_are_finite()? {
            return Err(EngineError::bad_input(format!(
                "after step {step} the trained weights are not finite numbers, so they are not saved. {NON_FINITE_CAUSES}. Earlier saves are kept"
            )));
        }
        let (parts, _) = self.trainer.state()?;
        let mut writer = CheckpointWriter::new(&self.folder.checkpoints(), step)
            .map_err(checkpoint_error)?
            .job(cx.job.name.clone())
            .data_epoch(self.data.order.epoch_of(step));
        let mut add = |role: &str, tensors: &BTreeMap<String, Tensor>| {
            writer
                .add_file(&format!("{role}.safetensors"), role, |out| {
                    write_tensors(out, tensors, &BTreeMap::new())
                })
                .map_err(checkpoint_error)
        };
        for (role, tensors) in &parts {
            add(role, tensors)?;
        }
        if !self.metrics.is_empty() {
            add(step_recorder::ROLE, &self.metrics.tensors()?)?;
        }
        let mut state = self.identity();
        state.insert("state_version".into(), STATE_VERSION.into());
        state.insert("process".into(), "lm_trainer".into());
        state.insert("optimizer".into(), self.process.train.optimizer.name().into());
        if self.non_finite_steps > 0 {
            state.insert(NON_FINITE_KEY.into(), self.non_finite_steps.into());
        }
        if let Some(chosen) = self.fit.stored(cx) {
            state.insert(STATE_KEY.into(), chosen);
        }
        state.insert(KEPT_KEY.into(), self.kept_saves.clone().into());
        if self.validation_is_pending {
            state.insert(UNMEASURED_KEY.into(), true.into());
        }
        let path = writer.commit(state).map_err(checkpoint_error)?;
        self.last_checkpoint = Some(step);
        cx.events.emit(ChildEvent::Checkpoint { path, step });
        Ok(())
    }
}
