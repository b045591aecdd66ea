//! The model without its output layer: embeddings and decoder layers.

use crate::checkpointing::{BlockSequence, Checkpointing};
use crate::error::Result;
use crate::models::config::check_sizes;
use crate::nn::{
    self, Activation, Attention, Embedding, LayerMut, Linear, RmsNorm, Rotary, RotaryPairs, VisitLayers, key_bias,
};
use crate::weights::Weights;
use candle_core::Tensor;
use serde::Deserialize;
use std::sync::Arc;

/// `config.json` of a Qwen3 model. Missing keys have the values of transformers' class.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub struct Qwen3Config {
    /// The number of token ids.
    pub vocab_size: usize,
    /// Features per token.
    pub hidden_size: usize,
    /// Features of the feed-forward's hidden layer.
    pub intermediate_size: usize,
    /// The number of layers.
    pub num_hidden_layers: usize,
    /// Query heads per layer.
    pub num_attention_heads: usize,
    /// Heads of keys and values per layer.
    pub num_key_value_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// The activation of the feed-forward.
    pub hidden_act: String,
    /// The epsilon of the norms.
    pub rms_norm_eps: f64,
    /// Whether the projections of attention have a bias.
    pub attention_bias: bool,
    /// Whether some layers attend only to near tokens; not supported.
    pub use_sliding_window: bool,
    /// The base of the rotary embedding's wavelengths, as transformers 4 writes it.
    pub rope_theta: Option<f64>,
    /// The rotary embedding, as transformers 5 writes it.
    pub rope_parameters: Option<RopeParameters>,
    /// A scaled rotary embedding, as transformers 4 writes it; only the default is supported.
    pub rope_scaling: Option<RopeParameters>,
}

/// The parameters of the rotary embedding.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct RopeParameters {
    /// The base of the wavelengths.
    pub rope_theta: Option<f64>,
    /// `default`: the positions are not scaled.
    pub rope_type: Option<String>,
    /// An older name of `rope_type`; many files have both.
    #[serde(rename = "type")]
    pub kind: Option<String>,
}

impl Default for Qwen3Config {
    fn default() -> Self {
        Self {
            vocab_size: 151_936,
            hidden_size: 4096,
            intermediate_size: 22_016,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: 32,
            head_dim: 128,
            hidden_act: "silu".into(),
            rms_norm_eps: 1e-6,
            attention_bias: false,
            use_sliding_window: false,
            rope_theta: None,
            rope_parameters: None,
            rope_scaling: None,
        }
    }
}

impl Qwen3Config {
    /// The config of Qwen3 4B, Z-Image's text encoder.
    #[must_use]
    pub fn qwen3_4b() -> Self {
        Self {
            hidden_size: 2560,
            intermediate_size: 9728,
            num_hidden_layers: 36,
            num_key_value_heads: 8,
            rope_theta: Some(1_000_000.0),
            ..Self::default()
        }
    }

    /// The base of the rotary embedding's wavelengths.
    #[must_use]
    pub fn theta(&self) -> f64 {
        let given = self.rope_parameters.as_ref().and_then(|rope| rope.rope_theta);
        given.or(self.rope_theta).unwrap_or(10_000.0)
    }

    /// What of this config is not supported.
    fn unsupported(&self) -> Option<String> {
        let scaled = [&self.rope_parameters, &self.rope_scaling].into_iter().flatten();
        let scaled = scaled
            .filter_map(|rope| rope.rope_type.as_deref().or(rope.kind.as_deref()))
            .find(|kind| *kind != "default");
        if let Some(kind) = scaled {
            return Some(format!(
                "the rotary embedding `{kind}` is not supported: only `default` is"
            ));
        }
        if self.use_sliding_window {
            return Some("use_sliding_window is not supported".into());
        }
        let heads = [self.num_attention_heads, self.num_key_value_heads, self.head_dim];
        if heads.contains(&0)
            || !self.num_attention_heads.is_multiple_of(self.num_key_value_heads)
            || !self.head_dim.is_multiple_of(2)
        {
            return Some(format!(
                "num_attention_heads {}, num_key_value_heads {} and head_dim {} do not fit together",
                heads[0], heads[1], heads[2]
            ));
        }
        let queries = self.num_attention_heads.saturating_mul(self.head_dim);
        check_sizes([
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads times head_dim", queries),
        ])
        .err()
    }
}

/// Qwen3 without its output layer.
#[derive(Clone, Debug)]
pub struct Qwen3Model {
    embedding: Embedding,
    layers: Vec<Arc<Layer>>,
    /// `None`: the states are those before the left-out layers, without a norm.
    final_norm: Option<RmsNorm>,
    head_width: usize,
    theta: f64,
    /// Whether and where gradient checkpointing is used.
    pub checkpointing: Checkpointing,
}

#[derive(Clone, Debug)]
struct Layer {
    input_norm: RmsNorm,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    heads: usize,
    kv_heads: usize,
    feed_forward_norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
    activation: Activation,
}

impl Layer {
    fn new(weights: &Weights, config: &Qwen3Config, activation: Activation) -> Result<Self> {
        let (width, head) = (config.hidden_size, config.head_dim);
        let (attention, mlp) = (weights.pp("self_attn"), weights.pp("mlp"));
        let [queries, keys] = [config.num_attention_heads * head, config.num_key_value_heads * head];
        let project =
            |name: &str, inputs, outputs| Linear::new(&attention.pp(name), inputs, outputs, config.attention_bias);
        let linear = |name: &str, inputs, outputs| Linear::new(&mlp.pp(name), inputs, outputs, false);
        let norm = |weights: Weights, width| RmsNorm::new(&weights, width, config.rms_norm_eps);
        Ok(Self {
            input_norm: norm(weights.pp("input_layernorm"), width)?,
            q: project("q_proj", width, queries)?,
            k: project("k_proj", width, keys)?,
            v: project("v_proj", width, keys)?,
            o: project("o_proj", queries, width)?,
            q_norm: norm(attention.pp("q_norm"), head)?,
            k_norm: norm(attention.pp("k_norm"), head)?,
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            feed_forward_norm: norm(weights.pp("post_attention_layernorm"), width)?,
            gate: linear("gate_proj", width, config.intermediate_size)?,
            up: linear("up_proj", width, config.intermediate_size)?,
            down: linear("down_proj", config.intermediate_size, width)?,
            activation,
        })
    }

    /// x [b, n, width] -> the same shape. `bias`: of masked keys, [b, 1, 1, n].
    fn forward(&self, x: &Tensor, rotary: &Rotary, bias: Option<&Tensor>) -> candle_core::Result<Tensor> {
        let h = self.input_norm.forward(x)?;
        let q = rotary.forward(&self.q_norm.forward(&self.q.forward(&h)?)?)?;
        let k = rotary.forward(&self.k_norm.forward(&self.k.forward(&h)?)?)?;
        let attention = Attention {
            kv_heads: self.kv_heads,
            causal: true,
            bias,
            ..Attention::new(self.heads)
        };
        let h = attention.forward(&q, &k, &self.v.forward(&h)?)?;
        let x = nn::add(x, &self.o.forward(&h)?)?;
        let h = self.feed_forward_norm.forward(&x)?;
        let h = (self.activation.forward(&self.gate.forward(&h)?)? * self.up.forward(&h)?)?;
        nn::add(&x, &self.down.forward(&h)?)
    }
}

impl Qwen3Model {
    /// Loads the model without its last `skipped` layers. With all layers, the states are those after the final norm.
    ///
    /// # Errors
    /// When the config is not supported, or a tensor is missing or has another shape.
    pub fn new(weights: &Weights, config: &Qwen3Config, skipped: usize) -> Result<Self> {
        if let Some(reason) = config.unsupported() {
            return Err(weights.config_error(reason));
        }
        let activation = Activation::from_name(&config.hidden_act)
            .ok_or_else(|| weights.config_error(format!("hidden_act `{}` is not supported", config.hidden_act)))?;
        let count = config.num_hidden_layers.checked_sub(skipped).ok_or_else(|| {
            weights.config_error(format!(
                "num_hidden_layers {} is less than the {skipped} layers that are not used",
                config.num_hidden_layers
            ))
        })?;
        // A model with an output layer has its other tensors below `model`.
        let weights = match weights.pp("model.embed_tokens").contains("weight") {
            true => weights.pp("model"),
            false => weights.clone(),
        };
        let layers = (0..count).map(|i| Layer::new(&weights.pp("layers").pp(i), config, activation).map(Arc::new));
        Ok(Self {
            embedding: Embedding::new(&weights.pp("embed_tokens"), config.vocab_size, config.hidden_size)?,
            layers: layers.collect::<Result<_>>()?,
            final_norm: match skipped {
                0 => Some(RmsNorm::new(
                    &weights.pp("norm"),
                    config.hidden_size,
                    config.rms_norm_eps,
                )?),
                _ => None,
            },
            head_width: config.head_dim,
            theta: config.theta(),
            checkpointing: Checkpointing::default(),
        })
    }

    /// ids [b, n] -> [b, n, width]. A token attends to itself and to the tokens before it for which `mask` [b, n] is not 0.
    /// Without a mask, padding at the end of a text changes nothing before it.
    ///
    /// # Errors
    /// When an id is not in the vocabulary, or the mask has another shape.
    pub fn forward(&self, ids: &Tensor, mask: Option<&Tensor>) -> candle_core::Result<Tensor> {
        let rotary = Rotary::for_sequence(ids.dim(1)?, self.head_width, self.theta, RotaryPairs::Halves)?;
        let bias = mask.map(key_bias).transpose()?;
        let mut sequence = BlockSequence::new();
        let mut x = sequence.input(self.embedding.forward(ids)?);
        for (index, layer) in self.layers.iter().enumerate() {
            let (layer, rotary, bias) = (Arc::clone(layer), rotary.clone(), bias.clone());
            x = sequence.add(format!("layer {index}"), [x], move |[x]| {
                layer.forward(x, &rotary, bias.as_ref())
            });
        }
        let x = sequence.run(self.checkpointing, x)?;
        match &self.final_norm {
            Some(norm) => norm.forward(&x),
            None => Ok(x),
        }
    }
}

impl VisitLayers for Qwen3Model {
    fn visit_layers(&mut self, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        for (index, layer) in self.layers.iter_mut().enumerate() {
            let layer = Arc::make_mut(layer);
            for (name, linear) in [
                ("self_attn.q_proj", &mut layer.q),
                ("self_attn.k_proj", &mut layer.k),
                ("self_attn.v_proj", &mut layer.v),
                ("self_attn.o_proj", &mut layer.o),
                ("mlp.gate_proj", &mut layer.gate),
                ("mlp.up_proj", &mut layer.up),
                ("mlp.down_proj", &mut layer.down),
            ] {
                f(&format!("layers.{index}.{name}"), LayerMut::Linear(linear))?;
            }
        }
        Ok(())
    }
}
