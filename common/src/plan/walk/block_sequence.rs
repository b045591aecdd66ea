//! Runs the blocks of a model, with or without gradient checkpointing, as `kernels/src/checkpointing`.

use super::meter::MetaTensor;
use super::tape::Walk;
use std::rc::Rc;

/// An input of a sequence, or the output of one of its blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Value(usize);

type Forward = dyn Fn(&Walk, &[MetaTensor]) -> Vec<MetaTensor>;

struct Block {
    inputs: Vec<Value>,
    outputs: Vec<Value>,
    forward: Rc<Forward>,
}

/// The blocks of a model, in execution order.
#[derive(Default)]
pub(super) struct BlockSequence {
    values: Vec<Option<MetaTensor>>,
    blocks: Vec<Block>,
}

impl BlockSequence {
    pub(super) fn input(&mut self, tensor: MetaTensor) -> Value {
        self.values.push(Some(tensor));
        Value(self.values.len() - 1)
    }

    pub(super) fn add(
        &mut self,
        inputs: &[Value],
        forward: impl Fn(&Walk, &[MetaTensor]) -> MetaTensor + 'static,
    ) -> Value {
        let [output] = self.add_with_outputs(inputs, move |walk, inputs| vec![forward(walk, inputs)]);
        output
    }

    /// Appends a block with several outputs.
    pub(super) fn add_with_outputs<const N: usize>(
        &mut self,
        inputs: &[Value],
        forward: impl Fn(&Walk, &[MetaTensor]) -> Vec<MetaTensor> + 'static,
    ) -> [Value; N] {
        let outputs = std::array::from_fn(|_| {
            self.values.push(None);
            Value(self.values.len() - 1)
        });
        self.blocks.push(Block {
            inputs: inputs.to_vec(),
            outputs: outputs.to_vec(),
            forward: Rc::new(forward),
        });
        outputs
    }

    /// Runs all blocks. Each tensor is freed after the last block that reads it.
    pub(super) fn run(self, walk: &Walk, checkpointed: bool, result: Value) -> Option<MetaTensor> {
        self.run_all(walk, checkpointed, &[result])?.pop()
    }

    /// As [`Self::run`], for a model with several results.
    pub(super) fn run_all(mut self, walk: &Walk, checkpointed: bool, results: &[Value]) -> Option<Vec<MetaTensor>> {
        let mut last_use_of = vec![0; self.values.len()];
        for (index, block) in self.blocks.iter().enumerate() {
            for value in &block.inputs {
                last_use_of[value.0] = index;
            }
        }
        for result in results {
            last_use_of[result.0] = usize::MAX;
        }
        for (index, block) in std::mem::take(&mut self.blocks).into_iter().enumerate() {
            let inputs = block.inputs.iter().map(|value| self.values[value.0].clone());
            let inputs: Vec<MetaTensor> = inputs.collect::<Option<_>>()?;
            let forward = block.forward;
            let outputs = match checkpointed {
                true => walk.checkpoint(inputs, move |walk, inputs| forward(walk, inputs)),
                false => forward(walk, &inputs),
            };
            for (value, output) in block.outputs.iter().zip(outputs) {
                self.values[value.0] = Some(output);
            }
            for (tensor, last_use) in self.values.iter_mut().zip(&last_use_of) {
                if *last_use <= index {
                    *tensor = None;
                }
            }
        }
        results.iter().map(|result| self.values[result.0].clone()).collect()
    }
}
