//! Two-dimensional convolution.
//!
//! On the processor: im2col in tiles of a bounded size, then a matrix product; gradients for input and weight the
//! same way. Elsewhere: candle's convolution.

use super::{LayerAdapter, cpu};
use crate::error::Result;
use crate::weights::{Init, Weights};
use candle_core::{CpuStorage, CustomOp2, CustomOp3, DType, Device, Layout, Shape, Tensor};
use rayon::prelude::*;
use std::sync::Arc;

/// A convolution with square padding and one stride for both axes, with adapters.
#[derive(Clone, Debug)]
pub struct Conv2d {
    /// [out, in, kernel height, kernel width].
    pub weight: Tensor,
    /// [out].
    pub bias: Option<Tensor>,
    /// Steps between outputs, both axes.
    pub stride: usize,
    /// Zeros on every side.
    pub padding: usize,
    /// Applied in this order.
    pub adapters: Vec<Arc<dyn LayerAdapter>>,
}

impl Conv2d {
    /// Loads `weight` ([outputs, inputs, kernel, kernel]) and `bias` ([outputs]).
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub fn new(
        weights: &Weights,
        inputs: usize,
        outputs: usize,
        kernel: usize,
        stride: usize,
        padding: usize,
    ) -> Result<Self> {
        let bound = 1.0 / ((inputs * kernel * kernel).max(1) as f64).sqrt();
        let weight = weights.get_with((outputs, inputs, kernel, kernel), "weight", Init::Uniform(bound))?;
        let bias = weights.get_with(outputs, "bias", Init::Uniform(bound))?;
        Ok(Self {
            weight,
            bias: Some(bias),
            stride,
            padding,
            adapters: Vec::new(),
        })
    }

    /// x [b, in, h, w] -> [b, out, h', w'].
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let mut y = conv2d(x, &self.weight, self.bias.as_ref(), self.stride, self.padding)?;
        for adapter in &self.adapters {
            y = adapter.apply(x, y)?;
        }
        Ok(y)
    }
}

/// x [b, in, h, w], weight [out, in, kh, kw], bias [out] -> [b, out, h', w']. Gradients go to whatever is tracked.
///
/// # Errors
/// When the shapes do not fit.
pub fn conv2d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    stride: usize,
    padding: usize,
) -> candle_core::Result<Tensor> {
    let outputs = weight.dim(0)?;
    if !cpu::runs_here(x) || weight.dtype() != DType::F32 {
        let y = x.conv2d(weight, padding, stride, 1, 1)?;
        return match bias {
            Some(bias) => y.broadcast_add(&bias.reshape((1, outputs, 1, 1))?),
            None => Ok(y),
        };
    }
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    match bias {
        Some(bias) if bias.track_op() => x.apply_op3(
            &weight,
            &bias.contiguous()?,
            ConvOp {
                stride,
                padding,
                bias: None,
            },
        ),
        Some(bias) => x.apply_op2(
            &weight,
            ConvOp {
                stride,
                padding,
                bias: Some(bias.contiguous()?),
            },
        ),
        None => x.apply_op2(
            &weight,
            ConvOp {
                stride,
                padding,
                bias: None,
            },
        ),
    }
}

/// With a trained bias it is an operation of three tensors, otherwise of two.
struct ConvOp {
    stride: usize,
    padding: usize,
    bias: Option<Tensor>,
}

/// The sizes of one convolution.
#[derive(Clone, Copy)]
struct Geometry {
    batch: usize,
    inputs: usize,
    height: usize,
    width: usize,
    outputs: usize,
    kernel_h: usize,
    kernel_w: usize,
    out_h: usize,
    out_w: usize,
    stride: usize,
    padding: usize,
}

/// Elements of the im2col buffer that one tile may have: 4 MiB of f32.
const TILE: usize = 1 << 20;

/// A tile: whole images, or some rows of pixels of one image.
#[derive(Clone, Copy)]
struct Tile {
    image: usize,
    images: usize,
    row: usize,
    rows: usize,
}

impl Geometry {
    fn new(x: &Shape, weight: &Shape, stride: usize, padding: usize) -> candle_core::Result<Self> {
        let (batch, inputs, height, width) = x.dims4()?;
        let (outputs, weight_inputs, kernel_h, kernel_w) = weight.dims4()?;
        let (padded_h, padded_w) = (height + 2 * padding, width + 2 * padding);
        if inputs != weight_inputs || stride == 0 || padded_h < kernel_h || padded_w < kernel_w {
            candle_core::bail!(
                "conv2d: input {:?} does not fit weight {:?} with stride {stride} and padding {padding}",
                x.dims(),
                weight.dims()
            );
        }
        let (out_h, out_w) = ((padded_h - kernel_h) / stride + 1, (padded_w - kernel_w) / stride + 1);
        Ok(Self {
            batch,
            inputs,
            height,
            width,
            outputs,
            kernel_h,
            kernel_w,
            out_h,
            out_w,
            stride,
            padding,
        })
    }

    /// Rows of the im2col matrix: in * kh * kw.
    fn depth(&self) -> usize {
        self.inputs * self.kernel_h * self.kernel_w
    }

    fn pixels(&self) -> usize {
        self.out_h * self.out_w
    }

    /// The im2col matrix of an image is the image itself.
    fn is_pointwise(&self) -> bool {
        self.kernel_h == 1 && self.kernel_w == 1 && self.stride == 1 && self.padding == 0
    }

    fn tiles(&self) -> Vec<Tile> {
        let image_elements = self.depth() * self.pixels();
        if image_elements <= TILE || self.is_pointwise() {
            let together = if self.is_pointwise() && image_elements > TILE {
                1
            } else {
                (TILE / image_elements.max(1)).max(1)
            };
            return (0..self.batch)
                .step_by(together)
                .map(|image| Tile {
                    image,
                    images: together.min(self.batch - image),
                    row: 0,
                    rows: self.out_h,
                })
                .collect();
        }
        let rows = (TILE / (self.depth() * self.out_w).max(1)).max(1);
        (0..self.batch)
            .flat_map(|image| (0..self.out_h).step_by(rows).map(move |row| (image, row)))
            .map(|(image, row)| Tile {
                image,
                images: 1,
                row,
                rows: rows.min(self.out_h - row),
            })
            .collect()
    }

    fn columns(&self, tile: Tile) -> usize {
        tile.images * tile.rows * self.out_w
    }

    /// Where output rows `oy`/columns `ox` and kernel offset `k` fall: the input index, if inside.
    fn source(&self, o: usize, k: usize, limit: usize) -> Option<usize> {
        (o * self.stride + k).checked_sub(self.padding).filter(|&i| i < limit)
    }

    /// The output columns whose input column lies inside, for kernel column `kx`.
    fn inside(&self, kx: usize) -> (usize, usize) {
        let first = self.padding.saturating_sub(kx).div_ceil(self.stride).min(self.out_w);
        let end = (self.width + self.padding)
            .saturating_sub(kx)
            .div_ceil(self.stride)
            .min(self.out_w);
        (first, end.max(first))
    }

    /// Fills `col` [depth, columns of the tile].
    fn im2col(&self, x: &[f32], tile: Tile, col: &mut [f32]) {
        let columns = self.columns(tile);
        let plane = self.height * self.width;
        let taps = self.kernel_h * self.kernel_w;
        col.par_chunks_mut(columns)
            .with_min_len((1 << 14) / columns.max(1) + 1)
            .enumerate()
            .for_each(|(k, out)| {
                let (c, ky, kx) = (k / taps, k % taps / self.kernel_w, k % self.kernel_w);
                let (first, end) = self.inside(kx);
                for (at, line) in out.chunks_exact_mut(self.out_w).enumerate() {
                    let (image, oy) = (tile.image + at / tile.rows, tile.row + at % tile.rows);
                    let Some(iy) = self.source(oy, ky, self.height) else {
                        line.fill(0.0);
                        continue;
                    };
                    let start = (image * self.inputs + c) * plane + iy * self.width;
                    let source = &x[start..start + self.width];
                    line[..first].fill(0.0);
                    line[end..].fill(0.0);
                    if first < end {
                        let from = first * self.stride + kx - self.padding;
                        if self.stride == 1 {
                            line[first..end].copy_from_slice(&source[from..from + end - first]);
                        } else {
                            for (value, pixel) in line[first..end]
                                .iter_mut()
                                .zip(source[from..].iter().step_by(self.stride))
                            {
                                *value = *pixel;
                            }
                        }
                    }
                }
            });
    }

    /// Adds `col` [depth, columns of the tile] back to where im2col took it from. `dx` [batch, in, h, w].
    fn col2im(&self, col: &[f32], tile: Tile, dx: &mut [f32]) {
        let columns = self.columns(tile);
        let plane = self.height * self.width;
        let taps = self.kernel_h * self.kernel_w;
        let first_plane = tile.image * self.inputs * plane;
        let planes = &mut dx[first_plane..first_plane + tile.images * self.inputs * plane];
        planes.par_chunks_mut(plane).enumerate().for_each(|(at, target)| {
            let (image, c) = (at / self.inputs, at % self.inputs);
            for tap in 0..taps {
                let (ky, kx) = (tap / self.kernel_w, tap % self.kernel_w);
                let (first, end) = self.inside(kx);
                if first == end {
                    continue;
                }
                let from = first * self.stride + kx - self.padding;
                let row = &col[(c * taps + tap) * columns..][..columns];
                for r in 0..tile.rows {
                    let Some(iy) = self.source(tile.row + r, ky, self.height) else {
                        continue;
                    };
                    let line = &row[(image * tile.rows + r) * self.out_w..][..self.out_w];
                    let target = &mut target[iy * self.width + from..(iy + 1) * self.width];
                    for (pixel, value) in target.iter_mut().step_by(self.stride).zip(&line[first..end]) {
                        *pixel += *value;
                    }
                }
            }
        });
    }

    /// Copies the tile's part of `y` [batch, out, pixels] to `flat` [out, columns].
    fn gather(&self, y: &[f32], tile: Tile, flat: &mut [f32]) {
        let (pixels, per_image) = (self.pixels(), tile.rows * self.out_w);
        let columns = self.columns(tile);
        flat.par_chunks_mut(columns)
            .with_min_len(8)
            .enumerate()
            .for_each(|(o, row)| {
                for (i, part) in row.chunks_exact_mut(per_image).enumerate() {
                    let start = ((tile.image + i) * self.outputs + o) * pixels + tile.row * self.out_w;
                    part.copy_from_slice(&y[start..start + per_image]);
                }
            });
    }

    fn forward(&self, x: &[f32], weight: &[f32], bias: Option<&[f32]>) -> candle_core::Result<Vec<f32>> {
        let (pixels, depth) = (self.pixels(), self.depth());
        let mut y = vec![0f32; self.batch * self.outputs * pixels];
        if y.is_empty() {
            return Ok(y);
        }
        let weight = cpu::Mat {
            data: weight,
            rows: self.outputs,
            cols: depth,
            row_stride: depth,
            col_stride: 1,
        };
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
                let out = cpu::MatMut {
                    data: out,
                    rows: self.outputs,
                    cols: columns,
                    row_stride: pixels,
                    col_stride: 1,
                };
                let col = cpu::Mat {
                    data,
                    rows: depth,
                    cols: columns,
                    row_stride: columns,
                    col_stride: 1,
                };
                cpu::gemm(out, weight, col, 0.0, 1.0, cpu::threads())?;
            } else {
                col.resize(depth * largest, 0.0);
                let col = &mut col[..depth * columns];
                self.im2col(x, tile, col);
                flat.resize(self.outputs * columns, 0.0);
                let out = cpu::MatMut {
                    data: &mut flat,
                    rows: self.outputs,
                    cols: columns,
                    row_stride: columns,
                    col_stride: 1,
                };
                let col = cpu::Mat {
                    data: col,
                    rows: depth,
                    cols: columns,
                    row_stride: columns,
                    col_stride: 1,
                };
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

    fn backward_input(&self, weight: &[f32], dy: &[f32]) -> candle_core::Result<Vec<f32>> {
        let depth = self.depth();
        let mut dx = vec![0f32; self.batch * self.inputs * self.height * self.width];
        let weight = cpu::Mat {
            data: weight,
            rows: depth,
            cols: self.outputs,
            row_stride: 1,
            col_stride: depth,
        };
        let (mut flat, mut col) = (Vec::new(), Vec::new());
        for tile in self.tiles() {
            let columns = self.columns(tile);
            flat.resize(self.outputs * columns, 0.0);
            col.resize(depth * columns, 0.0);
            self.gather(dy, tile, &mut flat);
            let grad = cpu::Mat {
                data: &flat,
                rows: self.outputs,
                cols: columns,
                row_stride: columns,
                col_stride: 1,
            };
            let out = cpu::MatMut {
                data: &mut col,
                rows: depth,
                cols: columns,
                row_stride: columns,
                col_stride: 1,
            };
            cpu::gemm(out, weight, grad, 0.0, 1.0, cpu::threads())?;
            self.col2im(&col, tile, &mut dx);
        }
        Ok(dx)
    }

    fn backward_weight(&self, x: &[f32], dy: &[f32]) -> candle_core::Result<Vec<f32>> {
        let depth = self.depth();
        let mut dw = vec![0f32; self.outputs * depth];
        let (mut flat, mut col) = (Vec::new(), Vec::new());
        for (n, tile) in self.tiles().into_iter().enumerate() {
            let columns = self.columns(tile);
            flat.resize(self.outputs * columns, 0.0);
            col.resize(depth * columns, 0.0);
            self.gather(dy, tile, &mut flat);
            self.im2col(x, tile, &mut col);
            let grad = cpu::Mat {
                data: &flat,
                rows: self.outputs,
                cols: columns,
                row_stride: columns,
                col_stride: 1,
            };
            let col = cpu::Mat {
                data: &col,
                rows: columns,
                cols: depth,
                row_stride: 1,
                col_stride: columns,
            };
            let out = cpu::MatMut {
                data: &mut dw,
                rows: self.outputs,
                cols: depth,
                row_stride: depth,
                col_stride: 1,
            };
            let keep = if n == 0 { 0.0 } else { 1.0 };
            cpu::gemm(out, grad, col, keep, 1.0, cpu::threads())?;
        }
        Ok(dw)
    }
}

impl ConvOp {
    fn run(
        &self,
        (x, x_layout): (&CpuStorage, &Layout),
        (weight, weight_layout): (&CpuStorage, &Layout),
        bias: Option<&[f32]>,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let g = Geometry::new(x_layout.shape(), weight_layout.shape(), self.stride, self.padding)?;
        if bias.is_some_and(|bias| bias.len() != g.outputs) {
            candle_core::bail!("conv2d: the bias does not have {} elements", g.outputs);
        }
        let y = g.forward(cpu::slice(x, x_layout)?, cpu::slice(weight, weight_layout)?, bias)?;
        Ok((CpuStorage::F32(y), (g.batch, g.outputs, g.out_h, g.out_w).into()))
    }

    /// The gradients of x and weight; `grad` is contiguous.
    fn gradients(
        &self,
        x: &Tensor,
        weight: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let g = Geometry::new(x.shape(), weight.shape(), self.stride, self.padding)?;
        let dx = if x.track_op() {
            let dx = cpu::with_slice(weight, |w| cpu::with_slice(grad, |dy| g.backward_input(w, dy)))???;
            Some(Tensor::from_vec(dx, x.shape(), &Device::Cpu)?)
        } else {
            None
        };
        let dw = if weight.track_op() {
            let dw = cpu::with_slice(x, |x| cpu::with_slice(grad, |dy| g.backward_weight(x, dy)))???;
            Some(Tensor::from_vec(dw, weight.shape(), &Device::Cpu)?)
        } else {
            None
        };
        Ok((dx, dw))
    }
}

impl CustomOp2 for ConvOp {
    fn name(&self) -> &'static str {
        "conv2d-im2col"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (x, weight) = ((x, x_layout), (weight, weight_layout));
        match &self.bias {
            Some(bias) => cpu::with_slice(bias, |bias| self.run(x, weight, Some(bias)))?,
            None => self.run(x, weight, None),
        }
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _y: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        self.gradients(x, weight, &grad.contiguous()?)
    }
}

impl CustomOp3 for ConvOp {
    fn name(&self) -> &'static str {
        "conv2d-im2col-bias"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        self.run(
            (x, x_layout),
            (weight, weight_layout),
            Some(cpu::slice(bias, bias_layout)?),
        )
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _y: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        let (dx, dw) = self.gradients(x, weight, &grad)?;
        let outputs = bias.elem_count();
        let pixels = grad.dim(2)? * grad.dim(3)?;
        let mut db = vec![0f64; outputs];
        cpu::with_slice(&grad, |dy| {
            for (at, plane) in dy.chunks(pixels.max(1)).enumerate() {
                // Eight partial sums, in an order of their own: fast, and always the same.
                let mut parts = [0f32; 8];
                let (blocks, rest) = plane.as_chunks::<8>();
                blocks
                    .iter()
                    .for_each(|block| parts.iter_mut().zip(block).for_each(|(sum, v)| *sum += v));
                db[at % outputs] += parts.iter().chain(rest).map(|v| f64::from(*v)).sum::<f64>();
            }
        })?;
        let db: Vec<f32> = db.into_iter().map(|v| v as f32).collect();
        Ok((dx, dw, Some(Tensor::from_vec(db, outputs, &Device::Cpu)?)))
    }
}
