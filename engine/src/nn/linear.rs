//! Linear layers.

use super::{LayerAdapter, Weight, cpu};
use crate::error::Result;
use crate::weights::{Init, Weights};
use candle_core::{CpuStorage, CustomOp1, CustomOp2, D, DType, Layout, Shape, Tensor};
use std::sync::Arc;

/// `y = x W^T + b`, with adapters.
#[derive(Clone, Debug)]
pub struct Linear {
    /// [out, in].
    pub weight: Weight,
    /// [out].
    pub bias: Option<Tensor>,
    /// Applied in this order.
    pub adapters: Vec<Arc<dyn LayerAdapter>>,
}

impl Linear {
    /// Loads `weight` ([outputs, inputs]) and, if asked, `bias` ([outputs]).
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub fn new(weights: &Weights, inputs: usize, outputs: usize, bias: bool) -> Result<Self> {
        let bound = 1.0 / (inputs.max(1) as f64).sqrt();
        let weight = weights.layer((outputs, inputs), Init::Uniform(bound))?;
        let bias = if bias {
            Some(weights.get_with(outputs, "bias", Init::Uniform(bound))?)
        } else {
            None
        };
        Ok(Self::from_parts(weight, bias))
    }

    /// From tensors: weight [out, in], bias [out].
    #[must_use]
    pub fn from_parts(weight: impl Into<Weight>, bias: Option<Tensor>) -> Self {
        Self {
            weight: weight.into(),
            bias,
            adapters: Vec::new(),
        }
    }

    /// Features of an input.
    #[must_use]
    pub fn in_features(&self) -> usize {
        self.weight.dims().get(1).copied().unwrap_or(0)
    }

    /// Features of an output.
    #[must_use]
    pub fn out_features(&self) -> usize {
        self.weight.dims().first().copied().unwrap_or(0)
    }

    /// x [.., in] -> [.., out].
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let mut y = project(x, &self.weight, self.bias.as_ref())?;
        for adapter in &self.adapters {
            y = adapter.apply(x, y)?;
        }
        Ok(y)
    }
}

/// `x W^T + b`: x [.., in], weight [out, in], bias [out] -> [.., out]. Gradients go to whatever is tracked; a frozen
/// weight costs nothing in the backward pass.
///
/// # Errors
/// When the shapes do not fit.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> candle_core::Result<Tensor> {
    project(x, &Weight::Plain(weight.clone()), bias)
}

fn project(x: &Tensor, weight: &Weight, bias: Option<&Tensor>) -> candle_core::Result<Tensor> {
    let &[outputs, inputs] = weight.dims() else {
        candle_core::bail!("linear: {:?} is no weight of two axes", weight.dims());
    };
    let mut shape = x.dims().to_vec();
    match shape.last_mut() {
        Some(last) if *last == inputs => *last = outputs,
        _ => candle_core::bail!("linear: input {:?} does not fit weight {:?}", x.dims(), weight.dims()),
    }
    let frozen = match weight {
        Weight::Plain(weight) if weight.track_op() => None,
        Weight::Plain(weight) => Some(Weight::Plain(weight.contiguous()?)),
        Weight::Packed(_) | Weight::Streamed(_) => Some(weight.clone()),
    };
    let x = x.contiguous()?;
    if let Some(weight) = frozen.filter(|weight| cpu::runs_here(&x) && weight.dtype() == DType::F32) {
        let (inside, outside) = match bias {
            Some(bias) if !bias.track_op() && cpu::runs_here(bias) && bias.elem_count() == outputs => {
                (Some(bias.contiguous()?), None)
            }
            other => (None, other),
        };
        let y = x.apply_op1(FrozenLinear { weight, bias: inside })?;
        return match outside {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        };
    }
    // candle keeps what it multiplied with until the backward pass: here a weight that is not plain is dense for so
    // long, unless the part is recomputed.
    let weight = weight.dense()?;
    let y = if cpu::runs_here(&x) && weight.dtype() == DType::F32 {
        x.apply_op2(&weight.contiguous()?, TrainedLinear)?
    } else {
        let rows = x.elem_count() / inputs.max(1);
        x.reshape((rows, inputs))?.matmul(&weight.t()?)?.reshape(shape)?
    };
    match bias {
        Some(bias) => y.broadcast_add(bias),
        None => Ok(y),
    }
}

/// `y` [.., out] (+)= x W^T: x [.., in], weight [out, in].
fn multiply(x: &[f32], dims: &[usize], weight: &[f32], outputs: usize, mut y: Vec<f32>, beta: f32) -> Product {
    let inputs = dims.last().copied().unwrap_or(0);
    let rows = x.len() / inputs.max(1);
    y.resize(rows * outputs, 0.0);
    let out = cpu::MatMut::new(&mut y, rows, outputs);
    let (x, weight) = (cpu::Mat::new(x, rows, inputs), cpu::Mat::new(weight, outputs, inputs));
    cpu::gemm(out, x, weight.t(), beta, 1.0, cpu::threads())?;
    let mut shape = dims.to_vec();
    if let Some(last) = shape.last_mut() {
        *last = outputs;
    }
    Ok((CpuStorage::F32(y), shape.into()))
}

type Product = candle_core::Result<(CpuStorage, Shape)>;

/// x [.., width] as rows.
fn rows(x: &Tensor) -> candle_core::Result<Tensor> {
    let x = x.contiguous()?;
    let width = x.dim(D::Minus1)?;
    x.reshape((x.elem_count() / width.max(1), width))
}

/// A product of which both sides may get a gradient. With candle's own there would be a change of shape before and
/// after, each of which goes through memory several times in the backward pass.
struct TrainedLinear;

impl CustomOp2 for TrainedLinear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(&self, x: &CpuStorage, x_layout: &Layout, w: &CpuStorage, w_layout: &Layout) -> Product {
        let (x, weight) = (cpu::slice(x, x_layout)?, cpu::slice(w, w_layout)?);
        let (outputs, _) = w_layout.shape().dims2()?;
        multiply(x, x_layout.dims(), weight, outputs, Vec::new(), 0.0)
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _y: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let grad = rows(grad)?;
        let dx = if x.track_op() {
            Some(grad.matmul(weight)?.reshape(x.shape())?)
        } else {
            None
        };
        let dw = if weight.track_op() {
            Some(grad.t()?.matmul(&rows(&x.detach())?)?)
        } else {
            None
        };
        Ok((dx, dw))
    }
}

/// A product with a weight that gets no gradient. candle's own matmul would compute one and throw it away.
struct FrozenLinear {
    weight: Weight,
    /// Gets no gradient either.
    bias: Option<Tensor>,
}

impl CustomOp1 for FrozenLinear {
    fn name(&self) -> &'static str {
        "frozen-linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Product {
        let weight = self.weight.dense()?;
        let (outputs, inputs) = weight.dims2()?;
        let x = cpu::slice(storage, layout)?;
        let rows = x.len() / inputs.max(1);
        let (mut y, mut beta) = (Vec::with_capacity(rows * outputs), 0.0);
        if let Some(bias) = &self.bias {
            cpu::with_slice(bias, |bias| (0..rows).for_each(|_| y.extend_from_slice(bias)))?;
            beta = 1.0;
        }
        cpu::with_slice(&weight, |weight| multiply(x, layout.dims(), weight, outputs, y, beta))?
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let dx = rows(grad)?.matmul(&self.weight.dense()?)?;
        Ok(Some(dx.reshape(x.shape())?))
    }
}
