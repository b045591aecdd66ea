//! Deformable convolutions (X. Zhu and others, arXiv:1811.11168): each result takes its values from places that depend on the image.

use super::conv::{conv, kernel_of};
use crate::error::Result;
use crate::nn::Conv2d;
use crate::weights::{Index, Weights};
use candle_core::{DType, Device, Tensor};

/// The most values that are taken from an image at once: 32 MiB.
const CHUNK: usize = 1 << 23;

/// A convolution that keeps the size of an image. Two others find the places that its values are taken from, and their weights.
#[derive(Clone, Debug)]
pub(super) struct DeformableConv {
    /// For each value of the kernel its distance, down and to the right, from the usual place: 2 * kernel^2 channels.
    offsets: Conv2d,
    /// For each value of the kernel a logit: kernel^2 channels.
    weights: Conv2d,
    /// [kernel^2 * in, out].
    kernel: Tensor,
    /// [1, out, 1, 1].
    bias: Tensor,
    side: usize,
}

/// Along one axis, for each value: the nearest place before it that is in the image, the one after it, and the weights of both, which are 0 outside
/// of the image.
struct Neighbours {
    places: [Tensor; 2],
    weights: [Tensor; 2],
}

impl Neighbours {
    /// `at`: numbers of any shape. `count`: the values along the axis.
    fn new(at: &Tensor, count: usize) -> candle_core::Result<Self> {
        let last = count as f64 - 1.0;
        // What is far outside has no weight wherever it is.
        let at = at.clamp(-2.0, last + 2.0)?;
        let before = at.floor()?;
        let share = (&at - &before)?;
        let side = |place: &Tensor, weight: &Tensor| -> candle_core::Result<(Tensor, Tensor)> {
            let is_inside = (place.ge(0.0)?.to_dtype(DType::F32)? * place.le(last)?.to_dtype(DType::F32)?)?;
            Ok((place.clamp(0.0, last)?, (weight * is_inside)?))
        };
        let (first, first_weight) = side(&before, &(1.0 - &share)?)?;
        let (second, second_weight) = side(&(before + 1.0)?, &share)?;
        Ok(Self {
            places: [first, second],
            weights: [first_weight, second_weight],
        })
    }
}

impl DeformableConv {
    /// Reads the three convolutions. A batch norm in `norm` follows.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape than its neighbours need.
    pub(super) fn new(
        (index, prefix): (&Index, &str),
        weights: &Weights,
        inputs: usize,
        norm: &Weights,
    ) -> Result<Self> {
        let name = format!("{prefix}.regular_conv");
        let (side, outputs) = kernel_of(index, &name)?;
        let regular = conv(&weights.pp("regular_conv"), (inputs, outputs, side), false, Some(norm))?;
        let part = |name: &str, outputs| Conv2d::new(&weights.pp(name), inputs, outputs, side, 1, side / 2);
        let kernel = regular.weight.dense()?;
        let bias = match regular.bias {
            Some(bias) => bias,
            None => Tensor::zeros(outputs, DType::F32, kernel.device())?,
        };
        Ok(Self {
            offsets: part("offset_conv", 2 * side * side)?,
            weights: part("modulator_conv", side * side)?,
            kernel: kernel
                .permute((2, 3, 1, 0))?
                .contiguous()?
                .reshape((side * side * inputs, outputs))?,
            bias: bias.reshape((1, outputs, 1, 1))?,
            side,
        })
    }

    /// x [b, in, h, w] -> [b, out, h, w].
    ///
    /// # Errors
    /// When the shapes do not match.
    pub(super) fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let (offsets, logits) = (self.offsets.forward(x)?, self.weights.forward(x)?);
        let weights = ((logits.neg()?.exp()? + 1.0)?.recip()? * 2.0)?;
        let image = |i: usize| self.image(&x.get(i)?, &offsets.get(i)?, &weights.get(i)?);
        let images: Vec<Tensor> = (0..x.dim(0)?).map(image).collect::<candle_core::Result<_>>()?;
        Tensor::stack(&images, 0)?.broadcast_add(&self.bias)
    }

    /// x [in, h, w], offsets [2 * kernel^2, h, w], weights [kernel^2, h, w] -> [out, h, w], without the bias.
    fn image(&self, x: &Tensor, offsets: &Tensor, weights: &Tensor) -> candle_core::Result<Tensor> {
        let (channels, height, width) = x.dims3()?;
        let (pixels, taps) = (height * width, self.side * self.side);
        // One row for each pixel.
        let rows = |x: &Tensor, channels: usize| x.reshape((channels, pixels))?.t()?.contiguous();
        let (x, weights) = (rows(x, channels)?, rows(weights, taps)?);
        let offsets = rows(offsets, 2 * taps)?.reshape((pixels, taps, 2))?;
        let at =
            |axis: usize| self.places(axis, (height, width), x.device())? + offsets.narrow(2, axis, 1)?.squeeze(2)?;
        let vertical = Neighbours::new(&at(0)?, height)?;
        let horizontal = Neighbours::new(&at(1)?, width)?;
        let mut corners = Vec::with_capacity(4);
        for (y, y_weight) in vertical.places.iter().zip(&vertical.weights) {
            for (x, x_weight) in horizontal.places.iter().zip(&horizontal.weights) {
                let index = ((y * width as f64)? + x)?.to_dtype(DType::U32)?;
                corners.push((index, ((y_weight * x_weight)? * &weights)?));
            }
        }
        let step = (CHUNK / (taps * channels).max(1)).max(1);
        let chunk = |first: usize| {
            let count = step.min(pixels - first);
            let mut values: Option<Tensor> = None;
            for (index, weight) in &corners {
                let index = index.narrow(0, first, count)?.flatten_all()?;
                let weight = weight.narrow(0, first, count)?.reshape((count * taps, 1))?;
                let found = x.index_select(&index, 0)?.broadcast_mul(&weight)?;
                values = Some(match values {
                    Some(values) => (values + found)?,
                    None => found,
                });
            }
            let values = values.ok_or_else(|| candle_core::Error::Msg("an image without corners".into()))?;
            values.reshape((count, taps * channels))?.matmul(&self.kernel)
        };
        let chunks = (0..pixels).step_by(step).map(chunk);
        let results = Tensor::cat(&chunks.collect::<candle_core::Result<Vec<_>>>()?, 0)?;
        let outputs = results.dim(1)?;
        results.t()?.contiguous()?.reshape((outputs, height, width))
    }

    /// The usual place along an axis of each value of the kernel for each pixel, [pixels, kernel^2].
    fn places(&self, axis: usize, (height, width): (usize, usize), device: &Device) -> candle_core::Result<Tensor> {
        let (side, pixels) = (self.side, height * width);
        let place = move |pixel: usize, tap: usize| match axis {
            0 => (pixel / width + tap / side) as f32,
            _ => (pixel % width + tap % side) as f32,
        };
        let row = move |pixel: usize| (0..side * side).map(move |tap| place(pixel, tap) - (side / 2) as f32);
        let places: Vec<f32> = (0..pixels).flat_map(row).collect();
        Tensor::from_vec(places, (pixels, side * side), device)
    }
}
