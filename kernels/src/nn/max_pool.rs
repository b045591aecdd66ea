//! The largest of each 2 x 2 values of an image, as PyTorch's `MaxPool2d(2)`.

use super::cpu;
use crate::autograd::{Input, Operation, apply};
use candle_core::{Device, Result, Shape, Tensor};
use rayon::prelude::*;

/// x [b, c, h, w] -> [b, c, h / 2, w / 2], without a last odd row or column.
///
/// # Errors
/// When x has another rank, or a side of less than 2.
pub fn max_pool(x: &Tensor) -> Result<Tensor> {
    let (_, _, h, w) = x.dims4()?;
    if h < 2 || w < 2 {
        candle_core::bail!("an image of {w} x {h} is too small to be halved");
    }
    // candle's gradient of `max_pool2d` is a quarter of what it should be where one value is the largest (0.11.1).
    apply([x], MaxPool)
}

struct MaxPool;

/// The places of the four values of a window in a plane of this width; the first one is at the row `2 * row` and the column `2 * column`.
fn places((row, column): (usize, usize), width: usize) -> [usize; 4] {
    let first = 2 * row * width + 2 * column;
    [first, first + 1, first + width, first + width + 1]
}

/// The four values of each window, each [b, c, h / 2, w / 2].
fn windows(x: &Tensor) -> Result<[Tensor; 4]> {
    let (b, c, h, w) = x.dims4()?;
    let even = x.narrow(2, 0, h - h % 2)?.narrow(3, 0, w - w % 2)?.contiguous()?;
    let even = even.reshape(vec![b, c, h / 2, 2, w / 2, 2])?;
    let at = |row, column| {
        even.narrow(3, row, 1)?
            .narrow(5, column, 1)?
            .contiguous()?
            .reshape((b, c, h / 2, w / 2))
    };
    Ok([at(0, 0)?, at(0, 1)?, at(1, 0)?, at(1, 1)?])
}

impl Operation<1> for MaxPool {
    const NAME: &'static str = "max-pool";

    fn saved_inputs(&self, requires_grad: [bool; 1]) -> [bool; 1] {
        requires_grad
    }

    fn forward(&self, [x]: [&[f32]; 1], [shape]: [&Shape; 1]) -> Result<(Vec<f32>, Shape)> {
        let (b, c, h, w) = shape.dims4()?;
        let (height, width) = (h / 2, w / 2);
        let mut y = vec![0f32; b * c * height * width];
        y.par_chunks_mut(height * width)
            .zip(x.par_chunks(h * w))
            .for_each(|(out, plane)| {
                for (i, value) in out.iter_mut().enumerate() {
                    let window = places((i / width, i % width), w).map(|place| plane[place]);
                    *value = window.into_iter().fold(window[0], f32::max);
                }
            });
        Ok((y, (b, c, height, width).into()))
    }

    fn backward(&self, [x]: [&Input; 1], gradient: &Tensor) -> Result<[Option<Tensor>; 1]> {
        let (_, _, h, w) = x.shape().dims4()?;
        let (height, width) = (h / 2, w / 2);
        let mut dx = vec![0f32; x.shape().elem_count()];
        x.with(|x| {
            cpu::with_slice(gradient, |dy| {
                dx.par_chunks_mut(h * w)
                    .zip(x.par_chunks(h * w))
                    .zip(dy.par_chunks(height * width))
                    .for_each(|((dx, plane), dy)| {
                        for (i, dy) in dy.iter().enumerate() {
                            // Of several largest values, the first.
                            let mut largest: Option<usize> = None;
                            for place in places((i / width, i % width), w) {
                                if largest.is_none_or(|largest| plane[place] > plane[largest]) {
                                    largest = Some(place);
                                }
                            }
                            if let Some(largest) = largest {
                                dx[largest] += dy;
                            }
                        }
                    });
            })
        })??;
        Ok([Some(Tensor::from_vec(dx, x.shape(), &Device::Cpu)?)])
    }

    fn forward_tensors(&self, [x]: [&Tensor; 1]) -> Result<Tensor> {
        let [a, b, c, d] = windows(x)?;
        a.maximum(&b)?.maximum(&c.maximum(&d)?)
    }

    fn backward_tensors(&self, [x]: [&Input; 1], gradient: &Tensor) -> Result<[Option<Tensor>; 1]> {
        let (b, c, h, w) = x.shape().dims4()?;
        let values = windows(x.tensor()?)?;
        let largest = values[0]
            .maximum(&values[1])?
            .maximum(&values[2].maximum(&values[3])?)?;
        let mut left = gradient.clone();
        let mut parts = Vec::with_capacity(values.len());
        for value in &values {
            // Of several largest values, the first.
            let part = (&left * value.eq(&largest)?.to_dtype(left.dtype())?)?;
            left = (left - &part)?;
            parts.push(part.unsqueeze(3)?.unsqueeze(5)?);
        }
        let row = |pair: &[Tensor]| Tensor::cat(pair, 5);
        let dx = Tensor::cat(&[row(&parts[..2])?, row(&parts[2..])?], 3)?;
        let dx = dx.reshape((b, c, h - h % 2, w - w % 2))?;
        Ok([Some(dx.pad_with_zeros(2, 0, h % 2)?.pad_with_zeros(3, 0, w % 2)?)])
    }
}
