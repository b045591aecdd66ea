//! The convolution and its gradients as matrix products. The gradient of the weight is always in f32.

use super::geometry::Geometry;
use super::im2col::{FlippedWeight, Im2col, Im2colTransposed};
use crate::nn::cpu::{
    self, Bf16Isa, Bf16Left, Bf16Mat, Bf16Product, InitialValue, LeftOperand, Mat, MatMut, Product, Sizes,
};
use rayon::prelude::*;

/// Images with fewer output pixels than this are computed several at a time, in one product.
const SMALL_IMAGE: usize = 512;

impl Geometry {
    /// Computes y [batch, out, pixels] from x [batch, in, h, w] and weight [out, in, kh, kw].
    pub(in crate::nn) fn forward(
        &self,
        x: &[f32],
        weight: &[f32],
        bias: Option<&[f32]>,
    ) -> candle_core::Result<Vec<f32>> {
        let depth = self.depth();
        let weight = Mat::new(weight, self.outputs, depth);
        if !self.is_pointwise() {
            return self.convolve(x, &weight, bias);
        }
        let pixels = self.pixels();
        let mut y = vec![0f32; self.batch * self.outputs * pixels];
        if y.is_empty() {
            return Ok(y);
        }
        for (y, x) in y.chunks_mut(self.outputs * pixels).zip(x.chunks(self.inputs * pixels)) {
            if let Some(bias) = bias {
                y.chunks_mut(pixels).zip(bias).for_each(|(plane, b)| plane.fill(*b));
            }
            let (out, x) = (MatMut::new(y, self.outputs, pixels), Mat::new(x, depth, pixels));
            cpu::layer_product(self.bf16, out, weight, x, bias.is_some(), cpu::threads())?;
        }
        Ok(y)
    }

    /// As [`Self::forward`], of a weight [out, in * kh * kw] that is in bfloat16.
    pub(in crate::nn) fn forward_bf16(
        &self,
        isa: Bf16Isa,
        x: &[f32],
        weight: Bf16Mat<'_>,
        bias: Option<&[f32]>,
    ) -> candle_core::Result<Vec<f32>> {
        let initial = bias.map_or(InitialValue::Zero, InitialValue::PerRow);
        let a = &weight;
        if !self.is_pointwise() {
            return self.each_product(x, |x, images, out| {
                let (sizes, b) = (self.product_sizes(images), &Im2col { g: self, x });
                Bf16Product { sizes, a, b, initial }.write(isa, out, sizes.cols, cpu::threads())
            });
        }
        let (pixels, sizes) = (self.pixels(), self.product_sizes(1));
        let mut y = vec![0f32; self.batch * self.outputs * pixels];
        if y.is_empty() {
            return Ok(y);
        }
        for (y, x) in y.chunks_mut(self.outputs * pixels).zip(x.chunks(self.inputs * pixels)) {
            let b = &Mat::new(x, sizes.depth, pixels);
            Bf16Product { sizes, a, b, initial }.write(isa, y, pixels, cpu::threads())?;
        }
        Ok(y)
    }

    fn convolve(
        &self,
        x: &[f32],
        weight: &(impl LeftOperand + Bf16Left),
        bias: Option<&[f32]>,
    ) -> candle_core::Result<Vec<f32>> {
        let initial = bias.map_or(InitialValue::Zero, InitialValue::PerRow);
        self.each_product(x, |x, images, out| {
            let sizes = self.product_sizes(images);
            let (a, b) = (weight, &Im2col { g: self, x });
            if let Some(isa) = self.bf16 {
                return Bf16Product { sizes, a, b, initial }.write(isa, out, sizes.cols, cpu::threads());
            }
            Product { sizes, a, b, initial }.write(out, sizes.cols, cpu::threads());
            Ok(())
        })
    }

    /// The sizes of the product for so many images.
    fn product_sizes(&self, images: usize) -> Sizes {
        Sizes {
            rows: self.outputs,
            cols: images * self.pixels(),
            depth: self.depth(),
        }
    }

    /// The output [batch, out, pixels] of `run`, which computes the product [out, images * pixels] for so many images from `x` on.
    fn each_product(
        &self,
        x: &[f32],
        run: impl Fn(&[f32], usize, &mut [f32]) -> candle_core::Result<()>,
    ) -> candle_core::Result<Vec<f32>> {
        let pixels = self.pixels();
        let (image_in, image_out) = (self.inputs * self.height * self.width, self.outputs * pixels);
        let mut y = vec![0f32; self.batch * image_out];
        if y.is_empty() {
            return Ok(y);
        }
        if self.batch == 1 || pixels >= SMALL_IMAGE {
            for (image, out) in y.chunks_mut(image_out).enumerate() {
                run(&x[image * image_in..], 1, out)?;
            }
            return Ok(y);
        }
        let images_per_product = (SMALL_IMAGE / pixels).max(1);
        let mut flat = vec![0f32; images_per_product.min(self.batch) * image_out];
        for (group, y) in y.chunks_mut(images_per_product * image_out).enumerate() {
            let images = y.len() / image_out;
            run(&x[group * images_per_product * image_in..], images, &mut flat)?;
            y.par_chunks_mut(pixels)
                .with_min_len(8)
                .enumerate()
                .for_each(|(at, plane)| {
                    let (image, o) = (at / self.outputs, at % self.outputs);
                    plane.copy_from_slice(&flat[(o * images + image) * pixels..][..pixels]);
                });
        }
        Ok(y)
    }

    /// Computes dx [batch, in, h, w] from weight [out, in, kh, kw] and dy [batch, out, pixels].
    pub(in crate::nn) fn backward_input(&self, weight: &[f32], dy: &[f32]) -> candle_core::Result<Vec<f32>> {
        if let Some(transposed) = self.transposed().filter(|_| !self.is_pointwise()) {
            let weight = FlippedWeight {
                weight,
                inputs: self.inputs,
                taps: self.kernel_h * self.kernel_w,
            };
            return transposed.convolve(dy, &weight, None);
        }
        let depth = self.depth();
        let mut dx = vec![0f32; self.batch * self.inputs * self.height * self.width];
        let weight = Mat::new(weight, self.outputs, depth).t();
        let (mut flat, mut col) = (Vec::new(), Vec::new());
        for tile in self.tiles() {
            let columns = self.columns(tile);
            flat.resize(self.outputs * columns, 0.0);
            col.resize(depth * columns, 0.0);
            self.gather(dy, tile, &mut flat);
            let grad = Mat::new(&flat, self.outputs, columns);
            let out = MatMut::new(&mut col, depth, columns);
            cpu::layer_product(self.bf16, out, weight, grad, false, cpu::threads())?;
            self.col2im(&col, tile, &mut dx);
        }
        Ok(dx)
    }

    /// Computes dw [out, in, kh, kw] from x [batch, in, h, w] and dy [batch, out, pixels].
    pub(in crate::nn) fn backward_weight(&self, x: &[f32], dy: &[f32]) -> Vec<f32> {
        let (pixels, depth) = (self.pixels(), self.depth());
        let mut dw = vec![0f32; self.outputs * depth];
        if pixels == 0 || self.outputs == 0 {
            return dw;
        }
        let sizes = Sizes {
            rows: self.outputs,
            cols: depth,
            depth: pixels,
        };
        let images = x.chunks(self.inputs * self.height * self.width);
        for (image, (x, dy)) in images.zip(dy.chunks(self.outputs * pixels)).enumerate() {
            let initial = if image == 0 {
                InitialValue::Zero
            } else {
                InitialValue::Output
            };
            let product = Product {
                sizes,
                a: &Mat::new(dy, self.outputs, pixels),
                b: &Im2colTransposed { g: self, x },
                initial,
            };
            product.write(&mut dw, depth, cpu::threads());
        }
        dw
    }
}
