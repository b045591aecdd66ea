//! The autoencoder in tiles that overlap by a quarter and are blended there, as diffusers' `tiled_encode` and
//! `tiled_decode` of `AutoencoderKL` do it: memory for one tile, whatever the size of the image. Each tile has group
//! norms of its own, so that a tiled image is close to the whole one, not equal.

use candle_core::{Result, Tensor};

/// How large the tiles are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tiling {
    /// Side of a tile in pixels.
    pub(super) pixels: usize,
    /// The same in latents.
    pub(super) latents: usize,
}

/// What one side of the autoencoder sees of the tiles.
struct Grid {
    /// Side of a tile that goes in.
    tile: usize,
    /// From one tile that goes in to the next.
    stride: usize,
    /// How much of what comes out is blended with the tile before.
    blend: usize,
    /// How much of what comes out is kept; the rest is the next tile's.
    keep: usize,
}

impl Tiling {
    /// For a model made for images of this side; `scale` pixels are a latent.
    pub(super) fn new(sample_size: usize, scale: usize) -> Self {
        // Below four latents there is nothing left to blend.
        let latents = (sample_size / scale).max(4);
        let pixels = sample_size.max(latents * scale);
        Self { pixels, latents }
    }

    /// Whether x [b, c, h, w] is larger than a tile of this side.
    pub(super) fn needed(self, x: &Tensor, side: usize) -> bool {
        x.dims().iter().skip(2).any(|length| *length > side)
    }

    /// pixels [b, c, H, W] -> moments [b, 2 latent, h, w]; `run` does so with a tile.
    pub(super) fn encode(self, images: &Tensor, run: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        Grid::new(self.pixels, self.latents).run(images, run)
    }

    /// latents [b, latent, h, w] -> pixels [b, c, H, W]; `run` does so with a tile.
    pub(super) fn decode(self, latents: &Tensor, run: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        Grid::new(self.latents, self.pixels).run(latents, run)
    }
}

impl Grid {
    fn new(tile: usize, out: usize) -> Self {
        let blend = out / 4;
        Self {
            tile,
            stride: (tile - tile.div_ceil(4)).max(1),
            blend,
            keep: out - blend,
        }
    }

    fn run(&self, x: &Tensor, run: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let (_, _, height, width) = x.dims4()?;
        let mut rows = Vec::new();
        let mut above: Vec<Tensor> = Vec::new();
        for top in (0..height).step_by(self.stride) {
            let band = x.narrow(2, top, self.tile.min(height - top))?;
            let mut row: Vec<Tensor> = Vec::new();
            for left in (0..width).step_by(self.stride) {
                let part = band.narrow(3, left, self.tile.min(width - left))?.contiguous()?;
                let mut tile = run(&part)?;
                if let Some(above) = above.get(row.len()) {
                    tile = blended(above, &tile, self.blend, 2)?;
                }
                if let Some(before) = row.last() {
                    tile = blended(before, &tile, self.blend, 3)?;
                }
                row.push(tile);
            }
            let kept = row.iter().map(|tile| {
                let (_, _, h, w) = tile.dims4()?;
                tile.narrow(2, 0, h.min(self.keep))?.narrow(3, 0, w.min(self.keep))
            });
            rows.push(Tensor::cat(&kept.collect::<Result<Vec<_>>>()?, 3)?);
            above = row;
        }
        Tensor::cat(&rows, 2)
    }
}

/// `tile`, whose first `extent` lines along an axis pass over from the last ones of the tile `before`.
fn blended(before: &Tensor, tile: &Tensor, extent: usize, axis: usize) -> Result<Tensor> {
    let (length, before_length) = (tile.dim(axis)?, before.dim(axis)?);
    let extent = extent.min(length).min(before_length);
    if extent == 0 {
        return Ok(tile.clone());
    }
    let mut shape = [1; 4];
    shape[axis] = extent;
    let share: Vec<f32> = (0..extent).map(|i| i as f32 / extent as f32).collect();
    let share = Tensor::from_vec(share, &shape, tile.device())?.to_dtype(tile.dtype())?;
    let old = before.narrow(axis, before_length - extent, extent)?;
    let new = tile.narrow(axis, 0, extent)?;
    let mixed = (&old + (new - &old)?.broadcast_mul(&share)?)?;
    Tensor::cat(&[&mixed, &tile.narrow(axis, extent, length - extent)?], axis)
}
