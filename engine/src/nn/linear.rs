//! Linear layers.

use super::{LayerAdapter, Weight, cpu};
use crate::error::Result;
use crate::weights::{Init, Weights};
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape, Tensor};
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
    let rows = x.elem_count() / inputs.max(1);
    let flat = x.contiguous()?.reshape((rows, inputs))?;
    let frozen = match weight {
        Weight::Plain(weight) if weight.track_op() => None,
        Weight::Plain(weight) => Some(Weight::Plain(weight.contiguous()?)),
        Weight::Packed(_) | Weight::Streamed(_) => Some(weight.clone()),
    };
    let y = match frozen.filter(|weight| cpu::runs_here(&flat) && weight.dtype() == DType::F32) {
        Some(weight) => flat.apply_op1(FrozenLinear { weight })?,
        // candle keeps what it multiplied with until the backward pass: here a weight that is not plain is dense for so
        // long, unless the part is recomputed.
        None => flat.matmul(&weight.dense()?.t()?)?,
    };
    let y = y.reshape(shape)?;
    match bias {
        Some(bias) => y.broadcast_add(bias),
        None => Ok(y),
    }
}

/// A product with a weight that gets no gradient. candle's own matmul would compute one and throw it away.
struct FrozenLinear {
    weight: Weight,
}

impl CustomOp1 for FrozenLinear {
    fn name(&self) -> &'static str {
        "frozen-linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let (rows, inputs) = layout.shape().dims2()?;
        let weight = self.weight.dense()?;
        let outputs = weight.dim(0)?;
        let mut y = vec![0f32; rows * outputs];
        let x = cpu::slice(storage, layout)?;
        cpu::with_slice(&weight, |w| {
            cpu::gemm(
                cpu::MatMut {
                    data: &mut y,
                    rows,
                    cols: outputs,
                    row_stride: outputs,
                    col_stride: 1,
                },
                cpu::Mat {
                    data: x,
                    rows,
                    cols: inputs,
                    row_stride: inputs,
                    col_stride: 1,
                },
                cpu::Mat {
                    data: w,
                    rows: inputs,
                    cols: outputs,
                    row_stride: 1,
                    col_stride: inputs,
                },
                0.0,
                1.0,
                cpu::threads(),
            )
        })??;
        Ok((CpuStorage::F32(y), (rows, outputs).into()))
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(grad.matmul(&self.weight.dense()?)?))
    }
}
