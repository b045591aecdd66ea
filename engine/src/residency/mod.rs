//! Runs a stack of blocks, with or without gradient checkpointing.
//!
//! A model defines its blocks as the steps of a [`Stack`]: the inputs of each step, and a function of tensors. This
//! module decides for every model family whether a step runs once, or again in the backward pass, so that models do not
//! have to.

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use crate::autograd;
use candle_core::{Result, Tensor};
use std::sync::Arc;

/// How the steps of a stack are run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Residency {
    /// All weights stay on the device, and all activations that the backward pass needs stay in memory.
    #[default]
    Resident,
    /// Gradient checkpointing: only the inputs and outputs of each segment of `steps` steps stay in memory, and the
    /// backward pass runs the segment again. Same numbers, less memory, about a third more time. Segments of one step
    /// need the least memory. Without trainable tensors, or outside [`autograd::record`], nothing runs twice.
    Checkpointed {
        /// The number of steps per segment; 0 counts as 1.
        steps: usize,
    },
}

impl Residency {
    /// Gradient checkpointing of single steps, or none.
    #[must_use]
    pub fn checkpointing(on: bool) -> Self {
        if on {
            Self::Checkpointed { steps: 1 }
        } else {
            Self::Resident
        }
    }
}

/// An input of a stack, or the output of one of its steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value(usize);

type Forward = dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + Sync;

#[derive(Clone)]
struct Step {
    name: String,
    inputs: Vec<Value>,
    outputs: Vec<Value>,
    forward: Arc<Forward>,
}

impl Step {
    fn run(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        (self.forward)(inputs).map_err(|e| e.context(format!("in {}", self.name)))
    }
}

/// The blocks of a model, in execution order, for one forward pass.
#[derive(Default)]
pub struct Stack {
    /// Indexed by [`Value`]; `None` until the step ran, and after the last use.
    values: Vec<Option<Tensor>>,
    steps: Vec<Step>,
}

impl std::fmt::Debug for Stack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list()
            .entries(self.steps.iter().map(|s| (&s.name, &s.inputs, &s.outputs)))
            .finish()
    }
}

impl Stack {
    /// An empty stack.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an input.
    pub fn input(&mut self, tensor: Tensor) -> Value {
        self.values.push(Some(tensor));
        Value(self.values.len() - 1)
    }

    /// Appends a step with the output `forward(inputs)`. `forward` may run more than once, so its result must depend
    /// only on its inputs and its weights.
    pub fn step<const N: usize>(
        &mut self,
        name: impl Into<String>,
        inputs: [Value; N],
        forward: impl Fn(&[Tensor; N]) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Value {
        let [output] = self.step_with_outputs(name, inputs, move |tensors| Ok([forward(tensors)?]));
        output
    }

    /// Appends a step with several outputs: a block that works on the tokens of image and text at once.
    pub fn step_with_outputs<const N: usize, const M: usize>(
        &mut self,
        name: impl Into<String>,
        inputs: [Value; N],
        forward: impl Fn(&[Tensor; N]) -> Result<[Tensor; M]> + Send + Sync + 'static,
    ) -> [Value; M] {
        let outputs = std::array::from_fn(|_| {
            self.values.push(None);
            Value(self.values.len() - 1)
        });
        let forward = move |tensors: &[Tensor]| match tensors.try_into() {
            Ok(tensors) => Ok(Vec::from(forward(tensors)?)),
            Err(_) => candle_core::bail!("a step reads {N} tensors, but got {}", tensors.len()),
        };
        self.steps.push(Step {
            name: name.into(),
            inputs: inputs.to_vec(),
            outputs: outputs.to_vec(),
            forward: Arc::new(forward),
        });
        outputs
    }

    /// Runs all steps and returns `result`. Each tensor is freed after the last segment that reads it (a segment is one step without checkpointing).
    ///
    /// # Errors
    /// The error of a step, with its name as context.
    pub fn run(mut self, residency: Residency, result: Value) -> Result<Tensor> {
        let segment_len = match residency {
            Residency::Resident => 1,
            Residency::Checkpointed { steps } => steps.max(1),
        };
        let mut last_use_of = vec![0; self.values.len()];
        for (index, step) in self.steps.iter().enumerate() {
            for value in &step.inputs {
                last_use_of[value.0] = index;
            }
        }
        last_use_of[result.0] = usize::MAX;
        for (segment_index, steps) in self.steps.chunks(segment_len).enumerate() {
            let segment_end = segment_index * segment_len + steps.len();
            let segment = Segment::new(steps, |value| last_use_of[value.0] >= segment_end);
            let inputs = segment.inputs.iter().map(|value| require(self.values[value.0].clone()));
            let inputs = inputs.collect::<Result<Vec<_>>>()?;
            let outputs = segment.outputs.clone();
            let made = match residency {
                Residency::Resident => segment.run(&inputs)?,
                Residency::Checkpointed { .. } => autograd::checkpoint(inputs, move |tensors| segment.run(tensors))?,
            };
            for (value, tensor) in outputs.into_iter().zip(made) {
                self.values[value.0] = Some(tensor);
            }
            for (tensor, last_use) in self.values.iter_mut().zip(&last_use_of) {
                if *last_use < segment_end {
                    *tensor = None;
                }
            }
        }
        require(self.values[result.0].take())
    }
}

/// Returns the tensor, or an error if its step has not run yet.
fn require(tensor: Option<Tensor>) -> Result<Tensor> {
    tensor.ok_or_else(|| candle_core::Error::Msg("a step reads the output of a later step".into()))
}

/// Consecutive steps as one function.
struct Segment {
    steps: Vec<Step>,
    /// The inputs that are not outputs of the segment itself.
    inputs: Vec<Value>,
    /// The outputs that later steps read.
    outputs: Vec<Value>,
}

impl Segment {
    fn new(steps: &[Step], is_read_later: impl Fn(Value) -> bool) -> Self {
        let outputs: Vec<Value> = steps.iter().flat_map(|step| step.outputs.iter().copied()).collect();
        let mut inputs = Vec::new();
        for value in steps.iter().flat_map(|step| &step.inputs) {
            if !outputs.contains(value) && !inputs.contains(value) {
                inputs.push(*value);
            }
        }
        Self {
            steps: steps.to_vec(),
            inputs,
            outputs: outputs.into_iter().filter(|value| is_read_later(*value)).collect(),
        }
    }

    fn run(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let mut values: Vec<(Value, Tensor)> = self.inputs.iter().copied().zip(inputs.iter().cloned()).collect();
        let find = |values: &[(Value, Tensor)], value: &Value| {
            require(values.iter().find(|(v, _)| v == value).map(|(_, t)| t.clone()))
        };
        for step in &self.steps {
            let tensors: Vec<Tensor> = step.inputs.iter().map(|v| find(&values, v)).collect::<Result<_>>()?;
            values.extend(step.outputs.iter().copied().zip(step.run(&tensors)?));
        }
        self.outputs.iter().map(|v| find(&values, v)).collect()
    }
}
