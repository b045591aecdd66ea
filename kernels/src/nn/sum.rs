//! Sums and concatenations of tensors.

use super::cpu::{Function, Simd, map_parallel, map_serial};
use super::tensors::sum_over;
use crate::autograd::{Input, Operation, apply};
use candle_core::{Shape, Tensor};
use rayon::prelude::*;

/// a + b; both have the same shape.
///
/// # Errors
/// When the shapes differ.
pub fn add(a: &Tensor, b: &Tensor) -> candle_core::Result<Tensor> {
    apply([a, b], Add)
}

/// x [b, c, ..] plus shift [b, c], which is added to every element of a channel.
///
/// # Errors
/// When the shapes do not match.
pub fn add_channels(x: &Tensor, shift: &Tensor) -> candle_core::Result<Tensor> {
    apply([x, shift], AddChannels)
}

/// a [b, c, ..] and b [b, d, ..] -> [b, c + d, ..].
///
/// # Errors
/// When the shapes differ anywhere else.
pub fn cat_channels(a: &Tensor, b: &Tensor) -> candle_core::Result<Tensor> {
    apply([a, b], CatChannels)
}

type ForwardResult = candle_core::Result<(Vec<f32>, Shape)>;
type BackwardResult = candle_core::Result<[Option<Tensor>; 2]>;

/// a + b.
#[derive(Clone, Copy)]
struct Add;

impl Function<2> for Add {
    #[inline(always)]
    fn eval<S: Simd>(self, [a, b]: [S::V; 2]) -> S::V {
        S::add(a, b)
    }
}

impl Operation<2> for Add {
    const NAME: &'static str = "add";

    fn saved_inputs(&self, _: [bool; 2]) -> [bool; 2] {
        [false; 2]
    }

    fn forward(&self, [a, b]: [&[f32]; 2], [a_shape, b_shape]: [&Shape; 2]) -> ForwardResult {
        if a_shape != b_shape {
            candle_core::bail!("add: the shapes {a_shape:?} and {b_shape:?} differ");
        }
        let mut y = vec![0f32; a.len()];
        map_parallel(Self, [a, b], &mut y);
        Ok((y, a_shape.clone()))
    }

    fn backward(&self, _: [&Input; 2], gradient: &Tensor) -> BackwardResult {
        Ok([Some(gradient.clone()), Some(gradient.clone())])
    }

    fn forward_tensors(&self, [a, b]: [&Tensor; 2]) -> candle_core::Result<Tensor> {
        a + b
    }

    fn backward_tensors(&self, inputs: [&Input; 2], gradient: &Tensor) -> BackwardResult {
        self.backward(inputs, gradient)
    }
}

/// x plus one number, for all elements of a channel.
#[derive(Clone, Copy)]
struct AddScalar(f32);

impl Function<1> for AddScalar {
    #[inline(always)]
    fn eval<S: Simd>(self, [x]: [S::V; 1]) -> S::V {
        S::add(x, S::splat(self.0))
    }
}

struct AddChannels;

/// The shape [b, c, 1, ..] in which a shift [b, c] is added to x [b, c, ..].
fn channel_shape(x: &Shape, shift: &Shape) -> candle_core::Result<Vec<usize>> {
    if x.rank() < 2 || shift.dims() != &x.dims()[..2] {
        candle_core::bail!("add_channels: shift {shift:?} does not match x {x:?}");
    }
    let mut shape = vec![1; x.rank()];
    shape[..2].copy_from_slice(shift.dims());
    Ok(shape)
}

impl Operation<2> for AddChannels {
    const NAME: &'static str = "add-channels";

    fn saved_inputs(&self, _: [bool; 2]) -> [bool; 2] {
        [false; 2]
    }

    fn forward(&self, [x, shift]: [&[f32]; 2], [x_shape, shift_shape]: [&Shape; 2]) -> ForwardResult {
        channel_shape(x_shape, shift_shape)?;
        let mut y = vec![0f32; x.len()];
        if !x.is_empty() {
            let pixels = x.len() / shift.len();
            y.par_chunks_mut(pixels)
                .zip(x.par_chunks(pixels))
                .zip(shift)
                .for_each(|((y, x), shift)| map_serial(AddScalar(*shift), [x], y));
        }
        Ok((y, x_shape.clone()))
    }

    fn backward(&self, [_, shift]: [&Input; 2], gradient: &Tensor) -> BackwardResult {
        let sums = if shift.requires_grad() {
            let (batch, channels) = shift.shape().dims2()?;
            Some(gradient.reshape((batch, channels, ()))?.sum(2)?)
        } else {
            None
        };
        Ok([Some(gradient.clone()), sums])
    }

    fn forward_tensors(&self, [x, shift]: [&Tensor; 2]) -> candle_core::Result<Tensor> {
        let shape = channel_shape(x.shape(), shift.shape())?;
        x.broadcast_add(&shift.reshape(shape)?)
    }

    fn backward_tensors(&self, [_, shift]: [&Input; 2], gradient: &Tensor) -> BackwardResult {
        let sums = if shift.requires_grad() {
            let (batch, channels) = shift.shape().dims2()?;
            Some(sum_over(&gradient.reshape((batch, channels, ()))?, &[2])?)
        } else {
            None
        };
        Ok([Some(gradient.clone()), sums])
    }
}

struct CatChannels;

impl Operation<2> for CatChannels {
    const NAME: &'static str = "cat-channels";

    fn saved_inputs(&self, _: [bool; 2]) -> [bool; 2] {
        [false; 2]
    }

    fn forward(&self, [a, b]: [&[f32]; 2], [a_shape, b_shape]: [&Shape; 2]) -> ForwardResult {
        let (mut dims, others) = (a_shape.dims().to_vec(), b_shape.dims());
        if dims.len() < 2 || others.len() != dims.len() || dims[0] != others[0] || dims[2..] != others[2..] {
            candle_core::bail!("cat_channels: the shapes {a_shape:?} and {b_shape:?} do not match");
        }
        dims[1] += others[1];
        let mut y = vec![0f32; a.len() + b.len()];
        let batch = dims[0].max(1);
        let (first, second) = (a.len() / batch, b.len() / batch);
        if !y.is_empty() {
            for (i, y) in y.chunks_mut(first + second).enumerate() {
                let (to_a, to_b) = y.split_at_mut(first);
                let copy = |to: &mut [f32], from: &[f32]| {
                    let grain = 1 << 14;
                    to.par_chunks_mut(grain)
                        .zip(from.par_chunks(grain))
                        .for_each(|(to, from)| to.copy_from_slice(from));
                };
                copy(to_a, &a[i * first..(i + 1) * first]);
                copy(to_b, &b[i * second..(i + 1) * second]);
            }
        }
        Ok((y, dims.into()))
    }

    fn backward(&self, [a, b]: [&Input; 2], gradient: &Tensor) -> BackwardResult {
        let (first, second) = (a.shape().dims()[1], b.shape().dims()[1]);
        Ok([
            Some(gradient.narrow(1, 0, first)?),
            Some(gradient.narrow(1, first, second)?),
        ])
    }

    fn forward_tensors(&self, [a, b]: [&Tensor; 2]) -> candle_core::Result<Tensor> {
        Tensor::cat(&[a, b], 1)
    }

    fn backward_tensors(&self, inputs: [&Input; 2], gradient: &Tensor) -> BackwardResult {
        self.backward(inputs, gradient)
    }
}
