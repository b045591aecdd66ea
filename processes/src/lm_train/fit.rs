//! What the config leaves to the machine (`auto`): the context, the rows that are computed at a time, and gradient checkpointing. The rules are those
//! of the planner (`plan/training_fit.rs` of aitk-common); a checkpoint keeps what was chosen, so that a run that resumes has the same batches.

use super::super::context::Context;
use super::memory_meter::process_peak;
use crate::error::{EngineError, Result};
use crate::models::causal_lm::CausalLmConfig;
use aitk_common::attempt::{ChildEvent, DeviceMemory};
use aitk_common::job::lm_trainer::{LmTrainerProcess, MIN_FIM_CONTEXT};
use aitk_common::plan::parameter_counts::ParameterCounts;
use aitk_common::plan::training_fit::{AutoKeys, Correction, MIN_PACKED_CONTEXT, TrainingChoice, TrainingFit};
use aitk_common::plan::training_memory::{StepSize, TrainingMemory, new_model_counts};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// The key of a checkpoint's state.
pub(super) const STATE_KEY: &str = "auto";

/// What a checkpoint keeps of the choice.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct StoredChoice {
    batch_size: u32,
    context: u32,
    gradient_checkpointing: bool,
    /// The memory that it is predicted to need, corrected by what the first step took, on a device of this kind under this profile.
    bytes: u64,
    device: String,
    profile: String,
}

impl StoredChoice {
    /// Reads the state of a checkpoint. `None`: nothing was left to the machine.
    pub(super) fn of(state: &serde_json::Map<String, Value>) -> Option<Self> {
        let stored: Self = serde_json::from_value(state.get(STATE_KEY)?.clone()).ok()?;
        (stored.batch_size > 0 && stored.context > 1).then_some(stored)
    }
}

/// The sizes of a run's steps.
pub(super) struct RunFit {
    keys: AutoKeys,
    /// The process and its model, for the planner. `None`: the config has all values, or the shapes of the model are not known.
    body: Value,
    counts: Option<ParameterCounts>,
    memory: Option<DeviceMemory>,
    /// What the checkpoint has from which the run resumes.
    stored: Option<StoredChoice>,
    context: u32,
    /// The shortest context to which one is shortened that was chosen.
    least_context: usize,
    choice: Option<TrainingChoice>,
}

fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / 1_073_741_824.0)
}

impl RunFit {
    /// Reads what the planner needs, and chooses the context. `stored`: the choice in the checkpoint from which the run resumes.
    ///
    /// # Errors
    /// When the context is too short for what the config asks for.
    pub(super) fn new(
        process: &LmTrainerProcess,
        (folder, config): (&Path, &CausalLmConfig),
        stored: Option<StoredChoice>,
        cx: &mut Context<'_>,
    ) -> Result<Self> {
        let body = serde_json::to_value(process).unwrap_or_default();
        let keys = AutoKeys::of(&body);
        let mut fit = Self {
            keys,
            counts: None,
            memory: cx.spec.device_memory,
            stored: stored.filter(|_| keys.any()),
            context: keys.context.unwrap_or(0),
            // Rows that are not packed are never longer than the longest document, and are predicted with the context.
            least_context: match process.packing {
                true => MIN_PACKED_CONTEXT,
                false => MIN_FIM_CONTEXT,
            } as usize,
            choice: None,
            body,
        };
        if !keys.any() {
            return Ok(fit);
        }
        fit.counts = match process.model.from_config {
            true => new_model_counts(folder),
            false => ParameterCounts::read(folder),
        };
        if fit.planner(cx).is_none() || fit.memory.is_none() {
            let what = if fit.memory.is_none() {
                "the memory of the device is"
            } else {
                "the shapes of the model are"
            };
            cx.log(
                "warn",
                format!("auto: {what} not known, so the smallest values are chosen"),
            );
        }
        if keys.context.is_none() {
            fit.context = fit.choose_context(config, cx);
            if process.fim_rate > 0.0 && fit.context < MIN_FIM_CONTEXT {
                return Err(EngineError::bad_input(format!(
                    "fim_rate: needs a context of at least {MIN_FIM_CONTEXT} tokens, and the model has {} positions",
                    fit.context
                )));
            }
        }
        Ok(fit)
    }

    /// Tokens of a row.
    pub(super) fn context(&self) -> usize {
        self.context as usize
    }

    /// The planner for the attempt's device. `None`: the shapes of the model are not known.
    fn planner(&self, cx: &Context<'_>) -> Option<TrainingFit<'_>> {
        let memory = TrainingMemory::new(&self.body, self.counts?)?;
        Some(TrainingFit::new(
            self.keys,
            memory,
            cx.spec.profile,
            cx.spec.device.kind,
        ))
    }

    /// Bytes that a new run may take.
    fn limit(&self) -> u64 {
        self.memory.map_or(0, |memory| memory.budget)
    }

    fn choose_context(&self, config: &CausalLmConfig, cx: &mut Context<'_>) -> u32 {
        if let Some(stored) = &self.stored {
            cx.log("info", format!("context: auto: {} tokens, as before", stored.context));
            return stored.context;
        }
        let positions = u32::try_from(config.max_positions).unwrap_or(u32::MAX);
        let Some(planner) = self.planner(cx) else {
            return self.keys.smallest(positions).context;
        };
        let Some(memory) = self.memory else {
            return self.keys.smallest(positions).context;
        };
        let context = planner.context(memory.budget);
        let why = planner.context_reason(context, memory.budget);
        cx.log("info", format!("context: auto: {context} tokens. {why}"));
        context
    }

    /// Shortens a context that was chosen to what the documents need. The longest has `longest` tokens. A run that resumes cuts the same
    /// documents: all are shorter than the new context, and fill-in-the-middle leaves as many tokens free.
    pub(super) fn shorten_context(&mut self, longest: usize, cx: &mut Context<'_>) {
        if self.keys.context.is_some() || self.stored.is_some() {
            return;
        }
        let needed = longest.saturating_add(FREE_TOKENS).max(self.least_context);
        let needed = u32::try_from(needed).unwrap_or(u32::MAX);
        if needed < self.context {
            let message = format!("context: auto: {needed} tokens, because the longest document has {longest}");
            cx.log("info", message);
            self.context = needed;
        }
    }

    /// Chooses the rows of a batch and gradient checkpointing, and logs both with their reasons.
    pub(super) fn choose(&mut self, cx: &mut Context<'_>) {
        if !self.keys.any() {
            return;
        }
        self.choice = match self.kept_choice(cx) {
            Some(choice) => Some(choice),
            None => self
                .planner(cx)
                .map(|planner| planner.choose(self.context, self.limit())),
        };
        self.log_choice("auto", cx);
    }

    /// The choice of the checkpoint, if it fits this device.
    fn kept_choice(&self, cx: &mut Context<'_>) -> Option<TrainingChoice> {
        let stored = self.stored.as_ref()?;
        let available = self.memory?.available;
        let planner = self.planner(cx)?;
        let (device, profile) = (cx.spec.device.kind.name(), cx.spec.profile.name());
        let is_same = stored.device == device && stored.profile == profile && stored.context == self.context;
        let rows = self.keys.batch_size.unwrap_or(stored.batch_size);
        let measured = is_same.then_some((stored.gradient_checkpointing, stored.bytes));
        if let Some(choice) = planner.keep(rows, self.context, measured, available) {
            return Some(choice);
        }
        let message = format!(
            "auto: the checkpoint was trained with {} rows at a time, for which this device has too little memory ({}): from here on there are fewer, \
             so that sums of gradients are rounded in another way",
            stored.batch_size,
            gib(available)
        );
        cx.log("warn", message);
        None
    }

    fn log_choice(&self, what: &str, cx: &mut Context<'_>) {
        let Some((choice, planner)) = self.choice.zip(self.planner(cx)) else {
            return;
        };
        match self.memory {
            Some(memory) => {
                let level = if choice.fits { "info" } else { "warn" };
                cx.log(level, format!("{what}: {}", planner.reason(&choice, memory.budget)));
            }
            None => cx.log("info", format!("{what}: {}", choice.summary(&self.keys))),
        }
        let predicted = choice.bytes as f64 / 1_073_741_824.0;
        cx.events.emit(ChildEvent::Metrics {
            step: 0,
            values: BTreeMap::from([("memory/predicted_gib".to_owned(), predicted)]),
        });
    }

    /// Rows that are computed at a time.
    pub(super) fn batch_size(&self) -> usize {
        let chosen = self.choice.map_or(1, |choice| choice.step.rows);
        self.keys.batch_size.unwrap_or(chosen).max(1) as usize
    }

    /// Whether blocks are computed again in the backward pass.
    pub(super) fn gradient_checkpointing(&self) -> bool {
        let chosen = self.choice.is_none_or(|choice| choice.step.checkpointed);
        self.keys.checkpointed.unwrap_or(chosen)
    }

    /// Corrects the choice once, by what the first step took, whose largest batch had this many rows and tokens in each. Returns whether it changed.
    pub(super) fn correct(&mut self, [rows, tokens]: [usize; 2], cx: &mut Context<'_>) -> bool {
        let Some(choice) = self
            .choice
            .filter(|_| self.keys.batch_size.is_none() || self.keys.checkpointed.is_none())
        else {
            return false;
        };
        let Some(taken) = process_peak(cx.spec.device) else {
            return false;
        };
        let size = |size: usize| u32::try_from(size).unwrap_or(u32::MAX);
        let step = StepSize {
            rows: size(rows),
            context: size(tokens),
            ..choice.step
        };
        let Some(planner) = self.planner(cx) else {
            return false;
        };
        let predicted = planner.first_step_bytes(step);
        let planner = planner.corrected(Correction {
            difference: taken as f64 - predicted as f64,
            measured: Some(step),
        });
        let corrected = planner.choose(self.context, self.limit());
        let message = format!(
            "auto: the first step took {}, {} was predicted",
            gib(taken),
            gib(predicted)
        );
        let is_changed = corrected.step != choice.step;
        let message = match is_changed {
            true => message,
            false => format!("{message}: the choice stays"),
        };
        cx.log("info", message);
        self.choice = Some(corrected);
        if is_changed {
            self.log_choice("auto, from the second step on", cx);
        }
        is_changed
    }

    /// What a checkpoint keeps. `None`: nothing was left to the machine.
    pub(super) fn stored(&self, cx: &Context<'_>) -> Option<Value> {
        if !self.keys.any() {
            return None;
        }
        let stored = StoredChoice {
            batch_size: u32::try_from(self.batch_size()).unwrap_or(u32::MAX),
            context: self.context,
            gradient_checkpointing: self.gradient_checkpointing(),
            bytes: self.choice.map_or(0, |choice| choice.bytes),
            device: cx.spec.device.kind.name().to_owned(),
            profile: cx.spec.profile.name().to_owned(),
        };
        serde_json::to_value(stored).ok()
    }
}

/// Tokens by which a chosen context is longer than the longest document: fill-in-the-middle needs them.
const FREE_TOKENS: usize = 8;
