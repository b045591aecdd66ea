//! The shapes of diffusion transformers and of the language models that encode their prompts, from their `config.json` files.

use super::config_values::{MAX_COUNT, MAX_WIDTH, flag, number};
use crate::gguf::MetadataValue;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// The most blocks of a transformer or a language model.
const MAX_TRANSFORMER_LAYERS: u32 = 512;

/// The kind of a diffusion transformer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransformerKind {
    /// There is none: the model has a U-Net.
    #[default]
    None,
    /// FLUX.1.
    Flux,
    /// Chroma.
    Chroma,
    /// Stable Diffusion 3 and 3.5.
    Sd3,
    /// Z-Image.
    ZImage,
}

/// The shapes of a diffusion transformer. Missing numbers are 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct TransformerShapes {
    /// Which transformer it is.
    pub kind: TransformerKind,
    /// Channels of the latents.
    pub in_channels: u32,
    /// Rows and columns of latents that make one token.
    pub patch: u32,
    /// Blocks: the double blocks of FLUX.1 and Chroma, the joint blocks of Stable Diffusion 3.5, the blocks of image and caption of Z-Image.
    pub blocks: u32,
    /// The single blocks of FLUX.1 and Chroma; of Z-Image the blocks of the image alone, which are as many as those of the caption alone.
    pub single_blocks: u32,
    /// Blocks with a second attention between image tokens, which are the first ones.
    pub dual_blocks: u32,
    /// Attention heads.
    pub heads: u32,
    /// Features of a head.
    pub head_width: u32,
    /// Features of an encoded text token.
    pub context: u32,
    /// Features of the pooled text; 0: it has none.
    pub pooled: u32,
    /// Whether it is conditioned on a guidance scale.
    pub guidance: bool,
    /// Whether queries and keys are normalised.
    pub qk_norm: bool,
    /// Rows and columns of its table of positions; 0: it has none.
    pub positions: u32,
    /// Layers of the network that makes every modulation vector (Chroma's approximator); 0: it has none.
    pub approximator_layers: u32,
    /// Features of these layers.
    pub approximator_width: u32,
    /// Whether T5 reads the short prompts of FLUX.1-schnell: 256 tokens instead of 512.
    pub short_prompts: bool,
}

/// The kind of a language model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LanguageKind {
    /// There is none.
    #[default]
    None,
    /// T5's encoder.
    T5,
    /// Qwen3.
    Qwen3,
    /// A model that generates texts: StarCoder, StarCoder2, Qwen2 or Llama.
    Decoder,
}

/// The most tokens of a text that a prediction considers.
const MAX_POSITIONS: u32 = 1 << 24;

/// The shapes of a language model that encodes prompts or generates texts. Missing numbers are 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct LanguageShapes {
    /// Which language model it is.
    pub kind: LanguageKind,
    /// Features of a token.
    pub width: u32,
    /// Attention heads.
    pub heads: u32,
    /// Heads of keys and values.
    pub kv_heads: u32,
    /// Features of a head.
    pub head_width: u32,
    /// Features of the hidden layer of the feed-forward.
    pub intermediate: u32,
    /// Layers.
    pub layers: u32,
    /// Token ids.
    pub vocabulary: u32,
    /// For a model that generates texts: the tokens of the longest text.
    pub positions: u32,
    /// For such a model: the tokens of its sliding window; 0: it has none.
    pub window: u32,
    /// For such a model: whether it has a table of learned positions, and one layer for queries, keys and values (StarCoder).
    pub learned_positions: bool,
    /// For such a model: whether its feed-forward networks have a gate, and its norms no bias (Qwen2, Llama).
    pub gated: bool,
    /// For such a model: whether the output layer has weights of its own.
    pub untied: bool,
}

impl TransformerShapes {
    /// Features of a token in the blocks.
    #[must_use]
    pub fn width(&self) -> f64 {
        f64::from(self.heads) * f64::from(self.head_width)
    }

    /// Numbers of the latents that make one token.
    #[must_use]
    pub fn token(&self) -> f64 {
        f64::from(self.in_channels) * f64::from(self.patch).powi(2)
    }

    /// Reads a `transformer/config.json`. `None`: it is of another class.
    pub(super) fn read(config: &Value) -> Option<Self> {
        let n = |key: &str, usual: u32| number(config, key, usual);
        let shapes = match config.get("_class_name")?.as_str()? {
            "FluxTransformer2DModel" => Self {
                kind: TransformerKind::Flux,
                in_channels: n("in_channels", 64)? / 4,
                patch: 2,
                blocks: n("num_layers", 19)?,
                single_blocks: n("num_single_layers", 38)?,
                heads: n("num_attention_heads", 24)?,
                head_width: n("attention_head_dim", 128)?,
                context: n("joint_attention_dim", 4096)?,
                pooled: n("pooled_projection_dim", 768)?,
                guidance: flag(config, "guidance_embeds", false),
                qk_norm: true,
                ..Self::default()
            },
            "ChromaTransformer2DModel" => Self {
                kind: TransformerKind::Chroma,
                in_channels: n("in_channels", 64)? / 4,
                patch: 2,
                blocks: n("num_layers", 19)?,
                single_blocks: n("num_single_layers", 38)?,
                heads: n("num_attention_heads", 24)?,
                head_width: n("attention_head_dim", 128)?,
                context: n("joint_attention_dim", 4096)?,
                qk_norm: true,
                approximator_layers: n("approximator_layers", 5)?,
                approximator_width: n("approximator_hidden_dim", 5120)?,
                ..Self::default()
            },
            "SD3Transformer2DModel" => Self {
                kind: TransformerKind::Sd3,
                in_channels: n("in_channels", 16)?,
                patch: n("patch_size", 2)?,
                blocks: n("num_layers", 18)?,
                dual_blocks: match config.get("dual_attention_layers") {
                    None | Some(Value::Null) => 0,
                    Some(layers) => u32::try_from(layers.as_array()?.len()).ok()?,
                },
                heads: n("num_attention_heads", 18)?,
                head_width: n("attention_head_dim", 64)?,
                context: n("joint_attention_dim", 4096)?,
                pooled: n("pooled_projection_dim", 2048)?,
                qk_norm: config.get("qk_norm").is_some_and(Value::is_string),
                positions: n("pos_embed_max_size", 96)?,
                ..Self::default()
            },
            "ZImageTransformer2DModel" => {
                let (width, heads) = (n("dim", 3840)?, n("n_heads", 30)?);
                Self {
                    kind: TransformerKind::ZImage,
                    in_channels: n("in_channels", 16)?,
                    patch: 2,
                    blocks: n("n_layers", 30)?,
                    single_blocks: n("n_refiner_layers", 2)?,
                    heads,
                    head_width: width.checked_div(heads)?,
                    context: n("cap_feat_dim", 2560)?,
                    qk_norm: true,
                    ..Self::default()
                }
            }
            _ => return None,
        };
        Some(shapes)
    }

    pub(super) fn is_valid(&self) -> bool {
        let has_no_pooled = matches!(self.kind, TransformerKind::Chroma | TransformerKind::ZImage);
        let has_approximator = self.approximator_width > 0 || self.kind != TransformerKind::Chroma;
        let sizes = [self.in_channels, self.heads, self.head_width, self.context];
        sizes.iter().all(|size| (1..=MAX_WIDTH).contains(size))
            && self.width() <= f64::from(MAX_WIDTH)
            && (has_no_pooled || self.pooled > 0)
            && self.pooled <= MAX_WIDTH
            && (1..=64).contains(&self.patch)
            && self.blocks > 0
            && self.blocks.saturating_add(self.single_blocks.saturating_mul(2)) <= MAX_TRANSFORMER_LAYERS
            && self.dual_blocks <= self.blocks
            && self.positions <= 1 << 12
            && has_approximator
            && self.approximator_width <= MAX_WIDTH
            && self.approximator_layers <= MAX_TRANSFORMER_LAYERS
    }

    /// A transformer of the same kind with this fraction of its parameters.
    pub(super) fn scaled(mut self, fraction: f64) -> Self {
        let side = fraction.sqrt();
        let heads = f64::from(self.heads);
        scale(&mut self.heads, side);
        if self.approximator_width > 0 {
            scale(&mut self.approximator_width, side);
        }
        // A model with few parameters has one head, whose features are fewer.
        let rest = side * heads / f64::from(self.heads.max(1));
        if rest < 1.0 {
            scale(&mut self.head_width, rest);
        }
        self
    }
}

impl LanguageShapes {
    /// Reads the `config.json` of T5's encoder. Missing keys have the values of T5 v1.1 XXL.
    pub(super) fn read_t5(config: &Value) -> Option<Self> {
        let n = |key: &str, usual: u32| number(config, key, usual);
        let heads = n("num_heads", 64)?;
        Some(Self {
            kind: LanguageKind::T5,
            width: n("d_model", 4096)?,
            heads,
            kv_heads: heads,
            head_width: n("d_kv", 64)?,
            intermediate: n("d_ff", 10_240)?,
            layers: n("num_layers", 24)?,
            vocabulary: n("vocab_size", 32_128)?,
            ..Self::default()
        })
    }

    /// Reads the `config.json` of Qwen3. Missing keys have the values of transformers' class.
    pub(super) fn read_qwen3(config: &Value) -> Option<Self> {
        let n = |key: &str, usual: u32| number(config, key, usual);
        Some(Self {
            kind: LanguageKind::Qwen3,
            width: n("hidden_size", 4096)?,
            heads: n("num_attention_heads", 32)?,
            kv_heads: n("num_key_value_heads", 32)?,
            head_width: n("head_dim", 128)?,
            intermediate: n("intermediate_size", 22_016)?,
            layers: n("num_hidden_layers", 32)?,
            vocabulary: n("vocab_size", 151_936)?,
            ..Self::default()
        })
    }

    /// Reads the `config.json` of a decoder. Missing keys have the values of transformers' classes. `None`: it is of another class.
    pub(super) fn read_decoder(config: &Value) -> Option<Self> {
        let n = |key: &str, usual: u32| number(config, key, usual);
        let usual = match config.get("model_type")?.as_str()? {
            "gpt_bigcode" => {
                let (width, heads) = (n("n_embd", 768)?, n("n_head", 12)?);
                let is_multi_query = config.get("multi_query").and_then(Value::as_bool).unwrap_or(true);
                let shapes = Self {
                    kind: LanguageKind::Decoder,
                    width,
                    heads,
                    kv_heads: if is_multi_query { 1 } else { heads },
                    head_width: width.checked_div(heads)?,
                    intermediate: n("n_inner", width.checked_mul(4)?)?,
                    layers: n("n_layer", 12)?,
                    vocabulary: n("vocab_size", 50_257)?,
                    positions: n("n_positions", 1024)?.min(MAX_POSITIONS),
                    learned_positions: true,
                    untied: !flag(config, "tie_word_embeddings", true),
                    ..Self::default()
                };
                return shapes.checked_decoder();
            }
            // Width, hidden width, layers, heads, heads of keys and values, vocabulary.
            "starcoder2" => [3072, 12_288, 30, 24, 2, 49_152],
            "qwen2" => [4096, 22_016, 32, 32, 32, 151_936],
            "llama" => [4096, 11_008, 32, 32, n("num_attention_heads", 32)?, 32_000],
            _ => return None,
        };
        let [width, intermediate, layers, heads, kv_heads, vocabulary] = usual;
        let kind = config.get("model_type").and_then(Value::as_str);
        let is_starcoder2 = kind == Some("starcoder2");
        // A window that is `null` is none. StarCoder2 has none without the key, Qwen2 that of its class.
        let has_window = match kind {
            Some("starcoder2") => config.get("sliding_window").is_some_and(|window| !window.is_null()),
            Some("qwen2") => {
                flag(config, "use_sliding_window", false) && !config.get("sliding_window").is_some_and(Value::is_null)
            }
            _ => false,
        };
        let (positions, window) = match kind {
            Some("starcoder2") => (4096, 0),
            Some("qwen2") => (32_768, 4096),
            _ => (2048, 0),
        };
        let (width, heads) = (n("hidden_size", width)?, n("num_attention_heads", heads)?);
        let shapes = Self {
            kind: LanguageKind::Decoder,
            width,
            heads,
            kv_heads: n("num_key_value_heads", kv_heads)?,
            head_width: n("head_dim", width.checked_div(heads)?)?,
            intermediate: n("intermediate_size", intermediate)?,
            layers: n("num_hidden_layers", layers)?,
            vocabulary: n("vocab_size", vocabulary)?,
            positions: n("max_position_embeddings", positions)?.min(MAX_POSITIONS),
            window: match has_window {
                true => n("sliding_window", window)?,
                false => 0,
            },
            learned_positions: false,
            gated: !is_starcoder2,
            untied: !flag(config, "tie_word_embeddings", is_starcoder2),
        };
        shapes.checked_decoder()
    }

    /// Reads the metadata of a GGUF file. `vocabulary`: the rows of its table of embeddings. `has_output`: whether there is an output layer. `None`:
    /// it is not a decoder.
    pub(super) fn read_gguf(
        metadata: &BTreeMap<String, MetadataValue>,
        vocabulary: u32,
        has_output: bool,
    ) -> Option<Self> {
        let MetadataValue::Text(arch) = metadata.get("general.architecture")? else {
            return None;
        };
        if !["llama", "qwen2", "starcoder2", "starcoder"].contains(&arch.as_str()) {
            return None;
        }
        let n = |key: &str| match metadata.get(&format!("{arch}.{key}"))? {
            MetadataValue::Whole(number) => u32::try_from(*number).ok(),
            _ => None,
        };
        let (width, heads) = (n("embedding_length")?, n("attention.head_count")?);
        let shapes = Self {
            kind: LanguageKind::Decoder,
            width,
            heads,
            kv_heads: n("attention.head_count_kv").unwrap_or(heads),
            head_width: n("attention.key_length").or(width.checked_div(heads))?,
            intermediate: n("feed_forward_length")?,
            layers: n("block_count")?,
            vocabulary,
            positions: n("context_length").unwrap_or(0).min(MAX_POSITIONS),
            window: n("attention.sliding_window").unwrap_or(0),
            learned_positions: arch == "starcoder",
            gated: matches!(arch.as_str(), "llama" | "qwen2"),
            untied: has_output,
        };
        shapes.checked_decoder()
    }

    /// The shapes, if they are those of a decoder and within the limits of known models.
    #[must_use]
    pub fn checked_decoder(self) -> Option<Self> {
        (self.kind == LanguageKind::Decoder && self.is_valid()).then_some(self)
    }

    /// The usual shapes of a model that generates texts with this many parameters, on the side of more memory: StarCoder2-3B has `layers * width`
    /// of 1.7 times the root of its parameters, Llama-2 7B 1.6, Qwen2.5-0.5B 1.0, SmolLM-135M 1.5.
    pub(super) fn of_parameters(parameters: u64) -> Self {
        const HEAD_WIDTH: f64 = 64.0;
        const DEPTH_TIMES_WIDTH: f64 = 1.75;
        const PARAMETERS_PER_SQUARED_WIDTH: f64 = 150.0;
        let parameters = (parameters as f64).clamp(1e4, 1e13);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let whole = |size: f64| size.round().clamp(1.0, f64::from(MAX_WIDTH)) as u32;
        let heads = whole((parameters / PARAMETERS_PER_SQUARED_WIDTH).sqrt() / HEAD_WIDTH);
        let width = heads * whole(HEAD_WIDTH);
        let layers = whole(DEPTH_TIMES_WIDTH * parameters.sqrt() / f64::from(width));
        // The rest is in the blocks: attention has up to 4 widths squared, a plain feed-forward network two products.
        let vocabulary = 49_152u32.min(whole(parameters / f64::from(width) / 2.0)).max(1);
        let in_blocks = parameters - f64::from(vocabulary) * f64::from(width);
        let in_block = in_blocks / f64::from(layers) / f64::from(width) - 2.5 * f64::from(width);
        Self {
            kind: LanguageKind::Decoder,
            width,
            heads,
            kv_heads: heads.min(whole(f64::from(heads) / 4.0)),
            head_width: whole(HEAD_WIDTH),
            intermediate: whole((in_block / 2.0).max(f64::from(width))),
            layers,
            vocabulary,
            positions: 0,
            window: 0,
            learned_positions: false,
            gated: false,
            untied: false,
        }
    }

    /// Whether it exists.
    #[must_use]
    pub fn exists(&self) -> bool {
        self.kind != LanguageKind::None
    }

    pub(super) fn is_valid(&self) -> bool {
        let sizes = [
            self.width,
            self.heads,
            self.kv_heads,
            self.head_width,
            self.intermediate,
        ];
        !self.exists()
            || sizes.iter().all(|size| (1..=MAX_WIDTH).contains(size))
                && f64::from(self.heads) * f64::from(self.head_width) <= f64::from(MAX_WIDTH)
                && self.kv_heads <= self.heads
                && (1..=MAX_TRANSFORMER_LAYERS).contains(&self.layers)
                && (1..=MAX_COUNT).contains(&self.vocabulary)
                && self.positions <= MAX_POSITIONS
    }

    /// A model of the same kind with this fraction of its parameters.
    pub(super) fn scaled(mut self, fraction: f64) -> Self {
        let side = fraction.sqrt();
        for size in [&mut self.width, &mut self.heads, &mut self.intermediate] {
            scale(size, side);
        }
        scale(&mut self.kv_heads, side);
        self
    }
}

/// Multiplies a size, which stays above 0 unless it is 0.
fn scale(size: &mut u32, factor: f64) {
    if *size > 0 {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let scaled = (f64::from(*size) * factor).round().clamp(1.0, f64::from(MAX_WIDTH)) as u32;
        *size = scaled;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn sliding_windows_of_decoders_are_those_of_transformers() {
        let window = |config: Value| LanguageShapes::read_decoder(&config).unwrap().window;
        assert_eq!(window(json!({"model_type": "starcoder2"})), 0);
        assert_eq!(window(json!({"model_type": "starcoder2", "sliding_window": null})), 0);
        assert_eq!(window(json!({"model_type": "starcoder2", "sliding_window": 128})), 128);
        assert_eq!(window(json!({"model_type": "qwen2", "sliding_window": 128})), 0);
        assert_eq!(window(json!({"model_type": "qwen2", "use_sliding_window": true})), 4096);
        assert_eq!(window(json!({"model_type": "llama", "sliding_window": 128})), 0);
    }

    #[test]
    fn configs_of_transformers_are_read_and_hostile_ones_are_refused() {
        let flux = json!({"_class_name": "FluxTransformer2DModel", "guidance_embeds": true});
        let read = TransformerShapes::read(&flux).unwrap();
        assert!(read.is_valid() && read.guidance);
        assert_eq!((read.width(), read.token(), read.single_blocks), (3072.0, 64.0, 38));
        let z_image = TransformerShapes::read(&json!({"_class_name": "ZImageTransformer2DModel"})).unwrap();
        assert_eq!((z_image.width(), z_image.head_width), (3840.0, 128));
        let chroma = TransformerShapes::read(&json!({"_class_name": "ChromaTransformer2DModel"})).unwrap();
        assert!(chroma.is_valid() && chroma.pooled == 0);
        assert_eq!((chroma.approximator_layers, chroma.approximator_width), (5, 5120));
        for (key, value) in [("approximator_hidden_dim", 0), ("approximator_layers", 513)] {
            let config = json!({"_class_name": "ChromaTransformer2DModel", key: value});
            assert!(!TransformerShapes::read(&config).unwrap().is_valid(), "{key}");
        }
        for (key, value) in [
            ("_class_name", json!("UNet2DConditionModel")),
            ("num_layers", json!(4_000_000_000_u32)),
            ("num_layers", json!(0)),
            ("num_attention_heads", json!(-1)),
            ("attention_head_dim", json!(65_536)),
            ("joint_attention_dim", json!("wide")),
            ("in_channels", json!(0)),
        ] {
            let mut config = flux.clone();
            config[key] = value.clone();
            let read = TransformerShapes::read(&config).filter(TransformerShapes::is_valid);
            assert_eq!(read, None, "{key}: {value}");
        }
        for config in [
            json!({"num_heads": 0}),
            json!({"vocab_size": u64::MAX}),
            json!({"d_kv": 4096}),
        ] {
            let read = LanguageShapes::read_t5(&config).filter(LanguageShapes::is_valid);
            assert_eq!(read, None, "{config}");
        }
    }
}
