//! The encoder.

use super::bias::relative_position_bias;
use crate::checkpointing::{BlockSequence, Checkpointing};
use crate::error::Result;
use crate::models::config::check_sizes;
use crate::nn::{self, Activation, Attention, Embedding, LayerMut, Linear, RmsNorm, VisitLayers, padding_bias};
use crate::weights::{Init, Weights};
use candle_core::{DType, Tensor};
use serde::Deserialize;
use std::sync::Arc;

/// `config.json` of a T5 encoder. Missing keys have the values of T5 v1.1 XXL.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub struct T5Config {
    /// The number of token ids.
    pub vocab_size: usize,
    /// Features per token.
    pub d_model: usize,
    /// Features of a head.
    pub d_kv: usize,
    /// Features of the feed-forward's hidden layer.
    pub d_ff: usize,
    /// The number of layers.
    pub num_layers: usize,
    /// Attention heads per layer.
    pub num_heads: usize,
    /// Buckets of distances between tokens.
    pub relative_attention_num_buckets: usize,
    /// The distance from which all tokens share a bucket.
    pub relative_attention_max_distance: usize,
    /// The epsilon of the norms.
    pub layer_norm_epsilon: f64,
    /// `gated-gelu`; the ungated feed-forward of T5 1.0 is not supported.
    pub feed_forward_proj: String,
}

impl Default for T5Config {
    fn default() -> Self {
        Self {
            vocab_size: 32128,
            d_model: 4096,
            d_kv: 64,
            d_ff: 10240,
            num_layers: 24,
            num_heads: 64,
            relative_attention_num_buckets: 32,
            relative_attention_max_distance: 128,
            layer_norm_epsilon: 1e-6,
            feed_forward_proj: "gated-gelu".into(),
        }
    }
}

impl T5Config {
    /// Checks the sizes that layers are made of.
    fn check_sizes(&self) -> std::result::Result<(), String> {
        check_sizes([
            ("vocab_size", self.vocab_size),
            ("d_model", self.d_model),
            ("d_ff", self.d_ff),
            ("num_heads", self.num_heads),
            ("num_heads times d_kv", self.num_heads.saturating_mul(self.d_kv)),
            ("relative_attention_num_buckets", self.relative_attention_num_buckets),
        ])?;
        let (buckets, distance) = (
            self.relative_attention_num_buckets,
            self.relative_attention_max_distance,
        );
        if buckets < 4 {
            return Err("there are too few buckets of distances".into());
        }
        // A quarter of the buckets is for one distance each; the others share the distances from there to the largest.
        let single = buckets / 4;
        if distance <= single {
            return Err(format!(
                "`relative_attention_max_distance` is {distance}, expected more than a quarter of the buckets, {single}"
            ));
        }
        Ok(())
    }
}

/// T5's encoder.
#[derive(Clone, Debug)]
pub struct T5EncoderModel {
    embedding: Embedding,
    layers: Vec<Arc<Layer>>,
    final_norm: RmsNorm,
    /// [buckets, heads], f32: the position bias, which the first layer has for all.
    bias_table: Tensor,
    max_distance: usize,
    /// Whether and where gradient checkpointing is used.
    pub checkpointing: Checkpointing,
}

#[derive(Clone, Debug)]
struct Layer {
    attention_norm: RmsNorm,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    heads: usize,
    ff_norm: RmsNorm,
    wi_0: Linear,
    wi_1: Linear,
    wo: Linear,
}

impl Layer {
    fn new(weights: &Weights, config: &T5Config) -> Result<Self> {
        let (width, inner) = (config.d_model, config.num_heads * config.d_kv);
        let attention = weights.pp("layer.0.SelfAttention");
        let feed_forward = weights.pp("layer.1.DenseReluDense");
        let norm = |layer: &str| RmsNorm::new(&weights.pp(layer).pp("layer_norm"), width, config.layer_norm_epsilon);
        let linear =
            |parent: &Weights, name: &str, inputs, outputs| Linear::new(&parent.pp(name), inputs, outputs, false);
        Ok(Self {
            attention_norm: norm("layer.0")?,
            q: linear(&attention, "q", width, inner)?,
            k: linear(&attention, "k", width, inner)?,
            v: linear(&attention, "v", width, inner)?,
            o: linear(&attention, "o", inner, width)?,
            heads: config.num_heads,
            ff_norm: norm("layer.1")?,
            wi_0: linear(&feed_forward, "wi_0", width, config.d_ff)?,
            wi_1: linear(&feed_forward, "wi_1", width, config.d_ff)?,
            // As in transformers (`_keep_in_fp32_modules`): its sums exceed the largest number of f16.
            wo: match feed_forward.dtype() {
                DType::F16 => linear(&feed_forward.in_dtype(DType::F32), "wo", config.d_ff, width)?,
                _ => linear(&feed_forward, "wo", config.d_ff, width)?,
            },
        })
    }

    /// x [b, n, width] -> the same shape. `bias`: [b or 1, heads, n, n].
    fn forward(&self, x: &Tensor, bias: &Tensor) -> candle_core::Result<Tensor> {
        let h = self.attention_norm.forward(x)?;
        // The scores are not scaled.
        let attention = Attention {
            scale: Some(1.0),
            bias: Some(bias),
            ..Attention::new(self.heads)
        };
        let h = attention.forward(&self.q.forward(&h)?, &self.k.forward(&h)?, &self.v.forward(&h)?)?;
        let x = within_f16(nn::add(x, &self.o.forward(&h)?)?)?;
        let h = self.ff_norm.forward(&x)?;
        let gate = Activation::GeluTanh.forward(&self.wi_0.forward(&h)?)?;
        let h = (gate * self.wi_1.forward(&h)?)?;
        let h = self.wo.forward(&h.to_dtype(self.wo.weight.dtype())?)?;
        within_f16(nn::add(&x, &h.to_dtype(x.dtype())?)?)
    }
}

/// Hidden states in f16 without infinite numbers, as transformers limits them; others as they are.
fn within_f16(x: Tensor) -> candle_core::Result<Tensor> {
    const LIMIT: f32 = 64_504.0;
    match x.dtype() {
        DType::F16 => x.clamp(-LIMIT, LIMIT),
        _ => Ok(x),
    }
}

impl T5EncoderModel {
    /// Loads the encoder.
    ///
    /// # Errors
    /// When the config is not supported, or a tensor is missing or has another shape.
    pub fn new(weights: &Weights, config: &T5Config) -> Result<Self> {
        if config.feed_forward_proj != "gated-gelu" {
            return Err(weights.config_error(format!(
                "feed_forward_proj `{}` is not supported: only `gated-gelu` (T5 v1.1) is",
                config.feed_forward_proj
            )));
        }
        config.check_sizes().map_err(|message| weights.config_error(message))?;
        let embedding = match ["shared", "encoder.embed_tokens"] {
            [shared, embed] if !weights.pp(shared).contains("weight") => weights.pp(embed),
            [shared, _] => weights.pp(shared),
        };
        let encoder = weights.pp("encoder");
        let blocks = (0..config.num_layers).map(|i| Layer::new(&encoder.pp("block").pp(i), config).map(Arc::new));
        let bias = encoder.pp("block.0.layer.0.SelfAttention.relative_attention_bias");
        let table = (config.relative_attention_num_buckets, config.num_heads);
        Ok(Self {
            embedding: Embedding::new(&embedding, config.vocab_size, config.d_model)?,
            layers: blocks.collect::<Result<_>>()?,
            final_norm: RmsNorm::new(
                &encoder.pp("final_layer_norm"),
                config.d_model,
                config.layer_norm_epsilon,
            )?,
            bias_table: bias
                .get_with(table, "weight", Init::Normal(0.02))?
                .to_dtype(DType::F32)?,
            max_distance: config.relative_attention_max_distance,
            checkpointing: Checkpointing::default(),
        })
    }

    /// ids [b, n] -> [b, n, width]. `lengths`: the tokens of each text, behind which its padding is masked; without them no token is
    /// masked, as in diffusers' pipelines.
    ///
    /// # Errors
    /// When an id is not in the vocabulary, or there is another number of lengths than of texts.
    pub fn forward(&self, ids: &Tensor, lengths: Option<&[usize]>) -> candle_core::Result<Tensor> {
        let places = ids.dim(1)?;
        // A block, at whose end the bias without the mask is freed: of T5 XXL it has 64 MiB.
        let bias = {
            let of_positions = relative_position_bias(&self.bias_table, places, self.max_distance)?;
            match lengths {
                Some(lengths) => {
                    of_positions.broadcast_add(&padding_bias(lengths, places, 0, of_positions.device())?)?
                }
                None => of_positions,
            }
        };
        let mut sequence = BlockSequence::new();
        let mut x = sequence.input(self.embedding.forward(ids)?);
        for (index, layer) in self.layers.iter().enumerate() {
            let (layer, bias) = (Arc::clone(layer), bias.clone());
            x = sequence.add(format!("layer {index}"), [x], move |[x]| layer.forward(x, &bias));
        }
        self.final_norm.forward(&sequence.run(self.checkpointing, x)?)
    }
}

impl VisitLayers for T5EncoderModel {
    fn visit_layers(&mut self, f: &mut dyn FnMut(&str, LayerMut<'_>) -> Result<()>) -> Result<()> {
        for (index, layer) in self.layers.iter_mut().enumerate() {
            let layer = Arc::make_mut(layer);
            let block = format!("encoder.block.{index}.layer");
            for (name, linear) in [
                ("0.SelfAttention.q", &mut layer.q),
                ("0.SelfAttention.k", &mut layer.k),
                ("0.SelfAttention.v", &mut layer.v),
                ("0.SelfAttention.o", &mut layer.o),
                ("1.DenseReluDense.wi_0", &mut layer.wi_0),
                ("1.DenseReluDense.wi_1", &mut layer.wi_1),
                ("1.DenseReluDense.wo", &mut layer.wo),
            ] {
                f(&format!("{block}.{name}"), LayerMut::Linear(linear))?;
            }
        }
        Ok(())
    }
}
