//! The block of Z-Image's transformer, under diffusers' names (`models/transformers/transformer_z_image.py`): attention and a gated
//! feed-forward, each between two norms, on one sequence of image and caption tokens.

use super::sequence::Positions;
use crate::error::Result;
use crate::nn::{self, Activation, Attention, LayerMut, Linear, RmsNorm, join};
use crate::weights::Weights;
use candle_core::Tensor;

/// The epsilon of the norms of queries and keys.
const HEAD_NORM_EPS: f64 = 1e-5;
/// The most features of the embedded timestep.
pub(super) const MAX_TIME_FEATURES: usize = 256;

/// What is called with each layer of a block.
pub(super) type Visitor<'f> = dyn FnMut(&str, LayerMut<'_>) -> Result<()> + 'f;

/// Sizes of a block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sizes {
    /// Features of a token.
    pub(super) width: usize,
    /// Attention heads.
    pub(super) heads: usize,
    /// The epsilon of the norms of tokens.
    pub(super) eps: f64,
}

impl Sizes {
    /// Features of a head.
    pub(super) fn head_width(self) -> usize {
        self.width / self.heads.max(1)
    }

    /// Features of the embedded timestep.
    pub(super) fn time_features(self) -> usize {
        self.width.min(MAX_TIME_FEATURES)
    }
}

/// A block. Without modulation it does not depend on the timestep (the caption's blocks).
#[derive(Clone, Debug)]
pub(super) struct ZImageTransformerBlock {
    q: Linear,
    k: Linear,
    v: Linear,
    to_out: Linear,
    norm_q: RmsNorm,
    norm_k: RmsNorm,
    w1: Linear,
    w2: Linear,
    w3: Linear,
    /// Before and after attention.
    attention_norms: [RmsNorm; 2],
    /// Before and after the feed-forward.
    feed_forward_norms: [RmsNorm; 2],
    modulation: Option<Linear>,
    sizes: Sizes,
}

impl ZImageTransformerBlock {
    /// Loads the block.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub(super) fn new(weights: &Weights, sizes: Sizes, is_modulated: bool) -> Result<Self> {
        let (attention, feed_forward) = (weights.pp("attention"), weights.pp("feed_forward"));
        let width = sizes.width;
        // As Python computes `int(dim / 3 * 8)`.
        let hidden = (width as f64 / 3.0 * 8.0) as usize;
        let project = |name: &str| Linear::new(&attention.pp(name), width, width, false);
        let head_norm = |name: &str| RmsNorm::new(&attention.pp(name), sizes.head_width(), HEAD_NORM_EPS);
        let norm = |name: &str| RmsNorm::new(&weights.pp(name), width, sizes.eps);
        let linear = |name: &str, inputs, outputs| Linear::new(&feed_forward.pp(name), inputs, outputs, false);
        Ok(Self {
            q: project("to_q")?,
            k: project("to_k")?,
            v: project("to_v")?,
            to_out: project("to_out.0")?,
            norm_q: head_norm("norm_q")?,
            norm_k: head_norm("norm_k")?,
            w1: linear("w1", width, hidden)?,
            w2: linear("w2", hidden, width)?,
            w3: linear("w3", width, hidden)?,
            attention_norms: [norm("attention_norm1")?, norm("attention_norm2")?],
            feed_forward_norms: [norm("ffn_norm1")?, norm("ffn_norm2")?],
            modulation: match is_modulated {
                true => Some(Linear::new(
                    &weights.pp("adaLN_modulation.0"),
                    sizes.time_features(),
                    4 * width,
                    true,
                )?),
                false => None,
            },
            sizes,
        })
    }

    /// Calls `f` with every linear layer, by its name in diffusers.
    pub(super) fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        for (name, layer) in [
            ("attention.to_q", Some(&mut self.q)),
            ("attention.to_k", Some(&mut self.k)),
            ("attention.to_v", Some(&mut self.v)),
            ("attention.to_out.0", Some(&mut self.to_out)),
            ("feed_forward.w1", Some(&mut self.w1)),
            ("feed_forward.w2", Some(&mut self.w2)),
            ("feed_forward.w3", Some(&mut self.w3)),
            ("adaLN_modulation.0", self.modulation.as_mut()),
        ] {
            if let Some(layer) = layer {
                f(&join(path, name), LayerMut::Linear(layer))?;
            }
        }
        Ok(())
    }

    /// Calls `f` with every norm, by its name in diffusers.
    pub(super) fn visit_norms(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        let [attention_1, attention_2] = &mut self.attention_norms;
        let [feed_forward_1, feed_forward_2] = &mut self.feed_forward_norms;
        for (name, norm) in [
            ("attention.norm_q", &mut self.norm_q),
            ("attention.norm_k", &mut self.norm_k),
            ("attention_norm1", attention_1),
            ("attention_norm2", attention_2),
            ("ffn_norm1", feed_forward_1),
            ("ffn_norm2", feed_forward_2),
        ] {
            norm.visit(&join(path, name), f)?;
        }
        Ok(())
    }

    /// x [b, n, width] at `positions`, conditioned on the embedded timestep [b, features] -> the same shape. `bias`: of masked
    /// keys, [b, 1, 1, n].
    ///
    /// # Errors
    /// When the shapes do not match.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        time: &Tensor,
        positions: &Positions,
        bias: Option<&Tensor>,
    ) -> candle_core::Result<Tensor> {
        let [before_attention, after_attention] = &self.attention_norms;
        let [before_feed_forward, after_feed_forward] = &self.feed_forward_norms;
        let Some(modulation) = &self.modulation else {
            let h = self.attend(&before_attention.forward(x)?, positions, bias)?;
            let x = nn::add(x, &after_attention.forward(&h)?)?;
            let h = self.feed_forward(&before_feed_forward.forward(&x)?)?;
            return nn::add(&x, &after_feed_forward.forward(&h)?);
        };
        let vectors = modulation.forward(time)?.chunk(4, 1)?;
        let [scale_attention, gate_attention, scale, gate] = vectors.as_slice() else {
            candle_core::bail!("a modulated block needs four vectors, found {}", vectors.len());
        };
        let no_shift = scale.zeros_like()?.detach();
        let h = nn::modulate(&before_attention.forward(x)?, scale_attention, &no_shift)?;
        let h = after_attention.forward(&self.attend(&h, positions, bias)?)?;
        let x = nn::gated_residual(x, &gate_attention.tanh()?, &h)?;
        let h = nn::modulate(&before_feed_forward.forward(&x)?, scale, &no_shift)?;
        let h = after_feed_forward.forward(&self.feed_forward(&h)?)?;
        nn::gated_residual(&x, &gate.tanh()?, &h)
    }

    /// Attention between all tokens of an item, with rotary embeddings.
    fn attend(&self, x: &Tensor, positions: &Positions, bias: Option<&Tensor>) -> candle_core::Result<Tensor> {
        let q = positions.rotate(&self.norm_q.forward(&self.q.forward(x)?)?)?;
        let k = positions.rotate(&self.norm_k.forward(&self.k.forward(x)?)?)?;
        let attention = Attention {
            bias,
            ..Attention::new(self.sizes.heads)
        };
        self.to_out.forward(&attention.forward(&q, &k, &self.v.forward(x)?)?)
    }

    fn feed_forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let gate = Activation::Silu.forward(&self.w1.forward(x)?)?;
        self.w2.forward(&(gate * self.w3.forward(x)?)?)
    }
}
