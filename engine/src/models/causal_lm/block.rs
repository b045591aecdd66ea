//! One block of a decoder: attention and a feed-forward network, each after a norm and added to its input.

use super::config::{CausalLmConfig, CausalLmFamily, FeedForwardKind, NormKind};
use super::layout::Positions;
use crate::error::Result;
use crate::nn::{self, Activation, Attention, LayerMut, LayerNorm, Linear, RmsNorm, join};
use crate::weights::Weights;
use candle_core::Tensor;

/// A norm over the features of a token.
#[derive(Clone, Debug)]
pub(super) enum Norm {
    Layer(LayerNorm),
    Rms(RmsNorm),
}

impl Norm {
    pub(super) fn new(weights: &Weights, config: &CausalLmConfig) -> Result<Self> {
        Ok(match config.norm {
            NormKind::Layer => Self::Layer(LayerNorm::new(weights, config.width, config.norm_eps)?),
            NormKind::Rms => Self::Rms(RmsNorm::new(weights, config.width, config.norm_eps)?),
        })
    }

    /// x [.., width] -> the same shape.
    pub(super) fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        match self {
            Self::Layer(norm) => norm.forward(x),
            Self::Rms(norm) => norm.forward(x),
        }
    }

    pub(super) fn visit(&mut self, path: &str, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        match self {
            Self::Layer(norm) => norm.visit(path, f),
            Self::Rms(norm) => norm.visit(path, f),
        }
    }
}

/// The projections to queries, keys and values.
#[derive(Clone, Debug)]
enum Projections {
    /// One layer, `c_attn` of GPTBigCode.
    Fused(Linear),
    /// `q_proj`, `k_proj`, `v_proj`.
    Separate([Linear; 3]),
}

/// The names of the separate projections.
const PROJECTIONS: [&str; 3] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];

/// A feed-forward network.
#[derive(Clone, Debug)]
enum FeedForward {
    /// `c_fc`, `c_proj`.
    Plain([Linear; 2]),
    /// `gate_proj`, `up_proj`, `down_proj`.
    Gated([Linear; 3]),
}

/// The names of the layers of each kind of feed-forward network.
const PLAIN: [&str; 2] = ["mlp.c_fc", "mlp.c_proj"];
const GATED: [&str; 3] = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"];

/// The names of the norms and of the output projection of attention.
struct Names {
    norms: [&'static str; 2],
    output: &'static str,
}

fn names(family: CausalLmFamily) -> Names {
    match family {
        CausalLmFamily::GptBigCode => Names {
            norms: ["ln_1", "ln_2"],
            output: "attn.c_proj",
        },
        CausalLmFamily::StarCoder2 | CausalLmFamily::Qwen2 | CausalLmFamily::Llama => Names {
            norms: ["input_layernorm", "post_attention_layernorm"],
            output: "self_attn.o_proj",
        },
    }
}

/// The name of the fused projection.
const FUSED: &str = "attn.c_attn";

/// One block.
#[derive(Clone, Debug)]
pub(super) struct Block {
    family: CausalLmFamily,
    norms: [Norm; 2],
    projections: Projections,
    output: Linear,
    feed_forward: FeedForward,
    activation: Activation,
    heads: usize,
    kv_heads: usize,
    head_width: usize,
    scales_scores: bool,
    /// The sliding window.
    pub(super) window: Option<usize>,
}

impl Block {
    /// Loads block `index`; `weights` is at its path.
    pub(super) fn new(weights: &Weights, config: &CausalLmConfig, index: usize) -> Result<Self> {
        let names = names(config.family);
        let (width, inner) = (config.width, config.inner_width);
        let (queries, keys) = (config.heads * config.head_width, config.kv_width());
        let layer = |name: &str, inputs, outputs, bias| Linear::new(&path(weights, name), inputs, outputs, bias);
        let projections = match config.family {
            CausalLmFamily::GptBigCode => Projections::Fused(layer(FUSED, width, queries + 2 * keys, config.qkv_bias)?),
            _ => {
                let [q, k, v] = PROJECTIONS;
                Projections::Separate([
                    layer(q, width, queries, config.qkv_bias)?,
                    layer(k, width, keys, config.qkv_bias)?,
                    layer(v, width, keys, config.qkv_bias)?,
                ])
            }
        };
        let bias = config.feed_forward_bias;
        let feed_forward = match config.feed_forward {
            FeedForwardKind::Plain => FeedForward::Plain([
                layer(PLAIN[0], width, inner, bias)?,
                layer(PLAIN[1], inner, width, bias)?,
            ]),
            FeedForwardKind::Gated => FeedForward::Gated([
                layer(GATED[0], width, inner, bias)?,
                layer(GATED[1], width, inner, bias)?,
                layer(GATED[2], inner, width, bias)?,
            ]),
        };
        let [first, second] = names.norms;
        Ok(Self {
            family: config.family,
            norms: [
                Norm::new(&path(weights, first), config)?,
                Norm::new(&path(weights, second), config)?,
            ],
            projections,
            output: layer(names.output, queries, width, config.attention_output_bias)?,
            feed_forward,
            activation: config.activation,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_width: config.head_width,
            scales_scores: config.scales_scores,
            window: config.windows.get(index).copied().flatten(),
        })
    }

    /// x [b, n, width] -> the same shape. `attend` computes attention with these settings from queries [b, n, heads * head width] and
    /// keys and values [b, n, kv heads * head width].
    pub(super) fn forward(
        &self,
        x: &Tensor,
        positions: &Positions,
        attend: impl FnOnce(Attention<'_>, [&Tensor; 3]) -> candle_core::Result<Tensor>,
    ) -> candle_core::Result<Tensor> {
        let [q, k, v] = self.project(&self.norms[0].forward(x)?)?;
        let (q, k) = (positions.rotate(&q)?, positions.rotate(&k)?);
        let settings = Attention {
            kv_heads: self.kv_heads,
            scale: if self.scales_scores { None } else { Some(1.0) },
            causal: true,
            ..Attention::new(self.heads)
        };
        let x = nn::add(x, &self.output.forward(&attend(settings, [&q, &k, &v])?)?)?;
        let h = self.norms[1].forward(&x)?;
        nn::add(&x, &self.feed_forward(&h)?)
    }

    /// x [b, n, width] -> queries, keys and values.
    fn project(&self, x: &Tensor) -> candle_core::Result<[Tensor; 3]> {
        let fused = match &self.projections {
            Projections::Separate([q, k, v]) => return Ok([q.forward(x)?, k.forward(x)?, v.forward(x)?]),
            Projections::Fused(layer) => layer.forward(x)?,
        };
        let (b, n, _) = fused.dims3()?;
        if self.kv_heads == 1 {
            let (queries, keys) = (self.heads * self.head_width, self.head_width);
            let part = |start, length| fused.narrow(2, start, length)?.contiguous();
            return Ok([part(0, queries)?, part(queries, keys)?, part(queries + keys, keys)?]);
        }
        // Without multi-query attention, each head has its query, key and value side by side.
        let by_head = fused.reshape((b, n, self.heads, 3, self.head_width))?;
        let part = |which| {
            let part = by_head.narrow(3, which, 1)?.contiguous()?;
            part.reshape((b, n, self.heads * self.head_width))
        };
        Ok([part(0)?, part(1)?, part(2)?])
    }

    fn feed_forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        match &self.feed_forward {
            FeedForward::Plain([up, down]) => down.forward(&self.activation.forward(&up.forward(x)?)?),
            FeedForward::Gated([gate, up, down]) => {
                down.forward(&(self.activation.forward(&gate.forward(x)?)? * up.forward(x)?)?)
            }
        }
    }

    /// Calls `f` with every linear layer; `at` is the block's path.
    pub(super) fn visit_layers(&mut self, at: &str, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        let mut visit = |name: &str, layer: &mut Linear| f(&join(at, name), LayerMut::Linear(layer));
        match &mut self.projections {
            Projections::Fused(layer) => visit(FUSED, layer)?,
            Projections::Separate(layers) => {
                for (name, layer) in PROJECTIONS.iter().zip(layers) {
                    visit(name, layer)?;
                }
            }
        }
        visit(names(self.family).output, &mut self.output)?;
        match &mut self.feed_forward {
            FeedForward::Plain(layers) => {
                for (name, layer) in PLAIN.iter().zip(layers) {
                    visit(name, layer)?;
                }
            }
            FeedForward::Gated(layers) => {
                for (name, layer) in GATED.iter().zip(layers) {
                    visit(name, layer)?;
                }
            }
        }
        Ok(())
    }

    /// Calls `f` with both norms; `at` is the block's path.
    pub(super) fn visit_norms(&mut self, at: &str, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        for (name, norm) in names(self.family).norms.iter().zip(&mut self.norms) {
            norm.visit(&join(at, name), f)?;
        }
        Ok(())
    }
}

/// The weights at a path of several names.
fn path(weights: &Weights, name: &str) -> Weights {
    name.split('.').fold(weights.clone(), |weights, name| weights.pp(name))
}
