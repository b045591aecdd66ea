//! The convolution and its gradients with candle's operations.
//!
//! Both gradients are convolutions again: candle computes them as matrix products, and its transposed convolution as a
//! loop per pixel. candle's own backward pass always computes both, and derives the size of the first from the height
//! alone (0.11.1).

use super::geometry::Geometry;
use crate::cuda_kernels::{self, Convolution};
use crate::nn::tensors::{convolve, sum_over};
use candle_core::{Result, Tensor};

/// Adds `before` and `after` zeros at the ends of an axis; negative numbers cut elements off.
fn pad_or_cut(x: &Tensor, axis: usize, before: isize, after: isize) -> Result<Tensor> {
    let cut = |count: isize| count.min(0).unsigned_abs();
    let kept = x.dim(axis)?.saturating_sub(cut(before) + cut(after));
    x.narrow(axis, cut(before), kept)?
        .pad_with_zeros(axis, before.max(0) as usize, after.max(0) as usize)
}

/// x with `[before, after]` zeros around the rows and around the columns, and what is left to do as the padding of a
/// convolution.
fn padded(x: &Tensor, rows: [isize; 2], columns: [isize; 2]) -> Result<(Tensor, usize)> {
    if rows == columns && rows[0] == rows[1] && rows[0] >= 0 {
        return Ok((x.clone(), rows[0] as usize));
    }
    let x = pad_or_cut(x, 2, rows[0], rows[1])?;
    Ok((pad_or_cut(&x, 3, columns[0], columns[1])?.contiguous()?, 0))
}

impl Geometry {
    /// The convolution of x [b, in, h, w] with a weight [out, in, kh, kw], in the dtype of x.
    pub(in crate::nn) fn forward_tensors(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let weight = weight.to_dtype(x.dtype())?.contiguous()?;
        let [rows, columns] = [self.padding_h, self.padding_w].map(|padding| padding as isize);
        if self.stride == 1 || !x.track_op() {
            let (x, padding) = padded(x, [rows; 2], [columns; 2])?;
            return convolve(&x, &weight, padding, self.stride, 1);
        }
        // For candle's backward pass, the pixels that no window covers are cut off, along both axes.
        let covered = |count: usize, kernel: usize| ((count - 1) * self.stride + kernel) as isize;
        let after_rows = covered(self.out_h, self.kernel_h) - self.height as isize - rows;
        let after_columns = covered(self.out_w, self.kernel_w) - self.width as isize - columns;
        let x = pad_or_cut(x, 2, rows, after_rows)?;
        let x = pad_or_cut(&x, 3, columns, after_columns)?.contiguous()?;
        convolve(&x, &weight, 0, self.stride, 1)
    }

    /// The gradient of x: the convolution of dy, with zeros between its pixels if the stride is above 1, with the
    /// turned weight.
    pub(in crate::nn) fn backward_input_tensors(&self, weight: &Tensor, dy: &Tensor) -> Result<Tensor> {
        let weight = weight.to_dtype(dy.dtype())?;
        let dy = spread(dy, self.stride)?;
        let ends = |axis: usize, size: usize, kernel: usize, padding: usize| -> Result<[isize; 2]> {
            let count = dy.dim(axis)? as isize;
            Ok([
                kernel as isize - 1 - padding as isize,
                size as isize - count + padding as isize,
            ])
        };
        let rows = ends(2, self.height, self.kernel_h, self.padding_h)?;
        let columns = ends(3, self.width, self.kernel_w, self.padding_w)?;
        let (dy, padding) = padded(&dy, rows, columns)?;
        // A kernel reads the taps in reverse order.
        let convolution = Convolution {
            kernel: [self.kernel_h, self.kernel_w],
            padding,
            stride: 1,
            dilation: 1,
            reversed: true,
        };
        if cuda_kernels::are_available(dy.device())
            && let Some(dx) = cuda_kernels::convolve(&convolution, &dy, &weight.transpose(0, 1)?.contiguous()?)?
        {
            return Ok(dx);
        }
        convolve(&dy, &turned(&weight)?, padding, 1, 1)
    }

    /// The gradient of the weight: the convolution of x with dy, whose kernel has the size of the image. Batch and
    /// channels change places.
    pub(in crate::nn) fn backward_weight_tensors(&self, x: &Tensor, dy: &Tensor) -> Result<Tensor> {
        let [rows, columns] = [self.padding_h, self.padding_w].map(|padding| padding as isize);
        if cuda_kernels::are_available(x.device()) {
            let (x, padding) = padded(x, [rows; 2], [columns; 2])?;
            let convolution = Convolution {
                kernel: [self.kernel_h, self.kernel_w],
                padding,
                stride: self.stride,
                dilation: 1,
                reversed: false,
            };
            if let Some(dw) = cuda_kernels::weight_gradient(&convolution, &x, &dy.to_dtype(x.dtype())?)? {
                return Ok(dw);
            }
        }
        let (x, padding) = padded(&x.transpose(0, 1)?.contiguous()?, [rows; 2], [columns; 2])?;
        let dy = dy.transpose(0, 1)?.contiguous()?;
        convolve(&x, &dy, padding, 1, self.stride)?
            .narrow(2, 0, self.kernel_h)?
            .narrow(3, 0, self.kernel_w)?
            .transpose(0, 1)?
            .contiguous()
    }
}

/// The gradient of the bias, in f32.
pub(super) fn backward_bias(dy: &Tensor) -> Result<Tensor> {
    sum_over(dy, &[0, 2, 3])
}

/// [out, in, kh, kw] -> [in, out, kh, kw], with both axes of the kernel reversed.
fn turned(weight: &Tensor) -> Result<Tensor> {
    let (outputs, inputs, height, width) = weight.dims4()?;
    let taps = height * width;
    let weight = weight.transpose(0, 1)?.contiguous()?;
    if taps == 1 {
        return Ok(weight);
    }
    let reversed: Vec<u32> = (0..taps as u32).rev().collect();
    weight
        .reshape((inputs, outputs, taps))?
        .index_select(&Tensor::from_vec(reversed, taps, weight.device())?, 2)?
        .reshape((inputs, outputs, height, width))
}

/// Puts `stride - 1` zeros between the pixels of x [b, c, h, w], along both axes.
fn spread(x: &Tensor, stride: usize) -> Result<Tensor> {
    if stride == 1 {
        return Ok(x.clone());
    }
    let (batch, channels, height, width) = x.dims4()?;
    x.reshape((batch, channels, height, 1, width, 1))?
        .pad_with_zeros(3, 0, stride - 1)?
        .pad_with_zeros(5, 0, stride - 1)?
        .reshape((batch, channels, height * stride, width * stride))?
        .narrow(2, 0, (height.max(1) - 1) * stride + 1)?
        .narrow(3, 0, (width.max(1) - 1) * stride + 1)?
        .contiguous()
}
