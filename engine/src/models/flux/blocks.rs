//! The two kinds of blocks of FLUX.1's transformer, under diffusers' names (`models/transformers/transformer_flux.py`):
//! double blocks, in which text and image have separate weights and joint attention, and single blocks, in which both
//! are one sequence and attention and feed-forward run in parallel.

use crate::error::{EngineError, Result};
use crate::models::mmdit::{AdaLayerNorm, FeedForward, Projections, Visitor};
use crate::nn::{self, Activation, Attention, LayerMut, LayerNorm, Linear, Rotary, RotaryPairs, join};
use crate::weights::Weights;
use candle_core::{DType, Tensor};

/// Sizes of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FluxSizes {
    /// Attention heads: 24.
    pub heads: usize,
    /// Features of a head: 128.
    pub head_width: usize,
}

impl FluxSizes {
    /// Features of a token. The transformer checks the product of its config.
    #[must_use]
    pub fn width(&self) -> usize {
        self.heads * self.head_width
    }
}

/// The rotary embedding for `text` text tokens, all at the origin, followed by an image of `height` x `width` tokens.
/// `axes`: the features of a head for the first axis (0 here), the row and the column; 16, 56 and 56 in FLUX.1.
///
/// # Errors
/// When a number in `axes` is odd.
pub fn rotary(text: usize, size: (usize, usize), axes: [usize; 3]) -> candle_core::Result<Rotary> {
    rotary_with_control(text, size, None, axes)
}

/// As [`rotary`], followed by a control image of `control` (height, width) tokens, whose position along the first axis is 1.
///
/// # Errors
/// As [`rotary`].
pub(super) fn rotary_with_control(
    text: usize,
    size: (usize, usize),
    control: Option<(usize, usize)>,
    axes: [usize; 3],
) -> candle_core::Result<Rotary> {
    let image = |first: f64, (height, width): (usize, usize)| {
        (0..height * width).map(move |i| vec![first, (i / width) as f64, (i % width) as f64])
    };
    let images = image(0.0, size).chain(control.into_iter().flat_map(|size| image(1.0, size)));
    let positions: Vec<_> = std::iter::repeat_n(vec![0.0; 3], text).chain(images).collect();
    Rotary::for_axes(&positions, &axes, 10_000.0, RotaryPairs::Interleaved)
}

/// Attention between all tokens, with rotary embeddings. `bias`: as that of [`Attention`].
fn attend(
    [q, k, v]: &[Tensor; 3],
    sizes: FluxSizes,
    rotary: &Rotary,
    bias: Option<&Tensor>,
) -> candle_core::Result<Tensor> {
    let attention = Attention {
        bias,
        ..Attention::new(sizes.heads)
    };
    attention.forward(&rotary.forward(q)?, &rotary.forward(k)?, v)
}

/// The layers of one stream, text or image, of a double block, without those that make its modulation.
#[derive(Clone, Debug)]
struct Stream {
    attention: Projections,
    to_out: Linear,
    /// The norm before the feed-forward, which has no weights.
    norm2: LayerNorm,
    ff: FeedForward,
}

impl Stream {
    /// `attn`: the weights of attention, of which this stream has the output layer `out`. `ff`: those of the feed-forward.
    fn new(
        attention: Projections,
        norm2: LayerNorm,
        (attn, out): (&Weights, &str),
        ff: &Weights,
        width: usize,
    ) -> Result<Self> {
        Ok(Self {
            attention,
            to_out: Linear::new(&attn.pp(out), width, width, true)?,
            norm2,
            ff: FeedForward::new(ff, width)?,
        })
    }

    /// The layers after attention. `attended` is its result; `vectors`: the gate of attention, shift, scale and gate of the
    /// feed-forward.
    fn forward_after_attention(
        &self,
        x: &Tensor,
        attended: &Tensor,
        vectors: &[Tensor],
    ) -> candle_core::Result<Tensor> {
        let [gate_attention, shift, scale, gate] = vectors else {
            candle_core::bail!("a double block needs six vectors, found {}", vectors.len() + 2);
        };
        let x = nn::gated_residual(x, gate_attention, &self.to_out.forward(attended)?)?;
        let h = nn::modulate(&self.norm2.forward(&x)?, scale, shift)?;
        nn::gated_residual(&x, gate, &self.ff.forward(&h)?)
    }
}

/// What double blocks of FLUX.1 and Chroma have in common: all layers but those that make the modulation.
#[derive(Clone, Debug)]
pub(in crate::models) struct DoubleStreams {
    image: Stream,
    text: Stream,
    sizes: FluxSizes,
}

impl DoubleStreams {
    /// Loads the layers. `norm(name)` loads the norm before attention of a stream, `norm1` or `norm1_context`; its result is also the
    /// norm before the feed-forward, which has no weights either.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub(in crate::models) fn new(
        weights: &Weights,
        sizes: FluxSizes,
        norm: &mut dyn FnMut(&str) -> Result<LayerNorm>,
    ) -> Result<Self> {
        let (width, attn) = (sizes.width(), weights.pp("attn"));
        let of_image = Projections::of_image(&attn, width, Some(sizes.head_width))?;
        let image = Stream::new(of_image, norm("norm1")?, (&attn, "to_out.0"), &weights.pp("ff"), width)?;
        let of_text = Projections::of_text(&attn, width, Some(sizes.head_width))?;
        let text = Stream::new(
            of_text,
            norm("norm1_context")?,
            (&attn, "to_add_out"),
            &weights.pp("ff_context"),
            width,
        )?;
        Ok(Self { image, text, sizes })
    }

    /// Calls `f` with every linear layer, by its name in diffusers.
    pub(in crate::models) fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        let (image, text) = (&mut self.image, &mut self.text);
        for (name, layer) in [
            ("attn.to_q", &mut image.attention.q),
            ("attn.to_k", &mut image.attention.k),
            ("attn.to_v", &mut image.attention.v),
            ("attn.to_out.0", &mut image.to_out),
            ("attn.add_q_proj", &mut text.attention.q),
            ("attn.add_k_proj", &mut text.attention.k),
            ("attn.add_v_proj", &mut text.attention.v),
            ("attn.to_add_out", &mut text.to_out),
            ("ff.net.0.proj", &mut image.ff.first),
            ("ff.net.2", &mut image.ff.second),
            ("ff_context.net.0.proj", &mut text.ff.first),
            ("ff_context.net.2", &mut text.ff.second),
        ] {
            f(&join(path, name), LayerMut::Linear(layer))?;
        }
        Ok(())
    }

    /// Calls `f` with every norm that has a weight, by its name in diffusers.
    pub(in crate::models) fn visit_norms(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        let names = ["norm_q", "norm_k", "norm_added_q", "norm_added_k"].map(|name| format!("{path}.attn.{name}"));
        let [q, k, added_q, added_k] = &names;
        self.image.attention.visit_norms([q, k], f)?;
        self.text.attention.visit_norms([added_q, added_k], f)
    }

    /// x [b, n, c] and text [b, m, c] -> the same shapes. `modulated`: both, normalised and modulated for attention. `vectors`: those of
    /// both for what follows, as of [`Stream::forward_after_attention`]. `rotary` has m + n positions, text first. `bias`
    /// [b, 1, 1, m + n] masks text.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub(in crate::models) fn forward(
        &self,
        [x, text]: [&Tensor; 2],
        [h, h_text]: [&Tensor; 2],
        [image_vectors, text_vectors]: [&[Tensor]; 2],
        rotary: &Rotary,
        bias: Option<&Tensor>,
    ) -> candle_core::Result<(Tensor, Tensor)> {
        let (image_qkv, text_qkv) = (self.image.attention.forward(h)?, self.text.attention.forward(h_text)?);
        let joined = |i: usize| nn::cat_channels(&text_qkv[i], &image_qkv[i]);
        let all = attend(&[joined(0)?, joined(1)?, joined(2)?], self.sizes, rotary, bias)?;
        let text_length = text.dim(1)?;
        let attended = all.narrow(1, text_length, x.dim(1)?)?;
        let text = self
            .text
            .forward_after_attention(text, &all.narrow(1, 0, text_length)?, text_vectors)?;
        Ok((
            self.image.forward_after_attention(x, &attended, image_vectors)?,
            within_f16(text)?,
        ))
    }
}

/// A double block: text and image have separate weights.
#[derive(Clone, Debug)]
pub struct FluxTransformerBlock {
    image_norm: AdaLayerNorm<6>,
    text_norm: AdaLayerNorm<6>,
    streams: DoubleStreams,
}

impl FluxTransformerBlock {
    /// Loads the block.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub fn new(weights: &Weights, sizes: FluxSizes) -> Result<Self> {
        let mut norms = Vec::with_capacity(2);
        let streams = DoubleStreams::new(weights, sizes, &mut |name| {
            let norm = AdaLayerNorm::<6>::new(&weights.pp(name), sizes.width())?;
            let plain = norm.norm.clone();
            norms.push(norm);
            Ok(plain)
        })?;
        let [image_norm, text_norm] = <[AdaLayerNorm<6>; 2]>::try_from(norms)
            .map_err(|norms| EngineError::Internal(format!("a double block has {} norms", norms.len())))?;
        Ok(Self {
            image_norm,
            text_norm,
            streams,
        })
    }

    /// Calls `f` with every linear layer, by its name in diffusers.
    pub(super) fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        f(
            &join(path, "norm1.linear"),
            LayerMut::Linear(&mut self.image_norm.linear),
        )?;
        f(
            &join(path, "norm1_context.linear"),
            LayerMut::Linear(&mut self.text_norm.linear),
        )?;
        self.streams.visit(path, f)
    }

    /// Calls `f` with every norm that has a weight, by its name in diffusers.
    pub(super) fn visit_norms(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        self.streams.visit_norms(path, f)
    }

    /// x [b, n, c] and text [b, m, c], conditioned on temb [b, c] -> the same shapes. `rotary` has m + n positions,
    /// text first. `bias` [b, 1, 1, m + n] masks text.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(
        &self,
        x: &Tensor,
        text: &Tensor,
        temb: &Tensor,
        rotary: &Rotary,
        bias: Option<&Tensor>,
    ) -> candle_core::Result<(Tensor, Tensor)> {
        let (h, image_vectors) = self.image_norm.forward(x, temb)?;
        let (h_text, text_vectors) = self.text_norm.forward(text, temb)?;
        self.streams
            .forward([x, text], [&h, &h_text], [&image_vectors, &text_vectors], rotary, bias)
    }
}

/// Hidden states in f16 without infinite numbers, as diffusers limits them; others as they are.
fn within_f16(x: Tensor) -> candle_core::Result<Tensor> {
    const LIMIT: f32 = 65_504.0;
    match x.dtype() {
        DType::F16 => x.clamp(-LIMIT, LIMIT),
        _ => Ok(x),
    }
}

/// What single blocks of FLUX.1 and Chroma have in common: all layers but those that make the modulation.
#[derive(Clone, Debug)]
pub(in crate::models) struct SingleStream {
    attention: Projections,
    proj_mlp: Linear,
    proj_out: Linear,
    sizes: FluxSizes,
}

impl SingleStream {
    /// Loads the layers.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub(in crate::models) fn new(weights: &Weights, sizes: FluxSizes) -> Result<Self> {
        let width = sizes.width();
        Ok(Self {
            attention: Projections::of_image(&weights.pp("attn"), width, Some(sizes.head_width))?,
            proj_mlp: Linear::new(&weights.pp("proj_mlp"), width, 4 * width, true)?,
            proj_out: Linear::new(&weights.pp("proj_out"), 5 * width, width, true)?,
            sizes,
        })
    }

    /// Calls `f` with every linear layer, by its name in diffusers.
    pub(in crate::models) fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        for (name, layer) in [
            ("attn.to_q", &mut self.attention.q),
            ("attn.to_k", &mut self.attention.k),
            ("attn.to_v", &mut self.attention.v),
            ("proj_mlp", &mut self.proj_mlp),
            ("proj_out", &mut self.proj_out),
        ] {
            f(&join(path, name), LayerMut::Linear(layer))?;
        }
        Ok(())
    }

    /// Calls `f` with every norm that has a weight, by its name in diffusers.
    pub(in crate::models) fn visit_norms(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        let names = ["norm_q", "norm_k"].map(|name| format!("{path}.attn.{name}"));
        self.attention.visit_norms([&names[0], &names[1]], f)
    }

    /// x [b, n, c], text first -> the same shape. `h`: x, normalised and modulated. `gate` [b, c]: that of the result. `rotary` has n
    /// positions. `bias` [b, 1, 1, n] masks text.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub(in crate::models) fn forward(
        &self,
        x: &Tensor,
        h: &Tensor,
        gate: &Tensor,
        rotary: &Rotary,
        bias: Option<&Tensor>,
    ) -> candle_core::Result<Tensor> {
        let mlp = Activation::GeluTanh.forward(&self.proj_mlp.forward(h)?)?;
        let attended = attend(&self.attention.forward(h)?, self.sizes, rotary, bias)?;
        let both = Tensor::cat(&[&attended, &mlp], 2)?;
        within_f16(nn::gated_residual(x, gate, &self.proj_out.forward(&both)?)?)
    }
}

/// A single block: text and image are one sequence.
#[derive(Clone, Debug)]
pub struct FluxSingleTransformerBlock {
    norm: AdaLayerNorm<3>,
    stream: SingleStream,
}

impl FluxSingleTransformerBlock {
    /// Loads the block.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub fn new(weights: &Weights, sizes: FluxSizes) -> Result<Self> {
        Ok(Self {
            norm: AdaLayerNorm::new(&weights.pp("norm"), sizes.width())?,
            stream: SingleStream::new(weights, sizes)?,
        })
    }

    /// Calls `f` with every linear layer, by its name in diffusers.
    pub(super) fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        f(&join(path, "norm.linear"), LayerMut::Linear(&mut self.norm.linear))?;
        self.stream.visit(path, f)
    }

    /// Calls `f` with every norm that has a weight, by its name in diffusers.
    pub(super) fn visit_norms(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        self.stream.visit_norms(path, f)
    }

    /// x [b, n, c], text first, conditioned on temb [b, c] -> the same shape. `rotary` has n positions. `bias` [b, 1, 1, n] masks text.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(
        &self,
        x: &Tensor,
        temb: &Tensor,
        rotary: &Rotary,
        bias: Option<&Tensor>,
    ) -> candle_core::Result<Tensor> {
        let (h, vectors) = self.norm.forward(x, temb)?;
        let [gate] = vectors.as_slice() else {
            candle_core::bail!("a single block needs three vectors, found {}", vectors.len() + 2);
        };
        self.stream.forward(x, &h, gate, rotary, bias)
    }
}
