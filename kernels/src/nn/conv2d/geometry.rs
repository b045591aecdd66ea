//! The sizes of a convolution, its division into tiles, and col2im for gradients of strided convolutions.

use crate::nn::cpu::Bf16Isa;
use candle_core::Shape;
use rayon::prelude::*;

/// Zero padding along the height and along the width, on both sides each.
pub(in crate::nn) type Padding = [usize; 2];

/// The sizes of one convolution.
#[derive(Clone, Copy)]
pub(in crate::nn) struct Geometry {
    pub(in crate::nn) batch: usize,
    pub(in crate::nn) inputs: usize,
    pub(in crate::nn) height: usize,
    pub(in crate::nn) width: usize,
    pub(in crate::nn) outputs: usize,
    pub(super) kernel_h: usize,
    pub(super) kernel_w: usize,
    pub(in crate::nn) out_h: usize,
    pub(in crate::nn) out_w: usize,
    pub(super) stride: usize,
    /// Zero padding above and below.
    pub(super) padding_h: usize,
    /// Zero padding left and right.
    pub(super) padding_w: usize,
    /// What the products with the weight are computed with; `None`: in f32.
    pub(super) bf16: Option<Bf16Isa>,
}

/// The maximum of elements in the window buffer of a tile: 4 MiB of f32.
const MAX_TILE_ELEMENTS: usize = 1 << 20;

/// A tile of the batch: whole images, or some rows of one image.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub(super) image: usize,
    pub(super) images: usize,
    pub(super) row: usize,
    pub(super) rows: usize,
}

impl Geometry {
    pub(in crate::nn) fn new(x: &Shape, weight: &Shape, stride: usize, padding: Padding) -> candle_core::Result<Self> {
        let [padding_h, padding_w] = padding;
        let (batch, inputs, height, width) = x.dims4()?;
        let (outputs, weight_inputs, kernel_h, kernel_w) = weight.dims4()?;
        let (padded_h, padded_w) = (height + 2 * padding_h, width + 2 * padding_w);
        if inputs != weight_inputs || stride == 0 || padded_h < kernel_h || padded_w < kernel_w {
            candle_core::bail!(
                "conv2d: input {:?} does not match weight {:?} with stride {stride} and padding {padding:?}",
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
            padding_h,
            padding_w,
            bf16: None,
        })
    }

    /// The same sizes, with products that are computed in this way; `None`: in f32.
    pub(in crate::nn) fn multiplied_with(self, bf16: Option<Bf16Isa>) -> Self {
        Self { bf16, ..self }
    }

    /// The elements of a window: in * kh * kw.
    pub(super) fn depth(&self) -> usize {
        self.inputs * self.kernel_h * self.kernel_w
    }

    pub(super) fn pixels(&self) -> usize {
        self.out_h * self.out_w
    }

    /// Whether it is a 1 x 1 convolution without stride and padding: then the windows are the image itself.
    pub(super) fn is_pointwise(&self) -> bool {
        self.kernel_h == 1 && self.kernel_w == 1 && self.stride == 1 && self.padding_h + self.padding_w == 0
    }

    /// The convolution that computes the gradient of the input from that of the output, with the weight flipped. `None`
    /// if the stride is above 1, or a padding is not smaller than the kernel.
    pub(super) fn transposed(&self) -> Option<Self> {
        let padding_fits = self.padding_h < self.kernel_h && self.padding_w < self.kernel_w;
        (self.stride == 1 && padding_fits).then(|| Self {
            inputs: self.outputs,
            outputs: self.inputs,
            height: self.out_h,
            width: self.out_w,
            out_h: self.height,
            out_w: self.width,
            padding_h: self.kernel_h - 1 - self.padding_h,
            padding_w: self.kernel_w - 1 - self.padding_w,
            ..*self
        })
    }

    pub(super) fn tiles(&self) -> Vec<Tile> {
        let image_elements = self.depth() * self.pixels();
        if image_elements <= MAX_TILE_ELEMENTS || self.is_pointwise() {
            let images_per_tile = if self.is_pointwise() && image_elements > MAX_TILE_ELEMENTS {
                1
            } else {
                (MAX_TILE_ELEMENTS / image_elements.max(1)).max(1)
            };
            return (0..self.batch)
                .step_by(images_per_tile)
                .map(|image| Tile {
                    image,
                    images: images_per_tile.min(self.batch - image),
                    row: 0,
                    rows: self.out_h,
                })
                .collect();
        }
        let rows = (MAX_TILE_ELEMENTS / (self.depth() * self.out_w).max(1)).max(1);
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

    /// The input row for output row `oy` and kernel row `ky`; `None` in the padding.
    pub(super) fn input_row(&self, oy: usize, ky: usize) -> Option<usize> {
        (oy * self.stride + ky)
            .checked_sub(self.padding_h)
            .filter(|row| *row < self.height)
    }

    /// The range of output columns whose input column, for kernel column `kx`, is not in the padding.
    fn valid_columns(&self, kx: usize) -> (usize, usize) {
        let first = self.padding_w.saturating_sub(kx).div_ceil(self.stride).min(self.out_w);
        let end = (self.width + self.padding_w)
            .saturating_sub(kx)
            .div_ceil(self.stride)
            .min(self.out_w);
        (first, end.max(first))
    }

    /// col2im: adds the gradients of windows, `col` [depth, columns of the tile], to their pixels in `dx` [batch, in,
    /// h, w].
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
                let (first, end) = self.valid_columns(kx);
                if first == end {
                    continue;
                }
                let from = first * self.stride + kx - self.padding_w;
                let row = &col[(c * taps + tap) * columns..][..columns];
                for r in 0..tile.rows {
                    let Some(iy) = self.input_row(tile.row + r, ky) else {
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

    /// Copies the elements of the tile from `y` [batch, out, pixels] to `flat` [out, columns].
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
