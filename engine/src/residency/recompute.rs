//! Gradient checkpointing, as operations of candle's own graph.
//!
//! The part runs on inputs without a graph, its intermediate tensors are dropped, and two kinds of operations take its
//! place in the graph:
//!
//! ```text
//! inputs and variables -> Join -> Join -> … -> token -> Emit -> output 1
//!                                                    -> Emit -> output 2
//! ```
//!
//! The token is one number without a meaning; it ties the part's outputs to everything that they depend on. candle goes
//! backward through the outputs first, where each [`Emit`] keeps the gradient of its output, and then through the joins.
//! The first of those runs the part again, this time with a graph, and sends the kept gradients through it; each [`Join`]
//! then hands out the gradient of its own tensor. So `backward()` is called as ever, sums over several readers are
//! candle's, and no more than one part has its intermediate tensors in memory.

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, DType, Layout, MetalStorage, Result, Shape, Storage, Tensor, Var,
};
use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// `forward(inputs)`, whose intermediate tensors are not kept but made again by the backward pass. Where nothing in it
/// takes part in a gradient, it simply runs.
pub(super) fn run(
    inputs: Vec<Tensor>,
    forward: impl Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + Sync + 'static,
) -> Result<Vec<Tensor>> {
    let detached: Vec<Tensor> = inputs.iter().map(Tensor::detach).collect();
    let outputs = forward(&detached)?;
    let variables = variables(&outputs);
    let first_variable = inputs.len();
    let tracked = inputs.iter().enumerate().filter(|(_, t)| t.track_op());
    let variables_too = variables.iter().enumerate().map(|(i, t)| (first_variable + i, t));
    let parents: Vec<(usize, &Tensor)> = tracked.chain(variables_too).collect();
    let Some((_, some)) = parents.first() else {
        return Ok(outputs);
    };

    let mut token = Tensor::zeros((), DType::F32, some.device())?;
    let part = Arc::new(Part {
        is_tracked: inputs.iter().map(Tensor::track_op).collect(),
        inputs: detached,
        variables: variables.clone(),
        forward: Box::new(forward),
        state: Mutex::new(State {
            output_grads: vec![None; outputs.len()],
            grads: Vec::new(),
        }),
    });
    for (slot, parent) in parents {
        let part = Arc::clone(&part);
        token = token.apply_op2(parent, Join { part, slot })?;
    }
    let outputs = outputs.into_iter().enumerate().map(|(index, output)| {
        let emit = Emit {
            part: Arc::clone(&part),
            index,
            value: Mutex::new(Some(output.detach())),
        };
        drop(output);
        token.apply_op1(emit)
    });
    outputs.collect()
}

/// Every variable that these tensors were computed from.
fn variables(outputs: &[Tensor]) -> Vec<Tensor> {
    let mut seen = HashSet::new();
    let nodes = outputs.iter().flat_map(Tensor::sorted_nodes);
    nodes
        .filter(|node| node.is_variable() && seen.insert(node.id()))
        .cloned()
        .collect()
}

type Forward = dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + Sync;

/// What a part needs to be run again.
struct Part {
    inputs: Vec<Tensor>,
    /// Which inputs want a gradient.
    is_tracked: Vec<bool>,
    variables: Vec<Tensor>,
    forward: Box<Forward>,
    state: Mutex<State>,
}

struct State {
    /// What came back so far, by output.
    output_grads: Vec<Option<Tensor>>,
    /// What is not handed out yet, by input and then by variable. Empty until the part was run again.
    grads: Vec<Option<Tensor>>,
}

impl Part {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The gradient of an input or variable; the first call of a backward pass computes all of them.
    fn grad(&self, slot: usize) -> Result<Tensor> {
        let mut state = self.lock();
        if state.grads.get(slot).is_none_or(Option::is_none) {
            let output_grads: Vec<Option<Tensor>> = state.output_grads.iter_mut().map(Option::take).collect();
            state.grads = self.run_again(&output_grads)?;
        }
        match state.grads.get_mut(slot).and_then(Option::take) {
            Some(grad) => Ok(grad),
            None => candle_core::bail!("gradient checkpointing has no gradient number {slot}"),
        }
    }

    fn run_again(&self, output_grads: &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>> {
        let inputs = self.inputs.iter().zip(&self.is_tracked).map(|(input, tracked)| {
            if *tracked {
                Ok(Var::from_tensor(input)?.into_inner())
            } else {
                Ok(input.clone())
            }
        });
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        let outputs = (self.forward)(&inputs)?;
        let mut root: Option<Tensor> = None;
        for (output, grad) in outputs.into_iter().zip(output_grads) {
            let Some(grad) = grad else { continue };
            if output.track_op() {
                let seed = output.apply_op1(Seed { grad: grad.clone() })?;
                root = Some(match root {
                    Some(root) => (root + seed)?,
                    None => seed,
                });
            }
        }
        let mut store = match root {
            Some(root) => Some(root.backward()?),
            None => None,
        };
        let wanted = self
            .is_tracked
            .iter()
            .copied()
            .chain(self.variables.iter().map(|_| true));
        let grads = inputs
            .iter()
            .chain(&self.variables)
            .zip(wanted)
            .map(|(tensor, wanted)| {
                if !wanted {
                    return Ok(None);
                }
                match store.as_mut().and_then(|store| store.remove(tensor)) {
                    Some(grad) => Ok(Some(grad)),
                    // candle counts on a gradient for everything that an operation was given.
                    None => tensor.zeros_like().map(Some),
                }
            });
        grads.collect()
    }
}

/// One number that is zero, on the device of `storage`.
fn zero<S: BackendStorage>(storage: &S) -> Result<(S, Shape)>
where
    S::Device: BackendDevice<Storage = S>,
{
    let shape = Shape::from(());
    Ok((storage.device().zeros_impl(&shape, DType::F32)?, shape))
}

/// The elements of a tensor, contiguous.
fn copy<S: BackendStorage>(storage: &S, layout: &Layout) -> Result<(S, Shape)>
where
    S::Device: BackendDevice<Storage = S>,
{
    let mut out = storage.device().zeros_impl(layout.shape(), storage.dtype())?;
    storage.copy_strided_src(&mut out, 0, layout)?;
    Ok((out, layout.shape().clone()))
}

/// Ties one input or variable to the token.
struct Join {
    part: Arc<Part>,
    slot: usize,
}

impl CustomOp2 for Join {
    fn name(&self) -> &'static str {
        "recompute-join"
    }

    fn cpu_fwd(&self, token: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        zero(token)
    }

    fn cuda_fwd(&self, token: &CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        zero(token)
    }

    fn metal_fwd(
        &self,
        token: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        zero(token)
    }

    fn bwd(&self, token: &Tensor, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let before = token.track_op().then(|| grad.clone());
        Ok((before, Some(self.part.grad(self.slot)?)))
    }
}

/// An output of the part: its value goes out, its gradient is kept.
struct Emit {
    part: Arc<Part>,
    index: usize,
    /// Taken by the forward pass, so that the graph does not hold it a second time.
    value: Mutex<Option<Tensor>>,
}

impl Emit {
    fn value(&self) -> Result<Tensor> {
        let value = self.value.lock().unwrap_or_else(PoisonError::into_inner).take();
        value.ok_or_else(|| candle_core::Error::Msg("an output of a part is made once".into()))
    }
}

fn elsewhere<T>() -> Result<T> {
    candle_core::bail!("the outputs of a part lie on several devices")
}

impl CustomOp1 for Emit {
    fn name(&self) -> &'static str {
        "recompute-emit"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let value = self.value()?;
        let (storage, layout) = value.storage_and_layout();
        match &*storage {
            Storage::Cpu(storage) => copy(storage, layout),
            _ => elsewhere(),
        }
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        let value = self.value()?;
        let (storage, layout) = value.storage_and_layout();
        match &*storage {
            Storage::Cuda(storage) => copy(storage, layout),
            _ => elsewhere(),
        }
    }

    fn metal_fwd(&self, _: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        let value = self.value()?;
        let (storage, layout) = value.storage_and_layout();
        match &*storage {
            Storage::Metal(storage) => copy(storage, layout),
            _ => elsewhere(),
        }
    }

    fn bwd(&self, token: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        if let Some(kept) = self.part.lock().output_grads.get_mut(self.index) {
            *kept = Some(grad.clone());
        }
        token.zeros_like().map(Some)
    }
}

/// Where a backward pass begins that is given its gradient: one number without a meaning.
struct Seed {
    grad: Tensor,
}

impl CustomOp1 for Seed {
    fn name(&self) -> &'static str {
        "recompute-seed"
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
        Ok(Some(self.grad.clone()))
    }
}
