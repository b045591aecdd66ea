//! Gradient checkpointing: runs the blocks of a model, and recomputes them in the backward pass where that is asked for.
//!
//! A model lists its blocks in a [`BlockSequence`]: the inputs of each block, and a function of tensors. This module decides for
//! every model family whether a block runs once, or again in the backward pass, so that models do not have to.

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use crate::autograd;
use candle_core::{Result, Tensor};
use std::sync::Arc;

/// Whether and how a model uses gradient checkpointing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checkpointing {
    /// None: all activations that the backward pass needs stay in memory.
    #[default]
    Off,
    /// Only the inputs and outputs of each segment of `blocks` blocks stay in memory, and the backward pass runs the segment
    /// again. Same numbers, less memory, about a third more time. Segments of one block need the least memory. Without trainable
    /// tensors, or outside [`autograd::record`], nothing runs twice.
    Segments {
        /// The number of blocks per segment; 0 counts as 1.
        blocks: usize,
    },
}

impl Checkpointing {
    /// Gradient checkpointing of each block, or none.
    #[must_use]
    pub fn each_block(on: bool) -> Self {
        if on { Self::Segments { blocks: 1 } } else { Self::Off }
    }
}

/// An input of a sequence, or the output of one of its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value(usize);

type Forward = dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + Sync;

#[derive(Clone)]
struct Block {
    name: String,
    inputs: Vec<Value>,
    outputs: Vec<Value>,
    forward: Arc<Forward>,
}

impl Block {
    fn run(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        (self.forward)(inputs).map_err(|e| e.context(format!("in {}", self.name)))
    }
}

/// The blocks of a model, in execution order, for one forward pass.
#[derive(Default)]
pub struct BlockSequence {
    /// Indexed by [`Value`]; `None` until the block ran, and after the last use.
    values: Vec<Option<Tensor>>,
    blocks: Vec<Block>,
}

impl std::fmt::Debug for BlockSequence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list()
            .entries(
                self.blocks
                    .iter()
                    .map(|block| (&block.name, &block.inputs, &block.outputs)),
            )
            .finish()
    }
}

impl BlockSequence {
    /// A sequence without blocks.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an input.
    pub fn input(&mut self, tensor: Tensor) -> Value {
        self.values.push(Some(tensor));
        Value(self.values.len() - 1)
    }

    /// Appends a block with the output `forward(inputs)`. `forward` may run more than once, so its result must depend
    /// only on its inputs and its weights.
    pub fn add<const N: usize>(
        &mut self,
        name: impl Into<String>,
        inputs: [Value; N],
        forward: impl Fn(&[Tensor; N]) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Value {
        let [output] = self.add_with_outputs(name, inputs, move |tensors| Ok([forward(tensors)?]));
        output
    }

    /// Appends a block with several outputs, such as one that works on the tokens of image and text at once.
    pub fn add_with_outputs<const N: usize, const M: usize>(
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
            Err(_) => candle_core::bail!("a block reads {N} tensors, but got {}", tensors.len()),
        };
        self.blocks.push(Block {
            name: name.into(),
            inputs: inputs.to_vec(),
            outputs: outputs.to_vec(),
            forward: Arc::new(forward),
        });
        outputs
    }

    /// Runs all blocks and returns `result`. Each tensor is freed after the last segment that reads it (without checkpointing each block is a segment).
    ///
    /// # Errors
    /// The error of a block, with its name as context.
    pub fn run(self, checkpointing: Checkpointing, result: Value) -> Result<Tensor> {
        let mut results = self.run_all(checkpointing, &[result])?;
        require(results.pop())
    }

    /// Runs all blocks and returns `results`, in their order: as [`Self::run`], for a model with several outputs.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_all(mut self, checkpointing: Checkpointing, results: &[Value]) -> Result<Vec<Tensor>> {
        let segment_len = match checkpointing {
            Checkpointing::Off => 1,
            Checkpointing::Segments { blocks } => blocks.max(1),
        };
        let mut last_use_of = vec![0; self.values.len()];
        for (index, block) in self.blocks.iter().enumerate() {
            for value in &block.inputs {
                last_use_of[value.0] = index;
            }
        }
        for result in results {
            last_use_of[result.0] = usize::MAX;
        }
        for (segment_index, blocks) in self.blocks.chunks(segment_len).enumerate() {
            let segment_end = segment_index * segment_len + blocks.len();
            let segment = Segment::new(blocks, |value| last_use_of[value.0] >= segment_end);
            let inputs = segment.inputs.iter().map(|value| require(self.values[value.0].clone()));
            let inputs = inputs.collect::<Result<Vec<_>>>()?;
            let outputs = segment.outputs.clone();
            let made = match checkpointing {
                Checkpointing::Off => segment.run(&inputs)?,
                Checkpointing::Segments { .. } => autograd::checkpoint(inputs, move |tensors| segment.run(tensors))?,
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
        results
            .iter()
            .map(|result| require(self.values[result.0].clone()))
            .collect()
    }
}

/// Returns the tensor, or an error if its block has not run yet.
fn require(tensor: Option<Tensor>) -> Result<Tensor> {
    tensor.ok_or_else(|| candle_core::Error::Msg("a block reads the output of a later block".into()))
}

/// Consecutive blocks as one function.
struct Segment {
    blocks: Vec<Block>,
    /// The inputs that are not outputs of the segment itself.
    inputs: Vec<Value>,
    /// The outputs that later blocks read.
    outputs: Vec<Value>,
}

impl Segment {
    fn new(blocks: &[Block], is_read_later: impl Fn(Value) -> bool) -> Self {
        let outputs: Vec<Value> = blocks.iter().flat_map(|block| block.outputs.iter().copied()).collect();
        let mut inputs = Vec::new();
        for value in blocks.iter().flat_map(|block| &block.inputs) {
            if !outputs.contains(value) && !inputs.contains(value) {
                inputs.push(*value);
            }
        }
        Self {
            blocks: blocks.to_vec(),
            inputs,
            outputs: outputs.into_iter().filter(|value| is_read_later(*value)).collect(),
        }
    }

    fn run(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let mut values: Vec<(Value, Tensor)> = self.inputs.iter().copied().zip(inputs.iter().cloned()).collect();
        let find = |values: &[(Value, Tensor)], value: &Value| {
            require(values.iter().find(|(v, _)| v == value).map(|(_, t)| t.clone()))
        };
        for block in &self.blocks {
            let tensors: Vec<Tensor> = block.inputs.iter().map(|v| find(&values, v)).collect::<Result<_>>()?;
            values.extend(block.outputs.iter().copied().zip(block.run(&tensors)?));
        }
        self.outputs.iter().map(|v| find(&values, v)).collect()
    }
}
