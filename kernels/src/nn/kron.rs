//! A layer's input times a Kronecker product of two weights, which is never built.
//!
//! The Kronecker product of `first` [a, c] and `second` [b, d] has a b rows and c d columns. The c groups of d features of an input
//! are multiplied with `second`, and `first` mixes the c results to a groups of b features. For each row that takes b (c d + a c)
//! multiplications instead of a b c d. The same holds for a convolution, whose kernel belongs to `second`.

use super::LayerKind;
use super::conv2d::Geometry;
use super::cpu::{self, Mat, MatMut};
use super::tensors::widen;
use crate::autograd::{Input, Operation, apply};
use candle_core::{Device, Result, Shape, Tensor};
use rayon::prelude::*;

/// `x` times `scale * (first ⊗ second)`, as a layer of this kind would compute it with that weight and without a bias: `x` [.., c d]
/// and `second` [b, d] -> [.., a b], or `x` [n, c d, h, w] and `second` [b, d, kh, kw] -> [n, a b, h', w']; `first` [a, c]. It is
/// computed in f32, whatever the dtype of `x`, and has that dtype. All tracked tensors get gradients.
///
/// # Errors
/// When the shapes do not match.
pub fn kron(x: &Tensor, first: &Tensor, second: &Tensor, kind: LayerKind, scale: f64) -> Result<Tensor> {
    let scale = scale as f32;
    apply([x, first, second], Kron { kind, scale })
}

/// Up to this number of items, each product uses all threads. Above it, each thread has items of its own.
const FEW_ITEMS: usize = 16;
/// Items whose gradients of `first` are summed before they are added to those of the others.
const SUMMED_ITEMS: usize = 64;

struct Kron {
    kind: LayerKind,
    scale: f32,
}

/// The sizes of one product.
struct Sizes {
    /// Rows of the input of a linear layer, or images.
    items: usize,
    a: usize,
    c: usize,
    b: usize,
    d: usize,
    /// Elements that `second` computes for each group of an item: b, or b h' w'.
    columns: usize,
    /// The convolution with `second`, whose batch has c groups for each image.
    conv: Option<Geometry>,
    output: Shape,
}

impl Kron {
    fn sizes(&self, x: &Shape, first: &Shape, second: &Shape) -> Result<Sizes> {
        let (a, c) = first.dims2()?;
        let mismatch = || candle_core::bail!("kron: {first:?} and {second:?} do not match the input {x:?}");
        match self.kind {
            LayerKind::Linear => {
                let (b, d) = second.dims2()?;
                let mut output = x.dims().to_vec();
                let Some(width) = output.last_mut().filter(|width| **width == c * d && **width > 0) else {
                    return mismatch();
                };
                *width = a * b;
                Ok(Sizes {
                    items: x.elem_count() / (c * d),
                    a,
                    c,
                    b,
                    d,
                    columns: b,
                    conv: None,
                    output: output.into(),
                })
            }
            LayerKind::Conv { stride, padding } => {
                let ((images, channels, height, width), (b, d, ..)) = (x.dims4()?, second.dims4()?);
                if channels != c * d {
                    return mismatch();
                }
                let groups = Shape::from((images * c, d, height, width));
                let conv = Geometry::new(&groups, second, stride, [padding; 2])?;
                Ok(Sizes {
                    items: images,
                    a,
                    c,
                    b,
                    d,
                    columns: b * conv.out_h * conv.out_w,
                    output: (images, a * b, conv.out_h, conv.out_w).into(),
                    conv: Some(conv),
                })
            }
            LayerKind::Conv1d { .. } | LayerKind::Conv3d { .. } | LayerKind::Embedding => {
                candle_core::bail!("kron: a {:?} is not computed with a Kronecker product", self.kind)
            }
        }
    }
}

/// The slices' form.
impl Sizes {
    /// The groups of `x` times `second`: [items, c, columns].
    fn groups(&self, x: &[f32], second: &[f32]) -> Result<Vec<f32>> {
        if let Some(conv) = &self.conv {
            return conv.forward(x, second, None);
        }
        let rows = self.items * self.c;
        let mut out = vec![0f32; rows * self.b];
        let (x, second) = (Mat::new(x, rows, self.d), Mat::new(second, self.b, self.d));
        cpu::gemm(
            MatMut::new(&mut out, rows, self.b),
            x,
            second.t(),
            1.0,
            0.0,
            cpu::threads(),
        )?;
        Ok(out)
    }

    /// The gradient of `x` from that of the groups.
    fn input_gradient(&self, second: &[f32], dz: &[f32]) -> Result<Vec<f32>> {
        if let Some(conv) = &self.conv {
            return conv.backward_input(second, dz);
        }
        let rows = self.items * self.c;
        let mut out = vec![0f32; rows * self.d];
        let (dz, second) = (Mat::new(dz, rows, self.b), Mat::new(second, self.b, self.d));
        cpu::gemm(
            MatMut::new(&mut out, rows, self.d),
            dz,
            second,
            1.0,
            0.0,
            cpu::threads(),
        )?;
        Ok(out)
    }

    /// The gradient of `second` from that of the groups.
    fn second_gradient(&self, x: &[f32], dz: &[f32]) -> Result<Vec<f32>> {
        if let Some(conv) = &self.conv {
            return Ok(conv.backward_weight(x, dz));
        }
        let rows = self.items * self.c;
        let mut out = vec![0f32; self.b * self.d];
        let (dz, x) = (Mat::new(dz, rows, self.b), Mat::new(x, rows, self.d));
        cpu::gemm(
            MatMut::new(&mut out, self.b, self.d),
            dz.t(),
            x,
            1.0,
            0.0,
            cpu::threads(),
        )?;
        Ok(out)
    }

    /// `scale * weight * x[i]` for every item i; `x` [items, weight.cols, columns].
    fn mix(&self, weight: Mat<'_>, x: &[f32], scale: f32) -> Result<Vec<f32>> {
        let (to, from) = (weight.rows * self.columns, weight.cols * self.columns);
        let mut out = vec![0f32; self.items * to];
        let one = |out: &mut [f32], x: &[f32], threads: usize| {
            let (out, x) = (
                MatMut::new(out, weight.rows, self.columns),
                Mat::new(x, weight.cols, self.columns),
            );
            cpu::gemm(out, weight, x, scale, 0.0, threads)
        };
        if self.items <= FEW_ITEMS {
            let mut items = out.chunks_mut(to.max(1)).zip(x.chunks(from.max(1)));
            items.try_for_each(|(out, x)| one(out, x, cpu::threads()))?;
        } else {
            let items = out.par_chunks_mut(to.max(1)).zip(x.par_chunks(from.max(1)));
            items.with_min_len(4).try_for_each(|(out, x)| one(out, x, 1))?;
        }
        Ok(out)
    }

    /// The gradient of `first`: the sum over all items of dy[i] z[i]^T, in an order that does not depend on the number of threads.
    fn first_gradient(&self, dy: &[f32], z: &[f32], scale: f32) -> Result<Vec<f32>> {
        let (of_y, of_z) = ((self.a * self.columns).max(1), (self.c * self.columns).max(1));
        let threads = if self.items <= FEW_ITEMS { cpu::threads() } else { 1 };
        let sum_block = |(dy, z): (&[f32], &[f32])| {
            let mut sum = vec![0f32; self.a * self.c];
            for (dy, z) in dy.chunks(of_y).zip(z.chunks(of_z)) {
                let (dy, z) = (Mat::new(dy, self.a, self.columns), Mat::new(z, self.c, self.columns));
                cpu::gemm(MatMut::new(&mut sum, self.a, self.c), dy, z.t(), scale, 1.0, threads)?;
            }
            Result::Ok(sum)
        };
        let blocks = dy
            .par_chunks(of_y * SUMMED_ITEMS)
            .zip(z.par_chunks(of_z * SUMMED_ITEMS));
        let blocks: Vec<Vec<f32>> = blocks.map(sum_block).collect::<Result<_>>()?;
        let mut sum = vec![0f32; self.a * self.c];
        for block in blocks {
            sum.iter_mut().zip(block).for_each(|(sum, part)| *sum += part);
        }
        Ok(sum)
    }
}

/// The tensors' form.
impl Sizes {
    /// `x` with a row or an image for each group.
    fn grouped(&self, x: &Tensor) -> Result<Tensor> {
        match &self.conv {
            None => x.reshape((self.items * self.c, self.d)),
            Some(conv) => x.reshape((conv.batch, conv.inputs, conv.height, conv.width)),
        }
    }

    /// What `second` computes from [`Self::grouped`], in its own shape.
    fn grouped_result(&self, z: &Tensor) -> Result<Tensor> {
        match &self.conv {
            None => z.reshape((self.items * self.c, self.b)),
            Some(conv) => z.reshape((conv.batch, conv.outputs, conv.out_h, conv.out_w)),
        }
    }

    /// As [`Self::groups`], for a widened `x`.
    fn groups_tensors(&self, x: &Tensor, second: &Tensor) -> Result<Tensor> {
        let x = self.grouped(x)?;
        let z = match &self.conv {
            None => x.matmul(&second.t()?)?,
            Some(conv) => conv.forward_tensors(&x, second)?,
        };
        z.reshape((self.items, self.c, self.columns))
    }

    /// The weight [rows, cols] once for each item, which takes no memory.
    fn repeated(&self, weight: &Tensor) -> Result<Tensor> {
        let (rows, cols) = weight.dims2()?;
        weight.broadcast_as((self.items, rows, cols))
    }
}

impl Operation<3> for Kron {
    const NAME: &'static str = "kron";

    fn saved_inputs(&self, [x, first, second]: [bool; 3]) -> [bool; 3] {
        [first || second, x || first || second, x || first || second]
    }

    fn forward(
        &self,
        [x, first, second]: [&[f32]; 3],
        [x_shape, first_shape, second_shape]: [&Shape; 3],
    ) -> Result<(Vec<f32>, Shape)> {
        let s = self.sizes(x_shape, first_shape, second_shape)?;
        let z = s.groups(x, second)?;
        let y = s.mix(Mat::new(first, s.a, s.c), &z, self.scale)?;
        Ok((y, s.output))
    }

    fn backward(&self, [x, first, second]: [&Input; 3], gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let s = self.sizes(x.shape(), first.shape(), second.shape())?;
        let tensor = |elements: Vec<f32>, shape: &Shape| Tensor::from_vec(elements, shape, &Device::Cpu).map(Some);
        let [mut dx, mut d_first, mut d_second] = [const { None }; 3];
        cpu::with_slice(gradient, |dy| {
            first.with(|first_weight| {
                second.with(|second_weight| {
                    if first.requires_grad() {
                        let z = x.with(|x| s.groups(x, second_weight))??;
                        d_first = tensor(s.first_gradient(dy, &z, self.scale)?, first.shape())?;
                    }
                    if !x.requires_grad() && !second.requires_grad() {
                        return Ok(());
                    }
                    let dz = s.mix(Mat::new(first_weight, s.a, s.c).t(), dy, self.scale)?;
                    if second.requires_grad() {
                        let sum = x.with(|x| s.second_gradient(x, &dz))??;
                        d_second = tensor(sum, second.shape())?;
                    }
                    if x.requires_grad() {
                        dx = tensor(s.input_gradient(second_weight, &dz)?, x.shape())?;
                    }
                    Result::Ok(())
                })
            })
        })????;
        Ok([dx, d_first, d_second])
    }

    fn forward_tensors(&self, [x, first, second]: [&Tensor; 3]) -> Result<Tensor> {
        let s = self.sizes(x.shape(), first.shape(), second.shape())?;
        let z = s.groups_tensors(&widen(x)?, &widen(second)?)?;
        let y = (s.repeated(&widen(first)?)?.matmul(&z)? * f64::from(self.scale))?;
        y.reshape(&s.output)?.to_dtype(x.dtype())
    }

    fn backward_tensors(&self, [x, first, second]: [&Input; 3], gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let s = self.sizes(x.shape(), first.shape(), second.shape())?;
        let (first_weight, second_weight) = (&widen(first.tensor()?)?, &widen(second.tensor()?)?);
        let dy = widen(gradient)?.reshape((s.items, s.a, s.columns))?;
        let [mut dx, mut d_first, mut d_second] = [const { None }; 3];
        if first.requires_grad() {
            let z = s.groups_tensors(&widen(x.tensor()?)?, second_weight)?;
            d_first = Some((dy.matmul(&z.t()?)?.sum(0)? * f64::from(self.scale))?);
        }
        if !x.requires_grad() && !second.requires_grad() {
            return Ok([dx, d_first, d_second]);
        }
        let dz = (s.repeated(&first_weight.t()?)?.matmul(&dy)? * f64::from(self.scale))?;
        drop(dy);
        let dz = s.grouped_result(&dz)?;
        if second.requires_grad() {
            let x = s.grouped(&widen(x.tensor()?)?)?;
            d_second = Some(match &s.conv {
                None => dz.t()?.matmul(&x)?,
                Some(conv) => conv.backward_weight_tensors(&x, &dz)?,
            });
        }
        if x.requires_grad() {
            let grouped = match &s.conv {
                None => dz.matmul(second_weight)?,
                Some(conv) => conv.backward_input_tensors(second_weight, &dz)?,
            };
            dx = Some(grouped.reshape(x.shape())?);
        }
        Ok([dx, d_first, d_second])
    }
}
