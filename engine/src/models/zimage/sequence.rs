//! Sequences of several items: tokens with padding, their positions, and which of them are masked.
//!
//! The tokens of an image, and those of a caption, are each padded to a multiple of 32 with a learned token, which takes part in
//! attention. Items with shorter captions are padded further, and that second padding is masked.

use crate::nn::{Rotary, RotaryPairs, key_bias};
use candle_core::{Device, Result, Tensor};

/// Tokens of images and of captions are padded to multiples of this number.
pub(super) const MULTIPLE: usize = 32;

/// The number of tokens with padding.
pub(super) fn padded(tokens: usize) -> usize {
    tokens.next_multiple_of(MULTIPLE)
}

/// The axes of a position: the features of a head that are rotated by the item in the sequence, the row and the column.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axes {
    pub(super) widths: [usize; 3],
    pub(super) theta: f64,
}

/// A rotary embedding whose positions may differ between the items of a batch.
#[derive(Clone, Debug)]
pub(super) struct Positions {
    rotary: Rotary,
    /// Whether the embedding has the positions of all items, one after another; else they are those of every item.
    is_per_item: bool,
}

impl Positions {
    /// The positions of each item; all items have the same number of tokens.
    fn new(items: &[Vec<Vec<f64>>], axes: Axes) -> Result<Self> {
        let is_per_item = items.iter().any(|item| Some(item) != items.first());
        let positions = match is_per_item {
            true => items.concat(),
            false => items.first().cloned().unwrap_or_default(),
        };
        let rotary = Rotary::for_axes(&positions, &axes.widths, axes.theta, RotaryPairs::Interleaved)?;
        Ok(Self { rotary, is_per_item })
    }

    /// Rotates every head of x [b, n, heads * width].
    ///
    /// # Errors
    /// When x has another number of positions.
    pub(super) fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        if !self.is_per_item {
            return self.rotary.forward(x);
        }
        let (batch, n, features) = x.dims3()?;
        self.rotary
            .forward(&x.reshape((1, batch * n, features))?)?
            .reshape((batch, n, features))
    }
}

/// The layout of the sequences of a batch.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    /// Rows and columns of image tokens.
    image: (usize, usize),
    /// The number of tokens of each caption.
    captions: Vec<usize>,
}

impl Layout {
    pub(super) fn new(image: (usize, usize), captions: Vec<usize>) -> Self {
        Self { image, captions }
    }

    /// Image tokens of an item.
    pub(super) fn image_tokens(&self) -> usize {
        self.image.0 * self.image.1
    }

    /// Image tokens of an item with padding.
    pub(super) fn padded_image(&self) -> usize {
        padded(self.image_tokens())
    }

    /// Caption tokens with padding of the longest caption.
    pub(super) fn padded_caption(&self) -> usize {
        padded(self.captions.iter().copied().max().unwrap_or(0))
    }

    /// The positions of the image tokens: after the caption, by row and column. Padding is at the origin.
    fn of_image(&self, caption: usize) -> Vec<Vec<f64>> {
        let after = (padded(caption) + 1) as f64;
        let (rows, columns) = self.image;
        let grid = (0..rows * columns).map(|i| vec![after, (i / columns) as f64, (i % columns) as f64]);
        let mut positions: Vec<_> = grid.collect();
        positions.resize(self.padded_image(), vec![0.0; 3]);
        positions
    }

    /// The positions of the caption tokens, with padding: 1, 2, 3, …
    fn of_caption(&self) -> Vec<Vec<f64>> {
        let positions = 1..=self.padded_caption();
        positions.map(|position| vec![position as f64, 0.0, 0.0]).collect()
    }

    /// The positions of the images alone, of the captions alone, and of both.
    pub(super) fn positions(&self, axes: Axes) -> Result<[Positions; 3]> {
        let images: Vec<_> = self.captions.iter().map(|caption| self.of_image(*caption)).collect();
        let caption = self.of_caption();
        let both = images.iter().map(|image| [image.as_slice(), &caption].concat());
        let both: Vec<_> = both.collect();
        Ok([
            Positions::new(&images, axes)?,
            Positions::new(std::slice::from_ref(&caption), axes)?,
            Positions::new(&both, axes)?,
        ])
    }

    /// The attention biases of the captions alone and of image and caption: minus infinity where a caption has no token. `None` if
    /// every caption is equally long with its padding.
    pub(super) fn biases(&self, device: &Device) -> Result<[Option<Tensor>; 2]> {
        let longest = self.padded_caption();
        if self.captions.iter().all(|caption| padded(*caption) == longest) {
            return Ok([None, None]);
        }
        let bias = |before: usize| {
            let keys = before + longest;
            let is_token = |caption: &usize| {
                let tokens = before + padded(*caption);
                (0..keys).map(move |key| u32::from(key < tokens)).collect::<Vec<_>>()
            };
            let mask: Vec<u32> = self.captions.iter().flat_map(is_token).collect();
            key_bias(&Tensor::from_vec(mask, (self.captions.len(), keys), device)?)
        };
        Ok([Some(bias(0)?), Some(bias(self.padded_image())?)])
    }

    /// The caption tokens x [b, n, c] with `token` [1, c] at all places behind a caption, up to the padded length.
    pub(super) fn with_caption_padding(&self, x: &Tensor, token: &Tensor) -> Result<Tensor> {
        let (batch, found, features) = x.dims3()?;
        let longest = self.padded_caption();
        let x = match found.min(longest) {
            kept if kept == longest => x.narrow(1, 0, longest)?,
            kept => x.narrow(1, 0, kept)?.pad_with_zeros(1, 0, longest - kept)?,
        };
        let is_token = |caption: &usize| {
            let caption = *caption;
            (0..longest).map(move |place| u8::from(place < caption))
        };
        let mask: Vec<u8> = self.captions.iter().flat_map(is_token).collect();
        let mask = Tensor::from_vec(mask, (batch, longest, 1), x.device())?;
        let token = token.reshape((1, 1, features))?;
        mask.broadcast_as(x.shape())?
            .where_cond(&x.contiguous()?, &token.broadcast_as(x.shape())?)
    }

    /// The image tokens x [b, n, c] with `token` [1, c] behind them.
    pub(super) fn with_image_padding(&self, x: &Tensor, token: &Tensor) -> Result<Tensor> {
        let (batch, found, features) = x.dims3()?;
        let missing = self.padded_image() - found;
        if missing == 0 {
            return Ok(x.clone());
        }
        let padding = token
            .reshape((1, 1, features))?
            .broadcast_as((batch, missing, features))?;
        Tensor::cat(&[x, &padding.contiguous()?], 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_follow_their_captions_and_padding_is_masked_only_behind_shorter_ones() {
        let layout = Layout::new((2, 3), vec![5, 40]);
        assert_eq!(
            (layout.image_tokens(), layout.padded_image(), layout.padded_caption()),
            (6, 32, 64)
        );
        assert_eq!(layout.of_image(5)[4], [33.0, 1.0, 1.0]);
        assert_eq!(layout.of_image(40)[0], [65.0, 0.0, 0.0]);
        assert_eq!(layout.of_image(40)[31], [0.0; 3]);
        assert_eq!(layout.of_caption()[63], [64.0, 0.0, 0.0]);
        let [caption, both] = layout.biases(&Device::Cpu).unwrap();
        let masked = |bias: Option<Tensor>, item: usize| {
            let bias = bias.unwrap().get(item).unwrap().flatten_all().unwrap();
            let bias: Vec<f32> = bias.to_vec1().unwrap();
            bias.iter().filter(|value| value.is_infinite()).count()
        };
        assert_eq!((masked(caption.clone(), 0), masked(caption, 1)), (32, 0));
        assert_eq!((masked(both.clone(), 0), masked(both, 1)), (32, 0));
        // Captions that are equally long with their padding need no mask.
        assert!(
            Layout::new((2, 3), vec![33, 64])
                .biases(&Device::Cpu)
                .unwrap()
                .iter()
                .all(Option::is_none)
        );
    }
}
