//! A frozen linear layer fused with a LoRA: one operation instead of five.

use super::halves::HalfWeight;
use super::kernels::{ForwardResult, multiply, rows_of, with_bias};
use super::tensors;
use crate::autograd::{Input, Operation};
use crate::nn::cpu::{self, Bf16Isa, Mat, MatMut};
use crate::nn::low_rank::LowRankSizes;
use crate::nn::tensors::widen;
use crate::weights::Weight;
use candle_core::{Device, Result, Shape, Tensor};

/// `x (W + scale * up * down)^T + b`; x [.., in], down [rank, in], up [out, rank].
pub(super) struct LowRankLinear {
    /// The frozen weight.
    pub(super) weight: Weight,
    /// The frozen bias.
    pub(super) bias: Option<Tensor>,
    pub(super) scale: f32,
    /// What products with the weight are computed with; `None`: in f32, as those with `down` and `up` are.
    pub(super) bf16: Option<Bf16Isa>,
}

impl LowRankLinear {
    fn sizes(&self, x: &Shape, down: &Shape, up: &Shape) -> Result<LowRankSizes> {
        let ((rank, inputs), (outputs, up_rank)) = (down.dims2()?, up.dims2()?);
        if self.weight.dims() != [outputs, inputs] || rank != up_rank || x.dims().last() != Some(&inputs) {
            candle_core::bail!(
                "a LoRA with down {down:?} and up {up:?} does not match the weight {:?} and the input {x:?}",
                self.weight.dims()
            );
        }
        Ok(LowRankSizes {
            rows: rows_of(x),
            inputs,
            outputs,
            rank,
            rounds_weight: self.bf16.is_some(),
        })
    }
}

/// Computes `alpha * a * b` into a new matrix.
fn product(a: Mat<'_>, b: Mat<'_>, alpha: f32) -> Result<Vec<f32>> {
    let mut out = vec![0f32; a.rows * b.cols];
    cpu::gemm(MatMut::new(&mut out, a.rows, b.cols), a, b, alpha, 0.0, cpu::threads())?;
    Ok(out)
}

impl Operation<3> for LowRankLinear {
    const NAME: &'static str = "low-rank-linear";

    fn saved_inputs(&self, [_, down, up]: [bool; 3]) -> [bool; 3] {
        [down || up, true, true]
    }

    fn forward(&self, [x, down, up]: [&[f32]; 3], [x_shape, down_shape, up_shape]: [&Shape; 3]) -> ForwardResult {
        let t = self.sizes(x_shape, down_shape, up_shape)?;
        let run = |weight: &[f32]| {
            with_bias(self.bias.as_ref(), |bias| {
                multiply(self.bf16, x, x_shape, weight, t.outputs, bias)
            })
        };
        let with_change = |(mut y, shape): (Vec<f32>, Shape)| {
            let x = Mat::new(x, t.rows, t.inputs);
            let h = product(x, Mat::new(down, t.rank, t.inputs).t(), 1.0)?;
            let (h, up) = (Mat::new(&h, t.rows, t.rank), Mat::new(up, t.outputs, t.rank).t());
            let out = MatMut::new(&mut y, t.rows, t.outputs);
            cpu::gemm(out, h, up, self.scale, 1.0, cpu::threads())?;
            candle_core::Result::Ok((y, shape))
        };
        if let Some((format, bytes)) = self.weight.half_bytes()? {
            if t.should_merge() {
                return run(&t.merged(format.widened(&bytes), down, up, self.scale)?);
            }
            let weight = HalfWeight::new(format, &bytes, self.weight.dims())?.multiplied_with(self.bf16);
            return with_change(with_bias(self.bias.as_ref(), |bias| weight.multiply(x, x_shape, bias))?);
        }
        cpu::with_slice(&self.weight.dense()?, |weight| match t.should_merge() {
            true => run(&t.merged(weight.to_vec(), down, up, self.scale)?),
            false => with_change(run(weight)?),
        })?
    }

    fn backward(&self, [x, down, up]: [&Input; 3], gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let t = self.sizes(x.shape(), down.shape(), up.shape())?;
        let (needs_factors, needs_dx) = (down.requires_grad() || up.requires_grad(), x.requires_grad());
        let tensor = |elements: Vec<f32>, shape: &Shape| Tensor::from_vec(elements, shape, &Device::Cpu).map(Some);
        let [mut dx, mut d_down, mut d_up] = [const { None }; 3];
        cpu::with_slice(gradient, |dy| {
            down.with(|d| {
                up.with(|u| {
                    let dy = Mat::new(dy, t.rows, t.outputs);
                    let (d_mat, u_mat) = (Mat::new(d, t.rank, t.inputs), Mat::new(u, t.outputs, t.rank));
                    let mut dh = Vec::new();
                    if needs_factors || (needs_dx && !t.should_merge()) {
                        dh = product(dy, u_mat, self.scale)?;
                    }
                    let dh = Mat::new(&dh, t.rows, t.rank);
                    if needs_factors {
                        x.with(|x| {
                            let x = Mat::new(x, t.rows, t.inputs);
                            let h = product(x, d_mat.t(), 1.0)?;
                            d_up = tensor(product(dy.t(), Mat::new(&h, t.rows, t.rank), self.scale)?, up.shape())?;
                            d_down = tensor(product(dh.t(), x, 1.0)?, down.shape())?;
                            candle_core::Result::Ok(())
                        })??;
                    }
                    if !needs_dx {
                        return Ok(());
                    }
                    let with_change = |mut back: Vec<f32>| {
                        let out = MatMut::new(&mut back, t.rows, t.inputs);
                        cpu::gemm(out, dh, d_mat, 1.0, 1.0, cpu::threads())?;
                        candle_core::Result::Ok(back)
                    };
                    let with_merged = |weight| {
                        let merged = t.merged(weight, d, u, self.scale)?;
                        product(dy, Mat::new(&merged, t.outputs, t.inputs), 1.0)
                    };
                    let back = match self.weight.half_bytes()? {
                        Some((format, bytes)) if t.should_merge() => with_merged(format.widened(&bytes))?,
                        Some((format, bytes)) => {
                            let weight =
                                HalfWeight::new(format, &bytes, self.weight.dims())?.multiplied_with(self.bf16);
                            with_change(weight.backward_input(t.rows, dy.data)?)?
                        }
                        None => cpu::with_slice(&self.weight.dense()?, |weight| {
                            if t.should_merge() {
                                return with_merged(weight.to_vec());
                            }
                            let mut back = vec![0f32; t.rows * t.inputs];
                            let (out, weight) = (
                                MatMut::new(&mut back, t.rows, t.inputs),
                                Mat::new(weight, t.outputs, t.inputs),
                            );
                            cpu::layer_product(self.bf16, out, dy, weight, false, cpu::threads())?;
                            with_change(back)
                        })??,
                    };
                    dx = tensor(back, x.shape())?;
                    candle_core::Result::Ok(())
                })
            })
        })????;
        Ok([dx, d_down, d_up])
    }

    fn has_slices(&self) -> bool {
        self.weight.has_slices() && self.bias.as_ref().is_none_or(cpu::is_cpu_f32)
    }

    /// The change is computed in f32, whatever the dtype of x.
    fn forward_tensors(&self, [x, down, up]: [&Tensor; 3]) -> Result<Tensor> {
        self.sizes(x.shape(), down.shape(), up.shape())?;
        let y = tensors::multiply(x, &self.weight.dense()?, self.bias.as_ref())?;
        let h = tensors::multiply(&widen(x)?, down, None)?;
        let change = (tensors::multiply(&h, up, None)? * f64::from(self.scale))?;
        y + change.to_dtype(x.dtype())?
    }

    fn backward_tensors(&self, [x, down, up]: [&Input; 3], gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let t = self.sizes(x.shape(), down.shape(), up.shape())?;
        let (down_weight, up_weight, dy) = (down.tensor()?, up.tensor()?, widen(gradient)?);
        let hidden = Shape::from((t.rows, t.rank));
        let dh = (tensors::backward_input(&hidden, up_weight, &dy)? * f64::from(self.scale))?;
        let [mut dx, mut d_down, mut d_up] = [const { None }; 3];
        if down.requires_grad() || up.requires_grad() {
            let x = widen(x.tensor()?)?;
            let h = tensors::multiply(&x, down_weight, None)?;
            d_up = Some((tensors::backward_weight(&h, &dy)? * f64::from(self.scale))?);
            d_down = Some(tensors::backward_weight(&x, &dh)?);
        }
        drop(dy);
        if x.requires_grad() {
            let back = tensors::backward_input(x.shape(), &self.weight.dense()?, gradient)?;
            let change = tensors::backward_input(x.shape(), down_weight, &dh)?;
            dx = Some((back + change.to_dtype(x.dtype())?)?);
        }
        Ok([dx, d_down, d_up])
    }
}
