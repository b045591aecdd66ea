//! A frozen convolution fused with a LoRA (LoCon): one operation instead of five.

use super::geometry::Geometry;
use super::op::ConvOp;
use crate::autograd::{Input, Operation};
use crate::nn::cpu::{self, Mat, MatMut};
use crate::nn::low_rank::LowRankSizes;
use crate::nn::tensors::widen;
use crate::weights::Weight;
use candle_core::{Device, Result, Shape, Tensor};

/// The convolution of x [b, in, h, w] with `W + scale * up * down`; down [rank, in, kh, kw], up [out, rank, 1, 1].
pub(super) struct LowRankConv {
    pub(super) op: ConvOp,
    /// The frozen weight.
    pub(super) weight: Weight,
    pub(super) scale: f32,
}

/// The sizes of the full convolution, of the one with `down`, and of both as matrices.
struct Sizes {
    full: Geometry,
    low_rank: Geometry,
    matrix: LowRankSizes,
    pixels: usize,
}

impl Sizes {
    /// The convolution with `up`, of one pixel.
    fn up(&self) -> Result<Geometry> {
        let (batch, rank, outputs) = (self.full.batch, self.matrix.rank, self.full.outputs);
        let hidden = Shape::from((batch, rank, self.full.out_h, self.full.out_w));
        Geometry::new(&hidden, &Shape::from((outputs, rank, 1, 1)), 1, [0, 0])
    }
}

impl LowRankConv {
    fn sizes(&self, x: &Shape, down: &Shape, up: &Shape) -> Result<Sizes> {
        let weight = Shape::from(self.weight.dims());
        let ((outputs, inputs, kh, kw), (rank, ..)) = (weight.dims4()?, down.dims4()?);
        if down.dims() != [rank, inputs, kh, kw] || up.dims() != [outputs, rank, 1, 1] {
            candle_core::bail!("a LoRA with down {down:?} and up {up:?} does not match the weight {weight:?}");
        }
        let (stride, padding) = (self.op.stride, self.op.padding);
        let full = Geometry::new(x, &weight, stride, padding)?.multiplied_with(self.op.bf16);
        let pixels = full.out_h * full.out_w;
        Ok(Sizes {
            low_rank: Geometry::new(x, down, stride, padding)?,
            matrix: LowRankSizes {
                rows: full.batch * pixels,
                inputs: inputs * kh * kw,
                outputs,
                rank,
                rounds_weight: self.op.bf16.is_some(),
            },
            pixels,
            full,
        })
    }
}

/// Computes `out[i] = alpha * a * b[i] + beta * out[i]` for every image `i` of the batch.
fn per_image(out: &mut [f32], a: Mat<'_>, b: &[f32], (pixels, alpha, beta): (usize, f32, f32)) -> Result<()> {
    let (to, from) = ((a.rows * pixels).max(1), (a.cols * pixels).max(1));
    for (out, b) in out.chunks_mut(to).zip(b.chunks(from)) {
        let b = Mat::new(b, a.cols, pixels);
        cpu::gemm(MatMut::new(out, a.rows, pixels), a, b, alpha, beta, cpu::threads())?;
    }
    Ok(())
}

impl Operation<3> for LowRankConv {
    const NAME: &'static str = "low-rank-conv2d";

    fn saved_inputs(&self, [_, down, up]: [bool; 3]) -> [bool; 3] {
        [down || up, true, true]
    }

    fn forward(
        &self,
        [x, down, up]: [&[f32]; 3],
        [x_shape, down_shape, up_shape]: [&Shape; 3],
    ) -> Result<(Vec<f32>, Shape)> {
        let s = self.sizes(x_shape, down_shape, up_shape)?;
        let LowRankSizes { outputs, rank, .. } = s.matrix;
        let weight = self.weight.dense()?;
        let run = |weight: &[f32]| match &self.op.bias {
            Some(bias) => cpu::with_slice(bias, |bias| s.full.forward(x, weight, Some(bias)))?,
            None => s.full.forward(x, weight, None),
        };
        let y = cpu::with_slice(&weight, |weight| {
            if s.matrix.should_merge() {
                return run(&s.matrix.merged(weight.to_vec(), down, up, self.scale)?);
            }
            let mut y = run(weight)?;
            let h = s.low_rank.forward(x, down, None)?;
            per_image(&mut y, Mat::new(up, outputs, rank), &h, (s.pixels, self.scale, 1.0))?;
            Ok(y)
        })??;
        Ok((y, (s.full.batch, outputs, s.full.out_h, s.full.out_w).into()))
    }

    fn backward(&self, [x, down, up]: [&Input; 3], gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let s = self.sizes(x.shape(), down.shape(), up.shape())?;
        let LowRankSizes { outputs, rank, .. } = s.matrix;
        let (needs_factors, needs_dx) = (down.requires_grad() || up.requires_grad(), x.requires_grad());
        let tensor = |elements: Vec<f32>, shape: &Shape| Tensor::from_vec(elements, shape, &Device::Cpu).map(Some);
        let [mut dx, mut d_down, mut d_up] = [const { None }; 3];
        cpu::with_slice(gradient, |dy| {
            down.with(|d| {
                up.with(|u| {
                    let mut dh = vec![0f32; s.full.batch * rank * s.pixels];
                    let u_mat = Mat::new(u, outputs, rank);
                    per_image(&mut dh, u_mat.t(), dy, (s.pixels, self.scale, 0.0))?;
                    if needs_factors {
                        x.with(|x| {
                            let h = s.low_rank.forward(x, d, None)?;
                            let mut sum = vec![0f32; outputs * rank];
                            let images = dy.chunks((outputs * s.pixels).max(1));
                            for (dy, h) in images.zip(h.chunks((rank * s.pixels).max(1))) {
                                let (dy, h) = (Mat::new(dy, outputs, s.pixels), Mat::new(h, rank, s.pixels));
                                let out = MatMut::new(&mut sum, outputs, rank);
                                cpu::gemm(out, dy, h.t(), self.scale, 1.0, cpu::threads())?;
                            }
                            d_up = tensor(sum, up.shape())?;
                            d_down = tensor(s.low_rank.backward_weight(x, &dh), down.shape())?;
                            candle_core::Result::Ok(())
                        })??;
                    }
                    if !needs_dx {
                        return Ok(());
                    }
                    let weight = self.weight.dense()?;
                    let back = cpu::with_slice(&weight, |weight| {
                        if s.matrix.should_merge() {
                            return s
                                .full
                                .backward_input(&s.matrix.merged(weight.to_vec(), d, u, self.scale)?, dy);
                        }
                        let mut back = s.full.backward_input(weight, dy)?;
                        let low_rank = s.low_rank.backward_input(d, &dh)?;
                        back.iter_mut().zip(low_rank).for_each(|(sum, change)| *sum += change);
                        Ok(back)
                    })??;
                    dx = tensor(back, x.shape())?;
                    candle_core::Result::Ok(())
                })
            })
        })????;
        Ok([dx, d_down, d_up])
    }

    fn has_slices(&self) -> bool {
        self.weight.has_slices() && Operation::<2>::has_slices(&self.op)
    }

    /// The change is computed in f32, whatever the dtype of x.
    fn forward_tensors(&self, [x, down, up]: [&Tensor; 3]) -> Result<Tensor> {
        let s = self.sizes(x.shape(), down.shape(), up.shape())?;
        let y = self.op.run_tensors(x, &self.weight.dense()?, None)?;
        let h = s.low_rank.forward_tensors(&widen(x)?, down)?;
        let change = (s.up()?.forward_tensors(&h, up)? * f64::from(self.scale))?;
        y + change.to_dtype(x.dtype())?
    }

    fn backward_tensors(&self, [x, down, up]: [&Input; 3], gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let s = self.sizes(x.shape(), down.shape(), up.shape())?;
        let (down_weight, up_weight, dy) = (down.tensor()?, up.tensor()?, widen(gradient)?);
        let dh = (s.up()?.backward_input_tensors(up_weight, &dy)? * f64::from(self.scale))?;
        let [mut dx, mut d_down, mut d_up] = [const { None }; 3];
        if down.requires_grad() || up.requires_grad() {
            let x = widen(x.tensor()?)?;
            let h = s.low_rank.forward_tensors(&x, down_weight)?;
            d_up = Some((s.up()?.backward_weight_tensors(&h, &dy)? * f64::from(self.scale))?);
            d_down = Some(s.low_rank.backward_weight_tensors(&x, &dh)?);
        }
        drop(dy);
        if x.requires_grad() {
            let back = s.full.backward_input_tensors(&self.weight.dense()?, gradient)?;
            let change = s.low_rank.backward_input_tensors(down_weight, &dh)?;
            dx = Some((back + change.to_dtype(x.dtype())?)?);
        }
        Ok([dx, d_down, d_up])
    }
}
