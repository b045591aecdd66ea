//! Chooses what the config of a training of a code model leaves to the machine (`auto`): the rows that are computed at a time, the context, and
//! gradient checkpointing. Pure arithmetic, so that `aitk fit` and the run have the same answer.

use super::json::number;
use super::profile::MemoryProfile;
use super::training_memory::{StepSize, TrainingMemory};
use crate::capability::DeviceKind;
use crate::job::limits::MAX_BATCH_TOKENS;
use serde_json::Value;

/// The shortest context that `auto` chooses, unless the model has fewer positions.
const MIN_CONTEXT: u32 = 512;
/// The shortest context to which a chosen one is shortened where documents are short, so that several are computed together.
pub const MIN_PACKED_CONTEXT: u32 = MIN_CONTEXT;
/// The longest one.
const MAX_CHOSEN_CONTEXT: u32 = 1 << 20;
/// Tokens of a batch from which a longer one is hardly faster, so that it is better spent on a pass without gradient checkpointing.
const LARGE_BATCH_TOKENS: u32 = 1024;
/// The context of a config that does not have one.
const DEFAULT_CONTEXT: f64 = 1024.0;

/// Which keys a config leaves to the machine, and the values of the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AutoKeys {
    /// `train.batch_size`. `None`: `auto`.
    pub batch_size: Option<u32>,
    /// `train.gradient_accumulation`: batches of a step, or with `batch_size: auto` its rows.
    pub accumulation: u32,
    /// `context`. `None`: `auto`.
    pub context: Option<u32>,
    /// `train.gradient_checkpointing`. `None`: `auto`.
    pub checkpointed: Option<bool>,
}

/// What was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrainingChoice {
    /// The size of a step.
    pub step: StepSize,
    /// Batches of a step.
    pub batches: u32,
    /// The memory that it is predicted to need.
    pub bytes: u64,
    /// Whether that is within the limit. False: nothing is, and this is the smallest choice.
    pub fits: bool,
}

/// A correction of predictions by what the first step took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Correction {
    /// Bytes that the step took more than predicted; negative: fewer.
    pub difference: f64,
    /// The size of that step.
    pub measured: Option<StepSize>,
}

fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / 1_073_741_824.0)
}

fn rows_text(rows: u32) -> String {
    format!("{rows} row{}", if rows == 1 { "" } else { "s" })
}

impl TrainingChoice {
    /// The choice as text: what the config left to the machine, and the memory.
    #[must_use]
    pub fn summary(&self, keys: &AutoKeys) -> String {
        let StepSize {
            rows,
            context,
            checkpointed,
            ..
        } = self.step;
        let mut parts = Vec::new();
        if keys.batch_size.is_none() {
            let all = rows_text(keys.rows());
            parts.push(match self.batches {
                1 => format!("all {all} of a step at a time"),
                batches => format!("{rows} of {all} at a time, {batches} batches for each step"),
            });
        }
        if keys.context.is_none() {
            parts.push(format!("a context of {context} tokens"));
        }
        if keys.checkpointed.is_none() {
            parts.push(format!(
                "{} gradient checkpointing",
                if checkpointed { "with" } else { "without" }
            ));
        }
        format!("{}: predicted to need {}", parts.join(", "), gib(self.bytes))
    }
}

fn is_auto(body: &Value, pointer: &str) -> bool {
    body.pointer(pointer).and_then(Value::as_str) == Some("auto")
}

impl AutoKeys {
    /// Reads a process of type `lm_trainer` (`JobSpec.process[i].kind.lm_train` as JSON).
    #[must_use]
    pub fn of(body: &Value) -> Self {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let count =
            |pointer: &str, default: f64, max: f64| number(body, pointer).unwrap_or(default).clamp(1.0, max) as u32;
        let fixed = |pointer: &str, value: u32| (!is_auto(body, pointer)).then_some(value);
        let checkpointed = body.pointer("/train/gradient_checkpointing").and_then(Value::as_bool);
        Self {
            batch_size: fixed("/train/batch_size", count("/train/batch_size", 1.0, 1e6)),
            accumulation: count("/train/gradient_accumulation", 1.0, 1e6),
            context: fixed(
                "/context",
                count("/context", DEFAULT_CONTEXT, f64::from(1u32 << 24)).max(2),
            ),
            checkpointed: match is_auto(body, "/train/gradient_checkpointing") {
                true => None,
                false => Some(checkpointed.unwrap_or(true)),
            },
        }
    }

    /// Whether the config leaves anything to the machine.
    #[must_use]
    pub fn any(&self) -> bool {
        self.batch_size.is_none() || self.context.is_none() || self.checkpointed.is_none()
    }

    /// Rows of a step, on any machine.
    #[must_use]
    pub fn rows(&self) -> u32 {
        self.batch_size.unwrap_or(1).saturating_mul(self.accumulation)
    }

    /// The step that needs the least memory. `positions`: the tokens of the model's longest text; 0: unknown.
    #[must_use]
    pub fn smallest(&self, positions: u32) -> StepSize {
        let context = self.context.unwrap_or_else(|| min_context(positions));
        self.step(self.batch_size.unwrap_or(1), context, self.checkpointed.unwrap_or(true))
    }

    fn step(&self, rows: u32, context: u32, checkpointed: bool) -> StepSize {
        StepSize {
            rows,
            context,
            accumulates: self.rows() > rows,
            checkpointed,
        }
    }

    /// The numbers of rows that may be computed at a time, the largest first: a step in one batch, in two of equal size, and so on.
    fn batch_sizes(&self) -> Vec<u32> {
        if let Some(fixed) = self.batch_size {
            return vec![fixed];
        }
        let rows = self.rows();
        let mut sizes = Vec::new();
        let mut size = rows;
        while size > 0 {
            sizes.push(size);
            // The fewest batches of fewer rows each.
            size = match size {
                1 => 0,
                size => {
                    let batches = rows.div_ceil(size - 1);
                    rows.div_ceil(batches)
                }
            };
        }
        sizes
    }
}

fn min_context(positions: u32) -> u32 {
    match positions {
        0 => MIN_CONTEXT,
        positions => MIN_CONTEXT.min(positions),
    }
}

/// The contexts that may be chosen for a model with this many positions, the longest first: powers of two, one and a half times as many, and all
/// positions.
fn contexts(positions: u32) -> Vec<u32> {
    let max = match positions {
        0 => MIN_CONTEXT,
        positions => positions.min(MAX_CHOSEN_CONTEXT),
    };
    let mut sizes = vec![max];
    let mut power = MIN_CONTEXT;
    while power < max {
        sizes.push(power);
        sizes.push(power + power / 2);
        power *= 2;
    }
    sizes.retain(|size| *size <= max);
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    sizes.dedup();
    sizes
}

/// The memory of a training on one device.
#[derive(Clone, Copy, Debug)]
pub struct TrainingFit<'a> {
    keys: AutoKeys,
    memory: TrainingMemory<'a>,
    profile: MemoryProfile,
    kind: DeviceKind,
    correction: Correction,
}

impl<'a> TrainingFit<'a> {
    /// A training with these keys under a memory profile on a kind of device.
    #[must_use]
    pub fn new(keys: AutoKeys, memory: TrainingMemory<'a>, profile: MemoryProfile, kind: DeviceKind) -> Self {
        Self {
            keys,
            memory,
            profile,
            kind,
            correction: Correction::default(),
        }
    }

    /// The same with predictions that are corrected by what a step took: where it took more, what comes and goes needs more in
    /// proportion; where it took less, the difference stays the same.
    #[must_use]
    pub fn corrected(self, correction: Correction) -> Self {
        Self { correction, ..self }
    }

    /// The bytes that a step is predicted to need.
    #[must_use]
    pub fn bytes(&self, step: StepSize) -> u64 {
        let predicted = self.memory.bytes(self.profile, self.kind, step);
        let Some(measured) = self.correction.measured else {
            return predicted;
        };
        let difference = self.correction.difference;
        let fixed = StepSize {
            rows: 1,
            context: 1,
            ..measured
        };
        let of = |step| self.memory.bytes(self.profile, self.kind, step) as f64;
        let (fixed, whole) = (of(fixed), of(measured));
        let share = match difference > 0.0 && whole > fixed {
            true => ((predicted as f64 - fixed) / (whole - fixed)).max(0.0),
            false => 1.0,
        };
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let bytes = (predicted as f64 + difference * share).clamp(0.0, 1e18) as u64;
        bytes
    }

    /// The bytes that the first step alone is predicted to take.
    #[must_use]
    pub fn first_step_bytes(&self, step: StepSize) -> u64 {
        self.memory.first_step_bytes(self.profile, self.kind, step)
    }

    /// The choice of an earlier attempt, if its `rows` at a time fit in `limit` bytes here. `measured`: whether it used gradient checkpointing, and
    /// the bytes that it needed, if that was on such a device.
    #[must_use]
    pub fn keep(&self, rows: u32, context: u32, measured: Option<(bool, u64)>, limit: u64) -> Option<TrainingChoice> {
        let rows = rows.min(self.keys.rows()).max(1);
        let of = |checkpointed: bool| {
            let step = self.keys.step(rows, context, checkpointed);
            (step, self.bytes(step))
        };
        let mut steps = Vec::new();
        if let Some((checkpointed, bytes)) = measured {
            steps.push((self.keys.step(rows, context, checkpointed), bytes));
        }
        match self.keys.checkpointed {
            Some(checkpointed) => steps.push(of(checkpointed)),
            None => steps.extend([of(false), of(true)]),
        }
        let fitting = steps.into_iter().find(|(_, bytes)| *bytes <= limit);
        fitting.map(|(step, bytes)| self.choice(step, bytes, true))
    }

    /// Why a context was chosen, for people.
    #[must_use]
    pub fn context_reason(&self, context: u32, limit: u64) -> String {
        let positions = self.memory.positions();
        let smallest = self.keys.smallest(positions);
        let needs = |context: u32| self.bytes(StepSize { context, ..smallest });
        let own = needs(context);
        if own > limit {
            return format!(
                "Not even that is predicted to fit: it needs {}, and the device has {}",
                gib(own),
                gib(limit)
            );
        }
        let (rows, own) = (rows_text(smallest.rows), gib(own));
        match contexts(positions).into_iter().rev().find(|longer| *longer > context) {
            Some(longer) => format!(
                "With {rows} at a time it needs {own} of {}, and {longer} tokens need {}",
                gib(limit),
                gib(needs(longer))
            ),
            None if context == positions => {
                format!("The model has no more positions. It needs {own} of {}", gib(limit))
            }
            None => format!("That is the longest that is chosen. It needs {own} of {}", gib(limit)),
        }
    }

    /// What was chosen and why, for people.
    #[must_use]
    pub fn reason(&self, choice: &TrainingChoice, limit: u64) -> String {
        let mut text = choice.summary(&self.keys);
        if !choice.fits {
            text.push_str(&format!(
                ". Nothing smaller is possible, and the device has {}: the training may run out of memory",
                gib(limit)
            ));
            return text;
        }
        text.push_str(&format!(", of {}", gib(limit)));
        if choice.batches > 1 && self.keys.batch_size.is_none() {
            let larger = self
                .keys
                .batch_sizes()
                .into_iter()
                .rev()
                .find(|rows| *rows > choice.step.rows);
            if let Some(larger) = larger {
                let step = self.keys.step(larger, choice.step.context, choice.step.checkpointed);
                text.push_str(&format!("; {larger} rows at a time need {}", gib(self.bytes(step))));
            }
        }
        if self.keys.checkpointed.is_none() && choice.step.checkpointed {
            let without = StepSize {
                checkpointed: false,
                ..choice.step
            };
            text.push_str(&format!(
                "; without gradient checkpointing, {}",
                gib(self.bytes(without))
            ));
        }
        text
    }

    /// The longest context within `limit` bytes for a batch of the fewest rows, up to the model's positions; that of the config if it has one.
    #[must_use]
    pub fn context(&self, limit: u64) -> u32 {
        if let Some(context) = self.keys.context {
            return context;
        }
        let smallest = self.keys.smallest(self.memory.positions());
        let contexts = contexts(self.memory.positions()).into_iter();
        let steps: Vec<StepSize> = contexts.map(|context| StepSize { context, ..smallest }).collect();
        let fitting = self.first_fitting(&steps, limit);
        fitting.map_or(smallest.context, |(step, _)| step.context)
    }

    /// The first of some steps, the largest first, that needs at most `limit` bytes, with its bytes. The one before it needs more.
    fn first_fitting(&self, steps: &[StepSize], limit: u64) -> Option<(StepSize, u64)> {
        let fitting = |index: usize| {
            let step = *steps.get(index)?;
            Some((step, self.bytes(step))).filter(|(_, bytes)| *bytes <= limit)
        };
        // Apart from the first one, which may be a step in one batch, whose gradients are not added to others.
        if let Some(first) = fitting(0) {
            return Some(first);
        }
        let mut to = steps.len().checked_sub(1)?;
        let mut found = fitting(to)?;
        // Those up to `from` do not fit, and the one at `to` does.
        let mut from = 0;
        while to - from > 1 {
            let middle = from + (to - from) / 2;
            match fitting(middle) {
                Some(step) => (found, to) = (step, middle),
                None => from = middle,
            }
        }
        Some(found)
    }

    /// The largest batch within `limit` bytes for rows of `context` tokens. Without gradient checkpointing, if that leaves a batch that is large
    /// enough to be computed fast, or that of the config.
    #[must_use]
    pub fn choose(&self, context: u32, limit: u64) -> TrainingChoice {
        let sizes = self.keys.batch_sizes();
        let largest = |checkpointed: bool| {
            let sizes = sizes.iter().filter(|rows| {
                **rows == 1
                    || self.keys.batch_size.is_some()
                    || u64::from(**rows) * u64::from(context) <= MAX_BATCH_TOKENS
            });
            let steps: Vec<StepSize> = sizes.map(|rows| self.keys.step(*rows, context, checkpointed)).collect();
            let (step, bytes) = self.first_fitting(&steps, limit)?;
            Some(self.choice(step, bytes, true))
        };
        let is_large = |choice: &TrainingChoice| {
            let is_fixed = self.keys.batch_size.is_some();
            is_fixed || choice.batches == 1 || choice.step.rows.saturating_mul(context) >= LARGE_BATCH_TOKENS
        };
        let found = match self.keys.checkpointed {
            Some(checkpointed) => largest(checkpointed),
            None => match largest(false) {
                Some(choice) if is_large(&choice) => Some(choice),
                other => largest(true).or(other),
            },
        };
        found.unwrap_or_else(|| {
            let step = StepSize {
                context,
                ..self.keys.smallest(self.memory.positions())
            };
            self.choice(step, self.bytes(step), false)
        })
    }

    fn choice(&self, step: StepSize, bytes: u64, fits: bool) -> TrainingChoice {
        let batches = self.keys.rows().div_ceil(step.rows.max(1));
        TrainingChoice {
            step,
            batches,
            bytes,
            fits,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
