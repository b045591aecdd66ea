//! How a stack of blocks is run.
//!
//! A model writes its blocks down as the steps of a [`Stack`]: what each reads, and a function of tensors. How the
//! steps are run is decided here, once for every family: whether a step simply runs, or is run a second time in the
//! backward pass. No model file knows which.

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use crate::autograd;
use candle_core::{Result, Tensor};
use std::sync::Arc;

/// How the steps of a stack are run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Residency {
    /// All weights stay on the device, all activations that a gradient needs are kept.
    #[default]
    Resident,
    /// Gradient checkpointing: of every so many steps in a row only what goes in and what comes out is kept; the backward
    /// pass runs them a second time. Same numbers, less memory, about a third more time. One step at a time keeps
    /// least; where nothing is trained, or no [`autograd::record`] goes on, it costs nothing.
    Recomputed {
        /// Steps that are run again together; 0 counts as 1.
        steps: usize,
    },
}

impl Residency {
    /// Gradient checkpointing on or off.
    #[must_use]
    pub fn checkpointing(on: bool) -> Self {
        if on {
            Self::Recomputed { steps: 1 }
        } else {
            Self::Resident
        }
    }
}

/// A tensor that goes into a stack, or that one of its steps makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value(usize);

type Forward = dyn Fn(&[Tensor]) -> Result<Tensor> + Send + Sync;

#[derive(Clone)]
struct Step {
    name: String,
    reads: Vec<Value>,
    makes: Value,
    forward: Arc<Forward>,
}

impl Step {
    fn run(&self, inputs: &[Tensor]) -> Result<Tensor> {
        (self.forward)(inputs).map_err(|e| e.context(format!("in {}", self.name)))
    }
}

/// The blocks of a model in the order in which they run, for one forward pass.
#[derive(Default)]
pub struct Stack {
    /// By [`Value`]; what a step makes is not there yet.
    values: Vec<Option<Tensor>>,
    steps: Vec<Step>,
}

impl std::fmt::Debug for Stack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list()
            .entries(self.steps.iter().map(|s| (&s.name, &s.reads, s.makes)))
            .finish()
    }
}

impl Stack {
    /// An empty stack.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts in a tensor from outside.
    pub fn input(&mut self, tensor: Tensor) -> Value {
        self.values.push(Some(tensor));
        Value(self.values.len() - 1)
    }

    /// Appends a step that makes `forward(reads)`. It may be run more than once, and its result must depend on what it
    /// reads (and its own weights) only.
    pub fn step<const N: usize>(
        &mut self,
        name: impl Into<String>,
        reads: [Value; N],
        forward: impl Fn(&[Tensor; N]) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Value {
        self.values.push(None);
        let makes = Value(self.values.len() - 1);
        let forward = move |tensors: &[Tensor]| match tensors.try_into() {
            Ok(tensors) => forward(tensors),
            Err(_) => candle_core::bail!("a step reads {N} tensors and got {}", tensors.len()),
        };
        self.steps.push(Step {
            name: name.into(),
            reads: reads.to_vec(),
            makes,
            forward: Arc::new(forward),
        });
        makes
    }

    /// Runs all steps and answers with `result`. A tensor that no later step reads is let go.
    ///
    /// # Errors
    /// What a step answers, with its name.
    pub fn run(mut self, residency: Residency, result: Value) -> Result<Tensor> {
        let together = match residency {
            Residency::Resident => 1,
            Residency::Recomputed { steps } => steps.max(1),
        };
        let mut last_read = vec![0; self.values.len()];
        for (at, step) in self.steps.iter().enumerate() {
            for value in &step.reads {
                last_read[value.0] = at;
            }
        }
        last_read[result.0] = usize::MAX;
        for (number, steps) in self.steps.chunks(together).enumerate() {
            let end = number * together + steps.len();
            let part = Part::of(steps, |value| last_read[value.0] >= end);
            let inputs = part.reads.iter().map(|value| missing(self.values[value.0].clone()));
            let inputs = inputs.collect::<Result<Vec<_>>>()?;
            let makes = part.makes.clone();
            let made = match residency {
                Residency::Resident => part.run(&inputs)?,
                Residency::Recomputed { .. } => autograd::checkpoint(inputs, move |tensors| part.run(tensors))?,
            };
            for (value, tensor) in makes.into_iter().zip(made) {
                self.values[value.0] = Some(tensor);
            }
            for (tensor, last) in self.values.iter_mut().zip(&last_read) {
                if *last < end {
                    *tensor = None;
                }
            }
        }
        missing(self.values[result.0].take())
    }
}

fn missing(tensor: Option<Tensor>) -> Result<Tensor> {
    tensor.ok_or_else(|| candle_core::Error::Msg("a step reads what a later step makes".into()))
}

/// Steps that follow one another, as one function.
struct Part {
    steps: Vec<Step>,
    /// What they read and do not make.
    reads: Vec<Value>,
    /// What they make and others read.
    makes: Vec<Value>,
}

impl Part {
    fn of(steps: &[Step], read_later: impl Fn(Value) -> bool) -> Self {
        let made: Vec<Value> = steps.iter().map(|step| step.makes).collect();
        let mut reads = Vec::new();
        for value in steps.iter().flat_map(|step| &step.reads) {
            if !made.contains(value) && !reads.contains(value) {
                reads.push(*value);
            }
        }
        Self {
            steps: steps.to_vec(),
            reads,
            makes: made.into_iter().filter(|value| read_later(*value)).collect(),
        }
    }

    fn run(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let mut known: Vec<(Value, Tensor)> = self.reads.iter().copied().zip(inputs.iter().cloned()).collect();
        let find = |known: &[(Value, Tensor)], value: &Value| {
            missing(known.iter().find(|(v, _)| v == value).map(|(_, t)| t.clone()))
        };
        for step in &self.steps {
            let reads: Vec<Tensor> = step.reads.iter().map(|v| find(&known, v)).collect::<Result<_>>()?;
            known.push((step.makes, step.run(&reads)?));
        }
        self.makes.iter().map(|v| find(&known, v)).collect()
    }
}
