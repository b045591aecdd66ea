//! Linear layers.

mod few_rows;
mod halves;
mod kernels;
mod low_rank;
mod stored_blocks;
mod tensors;
mod trained;

use super::cpu::{self, Bf16Isa};
use super::low_rank::FusedLora;
use super::{BaseLayer, LayerAdapter, LayerKind};
use crate::autograd::{Input, Operation, apply};
use crate::error::Result;
use crate::quant::StoredRows;
use crate::weights::Weight;
use crate::weights::{Init, Weights};
use candle_core::{Device, Shape, Tensor};
use halves::HalfWeight;
use kernels::{ForwardResult, backward_input, multiply, rows_of, with_bias};
use low_rank::LowRankLinear;
use std::sync::Arc;
use trained::TrainedLinear;

/// A linear layer `y = x W^T + b` with adapters.
#[derive(Clone, Debug)]
pub struct Linear {
    /// [out, in].
    pub weight: Weight,
    /// [out].
    pub bias: Option<Tensor>,
    /// Adapters, applied in this order.
    pub adapters: Vec<Arc<dyn LayerAdapter>>,
}

impl Linear {
    /// Loads `weight` ([outputs, inputs]) and, if `bias` is true, `bias` ([outputs]).
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

    /// A layer from tensors: weight [out, in], bias [out].
    #[must_use]
    pub fn from_parts(weight: impl Into<Weight>, bias: Option<Tensor>) -> Self {
        Self {
            weight: weight.into(),
            bias,
            adapters: Vec::new(),
        }
    }

    /// The number of input features.
    #[must_use]
    pub fn in_features(&self) -> usize {
        self.weight.dims().get(1).copied().unwrap_or(0)
    }

    /// The number of output features.
    #[must_use]
    pub fn out_features(&self) -> usize {
        self.weight.dims().first().copied().unwrap_or(0)
    }

    /// x [.., in] -> [.., out].
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let layer = BaseLayer {
            kind: LayerKind::Linear,
            weight: &self.weight,
            bias: self.bias.as_ref(),
        };
        let first = match (self.adapters.first(), self.forward_fused(x)?) {
            (Some(adapter), None) => adapter.forward(&layer, x)?,
            (_, fused) => fused,
        };
        let (mut y, adapters) = match first {
            Some(y) => (y, self.adapters.get(1..).unwrap_or_default()),
            None => (
                linear_with_weight(x, &self.weight, self.bias.as_ref())?,
                self.adapters.as_slice(),
            ),
        };
        for adapter in adapters {
            y = adapter.apply(&layer, x, y)?;
        }
        Ok(y)
    }

    /// The layer with its first adapter, as one operation. `None` where they cannot be fused.
    fn forward_fused(&self, x: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let Some(FusedLora { delta, weight, bias }) =
            FusedLora::try_new(&self.weight, self.bias.as_ref(), &self.adapters)?
        else {
            return Ok(None);
        };
        let scale = delta.scale as f32;
        let operation = LowRankLinear {
            weight,
            bias,
            scale,
            bf16: cpu::bf16_isa(),
        };
        apply([x, &delta.down, &delta.up], operation).map(Some)
    }
}

/// `x W^T + b`: x [.., in], weight [out, in], bias [out] -> [.., out]. All tracked inputs get gradients. For a frozen
/// weight no gradient is computed.
///
/// # Errors
/// When the shapes do not match.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> candle_core::Result<Tensor> {
    linear_with_weight(x, &Weight::Plain(weight.clone()), bias)
}

/// As [`linear`], with a weight that may be quantised.
///
/// # Errors
/// When the shapes do not match, or a quantised weight cannot be read.
pub fn linear_with_weight(x: &Tensor, weight: &Weight, bias: Option<&Tensor>) -> candle_core::Result<Tensor> {
    let &[outputs, inputs] = weight.dims() else {
        candle_core::bail!("linear: expected a weight of two dimensions, found {:?}", weight.dims());
    };
    if x.dims().last() != Some(&inputs) {
        candle_core::bail!("linear: input {:?} does not match weight {:?}", x.dims(), weight.dims());
    }
    if let Some(weight) = weight.as_frozen()? {
        let (fused_bias, other_bias) = match bias {
            Some(bias) if !bias.track_op() && bias.elem_count() == outputs => (Some(bias.contiguous()?), None),
            other => (None, other),
        };
        let y = apply(
            [x],
            FrozenLinear {
                weight,
                bias: fused_bias,
                bf16: cpu::bf16_isa(),
            },
        )?;
        return match other_bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        };
    }
    let (weight, bf16) = (weight.dense()?, cpu::bf16_isa());
    match bias {
        Some(bias) => apply([x, &weight, bias], TrainedLinear { bf16 }),
        None => apply([x, &weight], TrainedLinear { bf16 }),
    }
}

/// A linear layer whose weight gets no gradient. candle's matmul would compute that gradient and discard it.
struct FrozenLinear {
    weight: Weight,
    /// The frozen bias.
    bias: Option<Tensor>,
    /// What products are computed with; `None`: in f32.
    bf16: Option<Bf16Isa>,
}

impl FrozenLinear {
    /// The product with a weight whose stored form is read row by row. `None` for other forms.
    fn multiply_few_rows(&self, x: &[f32], shape: &Shape) -> candle_core::Result<Option<(Vec<f32>, Shape)>> {
        with_bias(self.bias.as_ref(), |bias| {
            let multiply = |rows: Option<StoredRows<'_>>| {
                let product = rows.map(|rows| few_rows::multiply(rows, x, shape, bias));
                product.transpose()
            };
            match &self.weight {
                Weight::Quantized(weight) => weight.with_rows(multiply)?,
                Weight::Streamed(_) => match self.weight.half_bytes()? {
                    Some((format, bytes)) => multiply(StoredRows::halves(format, &bytes, self.weight.dims())),
                    None => Ok(None),
                },
                Weight::Plain(_) => Ok(None),
            }
        })
    }
}

impl Operation<1> for FrozenLinear {
    const NAME: &'static str = "frozen-linear";

    fn saved_inputs(&self, _: [bool; 1]) -> [bool; 1] {
        [false]
    }

    fn forward(&self, [x]: [&[f32]; 1], [shape]: [&Shape; 1]) -> ForwardResult {
        if rows_of(shape) <= few_rows::MAX_ROWS
            && let Some(y) = self.multiply_few_rows(x, shape)?
        {
            return Ok(y);
        }
        if let Some((format, bytes)) = self.weight.half_bytes()? {
            let weight = HalfWeight::new(format, &bytes, self.weight.dims())?.multiplied_with(self.bf16);
            return with_bias(self.bias.as_ref(), |bias| weight.multiply(x, shape, bias));
        }
        let weight = self.weight.dense()?;
        let (outputs, _) = weight.dims2()?;
        with_bias(self.bias.as_ref(), |bias| {
            cpu::with_slice(&weight, |weight| multiply(self.bf16, x, shape, weight, outputs, bias))?
        })
    }

    fn backward(&self, [x]: [&Input; 1], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 1]> {
        if let Some((format, bytes)) = self.weight.half_bytes()? {
            let weight = HalfWeight::new(format, &bytes, self.weight.dims())?.multiplied_with(self.bf16);
            let dx = cpu::with_slice(gradient, |dy| weight.backward_input(rows_of(x.shape()), dy))??;
            return Ok([Some(Tensor::from_vec(dx, x.shape(), &Device::Cpu)?)]);
        }
        Ok([Some(backward_input(
            self.bf16,
            x.shape(),
            &self.weight.dense()?,
            gradient,
        )?)])
    }

    fn has_slices(&self) -> bool {
        self.weight.has_slices() && self.bias.as_ref().is_none_or(cpu::is_cpu_f32)
    }

    fn forward_tensors(&self, [x]: [&Tensor; 1]) -> candle_core::Result<Tensor> {
        tensors::multiply(x, &self.weight.dense()?, self.bias.as_ref())
    }

    fn backward_tensors(&self, [x]: [&Input; 1], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 1]> {
        let dx = tensors::backward_input(x.shape(), &self.weight.dense()?, gradient)?;
        Ok([Some(dx)])
    }
}
