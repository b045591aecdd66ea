//! The engine's own operations, as steps of a tape or as nodes of candle's graph.

use super::slices::{of, slice};
use super::{is_recording, leaf, push};
use candle_core::{CpuStorage, CustomOp1, CustomOp2, CustomOp3, Device, Layout, Result, Shape, Tensor};
use std::collections::HashSet;

/// An operation of `N` contiguous f32 tensors on the CPU.
pub(crate) trait Operation<const N: usize>: Send + Sync + 'static {
    /// For messages.
    const NAME: &'static str;

    /// Of which inputs the backward pass reads the elements, when these want a gradient. Of the others it knows the shape,
    /// and nothing is kept.
    fn keeps(&self, wanted: [bool; N]) -> [bool; N];

    /// The result, from elements and shapes.
    ///
    /// # Errors
    /// When the shapes do not fit.
    fn forward(&self, inputs: [&[f32]; N], shapes: [&Shape; N]) -> Result<(Vec<f32>, Shape)>;

    /// The gradients of the inputs that want one (others are of no account); `gradient` is contiguous.
    ///
    /// # Errors
    /// When the arithmetic fails.
    fn backward(&self, inputs: [&Input; N], gradient: &Tensor) -> Result<[Option<Tensor>; N]>;
}

/// An input, as the backward pass sees it.
#[derive(Debug)]
pub(crate) struct Input {
    elements: Option<Tensor>,
    shape: Shape,
    wanted: bool,
}

impl Input {
    /// Whether it wants a gradient.
    pub(crate) fn requires_grad(&self) -> bool {
        self.wanted
    }

    /// Its shape.
    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Itself, without a graph.
    pub(crate) fn tensor(&self) -> Result<&Tensor> {
        match &self.elements {
            Some(tensor) => Ok(tensor),
            None => candle_core::bail!("an operation reads an input that it did not keep"),
        }
    }

    /// Runs `f` on its elements.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
        super::with_slice(self.tensor()?, f)
    }
}

/// Applies an operation. Gradients go to the inputs that are tracked.
///
/// # Errors
/// When the shapes do not fit.
pub(crate) fn apply<'a, const N: usize, O: Operation<N>>(inputs: [&'a Tensor; N], operation: O) -> Result<Tensor>
where
    [&'a Tensor; N]: InCandle<N>,
{
    let wanted = inputs.map(Tensor::track_op);
    let tracked = wanted.contains(&true);
    if tracked && !is_recording() {
        return inputs.node(operation);
    }
    let mut whole = Vec::with_capacity(N);
    for input in inputs {
        whole.push(input.contiguous()?);
    }
    let (elements, shape) = run(&operation, &whole)?;
    if !tracked {
        return Tensor::from_vec(elements, shape, &Device::Cpu);
    }
    let result = leaf(elements, shape);
    let kept = keep(&operation, &whole, wanted);
    let ids: Vec<_> = whole.iter().map(Tensor::id).collect();
    let backward = Box::new(move |back: Vec<Option<Tensor>>| {
        let Some(gradient) = back.into_iter().flatten().next() else {
            return Ok(vec![]);
        };
        let gradients = operation.backward(kept.each_ref(), &gradient.contiguous()?)?;
        let found = gradients.into_iter().zip(ids).zip(wanted);
        Ok(found
            .filter_map(|((gradient, id), wanted)| Some((id, gradient.filter(|_| wanted)?)))
            .collect())
    });
    push(&whole, HashSet::new(), vec![result.id()], backward);
    Ok(result)
}

fn run<const N: usize, O: Operation<N>>(operation: &O, inputs: &[Tensor]) -> Result<(Vec<f32>, Shape)> {
    let places: Vec<_> = inputs.iter().map(Tensor::storage_and_layout).collect();
    let mut slices = [[].as_slice(); N];
    for (slice, (storage, layout)) in slices.iter_mut().zip(&places) {
        *slice = of(storage, layout)?;
    }
    operation.forward(slices, std::array::from_fn(|i| places[i].1.shape()))
}

fn keep<const N: usize, O: Operation<N>>(operation: &O, inputs: &[Tensor], wanted: [bool; N]) -> [Input; N] {
    let keeps = operation.keeps(wanted);
    std::array::from_fn(|i| Input {
        elements: keeps[i].then(|| inputs[i].detach()),
        shape: inputs[i].shape().clone(),
        wanted: wanted[i],
    })
}

/// Inputs to which candle can apply an operation.
pub(crate) trait InCandle<const N: usize> {
    /// The operation as a node of candle's graph.
    fn node<O: Operation<N>>(self, operation: O) -> Result<Tensor>;
}

/// An [`Operation`] as candle sees it.
struct Node<O>(O);

impl<O> Node<O> {
    fn forward<const N: usize>(&self, inputs: [(&CpuStorage, &Layout); N]) -> Result<(CpuStorage, Shape)>
    where
        O: Operation<N>,
    {
        let mut slices = [[].as_slice(); N];
        for (to, (storage, layout)) in slices.iter_mut().zip(inputs) {
            *to = slice(storage, layout)?;
        }
        let (elements, shape) = self.0.forward(slices, inputs.map(|(_, layout)| layout.shape()))?;
        Ok((CpuStorage::F32(elements), shape))
    }

    fn backward<const N: usize>(&self, inputs: [&Tensor; N], gradient: &Tensor) -> Result<[Option<Tensor>; N]>
    where
        O: Operation<N>,
    {
        let inputs = inputs.map(|input| Input {
            elements: Some(input.detach()),
            shape: input.shape().clone(),
            wanted: input.track_op(),
        });
        self.0.backward(inputs.each_ref(), &gradient.contiguous()?)
    }
}

impl<O: Operation<1>> CustomOp1 for Node<O> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(&self, a: &CpuStorage, a_layout: &Layout) -> Result<(CpuStorage, Shape)> {
        self.forward([(a, a_layout)])
    }

    fn bwd(&self, a: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let [a] = self.backward([a], gradient)?;
        Ok(a)
    }
}

impl<O: Operation<2>> CustomOp2 for Node<O> {
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

    fn bwd(&self, a: &Tensor, b: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [a, b] = self.backward([a, b], gradient)?;
        Ok((a, b))
    }
}

impl<O: Operation<3>> CustomOp3 for Node<O> {
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
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [a, b, c] = self.backward([a, b, c], gradient)?;
        Ok((a, b, c))
    }
}

impl InCandle<1> for [&Tensor; 1] {
    fn node<O: Operation<1>>(self, operation: O) -> Result<Tensor> {
        self[0].contiguous()?.apply_op1(Node(operation))
    }
}

impl InCandle<2> for [&Tensor; 2] {
    fn node<O: Operation<2>>(self, operation: O) -> Result<Tensor> {
        let [a, b] = self;
        a.contiguous()?.apply_op2(&b.contiguous()?, Node(operation))
    }
}

impl InCandle<3> for [&Tensor; 3] {
    fn node<O: Operation<3>>(self, operation: O) -> Result<Tensor> {
        let [a, b, c] = self;
        a.contiguous()?
            .apply_op3(&b.contiguous()?, &c.contiguous()?, Node(operation))
    }
}
