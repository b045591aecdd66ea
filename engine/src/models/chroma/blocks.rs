//! The blocks of Chroma: those of FLUX.1 without the layers that make their modulation (diffusers' `ChromaTransformerBlock` and
//! `ChromaSingleTransformerBlock`).

use crate::error::Result;
use crate::models::flux::{DoubleStreams, FluxSizes, SingleStream};
use crate::models::mmdit::{EPS, Visitor};
use crate::nn::{self, LayerNorm, Rotary};
use crate::weights::Weights;
use candle_core::Tensor;
use std::ops::Range;

/// Vectors of one stream of a double block: shift, scale and gate of attention, and those of the feed-forward.
pub(super) const STREAM_VECTORS: usize = 6;
/// Vectors of a single block: shift, scale, gate.
pub(super) const SINGLE_VECTORS: usize = 3;

/// Which of the approximator's vectors a double block uses.
#[derive(Clone, Copy, Debug)]
pub(super) struct DoubleVectors {
    /// The first one of the image.
    pub(super) image: usize,
    /// The first one of the text.
    pub(super) text: usize,
}

/// These vectors [b, c] among all [b, vectors, c].
pub(super) fn rows(all: &Tensor, range: Range<usize>) -> candle_core::Result<Vec<Tensor>> {
    range.map(|at| all.narrow(1, at, 1)?.squeeze(1)).collect()
}

/// A norm without weights.
pub(super) fn plain_norm(weights: &Weights, width: usize) -> Result<LayerNorm> {
    Ok(LayerNorm::plain(width, EPS, weights.dtype(), weights.device())?)
}

/// x [b, n, c], normalised and modulated for what the vectors are for, and the vectors after the shift and the scale.
fn modulated<'a>(x: &Tensor, norm: &LayerNorm, vectors: &'a [Tensor]) -> candle_core::Result<(Tensor, &'a [Tensor])> {
    let [shift, scale, rest @ ..] = vectors else {
        candle_core::bail!("a modulation needs at least two vectors, found {}", vectors.len());
    };
    Ok((nn::modulate(&norm.forward(x)?, scale, shift)?, rest))
}

/// A double block: text and image have separate weights.
#[derive(Clone, Debug)]
pub(super) struct ChromaTransformerBlock {
    norm: LayerNorm,
    streams: DoubleStreams,
    vectors: DoubleVectors,
}

impl ChromaTransformerBlock {
    /// Loads the block, which uses these vectors.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub(super) fn new(weights: &Weights, sizes: FluxSizes, vectors: DoubleVectors) -> Result<Self> {
        let norm = plain_norm(weights, sizes.width())?;
        Ok(Self {
            streams: DoubleStreams::new(weights, sizes, &mut |_| Ok(norm.clone()))?,
            norm,
            vectors,
        })
    }

    /// Calls `f` with every linear layer, by its name in diffusers.
    pub(super) fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        self.streams.visit(path, f)
    }

    /// Calls `f` with every norm that has a weight, by its name in diffusers.
    pub(super) fn visit_norms(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        self.streams.visit_norms(path, f)
    }

    /// x [b, n, c] and text [b, m, c] -> the same shapes. `vectors` [b, vectors, c]: all of the model. `rotary` has m + n positions, text
    /// first. `bias` [b, 1, 1, m + n] masks text.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub(super) fn forward(
        &self,
        [x, text]: [&Tensor; 2],
        vectors: &Tensor,
        rotary: &Rotary,
        bias: Option<&Tensor>,
    ) -> candle_core::Result<(Tensor, Tensor)> {
        let DoubleVectors { image, text: of_text } = self.vectors;
        let image_vectors = rows(vectors, image..image + STREAM_VECTORS)?;
        let (h, image_rest) = modulated(x, &self.norm, &image_vectors)?;
        let text_vectors = rows(vectors, of_text..of_text + STREAM_VECTORS)?;
        let (h_text, text_rest) = modulated(text, &self.norm, &text_vectors)?;
        self.streams
            .forward([x, text], [&h, &h_text], [image_rest, text_rest], rotary, bias)
    }
}

/// A single block: text and image are one sequence.
#[derive(Clone, Debug)]
pub(super) struct ChromaSingleTransformerBlock {
    norm: LayerNorm,
    stream: SingleStream,
    /// Its first vector.
    vectors: usize,
}

impl ChromaSingleTransformerBlock {
    /// Loads the block. `vectors`: the first one that it uses.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub(super) fn new(weights: &Weights, sizes: FluxSizes, vectors: usize) -> Result<Self> {
        Ok(Self {
            norm: plain_norm(weights, sizes.width())?,
            stream: SingleStream::new(weights, sizes)?,
            vectors,
        })
    }

    /// Calls `f` with every linear layer, by its name in diffusers.
    pub(super) fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        self.stream.visit(path, f)
    }

    /// Calls `f` with every norm that has a weight, by its name in diffusers.
    pub(super) fn visit_norms(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        self.stream.visit_norms(path, f)
    }

    /// x [b, n, c], text first -> the same shape. `vectors` [b, vectors, c]: all of the model. `rotary` has n positions. `bias`
    /// [b, 1, 1, n] masks text.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        vectors: &Tensor,
        rotary: &Rotary,
        bias: Option<&Tensor>,
    ) -> candle_core::Result<Tensor> {
        let vectors = rows(vectors, self.vectors..self.vectors + SINGLE_VECTORS)?;
        let (h, rest) = modulated(x, &self.norm, &vectors)?;
        let [gate] = rest else {
            candle_core::bail!("a single block needs three vectors, found {}", vectors.len());
        };
        self.stream.forward(x, &h, gate, rotary, bias)
    }
}
