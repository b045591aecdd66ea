//! What a forward pass did, written down so that it can be gone through backwards.
//!
//! candle has a backward pass of its own, which works on everything that is made of its operations, here too. Two things
//! it does not do: a gradient goes through memory three times at every operation (zeros, a sum, the result), and all
//! that the forward pass kept stays until the backward pass is through. So inside of [`record`] the engine's own
//! operations (`Operation`) are steps of a [`Tape`]: gradients are handed on as they are, and what a step kept goes
//! when the step is done.
//!
//! ```text
//! variable ──► step ──► tensor ──► candle's operations ──► tensor ──► step ──► … ──► loss
//!              tape                candle's graph                     tape
//! ```
//!
//! A tensor that a step makes looks like a variable to candle: whatever candle does with it is in candle's graph, down
//! to that tensor. When a step reads such a result, the stretch becomes a step of the tape itself, which sends its
//! gradient through candle's backward pass. So operations mix as they like; on CUDA and Metal, where the engine's
//! operations are made of candle's, everything is one such stretch.
//!
//! Outside of [`record`] the engine's operations are nodes of candle's graph, and `backward()` of candle does it all.

mod operation;
mod slices;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

pub(crate) use operation::{Input, Operation, apply};
pub(crate) use slices::{runs_here, with_slice};

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CustomOp1, Layout, MetalStorage, Result, Shape, Storage, Tensor, TensorId, Var};
use candle_core::{CudaStorage, DType};
use std::cell::RefCell;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

thread_local! {
    /// What is written on now, the innermost last.
    static SCOPES: RefCell<Vec<Written>> = const { RefCell::new(Vec::new()) };
}

/// What a forward pass leaves.
enum Written {
    /// Its steps.
    Steps(Tape),
    /// Of steps that are run again only the variables that they read; what depends on variables is marked all the same.
    Reads(HashSet<TensorId>),
}

/// Takes what comes back for a step's outputs and answers what goes on, and to which tensors.
type Backward = dyn FnOnce(Vec<Option<Tensor>>) -> Result<Vec<(TensorId, Tensor)>>;

struct Step {
    /// The variables that its gradients may go to, or more.
    reads: Vec<TensorId>,
    makes: Vec<TensorId>,
    backward: Box<Backward>,
}

/// The steps of a forward pass.
#[derive(Default)]
pub struct Tape {
    steps: Vec<Step>,
    /// Results of candle's graph that are the output of a step.
    bridged: HashSet<TensorId>,
}

impl std::fmt::Debug for Tape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a tape of {} steps", self.steps.len())
    }
}

/// Runs `forward` and answers its result with what is needed to go back. On this thread; may be nested.
///
/// # Errors
/// What `forward` answers.
pub fn record<R, E>(forward: impl FnOnce() -> std::result::Result<R, E>) -> std::result::Result<(R, Tape), E> {
    let scope = Scope::enter(Written::Steps(Tape::default()));
    let result = forward()?;
    let tape = match scope.leave() {
        Some(Written::Steps(tape)) => tape,
        _ => Tape::default(),
    };
    Ok((result, tape))
}

/// `loss()` with the gradients of all variables that it depends on.
///
/// # Errors
/// What `loss` answers, or the arithmetic of the backward pass.
pub fn gradients<E: From<candle_core::Error>>(
    loss: impl FnOnce() -> std::result::Result<Tensor, E>,
) -> std::result::Result<(Tensor, Gradients), E> {
    let (loss, tape) = record(loss)?;
    let gradients = tape.backward(&loss)?;
    Ok((loss, gradients))
}

impl Tape {
    /// The gradients of a sum over `output` (of any shape; usually one number).
    ///
    /// # Errors
    /// When the arithmetic fails.
    pub fn backward(self, output: &Tensor) -> Result<Gradients> {
        let ones = output.ones_like()?;
        self.backward_from([(output.clone(), ones)])
    }

    /// The same from several outputs, each with the gradient that comes back for it.
    ///
    /// # Errors
    /// When the arithmetic fails.
    pub fn backward_from(mut self, outputs: impl IntoIterator<Item = (Tensor, Tensor)>) -> Result<Gradients> {
        let mut gradients = Gradients::default();
        for (output, gradient) in outputs {
            self.bridge(&output);
            if output.track_op() {
                gradients.add(output.id(), gradient)?;
            }
        }
        while let Some(step) = self.steps.pop() {
            step.go_back(&mut gradients)?;
        }
        Ok(gradients)
    }

    /// As [`Tape::backward`] of one output, but gives the gradient of each variable to `take` as soon as it is complete,
    /// and keeps none of them: where the parts of a model are recomputed, those of one part exist at a time. Nothing
    /// reads a variable after its gradient was given, so that `take` may change it.
    ///
    /// # Errors
    /// What `take` answers, or when the arithmetic fails.
    pub fn backward_each<E: From<candle_core::Error>>(
        mut self,
        output: &Tensor,
        mut take: impl FnMut(TensorId, Tensor) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        self.bridge(output);
        // By the step that reads it first, which is the last one here.
        let mut first: HashMap<TensorId, usize> = HashMap::new();
        for (at, step) in self.steps.iter().enumerate() {
            for id in &step.reads {
                first.entry(*id).or_insert(at);
            }
        }
        for id in self.steps.iter().flat_map(|step| &step.makes) {
            first.remove(id);
        }
        let mut gradients = Gradients::default();
        if output.track_op() {
            gradients.add(output.id(), output.ones_like()?)?;
        }
        while let Some(mut step) = self.steps.pop() {
            let (at, reads) = (self.steps.len(), std::mem::take(&mut step.reads));
            step.go_back(&mut gradients)?;
            for id in reads {
                if first.get(&id) == Some(&at)
                    && let Some(gradient) = gradients.0.remove(&id)
                {
                    take(id, gradient)?;
                }
            }
        }
        // An output that is a variable itself.
        gradients
            .0
            .into_iter()
            .try_for_each(|(id, gradient)| take(id, gradient))
    }

    /// Makes a result of candle's graph the output of a step, so that its gradient finds its way.
    fn bridge(&mut self, tensor: &Tensor) {
        if tensor.is_variable() || !tensor.track_op() || !self.bridged.insert(tensor.id()) {
            return;
        }
        let (result, variables) = (tensor.clone(), variables_of(tensor));
        self.steps.push(Step {
            reads: variables.iter().map(Tensor::id).collect(),
            makes: vec![tensor.id()],
            backward: Box::new(move |back| {
                let Some(gradient) = back.into_iter().flatten().next() else {
                    return Ok(vec![]);
                };
                let mut store = result.apply_op1(Seed { gradient })?.backward()?;
                let found = variables.iter().filter_map(|v| Some((v.id(), store.remove(v)?)));
                Ok(found.collect())
            }),
        });
    }
}

impl Step {
    /// Sends what came back for its outputs on to its inputs.
    fn go_back(self, gradients: &mut Gradients) -> Result<()> {
        let back: Vec<_> = self.makes.iter().map(|id| gradients.0.remove(id)).collect();
        if back.iter().all(Option::is_none) {
            return Ok(());
        }
        for (id, gradient) in (self.backward)(back)? {
            gradients.add(id, gradient)?;
        }
        Ok(())
    }
}

/// The variables that a tensor was made of by candle's operations; its own self, if it is one.
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

/// Gradients by tensor.
#[derive(Debug, Default)]
pub struct Gradients(HashMap<TensorId, Tensor>);

impl Gradients {
    /// The gradient of a variable; `None` when nothing depends on it.
    #[must_use]
    pub fn get(&self, variable: &Tensor) -> Option<&Tensor> {
        self.0.get(&variable.id())
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

/// As long as it lives, this is what is written on.
struct Scope {
    depth: usize,
}

impl Scope {
    fn enter(written: Written) -> Self {
        SCOPES.with_borrow_mut(|scopes| {
            scopes.push(written);
            Self { depth: scopes.len() }
        })
    }

    fn leave(self) -> Option<Written> {
        SCOPES.with_borrow_mut(|scopes| if scopes.len() == self.depth { scopes.pop() } else { None })
    }
}

impl Drop for Scope {
    /// After an error or a panic: the tape goes, unless [`Scope::leave`] took it.
    fn drop(&mut self) {
        SCOPES.with_borrow_mut(|scopes| scopes.truncate(self.depth - 1));
    }
}

/// Whether a forward pass is written down, or is a part of one that is.
fn is_recording() -> bool {
    SCOPES.with_borrow(|scopes| !scopes.is_empty())
}

/// Writes a step that reads `inputs`, and inside of it the variables `within`, and makes `makes`, if steps are written here.
fn push<'a>(
    inputs: impl IntoIterator<Item = &'a Tensor>,
    within: HashSet<TensorId>,
    makes: Vec<TensorId>,
    backward: Box<Backward>,
) {
    SCOPES.with_borrow_mut(|scopes| match scopes.last_mut() {
        Some(Written::Steps(tape)) => {
            let mut reads: Vec<TensorId> = within.into_iter().collect();
            for input in inputs.into_iter().filter(|input| input.track_op()) {
                tape.bridge(input);
                reads.push(input.id());
            }
            tape.steps.push(Step { reads, makes, backward });
        }
        Some(Written::Reads(reads)) => {
            reads.extend(within);
            inputs.into_iter().for_each(|input| note(input, reads));
        }
        None => {}
    });
}

/// Notes the variables that a tensor was made of.
fn note(tensor: &Tensor, reads: &mut HashSet<TensorId>) {
    reads.extend(variables_of(tensor).iter().map(Tensor::id));
}

/// A tensor that looks like a variable to candle.
fn leaf(elements: Vec<f32>, shape: Shape) -> Tensor {
    let storage = Storage::Cpu(CpuStorage::F32(elements));
    Tensor::from_storage(storage, shape, BackpropOp::none(), true)
}

/// Gradient checkpointing: `forward(inputs)`, of whose steps nothing is kept; the backward pass runs it a second time and
/// then backwards. Outside of [`record`], and where nothing in it depends on a variable, it simply runs.
///
/// # Errors
/// What `forward` answers.
pub(crate) fn recomputed(
    inputs: Vec<Tensor>,
    forward: impl Fn(&[Tensor]) -> Result<Vec<Tensor>> + 'static,
) -> Result<Vec<Tensor>> {
    if !is_recording() {
        return forward(&inputs);
    }
    let scope = Scope::enter(Written::Reads(HashSet::new()));
    let outputs = forward(&inputs);
    let mut within = match scope.leave() {
        Some(Written::Reads(reads)) => reads,
        _ => HashSet::new(),
    };
    let mut outputs = outputs?;
    let mut tracked = Vec::new();
    for (index, output) in outputs.iter_mut().enumerate() {
        if output.track_op() {
            note(output, &mut within);
            // What candle made holds on to its graph; a copy does not.
            if !output.is_variable() {
                *output = Var::from_tensor(&output.detach())?.into_inner();
            }
            tracked.push((index, output.id()));
        }
    }
    if tracked.is_empty() {
        return Ok(outputs);
    }
    let (indices, makes): (Vec<usize>, Vec<TensorId>) = tracked.into_iter().unzip();
    let read = inputs.clone();
    let backward = Box::new(move |back: Vec<Option<Tensor>>| {
        let (again, tape) = record(|| forward(&inputs))?;
        let seeds = indices.into_iter().zip(back).filter_map(|(index, gradient)| {
            let output = again.get(index)?.clone();
            Some((output, gradient?))
        });
        Ok(tape.backward_from(seeds.collect::<Vec<_>>())?.0.into_iter().collect())
    });
    push(&read, within, makes, backward);
    Ok(outputs)
}

/// Where a backward pass of candle begins that is given its gradient: one number without a meaning.
struct Seed {
    gradient: Tensor,
}

/// One number that is zero, where `storage` lies.
fn zero<S: candle_core::backend::BackendStorage>(storage: &S) -> Result<(S, Shape)>
where
    S::Device: candle_core::backend::BackendDevice<Storage = S>,
{
    use candle_core::backend::BackendDevice as _;
    let shape = Shape::from(());
    Ok((storage.device().zeros_impl(&shape, DType::F32)?, shape))
}

impl CustomOp1 for Seed {
    fn name(&self) -> &'static str {
        "seed"
    }

    fn cpu_fwd(&self, output: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        zero(output)
    }

    fn cuda_fwd(&self, output: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        zero(output)
    }

    fn metal_fwd(&self, output: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        zero(output)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.gradient.clone()))
    }
}
