//! The engine's own operations: steps of a tape, or nodes of candle's graph.

use super::leaf::{leaf_from_result, leaf_from_vec};
use super::slices::{cpu_slice, storage_slice};
use super::{is_cpu_f32, is_recording, record_step};
use candle_core::{CpuStorage, CustomOp1, CustomOp2, CustomOp3, DType, Device, Layout, Result, Shape, Tensor};
use std::collections::HashSet;

/// A differentiable operation on `N` contiguous tensors, in two forms: [`forward`](Self::forward) and
/// [`backward`](Self::backward) work on slices, for f32 on the CPU; [`forward_tensors`](Self::forward_tensors) and
/// [`backward_tensors`](Self::backward_tensors) work on tensors of any device and dtype.
pub trait Operation<const N: usize>: Send + Sync + 'static {
    /// The name in error messages.
    const NAME: &'static str;

    /// Which inputs the backward pass reads, if the inputs in `requires_grad` get a gradient. Of the other inputs only
    /// the shape is saved.
    fn saved_inputs(&self, requires_grad: [bool; N]) -> [bool; N];

    /// Whether the form for slices can be used, as far as tensors are concerned that the operation itself holds.
    fn has_slices(&self) -> bool {
        true
    }

    /// Computes the elements and the shape of the result.
    ///
    /// # Errors
    /// When the shapes do not match.
    fn forward(&self, inputs: [&[f32]; N], shapes: [&Shape; N]) -> Result<(Vec<f32>, Shape)>;

    /// Receives the result of [`Self::forward`] before [`Self::backward`] runs. An operation whose backward pass reads the
    /// result keeps it, detached.
    fn save_result(&self, _result: &Tensor) {}

    /// Computes the gradients of the inputs that require one, from the contiguous `gradient` of the result. The values
    /// for other inputs are ignored.
    ///
    /// # Errors
    /// When an operation fails.
    fn backward(&self, inputs: [&Input; N], gradient: &Tensor) -> Result<[Option<Tensor>; N]>;

    /// Computes the result with candle's operations, which have a backward pass, so that tracked inputs get gradients
    /// outside a recording.
    ///
    /// # Errors
    /// When the shapes do not match.
    fn forward_tensors(&self, inputs: [&Tensor; N]) -> Result<Tensor>;

    /// As [`Self::backward`], for tensors of any device and dtype. A gradient may have another dtype than its input.
    ///
    /// # Errors
    /// When an operation fails.
    fn backward_tensors(&self, inputs: [&Input; N], gradient: &Tensor) -> Result<[Option<Tensor>; N]>;
}

/// An input of an operation in the backward pass.
#[derive(Debug)]
pub struct Input {
    elements: Option<Tensor>,
    shape: Shape,
    dtype: DType,
    requires_grad: bool,
}

impl Input {
    /// Whether this input gets a gradient.
    pub(crate) fn requires_grad(&self) -> bool {
        self.requires_grad
    }

    /// The shape of the input.
    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The dtype of the input.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// The input, detached from any graph.
    ///
    /// # Errors
    /// When the operation did not save it.
    pub(crate) fn tensor(&self) -> Result<&Tensor> {
        match &self.elements {
            Some(tensor) => Ok(tensor),
            None => candle_core::bail!("the backward pass reads an input that the operation did not save"),
        }
    }

    /// Runs `f` on the elements of the input.
    ///
    /// # Errors
    /// When the operation did not save it.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
        super::with_slice(self.tensor()?, f)
    }
}

/// Applies an operation, as a step of the active tape or as a node of candle's graph. Tracked inputs get gradients.
///
/// # Errors
/// When the shapes do not match.
pub fn apply<'a, const N: usize, O: Operation<N>>(inputs: [&'a Tensor; N], operation: O) -> Result<Tensor>
where
    [&'a Tensor; N]: CandleGraph<N>,
{
    let requires_grad = inputs.map(Tensor::track_op);
    let tracked = requires_grad.contains(&true);
    let on_slices = operation.has_slices() && inputs.iter().all(|input| is_cpu_f32(input));
    if tracked && !is_recording() {
        return match on_slices {
            true => inputs.apply_in_graph(operation),
            false => operation.forward_tensors(inputs),
        };
    }
    let mut contiguous = Vec::with_capacity(N);
    for input in inputs {
        contiguous.push(input.contiguous()?);
    }
    let result = if on_slices {
        let (elements, shape) = run(&operation, &contiguous)?;
        if !tracked {
            return Tensor::from_vec(elements, shape, &Device::Cpu);
        }
        let result = leaf_from_vec(elements, shape);
        operation.save_result(&result);
        result
    } else {
        let detached: [Tensor; N] = std::array::from_fn(|i| contiguous[i].detach());
        let result = operation.forward_tensors(detached.each_ref())?;
        if !tracked {
            return Ok(result);
        }
        leaf_from_result(result, &detached)?
    };
    let saved = save_inputs(&operation, &contiguous, requires_grad);
    let ids: Vec<_> = contiguous.iter().map(Tensor::id).collect();
    let backward = Box::new(move |output_gradients: Vec<Option<Tensor>>| {
        let Some(gradient) = output_gradients.into_iter().flatten().next() else {
            return Ok(vec![]);
        };
        let (inputs, gradient) = (saved.each_ref(), gradient.contiguous()?);
        let gradients = match on_slices {
            true => operation.backward(inputs, &gradient)?,
            false => operation.backward_tensors(inputs, &gradient)?,
        };
        let found = gradients.into_iter().zip(ids).zip(inputs);
        found
            .filter_map(|((gradient, id), input)| Some((id, gradient.filter(|_| input.requires_grad)?, input.dtype)))
            .map(|(id, gradient, dtype)| Ok((id, gradient.to_dtype(dtype)?)))
            .collect()
    });
    record_step(&contiguous, HashSet::new(), vec![result.id()], backward);
    Ok(result)
}

fn run<const N: usize, O: Operation<N>>(operation: &O, inputs: &[Tensor]) -> Result<(Vec<f32>, Shape)> {
    let storages: Vec<_> = inputs.iter().map(Tensor::storage_and_layout).collect();
    let mut slices = [[].as_slice(); N];
    for (slice, (storage, layout)) in slices.iter_mut().zip(&storages) {
        *slice = storage_slice(storage, layout)?;
    }
    operation.forward(slices, std::array::from_fn(|i| storages[i].1.shape()))
}

fn save_inputs<const N: usize, O: Operation<N>>(
    operation: &O,
    inputs: &[Tensor],
    requires_grad: [bool; N],
) -> [Input; N] {
    let saved_inputs = operation.saved_inputs(requires_grad);
    std::array::from_fn(|i| Input {
        elements: saved_inputs[i].then(|| inputs[i].detach()),
        shape: inputs[i].shape().clone(),
        dtype: inputs[i].dtype(),
        requires_grad: requires_grad[i],
    })
}

/// Numbers of inputs that candle's custom operations take.
pub trait CandleGraph<const N: usize> {
    /// Applies the operation as a node of candle's graph.
    fn apply_in_graph<O: Operation<N>>(self, operation: O) -> Result<Tensor>;
}

/// An [`Operation`] as a custom operation of candle.
struct GraphNode<O>(O);

impl<O> GraphNode<O> {
    fn forward<const N: usize>(&self, inputs: [(&CpuStorage, &Layout); N]) -> Result<(CpuStorage, Shape)>
    where
        O: Operation<N>,
    {
        let mut slices = [[].as_slice(); N];
        for (slice, (storage, layout)) in slices.iter_mut().zip(inputs) {
            *slice = cpu_slice(storage, layout)?;
        }
        let (elements, shape) = self.0.forward(slices, inputs.map(|(_, layout)| layout.shape()))?;
        Ok((CpuStorage::F32(elements), shape))
    }

    fn backward<const N: usize>(
        &self,
        inputs: [&Tensor; N],
        result: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; N]>
    where
        O: Operation<N>,
    {
        self.0.save_result(result);
        let inputs = inputs.map(|input| Input {
            elements: Some(input.detach()),
            shape: input.shape().clone(),
            dtype: input.dtype(),
            requires_grad: input.track_op(),
        });
        self.0.backward(inputs.each_ref(), &gradient.contiguous()?)
    }
}

impl<O: Operation<1>> CustomOp1 for GraphNode<O> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(&self, a: &CpuStorage, a_layout: &Layout) -> Result<(CpuStorage, Shape)> {
        self.forward([(a, a_layout)])
    }

    fn bwd(&self, a: &Tensor, result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let [a] = self.backward([a], result, gradient)?;
        Ok(a)
    }
}

impl<O: Operation<2>> CustomOp2 for GraphNode<O> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        a_layout: &Layout,
        b: &CpuStorage,
        b_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.forward([(a, a_layout), (b, b_layout)])
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [a, b] = self.backward([a, b], result, gradient)?;
        Ok((a, b))
    }
}

impl<O: Operation<3>> CustomOp3 for GraphNode<O> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        a_layout: &Layout,
        b: &CpuStorage,
        b_layout: &Layout,
        c: &CpuStorage,
        c_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.forward([(a, a_layout), (b, b_layout), (c, c_layout)])
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        c: &Tensor,
        result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [a, b, c] = self.backward([a, b, c], result, gradient)?;
        Ok((a, b, c))
    }
}

impl CandleGraph<1> for [&Tensor; 1] {
    fn apply_in_graph<O: Operation<1>>(self, operation: O) -> Result<Tensor> {
        self[0].contiguous()?.apply_op1(GraphNode(operation))
    }
}

impl CandleGraph<2> for [&Tensor; 2] {
    fn apply_in_graph<O: Operation<2>>(self, operation: O) -> Result<Tensor> {
        let [a, b] = self;
        a.contiguous()?.apply_op2(&b.contiguous()?, GraphNode(operation))
    }
}

impl CandleGraph<3> for [&Tensor; 3] {
    fn apply_in_graph<O: Operation<3>>(self, operation: O) -> Result<Tensor> {
        let [a, b, c] = self;
        a.contiguous()?
            .apply_op3(&b.contiguous()?, &c.contiguous()?, GraphNode(operation))
    }
}
