//! The joint blocks of Stable Diffusion 3's transformer, under diffusers' names (`JointTransformerBlock` in `models/attention.py`): image and
//! text have separate weights and joint attention. In the last block, text only gives keys and values. Blocks of Stable Diffusion 3.5 medium
//! have a second attention between image tokens alone.

use crate::error::Result;
use crate::models::mmdit::{AdaLayerNorm, AdaLayerNormContinuous, EPS, FeedForward, Projections, Visitor};
use crate::nn::{self, Attention, LayerMut, LayerNorm, Linear, join};
use crate::weights::Weights;
use candle_core::Tensor;

/// Sizes of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sd3Sizes {
    /// Attention heads: 24 (medium), 38 (large).
    pub heads: usize,
    /// Features of a head: 64.
    pub head_width: usize,
    /// Whether queries and keys are normalised (3.5).
    pub qk_norm: bool,
}

impl Sd3Sizes {
    /// Features of a token.
    #[must_use]
    pub fn width(&self) -> usize {
        self.heads * self.head_width
    }

    /// Features of a norm of queries and keys, if there is one.
    fn norm_width(&self) -> Option<usize> {
        self.qk_norm.then_some(self.head_width)
    }
}

/// What a block has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockKind {
    /// A second attention between image tokens (`dual_attention_layers` of the config).
    pub dual_attention: bool,
    /// The block is the last one: text only gives keys and values, and is not computed further (`context_pre_only`).
    pub last: bool,
}

/// The first norm of the image stream, with the second attention where there is one.
// A model has few blocks: the difference in size does not matter.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug)]
enum ImageNorm {
    Single(AdaLayerNorm<6>),
    Dual {
        norm: AdaLayerNorm<9>,
        attention: Projections,
        to_out: Linear,
    },
}

/// The layers after attention: a norm, which the conditioning modulates, and the feed-forward layers.
#[derive(Clone, Debug)]
struct Mlp {
    norm: LayerNorm,
    ff: FeedForward,
}

impl Mlp {
    fn new(weights: &Weights, width: usize, norm: &LayerNorm) -> Result<Self> {
        Ok(Self {
            norm: norm.clone(),
            ff: FeedForward::new(weights, width)?,
        })
    }

    fn forward(&self, x: &Tensor, shift: &Tensor, scale: &Tensor, gate: &Tensor) -> candle_core::Result<Tensor> {
        let h = nn::modulate(&self.norm.forward(x)?, scale, shift)?;
        nn::gated_residual(x, gate, &self.ff.forward(&h)?)
    }
}

/// The text stream after its projections.
// As above.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug)]
enum TextStream {
    Full {
        norm: AdaLayerNorm<6>,
        to_out: Linear,
        mlp: Mlp,
    },
    Last(AdaLayerNormContinuous),
}

/// A joint block.
#[derive(Clone, Debug)]
pub struct JointTransformerBlock {
    image_norm: ImageNorm,
    image_attention: Projections,
    to_out: Linear,
    mlp: Mlp,
    text: TextStream,
    text_attention: Projections,
    sizes: Sd3Sizes,
}

impl JointTransformerBlock {
    /// Loads the block.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub fn new(weights: &Weights, sizes: Sd3Sizes, kind: BlockKind) -> Result<Self> {
        let (width, norm_width) = (sizes.width(), sizes.norm_width());
        let (attn, attn2) = (weights.pp("attn"), weights.pp("attn2"));
        let norm1 = weights.pp("norm1");
        let image_norm = match kind.dual_attention {
            false => ImageNorm::Single(AdaLayerNorm::new(&norm1, width)?),
            true => ImageNorm::Dual {
                norm: AdaLayerNorm::new(&norm1, width)?,
                attention: Projections::of_image(&attn2, width, norm_width)?,
                to_out: Linear::new(&attn2.pp("to_out.0"), width, width, true)?,
            },
        };
        let to_out = Linear::new(&attn.pp("to_out.0"), width, width, true)?;
        let plain = LayerNorm::plain(width, EPS, to_out.weight.dtype(), to_out.weight.device())?;
        let norm1_context = weights.pp("norm1_context");
        let text = match kind.last {
            true => TextStream::Last(AdaLayerNormContinuous::new(&norm1_context, width)?),
            false => TextStream::Full {
                norm: AdaLayerNorm::new(&norm1_context, width)?,
                to_out: Linear::new(&attn.pp("to_add_out"), width, width, true)?,
                mlp: Mlp::new(&weights.pp("ff_context"), width, &plain)?,
            },
        };
        Ok(Self {
            image_norm,
            image_attention: Projections::of_image(&attn, width, norm_width)?,
            to_out,
            mlp: Mlp::new(&weights.pp("ff"), width, &plain)?,
            text,
            text_attention: Projections::of_text(&attn, width, norm_width)?,
            sizes,
        })
    }

    /// Calls `f` with every linear layer, by its name in diffusers.
    pub(super) fn visit(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        let norm1 = match &mut self.image_norm {
            ImageNorm::Single(norm) => &mut norm.linear,
            ImageNorm::Dual { norm, .. } => &mut norm.linear,
        };
        f(&join(path, "norm1.linear"), LayerMut::Linear(norm1))?;
        let norm1_context = match &mut self.text {
            TextStream::Full { norm, .. } => &mut norm.linear,
            TextStream::Last(norm) => &mut norm.linear,
        };
        f(&join(path, "norm1_context.linear"), LayerMut::Linear(norm1_context))?;
        let (image, text) = (&mut self.image_attention, &mut self.text_attention);
        for (name, layer) in [
            ("attn.to_q", &mut image.q),
            ("attn.to_k", &mut image.k),
            ("attn.to_v", &mut image.v),
            ("attn.to_out.0", &mut self.to_out),
            ("attn.add_q_proj", &mut text.q),
            ("attn.add_k_proj", &mut text.k),
            ("attn.add_v_proj", &mut text.v),
            ("ff.net.0.proj", &mut self.mlp.ff.first),
            ("ff.net.2", &mut self.mlp.ff.second),
        ] {
            f(&join(path, name), LayerMut::Linear(layer))?;
        }
        if let TextStream::Full { to_out, mlp, .. } = &mut self.text {
            f(&join(path, "attn.to_add_out"), LayerMut::Linear(to_out))?;
            f(
                &join(path, "ff_context.net.0.proj"),
                LayerMut::Linear(&mut mlp.ff.first),
            )?;
            f(&join(path, "ff_context.net.2"), LayerMut::Linear(&mut mlp.ff.second))?;
        }
        if let ImageNorm::Dual { attention, to_out, .. } = &mut self.image_norm {
            f(&join(path, "attn2.to_q"), LayerMut::Linear(&mut attention.q))?;
            f(&join(path, "attn2.to_k"), LayerMut::Linear(&mut attention.k))?;
            f(&join(path, "attn2.to_v"), LayerMut::Linear(&mut attention.v))?;
            f(&join(path, "attn2.to_out.0"), LayerMut::Linear(to_out))?;
        }
        Ok(())
    }

    /// Calls `f` with every norm that has a weight, by its name in diffusers.
    pub(super) fn visit_norms(&mut self, path: &str, f: &mut Visitor<'_>) -> Result<()> {
        let names = |attention: &str, names: [&str; 2]| names.map(|name| format!("{path}.{attention}.{name}"));
        let [q, k] = names("attn", ["norm_q", "norm_k"]);
        self.image_attention.visit_norms([&q, &k], f)?;
        let [q, k] = names("attn", ["norm_added_q", "norm_added_k"]);
        self.text_attention.visit_norms([&q, &k], f)?;
        match &mut self.image_norm {
            ImageNorm::Dual { attention, .. } => {
                let [q, k] = names("attn2", ["norm_q", "norm_k"]);
                attention.visit_norms([&q, &k], f)
            }
            ImageNorm::Single(_) => Ok(()),
        }
    }

    /// x [b, n, c] and text [b, m, c], conditioned on temb [b, c] -> the same shapes. The text of the last block is `None`.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(&self, x: &Tensor, text: &Tensor, temb: &Tensor) -> candle_core::Result<(Tensor, Option<Tensor>)> {
        let heads = Attention::new(self.sizes.heads);
        let (h, vectors, second) = self.normalised(x, temb)?;
        let (h_text, text_vectors) = match &self.text {
            TextStream::Full { norm, .. } => norm.forward(text, temb)?,
            TextStream::Last(norm) => (norm.forward(text, temb)?, Vec::new()),
        };
        let (image_qkv, text_qkv) = (self.image_attention.forward(&h)?, self.text_attention.forward(&h_text)?);
        let joined = |i: usize| nn::cat_channels(&image_qkv[i], &text_qkv[i]);
        let all = heads.forward(&joined(0)?, &joined(1)?, &joined(2)?)?;
        let image_length = x.dim(1)?;

        let [gate, shift, scale, gate_mlp] = four(&vectors)?;
        let attended = all.narrow(1, 0, image_length)?;
        let mut x = nn::gated_residual(x, gate, &self.to_out.forward(&attended)?)?;
        if let Some((attended, gate)) = second {
            x = nn::gated_residual(&x, &gate, &attended)?;
        }
        let x = self.mlp.forward(&x, shift, scale, gate_mlp)?;

        let TextStream::Full { to_out, mlp, .. } = &self.text else {
            return Ok((x, None));
        };
        let [gate, shift, scale, gate_mlp] = four(&text_vectors)?;
        let attended = all.narrow(1, image_length, text.dim(1)?)?;
        let text = nn::gated_residual(text, gate, &to_out.forward(&attended)?)?;
        let text = mlp.forward(&text, shift, scale, gate_mlp)?;
        Ok((x, Some(text)))
    }

    /// The normalised image tokens and the vectors of the stream; and, if the block has a second attention, its result and gate.
    #[allow(clippy::type_complexity)]
    fn normalised(
        &self,
        x: &Tensor,
        temb: &Tensor,
    ) -> candle_core::Result<(Tensor, Vec<Tensor>, Option<(Tensor, Tensor)>)> {
        match &self.image_norm {
            ImageNorm::Single(norm) => {
                let (h, vectors) = norm.forward(x, temb)?;
                Ok((h, vectors, None))
            }
            ImageNorm::Dual {
                norm,
                attention,
                to_out,
            } => {
                let (normalised, shift, scale, mut vectors) = norm.forward_unmodulated(x, temb)?;
                let second = vectors.split_off(4);
                let [shift_2, scale_2, gate_2] = second.as_slice() else {
                    candle_core::bail!("a second attention needs three vectors, found {}", second.len());
                };
                let [q, k, v] = attention.forward(&nn::modulate(&normalised, scale_2, shift_2)?)?;
                let attended = Attention::new(self.sizes.heads).forward(&q, &k, &v)?;
                let second = Some((to_out.forward(&attended)?, gate_2.clone()));
                Ok((nn::modulate(&normalised, &scale, &shift)?, vectors, second))
            }
        }
    }
}

/// The vectors of a stream: the gate of attention, and shift, scale and gate of the feed-forward layers.
fn four(vectors: &[Tensor]) -> candle_core::Result<&[Tensor; 4]> {
    vectors.try_into().map_err(|_| {
        candle_core::Error::Msg(format!(
            "a joint block needs four more vectors, found {}",
            vectors.len()
        ))
    })
}
