//! Two-dimensional convolution.
//!
//! On the processor: a matrix product whose one side is packed from the windows of the image as it is needed; gradients
//! for input and weight the same way. Elsewhere: candle's convolution.

mod geometry;
mod kernels;
mod windows;

use super::cpu::{self, Kernel3, Op3};
use super::{LayerAdapter, Weight};
use crate::error::Result;
use crate::weights::{Init, Weights};
use candle_core::{CpuStorage, CustomOp1, CustomOp2, DType, Device, Layout, Shape, Tensor};
use geometry::Geometry;
use std::sync::Arc;

/// A convolution with square padding and one stride for both axes, with adapters.
#[derive(Clone, Debug)]
pub struct Conv2d {
    /// [out, in, kernel height, kernel width].
    pub weight: Weight,
    /// [out].
    pub bias: Option<Tensor>,
    /// Steps between outputs, both axes.
    pub stride: usize,
    /// Zeros on every side.
    pub padding: usize,
    /// Applied in this order.
    pub adapters: Vec<Arc<dyn LayerAdapter>>,
}

impl Conv2d {
    /// Loads `weight` ([outputs, inputs, kernel, kernel]) and `bias` ([outputs]).
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub fn new(
        weights: &Weights,
        inputs: usize,
        outputs: usize,
        kernel: usize,
        stride: usize,
        padding: usize,
    ) -> Result<Self> {
        let bound = 1.0 / ((inputs * kernel * kernel).max(1) as f64).sqrt();
        let weight = weights.layer((outputs, inputs, kernel, kernel), Init::Uniform(bound))?;
        let bias = weights.get_with(outputs, "bias", Init::Uniform(bound))?;
        Ok(Self {
            weight,
            bias: Some(bias),
            stride,
            padding,
            adapters: Vec::new(),
        })
    }

    /// x [b, in, h, w] -> [b, out, h', w'].
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let bias = self.bias.as_ref();
        let mut y = match &self.weight {
            weight @ (Weight::Packed(_) | Weight::Streamed(_)) if cpu::runs_here(x) && weight.dtype() == DType::F32 => {
                let bias = bias.map(Tensor::contiguous).transpose()?;
                let (stride, padding) = (self.stride, self.padding);
                x.contiguous()?.apply_op1(FrozenConv {
                    op: ConvOp { stride, padding, bias },
                    weight: weight.clone(),
                })?
            }
            weight => conv2d(x, &weight.dense()?, bias, self.stride, self.padding)?,
        };
        for adapter in &self.adapters {
            y = adapter.apply(x, y)?;
        }
        Ok(y)
    }
}

/// x [b, in, h, w], weight [out, in, kh, kw], bias [out] -> [b, out, h', w']. Gradients go to whatever is tracked.
///
/// # Errors
/// When the shapes do not fit.
pub fn conv2d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    stride: usize,
    padding: usize,
) -> candle_core::Result<Tensor> {
    let outputs = weight.dim(0)?;
    if !cpu::runs_here(x) || weight.dtype() != DType::F32 {
        let y = x.conv2d(weight, padding, stride, 1, 1)?;
        return match bias {
            Some(bias) => y.broadcast_add(&bias.reshape((1, outputs, 1, 1))?),
            None => Ok(y),
        };
    }
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    let bias = bias.map(Tensor::contiguous).transpose()?;
    let op = |bias| ConvOp { stride, padding, bias };
    match bias {
        Some(bias) if bias.track_op() => x.apply_op3(&weight, &bias, Op3(op(None))),
        frozen => x.apply_op2(&weight, op(frozen)),
    }
}

/// With a trained bias it is an operation of three tensors, otherwise of two.
struct ConvOp {
    stride: usize,
    padding: usize,
    bias: Option<Tensor>,
}

impl ConvOp {
    fn run(
        &self,
        (x, x_shape): (&[f32], &Shape),
        (weight, weight_shape): (&[f32], &Shape),
        bias: Option<&[f32]>,
    ) -> candle_core::Result<(Vec<f32>, Shape)> {
        let g = Geometry::new(x_shape, weight_shape, self.stride, self.padding)?;
        if bias.is_some_and(|bias| bias.len() != g.outputs) {
            candle_core::bail!("conv2d: the bias does not have {} elements", g.outputs);
        }
        Ok((
            g.forward(x, weight, bias)?,
            (g.batch, g.outputs, g.out_h, g.out_w).into(),
        ))
    }

    /// The gradients of x and weight; `grad` is contiguous.
    fn gradients(
        &self,
        x: &Tensor,
        weight: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let g = Geometry::new(x.shape(), weight.shape(), self.stride, self.padding)?;
        let dx = if x.track_op() {
            let dx = cpu::with_slice(weight, |w| cpu::with_slice(grad, |dy| g.backward_input(w, dy)))???;
            Some(Tensor::from_vec(dx, x.shape(), &Device::Cpu)?)
        } else {
            None
        };
        let dw = if weight.track_op() {
            let dw = cpu::with_slice(x, |x| cpu::with_slice(grad, |dy| g.backward_weight(x, dy)))??;
            Some(Tensor::from_vec(dw, weight.shape(), &Device::Cpu)?)
        } else {
            None
        };
        Ok((dx, dw))
    }
}

impl CustomOp2 for ConvOp {
    fn name(&self) -> &'static str {
        "conv2d"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let x = (cpu::slice(x, x_layout)?, x_layout.shape());
        let weight = (cpu::slice(weight, weight_layout)?, weight_layout.shape());
        let (y, shape) = match &self.bias {
            Some(bias) => cpu::with_slice(bias, |bias| self.run(x, weight, Some(bias)))??,
            None => self.run(x, weight, None)?,
        };
        Ok((CpuStorage::F32(y), shape))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _y: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        self.gradients(x, weight, &grad.contiguous()?)
    }
}

/// A convolution with a weight that is made when it is used and gets no gradient.
struct FrozenConv {
    op: ConvOp,
    weight: Weight,
}

impl CustomOp1 for FrozenConv {
    fn name(&self) -> &'static str {
        "conv2d-frozen"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let x = (cpu::slice(x, layout)?, layout.shape());
        let weight = self.weight.dense()?;
        let run = |weight: &[f32], bias: Option<&[f32]>| {
            let shape = Shape::from(self.weight.dims());
            self.op.run(x, (weight, &shape), bias)
        };
        let (y, shape) = match &self.op.bias {
            Some(bias) => cpu::with_slice(&weight, |w| cpu::with_slice(bias, |b| run(w, Some(b))))???,
            None => cpu::with_slice(&weight, |w| run(w, None))??,
        };
        Ok((CpuStorage::F32(y), shape))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let (dx, _) = self.op.gradients(x, &self.weight.dense()?, &grad.contiguous()?)?;
        Ok(dx)
    }
}

impl Kernel3 for ConvOp {
    const NAME: &'static str = "conv2d-bias";

    fn forward(
        &self,
        [x, weight, bias]: [&[f32]; 3],
        [x_shape, weight_shape, _]: [&Shape; 3],
    ) -> candle_core::Result<(Vec<f32>, Shape)> {
        self.run((x, x_shape), (weight, weight_shape), Some(bias))
    }

    fn backward(&self, [x, weight, bias]: [&Tensor; 3], grad: &Tensor) -> candle_core::Result<[Option<Tensor>; 3]> {
        let (dx, dw) = self.gradients(x, weight, grad)?;
        let outputs = bias.elem_count();
        let pixels = grad.dim(2)? * grad.dim(3)?;
        let mut db = vec![0f64; outputs];
        cpu::with_slice(grad, |dy| {
            for (at, plane) in dy.chunks(pixels.max(1)).enumerate() {
                // Eight partial sums, in an order of their own: fast, and always the same.
                let mut parts = [0f32; 8];
                let (blocks, rest) = plane.as_chunks::<8>();
                blocks
                    .iter()
                    .for_each(|block| parts.iter_mut().zip(block).for_each(|(sum, v)| *sum += v));
                db[at % outputs] += parts.iter().chain(rest).map(|v| f64::from(*v)).sum::<f64>();
            }
        })?;
        let db: Vec<f32> = db.into_iter().map(|v| v as f32).collect();
        Ok([dx, dw, Some(Tensor::from_vec(db, outputs, &Device::Cpu)?)])
    }
}
