//! The transformer inside a U-Net block (diffusers' `Transformer2DModel`).

use super::resnet::Visitor;
use crate::checkpointing::{BlockSequence, Value};
use crate::error::Result;
use crate::nn::{self, Attention, Conv2d, GroupNorm, LayerMut, LayerNorm, Linear, join};
use crate::weights::Weights;
use candle_core::Tensor;
use std::sync::Arc;

/// Sizes of a transformer.
#[derive(Clone, Copy, Debug)]
pub struct TransformerSizes {
    /// Channels of the image, which are the features of a token.
    pub channels: usize,
    /// Attention heads.
    pub heads: usize,
    /// Features of a context token.
    pub context: usize,
    /// The number of transformer blocks.
    pub layers: usize,
    /// Groups of the first norm.
    pub groups: usize,
    /// Whether the input and output projections are linear layers (SD 2.x) instead of 1 x 1 convolutions (SD 1.x).
    pub linear: bool,
    /// Whether attention scores are computed in f32 whatever the dtype is: `upcast_attention`.
    pub upcast_attention: bool,
}

/// A transformer over the pixels of an image, with cross-attention to the context.
#[derive(Clone, Debug)]
pub struct Transformer2d {
    norm: GroupNorm,
    proj_in: Projection,
    blocks: Vec<TransformerBlock>,
    proj_out: Projection,
}

#[derive(Clone, Debug)]
enum Projection {
    Linear(Linear),
    Conv(Conv2d),
}

#[derive(Clone, Debug)]
struct TransformerBlock {
    norm1: LayerNorm,
    attn1: CrossAttention,
    norm2: LayerNorm,
    attn2: CrossAttention,
    norm3: LayerNorm,
    ff_in: Linear,
    ff_out: Linear,
}

#[derive(Clone, Debug)]
struct CrossAttention {
    to_q: Linear,
    to_k: Linear,
    to_v: Linear,
    to_out: Linear,
    heads: usize,
    upcast: bool,
}

impl Projection {
    fn new(weights: &Weights, channels: usize, linear: bool) -> Result<Self> {
        if linear {
            return Ok(Self::Linear(Linear::new(weights, channels, channels, true)?));
        }
        Ok(Self::Conv(Conv2d::new(weights, channels, channels, 1, 1, 0)?))
    }

    fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        match self {
            Self::Linear(layer) => f(path, LayerMut::Linear(layer)),
            Self::Conv(layer) => f(path, LayerMut::Conv2d(layer)),
        }
    }
}

impl Transformer2d {
    /// Loads the transformer.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub fn new(weights: &Weights, sizes: TransformerSizes) -> Result<Self> {
        let TransformerSizes {
            channels,
            heads,
            context,
            layers,
            groups,
            linear,
            upcast_attention,
        } = sizes;
        let blocks = (0..layers).map(|i| {
            let w = weights.pp("transformer_blocks").pp(i);
            let norm = |name| LayerNorm::new(&w.pp(name), channels, 1e-5);
            Ok(TransformerBlock {
                norm1: norm("norm1")?,
                attn1: CrossAttention::new(&w.pp("attn1"), [channels, channels], heads, upcast_attention)?,
                norm2: norm("norm2")?,
                attn2: CrossAttention::new(&w.pp("attn2"), [channels, context], heads, upcast_attention)?,
                norm3: norm("norm3")?,
                ff_in: Linear::new(&w.pp("ff.net.0.proj"), channels, 8 * channels, true)?,
                ff_out: Linear::new(&w.pp("ff.net.2"), 4 * channels, channels, true)?,
            })
        });
        Ok(Self {
            norm: GroupNorm::new(&weights.pp("norm"), groups, channels, 1e-6)?,
            proj_in: Projection::new(&weights.pp("proj_in"), channels, linear)?,
            blocks: blocks.collect::<Result<_>>()?,
            proj_out: Projection::new(&weights.pp("proj_out"), channels, linear)?,
        })
    }

    /// x [b, c, h, w], context [b, n, d] -> [b, c, h, w].
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(&self, x: &Tensor, context: &Tensor) -> candle_core::Result<Tensor> {
        let mut h = self.tokens(x)?;
        for block in &self.blocks {
            h = block.forward(&h, context)?;
        }
        self.image(&h, x)
    }

    /// Appends what [`Self::forward`] does to a sequence. Each of its transformer blocks is a block of its own there, so that
    /// gradient checkpointing keeps the activations of one only: SDXL has ten in a row.
    pub(super) fn add_blocks(
        self: &Arc<Self>,
        path: &str,
        sequence: &mut BlockSequence,
        x: Value,
        context: Value,
    ) -> Value {
        let this = Arc::clone(self);
        if self.blocks.len() < 2 {
            return sequence.add(path, [x, context], move |[x, context]| this.forward(x, context));
        }
        let mut h = sequence.add(format!("{path}.proj_in"), [x], move |[x]| this.tokens(x));
        for index in 0..self.blocks.len() {
            let this = Arc::clone(self);
            let name = format!("{path}.transformer_blocks.{index}");
            h = sequence.add(name, [h, context], move |[h, context]| {
                this.blocks[index].forward(h, context)
            });
        }
        let this = Arc::clone(self);
        sequence.add(format!("{path}.proj_out"), [h, x], move |[h, x]| this.image(h, x))
    }

    /// The tokens of an image: x [b, c, h, w] -> [b, h * w, c].
    fn tokens(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let h = self.norm.forward(x)?;
        match &self.proj_in {
            Projection::Linear(layer) => layer.forward(&nn::to_tokens(&h)?),
            Projection::Conv(layer) => nn::to_tokens(&layer.forward(&h)?),
        }
    }

    /// The image of tokens h [b, h * w, c], plus x [b, c, h, w].
    fn image(&self, h: &Tensor, x: &Tensor) -> candle_core::Result<Tensor> {
        let h = match &self.proj_out {
            Projection::Linear(layer) => nn::to_image(&layer.forward(h)?, x.dims())?,
            Projection::Conv(layer) => layer.forward(&nn::to_image(h, x.dims())?)?,
        };
        nn::add(&h, x)
    }

    pub(crate) fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        self.proj_in.visit(&join(path, "proj_in"), f)?;
        for (i, block) in self.blocks.iter_mut().enumerate() {
            let path = format!("{path}.transformer_blocks.{i}");
            block.attn1.visit(&join(&path, "attn1"), f)?;
            block.attn2.visit(&join(&path, "attn2"), f)?;
            f(&join(&path, "ff.net.0.proj"), LayerMut::Linear(&mut block.ff_in))?;
            f(&join(&path, "ff.net.2"), LayerMut::Linear(&mut block.ff_out))?;
        }
        self.proj_out.visit(&join(path, "proj_out"), f)
    }

    pub(crate) fn visit_norms(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        self.norm.visit(&join(path, "norm"), f)?;
        for (i, block) in self.blocks.iter_mut().enumerate() {
            let path = format!("{path}.transformer_blocks.{i}");
            block.norm1.visit(&join(&path, "norm1"), f)?;
            block.norm2.visit(&join(&path, "norm2"), f)?;
            block.norm3.visit(&join(&path, "norm3"), f)?;
        }
        Ok(())
    }
}

impl TransformerBlock {
    fn forward(&self, x: &Tensor, context: &Tensor) -> candle_core::Result<Tensor> {
        let h = self.norm1.forward(x)?;
        let x = nn::add(&self.attn1.forward(&h, &h)?, x)?;
        let x = nn::add(&self.attn2.forward(&self.norm2.forward(&x)?, context)?, &x)?;
        let h = nn::geglu(&self.ff_in.forward(&self.norm3.forward(&x)?)?)?;
        nn::add(&self.ff_out.forward(&h)?, &x)
    }
}

impl CrossAttention {
    fn new(weights: &Weights, [channels, context]: [usize; 2], heads: usize, upcast: bool) -> Result<Self> {
        Ok(Self {
            to_q: Linear::new(&weights.pp("to_q"), channels, channels, false)?,
            to_k: Linear::new(&weights.pp("to_k"), context, channels, false)?,
            to_v: Linear::new(&weights.pp("to_v"), context, channels, false)?,
            to_out: Linear::new(&weights.pp("to_out.0"), channels, channels, true)?,
            heads,
            upcast,
        })
    }

    fn forward(&self, x: &Tensor, context: &Tensor) -> candle_core::Result<Tensor> {
        let (q, k, v) = (
            self.to_q.forward(x)?,
            self.to_k.forward(context)?,
            self.to_v.forward(context)?,
        );
        let attention = Attention {
            upcast: self.upcast,
            ..Attention::new(self.heads)
        };
        self.to_out.forward(&attention.forward(&q, &k, &v)?)
    }

    fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        f(&join(path, "to_q"), LayerMut::Linear(&mut self.to_q))?;
        f(&join(path, "to_k"), LayerMut::Linear(&mut self.to_k))?;
        f(&join(path, "to_v"), LayerMut::Linear(&mut self.to_v))?;
        f(&join(path, "to_out.0"), LayerMut::Linear(&mut self.to_out))
    }
}
