//! A linear layer that is trained: gradients of input, weight and bias.

use super::kernels::{ForwardResult, backward_input, multiply, rows_of};
use super::tensors;
use crate::autograd::{Input, Operation};
use crate::nn::cpu::{self, Bf16Isa};
use candle_core::{Device, Shape, Tensor};
use rayon::prelude::*;

/// A linear layer whose input and weight may both get a gradient. With candle's matmul, the reshapes before and after
/// it would each go through memory several times in the backward pass.
pub(super) struct TrainedLinear {
    /// What the output and the gradient of the input are computed with; `None`: in f32. The gradient of the weight is in f32.
    pub(super) bf16: Option<Bf16Isa>,
}

impl TrainedLinear {
    fn gradients(&self, x: &Input, weight: &Input, gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 2]> {
        let dx = if x.requires_grad() {
            Some(backward_input(self.bf16, x.shape(), weight.tensor()?, gradient)?)
        } else {
            None
        };
        if !weight.requires_grad() {
            return Ok([dx, None]);
        }
        let ((outputs, inputs), rows) = (weight.shape().dims2()?, rows_of(x.shape()));
        let mut dw = vec![0f32; outputs * inputs];
        x.with(|x| {
            cpu::with_slice(gradient, |dy| {
                let (dy, x) = (cpu::Mat::new(dy, rows, outputs), cpu::Mat::new(x, rows, inputs));
                let out = cpu::MatMut::new(&mut dw, outputs, inputs);
                cpu::gemm(out, dy.t(), x, 1.0, 0.0, cpu::threads())
            })
        })???;
        Ok([dx, Some(Tensor::from_vec(dw, weight.shape(), &Device::Cpu)?)])
    }

    fn tensor_gradients(x: &Input, weight: &Input, gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 2]> {
        let dx = match x.requires_grad() {
            true => Some(tensors::backward_input(x.shape(), weight.tensor()?, gradient)?),
            false => None,
        };
        let dw = match weight.requires_grad() {
            true => Some(tensors::backward_weight(x.tensor()?, gradient)?),
            false => None,
        };
        Ok([dx, dw])
    }
}

/// Sums x [rows, width] over its rows, in an order that does not depend on the number of threads.
fn sum_rows(x: &[f32], width: usize) -> Vec<f32> {
    /// Columns per task, and rows that are summed in f32 before the sum is added in f64.
    const COLUMNS: usize = 256;
    const ROWS: usize = 32;
    let mut sums = vec![0f32; width];
    sums.par_chunks_mut(COLUMNS).enumerate().for_each(|(i, sums)| {
        let columns = i * COLUMNS..i * COLUMNS + sums.len();
        let mut exact = vec![0f64; sums.len()];
        for rows in x.chunks(ROWS * width) {
            sums.fill(0.0);
            for row in rows.chunks_exact(width) {
                sums.iter_mut()
                    .zip(&row[columns.clone()])
                    .for_each(|(sum, v)| *sum += v);
            }
            exact
                .iter_mut()
                .zip(&*sums)
                .for_each(|(exact, sum)| *exact += f64::from(*sum));
        }
        sums.iter_mut().zip(exact).for_each(|(sum, exact)| *sum = exact as f32);
    });
    sums
}

impl Operation<2> for TrainedLinear {
    const NAME: &'static str = "linear";

    fn saved_inputs(&self, [x, weight]: [bool; 2]) -> [bool; 2] {
        [weight, x]
    }

    fn forward(&self, [x, weight]: [&[f32]; 2], [x_shape, weight_shape]: [&Shape; 2]) -> ForwardResult {
        let (outputs, _) = weight_shape.dims2()?;
        multiply(self.bf16, x, x_shape, weight, outputs, None)
    }

    fn backward(&self, [x, weight]: [&Input; 2], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 2]> {
        self.gradients(x, weight, gradient)
    }

    fn forward_tensors(&self, [x, weight]: [&Tensor; 2]) -> candle_core::Result<Tensor> {
        tensors::multiply(x, weight, None)
    }

    fn backward_tensors(
        &self,
        [x, weight]: [&Input; 2],
        gradient: &Tensor,
    ) -> candle_core::Result<[Option<Tensor>; 2]> {
        Self::tensor_gradients(x, weight, gradient)
    }
}

impl Operation<3> for TrainedLinear {
    const NAME: &'static str = "linear-bias";

    fn saved_inputs(&self, [x, weight, _]: [bool; 3]) -> [bool; 3] {
        [weight, x, false]
    }

    fn forward(&self, [x, weight, bias]: [&[f32]; 3], [x_shape, weight_shape, _]: [&Shape; 3]) -> ForwardResult {
        let (outputs, _) = weight_shape.dims2()?;
        multiply(self.bf16, x, x_shape, weight, outputs, Some(bias))
    }

    fn backward(&self, [x, weight, bias]: [&Input; 3], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 3]> {
        let [dx, dw] = self.gradients(x, weight, gradient)?;
        let db = if bias.requires_grad() {
            let outputs = bias.shape().elem_count();
            let sums = cpu::with_slice(gradient, |dy| sum_rows(dy, outputs))?;
            Some(Tensor::from_vec(sums, bias.shape(), &Device::Cpu)?)
        } else {
            None
        };
        Ok([dx, dw, db])
    }

    fn forward_tensors(&self, [x, weight, bias]: [&Tensor; 3]) -> candle_core::Result<Tensor> {
        tensors::multiply(x, weight, Some(bias))
    }

    fn backward_tensors(
        &self,
        [x, weight, bias]: [&Input; 3],
        gradient: &Tensor,
    ) -> candle_core::Result<[Option<Tensor>; 3]> {
        let [dx, dw] = Self::tensor_gradients(x, weight, gradient)?;
        let db = match bias.requires_grad() {
            true => Some(tensors::backward_bias(gradient)?),
            false => None,
        };
        Ok([dx, dw, db])
    }
}
