//! The convolution and its gradients as matrix products over tiles.

use super::geometry::Geometry;
use crate::nn::cpu::{self, Mat, MatMut};
use rayon::prelude::*;

impl Geometry {
    pub(super) fn forward(&self, x: &[f32], weight: &[f32], bias: Option<&[f32]>) -> candle_core::Result<Vec<f32>> {
        let (pixels, depth) = (self.pixels(), self.depth());
        let mut y = vec![0f32; self.batch * self.outputs * pixels];
        if y.is_empty() {
            return Ok(y);
        }
        let weight = Mat::new(weight, self.outputs, depth);
        let tiles = self.tiles();
        let largest = tiles.iter().map(|tile| self.columns(*tile)).max().unwrap_or(0);
        let mut col = vec![0f32; if self.is_pointwise() { 0 } else { depth * largest }];
        let mut flat = Vec::new();
        for tile in tiles {
            let columns = self.columns(tile);
            let image_out = &mut y[tile.image * self.outputs * pixels..];
            if tile.images == 1 {
                let data = if self.is_pointwise() {
                    &x[tile.image * self.inputs * pixels..]
                } else {
                    let col = &mut col[..depth * columns];
                    self.im2col(x, tile, col);
                    &*col
                };
                let out = &mut image_out[tile.row * self.out_w..];
                let out = MatMut::strided(out, self.outputs, columns, pixels);
                let col = Mat::new(data, depth, columns);
                cpu::gemm(out, weight, col, 0.0, 1.0, cpu::threads())?;
            } else {
                col.resize(depth * largest, 0.0);
                let col = &mut col[..depth * columns];
                self.im2col(x, tile, col);
                flat.resize(self.outputs * columns, 0.0);
                let out = MatMut::new(&mut flat, self.outputs, columns);
                let col = Mat::new(col, depth, columns);
                cpu::gemm(out, weight, col, 0.0, 1.0, cpu::threads())?;
                let outputs = &mut image_out[..tile.images * self.outputs * pixels];
                outputs
                    .par_chunks_mut(pixels)
                    .with_min_len(8)
                    .enumerate()
                    .for_each(|(at, plane)| {
                        let (image, o) = (at / self.outputs, at % self.outputs);
                        plane.copy_from_slice(&flat[o * columns + image * pixels..][..pixels]);
                    });
            }
        }
        if let Some(bias) = bias {
            y.par_chunks_mut(pixels).enumerate().for_each(|(at, plane)| {
                let b = bias[at % self.outputs];
                plane.iter_mut().for_each(|value| *value += b);
            });
        }
        Ok(y)
    }

    pub(super) fn backward_input(&self, weight: &[f32], dy: &[f32]) -> candle_core::Result<Vec<f32>> {
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
            cpu::gemm(out, weight, grad, 0.0, 1.0, cpu::threads())?;
            self.col2im(&col, tile, &mut dx);
        }
        Ok(dx)
    }

    pub(super) fn backward_weight(&self, x: &[f32], dy: &[f32]) -> candle_core::Result<Vec<f32>> {
        let depth = self.depth();
        let mut dw = vec![0f32; self.outputs * depth];
        let (mut flat, mut col) = (Vec::new(), Vec::new());
        for (n, tile) in self.tiles().into_iter().enumerate() {
            let columns = self.columns(tile);
            flat.resize(self.outputs * columns, 0.0);
            col.resize(depth * columns, 0.0);
            self.gather(dy, tile, &mut flat);
            self.im2col(x, tile, &mut col);
            let grad = Mat::new(&flat, self.outputs, columns);
            let col = Mat::new(&col, depth, columns).t();
            let out = MatMut::new(&mut dw, self.outputs, depth);
            let keep = if n == 0 { 0.0 } else { 1.0 };
            cpu::gemm(out, grad, col, keep, 1.0, cpu::threads())?;
        }
        Ok(dw)
    }
}
