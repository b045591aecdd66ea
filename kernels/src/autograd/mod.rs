//! A tape of the forward pass for the backward pass, and gradient checkpointing.
//!
//! candle's own backward pass works on everything that is composed of candle's operations. It has two costs: at every
//! operation a gradient goes through memory three times (zeros, a sum, the result), and everything that the forward
//! pass saved stays in memory until the backward pass ends. Inside [`record`], the engine's own operations
//! (`Operation`) are therefore steps of a [`Tape`]: a step passes its gradient on without a copy, and its saved inputs
//! are freed as soon as the step is done.
//!
//! ```text
//! variable ──► step ──► tensor ──► candle's operations ──► tensor ──► step ──► … ──► loss
//!              tape                candle's graph                     tape
//! ```
//!
//! The output of a step is a variable (a leaf) to candle: candle's graph of later operations ends at that tensor. When
//! a step reads a tensor that candle computed, this part of candle's graph becomes one step of the tape, which runs
//! candle's backward pass on its gradient. Both kinds of operations can therefore be mixed freely.
//!
//! An operation has two forms, each with a forward and a backward pass: kernels on slices for f32 on the CPU, and
//! candle's operations on tensors for CUDA, Metal, other dtypes and portable mode ([`crate::device::portable`]). In a
//! recording, both are one step: what a step does not save, and gradients of what is not trained, exist on no device.
//!
//! Outside [`record`], the engine's operations are nodes of candle's graph, or are composed of its operations where
//! they run on tensors, and candle's `backward()` does everything.

mod leaf;
mod operation;
mod pass;
mod slices;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

pub use operation::{Input, Operation, apply};
pub use pass::PassKey;
pub(crate) use slices::{is_cpu_f32, with_slice};

use candle_core::{CpuStorage, CustomOp1, Layout, MetalStorage, Result, Shape, Tensor, TensorId, Var};
use candle_core::{CudaStorage, DType};
use pass::PassValues;
use std::cell::RefCell;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

thread_local! {
    /// The active recordings of this thread, the innermost last.
    static SCOPES: RefCell<Vec<Recording>> = const { RefCell::new(Vec::new()) };
}

/// What is recorded of a forward pass.
enum Recording {
    /// All steps.
    Tape(Tape),
    /// Only the variables that the steps read, for a forward pass that is recomputed later. Tensors that depend on
    /// variables are still tracked.
    Variables(HashSet<TensorId>),
}

/// Takes the gradients of a step's outputs and returns those of its inputs, with the ids of the tensors.
type Backward = dyn FnOnce(Vec<Option<Tensor>>) -> Result<Vec<(TensorId, Tensor)>>;

struct Step {
    /// The tensors that may get a gradient from this step, and possibly others.
    input_ids: Vec<TensorId>,
    output_ids: Vec<TensorId>,
    backward: Box<Backward>,
}

/// The steps of a forward pass.
#[derive(Default)]
pub struct Tape {
    steps: Vec<Step>,
    /// Tensors of candle's graph that already are the output of a step.
    bridged_ids: HashSet<TensorId>,
}

impl std::fmt::Debug for Tape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tape({} steps)", self.steps.len())
    }
}

/// Runs `forward` on this thread and returns its result with the tape of its steps. Calls may be nested.
///
/// # Errors
/// The error of `forward`.
pub fn record<R, E>(forward: impl FnOnce() -> std::result::Result<R, E>) -> std::result::Result<(R, Tape), E> {
    let scope = Scope::enter(Recording::Tape(Tape::default()));
    let result = forward()?;
    let tape = match scope.leave() {
        Some(Recording::Tape(tape)) => tape,
        _ => Tape::default(),
    };
    Ok((result, tape))
}

/// Computes `loss()` and the gradients of all variables that it depends on.
///
/// # Errors
/// The error of `loss`, or of an operation in the backward pass.
pub fn gradients<E: From<candle_core::Error>>(
    loss: impl FnOnce() -> std::result::Result<Tensor, E>,
) -> std::result::Result<(Tensor, Gradients), E> {
    let (loss, tape) = record(loss)?;
    let gradients = tape.backward(&loss)?;
    Ok((loss, gradients))
}

impl Tape {
    /// Computes the gradients of the sum over `output` (any shape; usually a scalar loss).
    ///
    /// # Errors
    /// When an operation fails.
    pub fn backward(self, output: &Tensor) -> Result<Gradients> {
        let ones = output.ones_like()?;
        self.backward_from([(output.clone(), ones)])
    }

    /// As [`Tape::backward`], from several outputs, each with its gradient.
    ///
    /// # Errors
    /// When an operation fails.
    pub fn backward_from(mut self, outputs: impl IntoIterator<Item = (Tensor, Tensor)>) -> Result<Gradients> {
        let mut gradients = Gradients::default();
        for (output, gradient) in outputs {
            self.bridge(&output);
            if output.track_op() {
                gradients.add(output.id(), gradient)?;
            }
        }
        while let Some(step) = self.steps.pop() {
            step.propagate(&mut gradients)?;
        }
        Ok(gradients)
    }

    /// As [`Tape::backward`], but passes the gradient of each variable to `take` as soon as it is complete and then
    /// drops it. With gradient checkpointing, at most one block's gradients are in memory at a time. Nothing reads a
    /// variable after its gradient was passed on, so `take` may change the variable.
    ///
    /// # Errors
    /// The error of `take`, or when an operation fails.
    pub fn backward_each<E: From<candle_core::Error>>(
        self,
        output: &Tensor,
        take: impl FnMut(TensorId, Tensor) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let ones = output.ones_like()?;
        self.backward_each_from((output, ones), take)
    }

    /// As [`Tape::backward_each`], from an output with its gradient.
    ///
    /// # Errors
    /// As [`Tape::backward_each`].
    pub fn backward_each_from<E: From<candle_core::Error>>(
        mut self,
        (output, gradient): (&Tensor, Tensor),
        mut take: impl FnMut(TensorId, Tensor) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        self.bridge(output);
        // For each variable, the first step that reads it. The backward pass reaches that step last.
        let mut first_use: HashMap<TensorId, usize> = HashMap::new();
        for (at, step) in self.steps.iter().enumerate() {
            for id in &step.input_ids {
                first_use.entry(*id).or_insert(at);
            }
        }
        for id in self.steps.iter().flat_map(|step| &step.output_ids) {
            first_use.remove(id);
        }
        let mut gradients = Gradients::default();
        if output.track_op() {
            gradients.add(output.id(), gradient)?;
        }
        while let Some(mut step) = self.steps.pop() {
            let (at, input_ids) = (self.steps.len(), std::mem::take(&mut step.input_ids));
            step.propagate(&mut gradients)?;
            for id in input_ids {
                if first_use.get(&id) == Some(&at)
                    && let Some(gradient) = gradients.0.remove(&id)
                {
                    take(id, gradient)?;
                }
            }
        }
        // The gradient of an output that is itself a variable.
        gradients
            .0
            .into_iter()
            .try_for_each(|(id, gradient)| take(id, gradient))
    }

    /// Adds a step for the part of candle's graph that ends in `tensor`, so that its gradient reaches the variables
    /// there.
    fn bridge(&mut self, tensor: &Tensor) {
        if tensor.is_variable() || !tensor.track_op() || !self.bridged_ids.insert(tensor.id()) {
            return;
        }
        let (result, variables) = (tensor.clone(), variables_of(tensor));
        self.steps.push(Step {
            input_ids: variables.iter().map(Tensor::id).collect(),
            output_ids: vec![tensor.id()],
            backward: Box::new(move |gradients| {
                let Some(gradient) = gradients.into_iter().flatten().next() else {
                    return Ok(vec![]);
                };
                let mut store = result.apply_op1(SeedGradient { gradient })?.backward()?;
                // A gradient that candle computed from a variable, as that of a product, has a graph, which every later operation on
                // tensors would extend: all of the backward pass would stay in memory.
                let gradients = variables
                    .iter()
                    .filter_map(|v| Some((v.id(), store.remove(v)?.detach())));
                Ok(gradients.collect())
            }),
        });
    }
}

impl Step {
    /// Computes the gradients of its inputs from those of its outputs, and adds them to `gradients`.
    fn propagate(self, gradients: &mut Gradients) -> Result<()> {
        let output_gradients: Vec<_> = self.output_ids.iter().map(|id| gradients.0.remove(id)).collect();
        if output_gradients.iter().all(Option::is_none) {
            return Ok(());
        }
        for (id, gradient) in (self.backward)(output_gradients)? {
            gradients.add(id, gradient)?;
        }
        Ok(())
    }
}

/// The variables that `tensor` depends on through candle's graph; `tensor` itself if it is a variable.
fn variables_of(tensor: &Tensor) -> Vec<Tensor> {
    if tensor.is_variable() {
        return vec![tensor.clone()];
    }
    if !tensor.track_op() {
        return vec![];
    }
    let nodes = tensor.sorted_nodes().into_iter();
    nodes.filter(|node| node.is_variable()).cloned().collect()
}

/// Gradients by tensor id.
#[derive(Debug, Default)]
pub struct Gradients(HashMap<TensorId, Tensor>);

impl Gradients {
    /// The gradient of a variable; `None` when the output does not depend on it.
    #[must_use]
    pub fn get(&self, variable: &Tensor) -> Option<&Tensor> {
        self.0.get(&variable.id())
    }

    /// Takes the gradient of a variable out; `None` when the output does not depend on it, or when it was taken.
    pub fn take(&mut self, variable: &Tensor) -> Option<Tensor> {
        self.0.remove(&variable.id())
    }

    fn add(&mut self, id: TensorId, gradient: Tensor) -> Result<()> {
        match self.0.entry(id) {
            Entry::Vacant(entry) => {
                entry.insert(gradient);
            }
            Entry::Occupied(mut entry) => {
                let sum = (entry.get() + gradient)?;
                entry.insert(sum);
            }
        }
        Ok(())
    }
}

/// Keeps a [`Recording`] active until it is left or dropped.
struct Scope {
    depth: usize,
}

impl Scope {
    fn enter(recording: Recording) -> Self {
        SCOPES.with_borrow_mut(|scopes| {
            scopes.push(recording);
            Self { depth: scopes.len() }
        })
    }

    fn leave(self) -> Option<Recording> {
        SCOPES.with_borrow_mut(|scopes| if scopes.len() == self.depth { scopes.pop() } else { None })
    }
}

impl Drop for Scope {
    /// Drops the recording after an error or a panic, unless [`Scope::leave`] took it.
    fn drop(&mut self) {
        SCOPES.with_borrow_mut(|scopes| scopes.truncate(self.depth - 1));
    }
}

/// Whether a recording is active on this thread.
fn is_recording() -> bool {
    SCOPES.with_borrow(|scopes| !scopes.is_empty())
}

/// Adds a step to the innermost recording, if there is one. The step reads `inputs` and, if it is a checkpoint, also
/// `inner_variables`; its outputs have the ids `output_ids`.
fn record_step<'a>(
    inputs: impl IntoIterator<Item = &'a Tensor>,
    inner_variables: HashSet<TensorId>,
    output_ids: Vec<TensorId>,
    backward: Box<Backward>,
) {
    SCOPES.with_borrow_mut(|scopes| match scopes.last_mut() {
        Some(Recording::Tape(tape)) => {
            let mut input_ids: Vec<TensorId> = inner_variables.into_iter().collect();
            for input in inputs.into_iter().filter(|input| input.track_op()) {
                tape.bridge(input);
                input_ids.push(input.id());
            }
            tape.steps.push(Step {
                input_ids,
                output_ids,
                backward,
            });
        }
        Some(Recording::Variables(variables)) => {
            variables.extend(inner_variables);
            inputs.into_iter().for_each(|input| add_variables(input, variables));
        }
        None => {}
    });
}

/// Adds the variables that `tensor` depends on.
fn add_variables(tensor: &Tensor, variables: &mut HashSet<TensorId>) {
    variables.extend(variables_of(tensor).iter().map(Tensor::id));
}

/// Gradient checkpointing (`torch.utils.checkpoint`): runs `forward(inputs)` and saves only the inputs; the backward
/// pass runs `forward` a second time with a tape and with the values of this pass ([`PassKey`]). Outside [`record`], and where no output depends on a variable,
/// nothing is recomputed.
///
/// # Errors
/// The error of `forward`.
pub(crate) fn checkpoint(
    inputs: Vec<Tensor>,
    forward: impl Fn(&[Tensor]) -> Result<Vec<Tensor>> + 'static,
) -> Result<Vec<Tensor>> {
    if !is_recording() {
        return forward(&inputs);
    }
    let scope = Scope::enter(Recording::Variables(HashSet::new()));
    let outputs = forward(&inputs);
    let mut inner_variables = match scope.leave() {
        Some(Recording::Variables(variables)) => variables,
        _ => HashSet::new(),
    };
    let mut outputs = outputs?;
    let mut tracked = Vec::new();
    for (index, output) in outputs.iter_mut().enumerate() {
        if output.track_op() {
            add_variables(output, &mut inner_variables);
            // A tensor that candle computed keeps its graph in memory; a copy does not.
            if !output.is_variable() {
                *output = Var::from_tensor(&output.detach())?.into_inner();
            }
            tracked.push((index, output.id()));
        }
    }
    if tracked.is_empty() {
        return Ok(outputs);
    }
    let (indices, output_ids): (Vec<usize>, Vec<TensorId>) = tracked.into_iter().unzip();
    let saved_inputs = inputs.clone();
    let pass = PassValues::current();
    let backward = Box::new(move |gradients: Vec<Option<Tensor>>| {
        let (recomputed, tape) = pass.run(|| record(|| forward(&inputs)))?;
        let seeds = indices.into_iter().zip(gradients).filter_map(|(index, gradient)| {
            let output = recomputed.get(index)?.clone();
            Some((output, gradient?))
        });
        Ok(tape.backward_from(seeds.collect::<Vec<_>>())?.0.into_iter().collect())
    });
    record_step(&saved_inputs, inner_variables, output_ids, backward);
    Ok(outputs)
}

/// An operation that starts candle's backward pass with a given gradient. Its own result is a scalar that nobody reads.
struct SeedGradient {
    gradient: Tensor,
}

/// A scalar zero on the device of `storage`.
fn scalar_zero<S: candle_core::backend::BackendStorage>(storage: &S) -> Result<(S, Shape)>
where
    S::Device: candle_core::backend::BackendDevice<Storage = S>,
{
    use candle_core::backend::BackendDevice as _;
    let shape = Shape::from(());
    Ok((storage.device().zeros_impl(&shape, DType::F32)?, shape))
}

impl CustomOp1 for SeedGradient {
    fn name(&self) -> &'static str {
        "seed"
    }

    fn cpu_fwd(&self, output: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        scalar_zero(output)
    }

    fn cuda_fwd(&self, output: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        scalar_zero(output)
    }

    fn metal_fwd(&self, output: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        scalar_zero(output)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.gradient.clone()))
    }
}
