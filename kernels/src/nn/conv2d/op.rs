//! The convolution on the CPU as an operation with gradients.

use super::geometry::{Geometry, Padding};
use super::tensors::backward_bias;
use crate::autograd::{Input, Operation};
use crate::cuda_kernels;
use crate::nn::cpu::{self, Bf16Isa, Bf16Mat};
use crate::quant::HalfFormat;
use crate::weights::Weight;
use candle_core::{Device, Shape, Tensor};

type ForwardResult = candle_core::Result<(Vec<f32>, Shape)>;

/// A convolution: an operation of three tensors if the bias is trained, else of two.
pub(super) struct ConvOp {
    pub(super) stride: usize,
    pub(super) padding: Padding,
    pub(super) bias: Option<Tensor>,
    /// What the output and the gradient of the input are computed with; `None`: in f32. The gradient of the weight is in f32.
    pub(super) bf16: Option<Bf16Isa>,
}

/// Checks that there is a bias for each output.
fn check_bias(bias: &[f32], g: &Geometry) -> candle_core::Result<()> {
    match bias.len() == g.outputs {
        true => Ok(()),
        false => candle_core::bail!("conv2d: the bias has {} elements, expected {}", bias.len(), g.outputs),
    }
}

impl ConvOp {
    pub(super) fn run(
        &self,
        (x, x_shape): (&[f32], &Shape),
        (weight, weight_shape): (&[f32], &Shape),
        bias: Option<&[f32]>,
    ) -> ForwardResult {
        let g = Geometry::new(x_shape, weight_shape, self.stride, self.padding)?.multiplied_with(self.bf16);
        if let Some(bias) = bias {
            check_bias(bias, &g)?;
        }
        Ok((
            g.forward(x, weight, bias)?,
            (g.batch, g.outputs, g.out_h, g.out_w).into(),
        ))
    }

    /// As [`Self::run`], with the frozen bias and a weight in bfloat16, each number with its low byte first.
    fn run_bf16(
        &self,
        isa: Bf16Isa,
        (x, x_shape): (&[f32], &Shape),
        weight: &[u8],
        weight_shape: &Shape,
    ) -> ForwardResult {
        let g = Geometry::new(x_shape, weight_shape, self.stride, self.padding)?;
        let (data, _) = weight.as_chunks::<2>();
        let weight = Bf16Mat {
            data,
            rows: g.outputs,
            cols: g.depth(),
        };
        let y = match &self.bias {
            Some(bias) => cpu::with_slice(bias, |bias| {
                check_bias(bias, &g)?;
                g.forward_bf16(isa, x, weight, Some(bias))
            })??,
            None => g.forward_bf16(isa, x, weight, None)?,
        };
        Ok((y, (g.batch, g.outputs, g.out_h, g.out_w).into()))
    }

    /// Computes the gradient of x.
    pub(super) fn backward_input(&self, x: &Shape, weight: &Tensor, gradient: &Tensor) -> candle_core::Result<Tensor> {
        let g = Geometry::new(x, weight.shape(), self.stride, self.padding)?.multiplied_with(self.bf16);
        let dx = cpu::with_slice(weight, |w| cpu::with_slice(gradient, |dy| g.backward_input(w, dy)))???;
        Tensor::from_vec(dx, x, &Device::Cpu)
    }

    /// Computes the gradients of x and weight.
    pub(super) fn gradients(
        &self,
        x: &Input,
        weight: &Input,
        gradient: &Tensor,
    ) -> candle_core::Result<[Option<Tensor>; 2]> {
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

/// The tensor form.
impl ConvOp {
    fn geometry(&self, x: &Shape, weight: &Shape) -> candle_core::Result<Geometry> {
        Geometry::new(x, weight, self.stride, self.padding)
    }

    /// The convolution, with `bias` or else the frozen bias.
    pub(super) fn run_tensors(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> candle_core::Result<Tensor> {
        let y = self.geometry(x.shape(), weight.shape())?.forward_tensors(x, weight)?;
        match bias.or(self.bias.as_ref()) {
            Some(bias) => {
                let bias = bias.to_dtype(y.dtype())?;
                match cuda_kernels::add_bias(&y, &bias, y.dim(2)? * y.dim(3)?)? {
                    true => Ok(y),
                    false => y.broadcast_add(&bias.reshape((1, weight.dim(0)?, 1, 1))?),
                }
            }
            None => Ok(y),
        }
    }

    fn tensor_gradients(&self, x: &Input, weight: &Input, dy: &Tensor) -> candle_core::Result<[Option<Tensor>; 2]> {
        let g = self.geometry(x.shape(), weight.shape())?;
        let dx = match x.requires_grad() {
            true => Some(g.backward_input_tensors(weight.tensor()?, dy)?),
            false => None,
        };
        let dw = match weight.requires_grad() {
            true => Some(g.backward_weight_tensors(x.tensor()?, dy)?),
            false => None,
        };
        Ok([dx, dw])
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

    fn has_slices(&self) -> bool {
        self.bias.as_ref().is_none_or(cpu::is_cpu_f32)
    }

    fn forward_tensors(&self, [x, weight]: [&Tensor; 2]) -> candle_core::Result<Tensor> {
        self.run_tensors(x, weight, None)
    }

    fn backward_tensors(
        &self,
        [x, weight]: [&Input; 2],
        gradient: &Tensor,
    ) -> candle_core::Result<[Option<Tensor>; 2]> {
        self.tensor_gradients(x, weight, gradient)
    }
}

/// A convolution whose weight gets no gradient, and is dequantised or read at each use.
pub(super) struct FrozenConv {
    pub(super) op: ConvOp,
    pub(super) weight: Weight,
}

impl Operation<1> for FrozenConv {
    const NAME: &'static str = "conv2d-frozen";

    fn saved_inputs(&self, _: [bool; 1]) -> [bool; 1] {
        [false]
    }

    fn forward(&self, [x]: [&[f32]; 1], [x_shape]: [&Shape; 1]) -> ForwardResult {
        let shape = Shape::from(self.weight.dims());
        if let Some(isa) = self.op.bf16
            && let Some((HalfFormat::Bf16, bytes)) = self.weight.half_bytes()?
        {
            return self.op.run_bf16(isa, (x, x_shape), &bytes, &shape);
        }
        let weight = self.weight.dense()?;
        cpu::with_slice(&weight, |weight| {
            Operation::<2>::forward(&self.op, [x, weight], [x_shape, &shape])
        })?
    }

    fn backward(&self, [x]: [&Input; 1], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 1]> {
        let dx = self.op.backward_input(x.shape(), &self.weight.dense()?, gradient)?;
        Ok([Some(dx)])
    }

    fn has_slices(&self) -> bool {
        self.weight.has_slices() && Operation::<2>::has_slices(&self.op)
    }

    fn forward_tensors(&self, [x]: [&Tensor; 1]) -> candle_core::Result<Tensor> {
        self.op.run_tensors(x, &self.weight.dense()?, None)
    }

    fn backward_tensors(&self, [x]: [&Input; 1], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 1]> {
        let weight = self.weight.dense()?;
        let g = self.op.geometry(x.shape(), weight.shape())?;
        Ok([Some(g.backward_input_tensors(&weight, gradient)?)])
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

    fn forward_tensors(&self, [x, weight, bias]: [&Tensor; 3]) -> candle_core::Result<Tensor> {
        self.run_tensors(x, weight, Some(bias))
    }

    fn backward_tensors(
        &self,
        [x, weight, bias]: [&Input; 3],
        gradient: &Tensor,
    ) -> candle_core::Result<[Option<Tensor>; 3]> {
        let [dx, dw] = self.tensor_gradients(x, weight, gradient)?;
        let db = match bias.requires_grad() {
            true => Some(backward_bias(gradient)?),
            false => None,
        };
        Ok([dx, dw, db])
    }
}
