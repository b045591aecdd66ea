//! The sizes of a convolution, and the im2col matrix in tiles: where its elements come from and go back to.

use candle_core::Shape;
use rayon::prelude::*;

/// The sizes of one convolution.
#[derive(Clone, Copy)]
pub(super) struct Geometry {
    pub(super) batch: usize,
    pub(super) inputs: usize,
    pub(super) height: usize,
    pub(super) width: usize,
    pub(super) outputs: usize,
    kernel_h: usize,
    kernel_w: usize,
    pub(super) out_h: usize,
    pub(super) out_w: usize,
    stride: usize,
    padding: usize,
}

/// Elements of the im2col buffer that one tile may have: 4 MiB of f32.
const TILE: usize = 1 << 20;

/// A tile: whole images, or some rows of pixels of one image.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub(super) image: usize,
    pub(super) images: usize,
    pub(super) row: usize,
    pub(super) rows: usize,
}

impl Geometry {
    pub(super) fn new(x: &Shape, weight: &Shape, stride: usize, padding: usize) -> candle_core::Result<Self> {
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
    pub(super) fn depth(&self) -> usize {
        self.inputs * self.kernel_h * self.kernel_w
    }

    pub(super) fn pixels(&self) -> usize {
        self.out_h * self.out_w
    }

    /// The im2col matrix of an image is the image itself.
    pub(super) fn is_pointwise(&self) -> bool {
        self.kernel_h == 1 && self.kernel_w == 1 && self.stride == 1 && self.padding == 0
    }

    pub(super) fn tiles(&self) -> Vec<Tile> {
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

    pub(super) fn columns(&self, tile: Tile) -> usize {
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
    pub(super) fn im2col(&self, x: &[f32], tile: Tile, col: &mut [f32]) {
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
    pub(super) fn col2im(&self, col: &[f32], tile: Tile, dx: &mut [f32]) {
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
    pub(super) fn gather(&self, y: &[f32], tile: Tile, flat: &mut [f32]) {
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
}
