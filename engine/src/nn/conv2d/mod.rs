//! Two-dimensional convolution.
//!
//! On the CPU it is a matrix product with an implicit im2col: panels are packed directly from the image. The gradients
//! of input and weight are computed in the same way. On other devices it is candle's convolution.

mod geometry;
mod im2col;
mod kernels;
mod low_rank;

use super::low_rank::FusedLora;
use super::{LayerAdapter, Weight, cpu};
use crate::autograd::{Input, Operation, apply};
use crate::error::Result;
use crate::weights::{Init, Weights};
use candle_core::{DType, Device, Shape, Tensor};
use geometry::{Geometry, Padding};
use low_rank::LowRankConv;
use std::sync::Arc;

/// A convolution layer with adapters. Stride and padding are the same for both axes.
#[derive(Clone, Debug)]
pub struct Conv2d {
    /// [out, in, kernel height, kernel width].
    pub weight: Weight,
    /// [out].
    pub bias: Option<Tensor>,
    /// The stride along both axes.
    pub stride: usize,
    /// Zero padding on every side.
    pub padding: usize,
    /// Adapters, applied in this order.
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
    /// When the shapes do not match.
    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let (mut y, adapters) = match self.forward_fused(x)? {
            Some(y) => (y, self.adapters.get(1..).unwrap_or_default()),
            None => (self.forward_base(x)?, self.adapters.as_slice()),
        };
        for adapter in adapters {
            y = adapter.apply(x, y)?;
        }
        Ok(y)
    }

    /// The layer without adapters.
    fn forward_base(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let bias = self.bias.as_ref();
        match &self.weight {
            weight @ (Weight::Quantized(_) | Weight::Streamed(_))
                if cpu::is_cpu_f32(x) && weight.dtype() == DType::F32 =>
            {
                let op = self.op(bias)?;
                let weight = weight.clone();
                apply([x], FrozenConv { op, weight })
            }
            weight => conv2d(x, &weight.dense()?, bias, self.stride, self.padding),
        }
    }

    /// The layer with its first adapter, as one operation. `None` where they cannot be fused.
    fn forward_fused(&self, x: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let Some(FusedLora { delta, weight, bias }) =
            FusedLora::try_new(x, &self.weight, self.bias.as_ref(), &self.adapters)?
        else {
            return Ok(None);
        };
        let (op, scale) = (self.op(bias.as_ref())?, delta.scale as f32);
        apply([x, &delta.down, &delta.up], LowRankConv { op, weight, scale }).map(Some)
    }

    fn op(&self, bias: Option<&Tensor>) -> candle_core::Result<ConvOp> {
        Ok(ConvOp {
            stride: self.stride,
            padding: [self.padding; 2],
            bias: bias.map(Tensor::contiguous).transpose()?,
        })
    }
}

/// x [b, in, h, w], weight [out, in, kh, kw], bias [out] -> [b, out, h', w']. All tracked inputs get gradients.
///
/// # Errors
/// When the shapes do not match.
pub fn conv2d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    stride: usize,
    padding: usize,
) -> candle_core::Result<Tensor> {
    let outputs = weight.dim(0)?;
    if !cpu::is_cpu_f32(x) || weight.dtype() != DType::F32 {
        let y = if stride == 1 {
            x.conv2d(weight, padding, stride, 1, 1)?
        } else {
            strided_with_candle(x, weight, stride, padding)?
        };
        return match bias {
            Some(bias) => y.broadcast_add(&bias.reshape((1, outputs, 1, 1))?),
            None => Ok(y),
        };
    }
    conv2d_cpu(x, weight, bias, stride, [padding; 2])
}

/// candle's convolution with a stride above 1. Its gradient computes the output padding from the height alone, so
/// pixels that no window covers are cut off first, along both axes.
fn strided_with_candle(x: &Tensor, weight: &Tensor, stride: usize, padding: usize) -> candle_core::Result<Tensor> {
    let (height, width) = (x.dim(2)? + 2 * padding, x.dim(3)? + 2 * padding);
    let (kernel_h, kernel_w) = (weight.dim(2)?, weight.dim(3)?);
    if stride == 0 || height < kernel_h || width < kernel_w {
        candle_core::bail!(
            "conv2d: input {:?} does not match weight {:?} with stride {stride} and padding {padding}",
            x.dims(),
            weight.dims()
        );
    }
    let covered = |size: usize, kernel: usize| (size - kernel) / stride * stride + kernel;
    let x = x
        .pad_with_zeros(2, padding, padding)?
        .pad_with_zeros(3, padding, padding)?
        .narrow(2, 0, covered(height, kernel_h))?
        .narrow(3, 0, covered(width, kernel_w))?
        .contiguous()?;
    x.conv2d(weight, 0, stride, 1, 1)
}

/// [`conv2d`] in f32 on the CPU, with a padding for each axis.
pub(super) fn conv2d_cpu(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    stride: usize,
    padding: Padding,
) -> candle_core::Result<Tensor> {
    let op = |bias| ConvOp { stride, padding, bias };
    match bias.map(Tensor::contiguous).transpose()? {
        Some(bias) if bias.track_op() => apply([x, weight, &bias], op(None)),
        frozen => apply([x, weight], op(frozen)),
    }
}

type ForwardResult = candle_core::Result<(Vec<f32>, Shape)>;

/// A convolution: an operation of three tensors if the bias is trained, else of two.
struct ConvOp {
    stride: usize,
    padding: Padding,
    bias: Option<Tensor>,
}

impl ConvOp {
    fn run(
        &self,
        (x, x_shape): (&[f32], &Shape),
        (weight, weight_shape): (&[f32], &Shape),
        bias: Option<&[f32]>,
    ) -> ForwardResult {
        let g = Geometry::new(x_shape, weight_shape, self.stride, self.padding)?;
        if bias.is_some_and(|bias| bias.len() != g.outputs) {
            candle_core::bail!(
                "conv2d: the bias has {} elements, expected {}",
                bias.map_or(0, <[f32]>::len),
                g.outputs
            );
        }
        Ok((
            g.forward(x, weight, bias)?,
            (g.batch, g.outputs, g.out_h, g.out_w).into(),
        ))
    }

    /// Computes the gradient of x.
    fn backward_input(&self, x: &Shape, weight: &Tensor, gradient: &Tensor) -> candle_core::Result<Tensor> {
        let g = Geometry::new(x, weight.shape(), self.stride, self.padding)?;
        let dx = cpu::with_slice(weight, |w| cpu::with_slice(gradient, |dy| g.backward_input(w, dy)))???;
        Tensor::from_vec(dx, x, &Device::Cpu)
    }

    /// Computes the gradients of x and weight.
    fn gradients(&self, x: &Input, weight: &Input, gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 2]> {
        let dx = if x.requires_grad() {
            Some(self.backward_input(x.shape(), weight.tensor()?, gradient)?)
        } else {
            None
        };
        if !weight.requires_grad() {
            return Ok([dx, None]);
        }
        let g = Geometry::new(x.shape(), weight.shape(), self.stride, self.padding)?;
        let dw = x.with(|x| cpu::with_slice(gradient, |dy| g.backward_weight(x, dy)))??;
        Ok([dx, Some(Tensor::from_vec(dw, weight.shape(), &Device::Cpu)?)])
    }
}

impl Operation<2> for ConvOp {
    const NAME: &'static str = "conv2d";

    fn saved_inputs(&self, [x, weight]: [bool; 2]) -> [bool; 2] {
        [weight, x]
    }

    fn forward(&self, [x, weight]: [&[f32]; 2], [x_shape, weight_shape]: [&Shape; 2]) -> ForwardResult {
        let (x, weight) = ((x, x_shape), (weight, weight_shape));
        match &self.bias {
            Some(bias) => cpu::with_slice(bias, |bias| self.run(x, weight, Some(bias)))?,
            None => self.run(x, weight, None),
        }
    }

    fn backward(&self, [x, weight]: [&Input; 2], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 2]> {
        self.gradients(x, weight, gradient)
    }
}

/// A convolution whose weight gets no gradient, and is dequantised or read at each use.
struct FrozenConv {
    op: ConvOp,
    weight: Weight,
}

impl Operation<1> for FrozenConv {
    const NAME: &'static str = "conv2d-frozen";

    fn saved_inputs(&self, _: [bool; 1]) -> [bool; 1] {
        [false]
    }

    fn forward(&self, [x]: [&[f32]; 1], [x_shape]: [&Shape; 1]) -> ForwardResult {
        let weight = self.weight.dense()?;
        let shape = Shape::from(self.weight.dims());
        cpu::with_slice(&weight, |weight| {
            Operation::<2>::forward(&self.op, [x, weight], [x_shape, &shape])
        })?
    }

    fn backward(&self, [x]: [&Input; 1], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 1]> {
        let dx = self.op.backward_input(x.shape(), &self.weight.dense()?, gradient)?;
        Ok([Some(dx)])
    }
}

impl Operation<3> for ConvOp {
    const NAME: &'static str = "conv2d-bias";

    fn saved_inputs(&self, [x, weight, _]: [bool; 3]) -> [bool; 3] {
        [weight, x, false]
    }

    fn forward(&self, [x, weight, bias]: [&[f32]; 3], [x_shape, weight_shape, _]: [&Shape; 3]) -> ForwardResult {
        self.run((x, x_shape), (weight, weight_shape), Some(bias))
    }

    fn backward(&self, [x, weight, bias]: [&Input; 3], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 3]> {
        let [dx, dw] = self.gradients(x, weight, gradient)?;
        let outputs = bias.shape().elem_count();
        let pixels = gradient.dim(2)? * gradient.dim(3)?;
        let mut db = vec![0f64; outputs];
        cpu::with_slice(gradient, |dy| {
            for (at, plane) in dy.chunks(pixels.max(1)).enumerate() {
                // Eight partial sums: fast, and always in the same order.
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
