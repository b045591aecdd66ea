//! Finds where a run resumes, and restores its state.
//!
//! A run resumes from the first of these that exists: the checkpoint in the attempt's spec, the newest complete
//! checkpoint in the run folder, its newest save by step (of an unfinished ai-toolkit run),
//! `network.pretrained_lora_path`. Else it starts anew. A checkpoint in the run folder that does not fit the config gives way to the newest
//! save; without a save it is an error.

use super::super::context::Context;
use super::super::run_folder::{RunFolder, checkpoint_error};
use super::checkpoint::{
    INTERRUPTED_KEY, KEPT_KEY, NON_FINITE_KEY, REQUESTED_KEY, START_KEY, STATE_VERSION, UNMEASURED_KEY, WORD_KEY,
};
use super::embedding::TrainedEmbedding;
use super::image_adapter::check_numbers;
use super::merging::MERGED_ROLE;
use super::run::Run;
use super::target::TrainedParameters;
use crate::adapters::{AdapterFile, saved_since};
use crate::error::{EngineError, Result};
use crate::families::saved_step;
use crate::training::{SharedLearnedSnr, Trainer};
use crate::weights::{Index, read_tensors};
use aitk_common::attempt::{AttemptSpec, FailureCause};
use aitk_common::checkpoint::Checkpoint;
use candle_core::Tensor;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The seed in the checkpoint from which the run resumes, if there is one.
pub(super) fn resumed_seed(spec: &AttemptSpec, folder: &RunFolder) -> Option<u64> {
    let checkpoint = match &spec.resume_from {
        Some(path) => Checkpoint::open(path).ok()?,
        None => Checkpoint::scan(&folder.checkpoints()).ok()?.newest?,
    };
    checkpoint.state().get("seed")?.as_u64()
}

/// The file in which ai-toolkit keeps the state of its optimizer.
const TOOLKIT_STATE: &str = "optimizer.pt";

/// The newest save of a run folder.
struct NewestSave {
    step: u64,
    path: PathBuf,
    /// What is in it, if it is a network's.
    adapter: Option<AdapterFile>,
}

/// The error about a file of an adapter that is the newest save.
fn as_newest_save(error: EngineError) -> EngineError {
    match error {
        EngineError::WeightsFile { path, reason } => EngineError::WeightsFile {
            path,
            reason: format!(
                "{reason}. It is the newest save of the run folder, with whose weights the training goes on: undo the change of the config, \
                 move it away, or give the run another `config.name`"
            ),
        },
        other => other,
    }
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
        } else if !self.resume_from_run_folder(cx)? {
            self.start_anew(cx)?;
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
            if self.start_step != step {
                // No checkpoint is of this training's steps yet.
                self.last_checkpoint = None;
            }
            self.start_step = step;
        }
        Ok(())
    }

    /// Starts with the weights that the config names, or with new ones.
    fn start_anew(&mut self, cx: &mut Context<'_>) -> Result<()> {
        if let TrainedParameters::ImageAdapter(adapter) = &self.target {
            cx.log("info", adapter.beginning().to_owned());
        }
        let network = self.process.network.as_ref();
        if let Some(path) = network.and_then(|network| network.pretrained_lora_path.as_deref()) {
            let path = cx.local_path(path)?;
            let file = AdapterFile::open(&path)?;
            check_numbers(&file.path)
                .map_err(|error| EngineError::bad_input(format!("network.pretrained_lora_path: {error}")))?;
            self.load_lora(&file, cx)?;
            cx.log("info", format!("starting from the weights of {}", path.display()));
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
        // The checkpoint that does not fit, and why.
        let mut unfit: Option<(String, EngineError)> = None;
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
                Err(error) => {
                    let problem = format!(
                        "the checkpoint of step {} does not fit this config ({error})",
                        checkpoint.step()
                    );
                    unfit = Some((problem, error));
                }
            }
        }
        let newest = self.newest_save(cx);
        match (unfit, &newest) {
            (None, _) => {}
            (Some((problem, _)), Some(_)) => cx.log("warn", format!("{problem}; trying the newest save instead")),
            // A run that started anew would remove this checkpoint with its first one.
            (Some((problem, error)), None) if error.cause() == FailureCause::BadInput => {
                let no_save = match self.folder.other_saves().first() {
                    None => "there is no save".to_owned(),
                    Some(other) => format!("the saves there, such as {other}, are of another type"),
                };
                return Err(EngineError::bad_input(format!(
                    "{problem}, and {no_save}: undo the change of the config, give the run another `config.name`, or move {} away",
                    self.folder.path.display()
                )));
            }
            (Some((_, error)), None) => return Err(error),
        }
        let Some(NewestSave { step, path, adapter }) = newest else {
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
            TrainedParameters::Adapter(_) => {
                let file = adapter.ok_or_else(|| EngineError::Internal("a save of a network was not read".into()))?;
                self.load_lora(&file, cx).map_err(as_newest_save)?;
            }
            TrainedParameters::Embedding(word) => {
                word.load(&path)?;
                self.trainer = self.new_trainer()?;
            }
            TrainedParameters::ImageAdapter(adapter) => {
                adapter.load(&path)?;
                self.trainer = self.new_trainer()?;
            }
            TrainedParameters::Decorator(decorator) => {
                decorator.load(&path)?;
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
        if self.folder.path.join(TOOLKIT_STATE).is_file() {
            cx.log(
                "info",
                format!(
                    "{TOOLKIT_STATE} of ai-toolkit is not read: it numbers the parameters in the order of the modules of the diffusers version \
                     that wrote it, so that its numbers could go to other layers"
                ),
            );
        }
        Ok(true)
    }

    /// The newest save of the run folder by step that can be read. The step in the file has precedence over the one in its name. Of older
    /// saves only the headers are read.
    fn newest_save(&self, cx: &mut Context<'_>) -> Option<NewestSave> {
        let is_adapter = matches!(self.target, TrainedParameters::Adapter(_)) && !self.process.merges_network();
        let mut skip = |error: EngineError| cx.log("warn", format!("skipping a save that cannot be read: {error}"));
        let mut saves = Vec::new();
        for (step_in_name, path) in self.folder.saves() {
            let step = match self.target {
                TrainedParameters::Adapter(_) if is_adapter => {
                    AdapterFile::open_layout(&path).map(|file| file.training_info().map(|(step, _)| step))
                }
                TrainedParameters::Adapter(_) | TrainedParameters::Model(_) => saved_step(&path),
                // In a folder the step is not in the file of the weights.
                TrainedParameters::ImageAdapter(_) | TrainedParameters::Decorator(_) => {
                    Index::open(&path).and_then(|_| saved_step(&path))
                }
                // It has the vectors of one word.
                TrainedParameters::Embedding(_) => TrainedEmbedding::saved_step(&path),
            };
            match step {
                Ok(step) => saves.push((step.or(step_in_name).unwrap_or(0), path)),
                Err(error) => skip(error),
            }
        }
        saves.sort_by_key(|(step, _)| std::cmp::Reverse(*step));
        for (step, path) in saves {
            let read = match self.target {
                TrainedParameters::ImageAdapter(_) | TrainedParameters::Decorator(_) => {
                    check_numbers(&path).map(|()| None)
                }
                _ if is_adapter => {
                    AdapterFile::open(&path).and_then(|file| check_numbers(&file.path).map(|()| Some(file)))
                }
                _ => Ok(None),
            };
            let adapter = match read {
                Ok(adapter) => adapter,
                Err(error) => {
                    skip(error);
                    continue;
                }
            };
            return Some(NewestSave { step, path, adapter });
        }
        None
    }

    /// Loads the weights of a LoRA file and makes a new trainer.
    fn load_lora(&mut self, file: &AdapterFile, cx: &mut Context<'_>) -> Result<()> {
        let TrainedParameters::Adapter(network) = &self.target else {
            return Err(EngineError::Internal("a LoRA for a full fine-tune".into()));
        };
        let report = network.load(file)?;
        if report.resized > 0 {
            cx.log(
                "warn",
                format!(
                    "{} layers have another rank: their weights are truncated or extended with new rows",
                    report.resized
                ),
            );
        }
        if let Some(factor) = report.first_other_strength {
            cx.log(
                "warn",
                format!(
                    "{} layers have another alpha / rank in {}: as in ai-toolkit, their matrices are used as they are, so that the change of \
                     the first one has {factor:.3} times its strength; `network.linear_alpha` and `conv_alpha` set it",
                    report.other_strengths,
                    file.path.display()
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

    /// Restores the complete state of a checkpoint. If it does not fit, nothing changes.
    fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let learned = self.learned_snr.as_ref().map(SharedLearnedSnr::get);
        let restored = self.restore_all(checkpoint);
        if restored.is_err() {
            // The trainer may have the checkpoint's state already.
            if let (Some(shared), Some(learned)) = (&self.learned_snr, learned) {
                shared.set(learned);
            }
            self.trainer = self.new_trainer()?;
        }
        restored
    }

    /// [`Self::restore`]; on an error the trainer has to be replaced.
    fn restore_all(&mut self, checkpoint: &Checkpoint) -> Result<()> {
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
            let map = read_tensors(&path)?.into_iter();
            let known = |name: String| saved_since(&name).unwrap_or(name);
            Ok(Some(map.map(|(name, tensor)| (known(name), tensor)).collect()))
        };
        // Everything is checked before a weight changes, so the weights are last.
        let mut tensors = BTreeMap::new();
        for role in ["optimizer", "ema", "gradients"] {
            tensors.extend(read(role)?.map(|map| (role.to_owned(), map)));
        }
        let has_average = tensors.contains_key("ema");
        self.trainer
            .restore_state(tensors, number("ema_updates").unwrap_or(0))?;
        let Some(weights) = read("weights")? else {
            return Err(EngineError::bad_input("it has no weights"));
        };
        self.trainer.check_weights(&weights)?;
        self.restore_merged(read(MERGED_ROLE)?.as_ref())?;
        self.trainer.restore_weights(&weights)?;
        drop(weights);
        if let (false, Some(ema)) = (has_average, self.trainer.ema()) {
            ema.restart().map_err(crate::training::optim_error)?;
        }
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
}
