//! A layer of a vision transformer, and what the transformers here have in common.

use crate::checkpointing::{BlockSequence, Checkpointing};
use crate::error::Result;
use crate::nn::{Activation, Attention, LayerNorm, Linear, RmsNorm, Rotary, add, gated_residual};
use crate::weights::Weights;
use candle_core::Tensor;
use std::sync::Arc;

/// The mean and the deviation of the images of ImageNet, for red, green and blue.
pub(super) const IMAGENET_MEAN: [f32; 3] = [0.485, 0.456, 0.406];
pub(super) const IMAGENET_DEVIATION: [f32; 3] = [0.229, 0.224, 0.225];

/// The names of a layer's tensors in the files of a model.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerNames {
    pub(super) norms: [&'static str; 2],
    /// Those of the queries, keys, values and results.
    pub(super) attention: [&'static str; 4],
    /// Those of the RMS norms of the heads of queries and keys, if there are any.
    pub(super) head_norms: Option<[&'static str; 2]>,
    /// Those of the gates, if there are any, of the first and of the last layer of the MLP.
    pub(super) mlp: [&'static str; 3],
    /// Factors of what the attention and the MLP add, where they have one.
    pub(super) scales: [Option<&'static str>; 2],
}

/// How the tokens are normalised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NormKind {
    Layer,
    Rms,
}

/// The sizes of a layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerSizes {
    pub(super) width: usize,
    pub(super) hidden: usize,
    pub(super) heads: usize,
    /// Heads of keys and values; each is used by as many heads of queries.
    pub(super) kv_heads: usize,
    pub(super) norm: NormKind,
    pub(super) eps: f64,
    pub(super) activation: Activation,
    /// Whether the MLP has gates.
    pub(super) is_gated: bool,
    /// Whether the queries, keys, values and results have a bias.
    pub(super) attention_bias: [bool; 4],
    /// Whether the layers of the MLP have one.
    pub(super) mlp_bias: bool,
}

/// A norm over the features of a token.
#[derive(Clone, Debug)]
enum Norm {
    Layer(LayerNorm),
    Rms(RmsNorm),
}

impl Norm {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        match self {
            Self::Layer(norm) => norm.forward(x),
            Self::Rms(norm) => norm.forward(x),
        }
    }
}

/// A layer: attention and an MLP, each after a norm.
#[derive(Clone, Debug)]
pub(super) struct VisionLayer {
    heads: [usize; 2],
    norms: [Norm; 2],
    /// Of the queries, keys, values and results.
    attention: [Linear; 4],
    head_norms: Option<[RmsNorm; 2]>,
    gate: Option<Linear>,
    mlp: [Linear; 2],
    activation: Activation,
    /// [width] each.
    scales: [Option<Tensor>; 2],
}

impl VisionLayer {
    pub(super) fn new(weights: &Weights, names: &LayerNames, sizes: &LayerSizes) -> Result<Self> {
        let (width, hidden) = (sizes.width, sizes.hidden);
        let kv_width = width / sizes.heads * sizes.kv_heads;
        let norm = |name: &str| -> Result<Norm> {
            Ok(match sizes.norm {
                NormKind::Layer => Norm::Layer(LayerNorm::new(&weights.pp(name), width, sizes.eps)?),
                NormKind::Rms => Norm::Rms(RmsNorm::new(&weights.pp(name), width, sizes.eps)?),
            })
        };
        let head_norm = |name: &str| RmsNorm::new(&weights.pp(name), width / sizes.heads, sizes.eps);
        let head_norms = names
            .head_norms
            .map(|[q, k]| -> Result<_> { Ok([head_norm(q)?, head_norm(k)?]) });
        let linear = |name: &str, inputs, outputs, bias| Linear::new(&weights.pp(name), inputs, outputs, bias);
        let [q, k, v, o] = names.attention;
        let [q_bias, k_bias, v_bias, o_bias] = sizes.attention_bias;
        let [gate, up, down] = names.mlp;
        let scale = |name: Option<&str>| name.map(|name| weights.get(width, name)).transpose();
        Ok(Self {
            heads: [sizes.heads, sizes.kv_heads],
            norms: [norm(names.norms[0])?, norm(names.norms[1])?],
            attention: [
                linear(q, width, width, q_bias)?,
                linear(k, width, kv_width, k_bias)?,
                linear(v, width, kv_width, v_bias)?,
                linear(o, width, width, o_bias)?,
            ],
            head_norms: head_norms.transpose()?,
            gate: sizes
                .is_gated
                .then(|| linear(gate, width, hidden, sizes.mlp_bias))
                .transpose()?,
            mlp: [
                linear(up, width, hidden, sizes.mlp_bias)?,
                linear(down, hidden, width, sizes.mlp_bias)?,
            ],
            activation: sizes.activation,
            scales: [scale(names.scales[0])?, scale(names.scales[1])?],
        })
    }

    /// x [b, tokens, width] -> the same shape.
    fn forward(&self, x: &Tensor, rotary: Option<&Rotary>) -> candle_core::Result<Tensor> {
        let h = self.norms[0].forward(x)?;
        let [q, k, v, o] = &self.attention;
        let prepared = |x: Tensor, which: usize| -> candle_core::Result<Tensor> {
            let x = match &self.head_norms {
                Some(norms) => norms[which].forward(&x)?,
                None => x,
            };
            match rotary {
                Some(rotary) => rotary.forward(&x),
                None => Ok(x),
            }
        };
        let (q, k) = (prepared(q.forward(&h)?, 0)?, prepared(k.forward(&h)?, 1)?);
        let [heads, kv_heads] = self.heads;
        let attention = Attention {
            kv_heads,
            ..Attention::new(heads)
        };
        let h = o.forward(&attention.forward(&q, &k, &v.forward(&h)?)?)?;
        let x = self.plus(x, &h, 0)?;
        let h = self.norms[1].forward(&x)?;
        let [up, down] = &self.mlp;
        let inner = match &self.gate {
            Some(gate) => (self.activation.forward(&gate.forward(&h)?)? * up.forward(&h)?)?,
            None => self.activation.forward(&up.forward(&h)?)?,
        };
        self.plus(&x, &down.forward(&inner)?, 1)
    }

    fn plus(&self, x: &Tensor, change: &Tensor, index: usize) -> candle_core::Result<Tensor> {
        match self.scales.get(index).and_then(Option::as_ref) {
            Some(scale) => {
                let scale = scale.broadcast_as((x.dim(0)?, x.dim(2)?))?.contiguous()?;
                gated_residual(x, &scale, change)
            }
            None => add(change, x),
        }
    }
}

/// The activation with this name in a config.
///
/// # Errors
/// A sentence that names the key.
pub(super) fn activation_of(name: &str) -> std::result::Result<Activation, String> {
    Activation::from_name(name).ok_or_else(|| format!("`hidden_act` is `{name}`, which is not supported"))
}

/// Runs layers one after the other. `checkpointing`: whether each of them runs again in the backward pass.
pub(super) fn run_layers(
    layers: &[Arc<VisionLayer>],
    x: Tensor,
    rotary: Option<&Rotary>,
    checkpointing: Checkpointing,
) -> candle_core::Result<Tensor> {
    let last = [layers.len().saturating_sub(1)];
    match layers.is_empty() {
        true => Ok(x),
        false => {
            let results = run_layers_with_results(layers, x, rotary, checkpointing, &last)?;
            results
                .into_iter()
                .next()
                .ok_or_else(|| candle_core::Error::Msg("a vision transformer has no result".into()))
        }
    }
}

/// As [`run_layers`], with the tokens after each of these layers.
pub(super) fn run_layers_with_results(
    layers: &[Arc<VisionLayer>],
    x: Tensor,
    rotary: Option<&Rotary>,
    checkpointing: Checkpointing,
    results: &[usize],
) -> candle_core::Result<Vec<Tensor>> {
    let mut sequence = BlockSequence::new();
    let mut x = sequence.input(x);
    let mut taken = Vec::with_capacity(results.len());
    for (i, layer) in layers.iter().enumerate() {
        let (layer, rotary) = (Arc::clone(layer), rotary.cloned());
        x = sequence.add(format!("layer {i}"), [x], move |[x]| layer.forward(x, rotary.as_ref()));
        if results.contains(&i) {
            taken.push(x);
        }
    }
    sequence.run_all(checkpointing, &taken)
}

/// The height and width to which an image is scaled: multiples of the side of a patch, with at most `most` pixels, as in ai-toolkit.
pub(super) fn scaled_size((height, width): (usize, usize), patch: usize, most: usize) -> (usize, usize) {
    let (mut rows, mut columns) = (height, width);
    if height * width > most {
        let factor = (most as f64 / (height * width) as f64).sqrt();
        (rows, columns) = ((height as f64 * factor) as usize, (width as f64 * factor) as usize);
    }
    // A thin image keeps a row of patches.
    ((rows / patch).max(1) * patch, (columns / patch).max(1) * patch)
}

/// Checks that the heads of a transformer have whole numbers of features.
///
/// # Errors
/// A sentence that names the keys.
pub(super) fn check_heads(hidden_size: usize, heads: usize) -> std::result::Result<(), String> {
    match hidden_size.is_multiple_of(heads) {
        true => Ok(()),
        false => Err(format!(
            "`hidden_size` is {hidden_size}, expected a multiple of `num_attention_heads` ({heads})"
        )),
    }
}

/// Images [b, 3, h, w] from -1 to 1 as numbers from 0 to 1, with those beyond clamped.
pub(super) fn from_zero_to_one(images: &Tensor) -> candle_core::Result<Tensor> {
    ((images + 1.0)? * 0.5)?.clamp(0f32, 1f32)
}

/// Images [b, 3, h, w], less the mean and divided by the deviation of each colour.
pub(super) fn standardised(images: &Tensor, mean: [f32; 3], deviation: [f32; 3]) -> candle_core::Result<Tensor> {
    let row = |values: [f32; 3]| Tensor::new(&values, images.device())?.reshape((1, 3, 1, 1));
    images.broadcast_sub(&row(mean)?)?.broadcast_div(&row(deviation)?)
}
