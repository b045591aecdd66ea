//! Tiled encoding and decoding, as diffusers' `tiled_encode` and `tiled_decode` of `AutoencoderKL`: tiles overlap by a
//! quarter and are blended there. The memory is that of one tile, whatever the size of the image. Group norms are
//! computed per tile, so the result is close to that of the whole image, but not equal.

use candle_core::{Result, Tensor};

/// The largest side of a tile in pixels.
const MAX_SIDE: usize = 512;

/// The size of tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tiling {
    /// The side of a tile in pixels.
    pub(super) pixels: usize,
    /// The side of a tile in latents.
    pub(super) latents: usize,
}

/// The tiles of one direction: encoding or decoding.
struct Grid {
    /// The side of an input tile.
    tile: usize,
    /// The distance between input tiles.
    stride: usize,
    /// The width of the output that is blended with the previous tile.
    blend: usize,
    /// The width of the output that is kept; the next tile provides the rest.
    keep: usize,
}

impl Tiling {
    /// Tiles for a model that was trained on images of this side. `scale` pixels are one latent. Tiles of a model for
    /// larger images have [`MAX_SIDE`] pixels too, unlike in diffusers: those of Stable Diffusion XL would be as large as
    /// its images, and save nothing.
    pub(super) fn new(sample_size: usize, scale: usize) -> Self {
        let sample_size = sample_size.min(MAX_SIDE);
        // Fewer than four latents would leave nothing to blend.
        let latents = (sample_size / scale).max(4);
        let pixels = sample_size.max(latents * scale);
        Self { pixels, latents }
    }

    /// Whether x [b, c, h, w] is larger than a tile with this side.
    pub(super) fn is_needed(self, x: &Tensor, side: usize) -> bool {
        x.dims().iter().skip(2).any(|length| *length > side)
    }

    /// pixels [b, c, H, W] -> moments [b, 2 latent, h, w]; `run` encodes one tile.
    pub(super) fn encode(self, images: &Tensor, run: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        Grid::new(self.pixels, self.latents).run(images, run)
    }

    /// latents [b, latent, h, w] -> pixels [b, c, H, W]; `run` decodes one tile.
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
                    tile = blend(above, &tile, self.blend, 2)?;
                }
                if let Some(left) = row.last() {
                    tile = blend(left, &tile, self.blend, 3)?;
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

/// Blends the first `extent` lines of `tile` along an axis with the last lines of the previous tile.
fn blend(previous: &Tensor, tile: &Tensor, extent: usize, axis: usize) -> Result<Tensor> {
    let (length, previous_length) = (tile.dim(axis)?, previous.dim(axis)?);
    let extent = extent.min(length).min(previous_length);
    if extent == 0 {
        return Ok(tile.clone());
    }
    let mut shape = [1; 4];
    shape[axis] = extent;
    let share: Vec<f32> = (0..extent).map(|i| i as f32 / extent as f32).collect();
    let share = Tensor::from_vec(share, &shape, tile.device())?.to_dtype(tile.dtype())?;
    let old = previous.narrow(axis, previous_length - extent, extent)?;
    let new = tile.narrow(axis, 0, extent)?;
    let mixed = (&old + (new - &old)?.broadcast_mul(&share)?)?;
    Tensor::cat(&[&mixed, &tile.narrow(axis, extent, length - extent)?], axis)
}
