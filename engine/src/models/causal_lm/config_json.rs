//! Reads `config.json` of a Hugging Face folder by its `model_type`. Missing keys have the values of transformers' classes.

use super::config::{CausalLmConfig, CausalLmFamily, FeedForwardKind, NormKind, PositionKind};
use super::rope_json::{BesideSection, RopeJson, rotary_positions};
use crate::error::{EngineError, Result};
use crate::models::config;
use crate::nn::Activation;
use serde::Deserialize;
use serde_json::Value;
use std::path::Path;

pub(super) use crate::models::config::MAX_SIZE;

/// The most blocks.
pub(super) const MAX_LAYERS: usize = 4096;
/// The most ids that end a text.
const MAX_END_TOKENS: usize = 64;

/// One id, or a list of them.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a token id or a list of token ids")]
enum EndTokens {
    One(u32),
    Many(Vec<u32>),
}

/// The keys of `generation_config.json` that are used.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct GenerationJson {
    eos_token_id: Option<EndTokens>,
}

/// The keys of `gpt_bigcode`.
#[derive(Debug, Deserialize)]
#[serde(default)]
struct GptBigCodeJson {
    vocab_size: usize,
    n_positions: usize,
    n_embd: usize,
    n_layer: usize,
    n_head: usize,
    n_inner: Option<usize>,
    activation_function: String,
    layer_norm_epsilon: f64,
    scale_attn_weights: bool,
    multi_query: bool,
    add_cross_attention: bool,
    tie_word_embeddings: bool,
    eos_token_id: Option<EndTokens>,
}

impl Default for GptBigCodeJson {
    fn default() -> Self {
        Self {
            vocab_size: 50_257,
            n_positions: 1024,
            n_embd: 768,
            n_layer: 12,
            n_head: 12,
            n_inner: None,
            activation_function: "gelu_pytorch_tanh".into(),
            layer_norm_epsilon: 1e-5,
            scale_attn_weights: true,
            multi_query: true,
            add_cross_attention: false,
            tie_word_embeddings: true,
            eos_token_id: Some(EndTokens::One(50_256)),
        }
    }
}

/// The keys of `starcoder2`, `qwen2` and `llama`, whose defaults differ.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RotaryJson {
    vocab_size: Option<usize>,
    hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: Option<usize>,
    hidden_act: Option<String>,
    rms_norm_eps: Option<f64>,
    norm_epsilon: Option<f64>,
    rope_theta: Option<f64>,
    rope_parameters: Option<RopeJson>,
    rope_scaling: Option<RopeJson>,
    original_max_position_embeddings: Option<f64>,
    partial_rotary_factor: Option<f64>,
    tie_word_embeddings: Option<bool>,
    eos_token_id: Option<EndTokens>,
    pad_token_id: Option<i64>,
    /// StarCoder2.
    use_bias: Option<bool>,
    /// StarCoder2 and Qwen2.
    sliding_window: Option<usize>,
    /// Qwen2.
    use_sliding_window: Option<bool>,
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
    /// Llama.
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
}

/// Which keys are `null`.
#[derive(Clone, Copy)]
struct Nulls {
    eos_token_ids: bool,
    sliding_window: bool,
    kv_heads: bool,
}

impl CausalLmConfig {
    /// Reads the `config.json` of a model folder.
    ///
    /// # Errors
    /// When it cannot be read, belongs to another kind of model, or has an option that is not supported; the error names it.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        if !path.exists() && folder.join("model_index.json").is_file() {
            return Err(EngineError::model_config(
                folder,
                "this is the folder of an image model (it has a model_index.json): name the folder of a language model",
            ));
        }
        let value = config::read_json(&path)?;
        let mut config = Self::from_json(value).map_err(|message| EngineError::model_config(path, message))?;
        // As in transformers, the tokens that end a generated text are those of this file, if it has some.
        let path = folder.join("generation_config.json");
        if path.is_file() {
            let json: GenerationJson = config::read(&path)?;
            if json.eos_token_id.is_some() {
                let ids =
                    eos_token_ids(json.eos_token_id).map_err(|message| EngineError::model_config(path, message))?;
                config.eos_token_ids = ids;
                config.eos_token_ids.retain(|id| (*id as usize) < config.vocab_size);
            }
        }
        Ok(config)
    }

    /// The config of a parsed `config.json`.
    ///
    /// # Errors
    /// A sentence that names the key.
    pub fn from_json(value: Value) -> std::result::Result<Self, String> {
        let known = CausalLmFamily::ALL
            .map(|family| format!("`{}`", family.model_type()))
            .join(", ");
        let model_type = match value.get("model_type") {
            Some(Value::String(name)) => name.clone(),
            _ => {
                return Err(format!(
                    "`model_type` is missing: expected the config of a language model: {known}"
                ));
            }
        };
        let family = CausalLmFamily::ALL
            .into_iter()
            .find(|family| family.model_type() == model_type)
            .ok_or_else(|| {
                format!("`model_type: {model_type}` is not a language model that this release runs: expected {known}")
            })?;
        check_other_keys(&value)?;
        // `null` differs from a missing key where transformers' class has another default.
        let nulls = Nulls {
            eos_token_ids: value.get("eos_token_id").is_some_and(Value::is_null),
            sliding_window: value.get("sliding_window").is_some_and(Value::is_null),
            kv_heads: value.get("num_key_value_heads").is_some_and(Value::is_null),
        };
        let windows = windows_of_cache(&value, family);
        let mut config = match family {
            CausalLmFamily::GptBigCode => gpt_bigcode(config::from_value(with_short_names(value))?)?,
            _ => rotary(family, config::from_value(value)?, nulls)?,
        };
        if nulls.eos_token_ids {
            config.eos_token_ids.clear();
        }
        check_sizes(&config)?;
        if let Some((key, window)) = windows
            .into_iter()
            .find(|(_, window)| *window < config.max_positions as u64)
        {
            return Err(format!(
                "`{key}` is {window}, and models of `{model_type}` have no window: transformers uses it for the tokens that it generates alone. Set it to null"
            ));
        }
        config.eos_token_ids.retain(|id| (*id as usize) < config.vocab_size);
        Ok(config)
    }
}

/// Windows that are not part of a family's model, and that transformers' cache takes into account when texts are generated.
fn windows_of_cache(value: &Value, family: CausalLmFamily) -> Vec<(&'static str, u64)> {
    let keys: &[&'static str] = match family {
        CausalLmFamily::Llama | CausalLmFamily::GptBigCode => &["sliding_window", "attention_chunk_size"],
        CausalLmFamily::StarCoder2 => &["attention_chunk_size"],
        // It has `layer_types`, which say what the cache does.
        CausalLmFamily::Qwen2 => &[],
    };
    keys.iter()
        .filter_map(|key| Some((*key, value.get(*key)?.as_u64()?)))
        .collect()
}

/// Checks keys of a `config.json` with which transformers computes other numbers than this engine, for every family.
fn check_other_keys(value: &Value) -> std::result::Result<(), String> {
    if let Some(is_causal) = value
        .get("is_causal")
        .filter(|is_causal| **is_causal != Value::Bool(true))
    {
        return Err(format!(
            "`is_causal` is {is_causal}, and models that attend to later tokens are not supported: expected true, or no such key"
        ));
    }
    for key in ["rope_parameters", "rope_scaling"] {
        let section = value.get(key).and_then(Value::as_object);
        if let Some((inner, _)) = section.into_iter().flatten().find(|(_, value)| value.is_object()) {
            return Err(format!(
                "`{key}` has a section `{inner}`, and frequencies by layer type are not supported: expected one section for all layers"
            ));
        }
    }
    Ok(())
}

/// The config with the short names of `gpt_bigcode` for keys that have the long ones of other models (`attribute_map` of transformers). Of two
/// values the one with the long name counts, as in transformers 5.
fn with_short_names(mut value: Value) -> Value {
    if let Some(keys) = value.as_object_mut() {
        for (short, long) in [
            ("n_positions", "max_position_embeddings"),
            ("n_embd", "hidden_size"),
            ("n_layer", "num_hidden_layers"),
            ("n_head", "num_attention_heads"),
        ] {
            if let Some(found) = keys.remove(long).filter(|found| !found.is_null()) {
                keys.insert(short.into(), found);
            }
        }
    }
    value
}

fn gpt_bigcode(json: GptBigCodeJson) -> std::result::Result<CausalLmConfig, String> {
    if json.add_cross_attention {
        return Err("`add_cross_attention` is not supported: set it to false".into());
    }
    if json.n_head == 0 || !json.n_embd.is_multiple_of(json.n_head) {
        return Err(format!(
            "`n_embd` {} is not a multiple of `n_head` {}",
            json.n_embd, json.n_head
        ));
    }
    Ok(CausalLmConfig {
        family: CausalLmFamily::GptBigCode,
        vocab_size: json.vocab_size,
        width: json.n_embd,
        inner_width: json.n_inner.unwrap_or_else(|| json.n_embd.saturating_mul(4)),
        layers: json.n_layer,
        heads: json.n_head,
        kv_heads: if json.multi_query { 1 } else { json.n_head },
        head_width: json.n_embd / json.n_head,
        max_positions: json.n_positions,
        norm: NormKind::Layer,
        norm_eps: json.layer_norm_epsilon,
        feed_forward: FeedForwardKind::Plain,
        activation: activation("activation_function", &json.activation_function)?,
        positions: PositionKind::Learned,
        qkv_bias: true,
        attention_output_bias: true,
        feed_forward_bias: true,
        scales_scores: json.scale_attn_weights,
        windows: vec![None; json.n_layer.min(MAX_LAYERS)],
        ties_embeddings: json.tie_word_embeddings,
        eos_token_ids: eos_token_ids(json.eos_token_id)?,
        // Its embedding has no `padding_idx`.
        padding_id: None,
    })
}

/// The values of keys that transformers' class of a family has when they are missing.
struct Defaults {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    layers: usize,
    heads: usize,
    /// `None`: as many as query heads.
    kv_heads: Option<usize>,
    positions: usize,
    activation: &'static str,
    ties_embeddings: bool,
    end_token: Option<u32>,
}

fn defaults(family: CausalLmFamily) -> Defaults {
    match family {
        CausalLmFamily::StarCoder2 => Defaults {
            vocab_size: 49_152,
            hidden_size: 3072,
            intermediate_size: 12_288,
            layers: 30,
            heads: 24,
            kv_heads: Some(2),
            positions: 4096,
            activation: "gelu_pytorch_tanh",
            ties_embeddings: true,
            end_token: Some(50_256),
        },
        CausalLmFamily::Qwen2 => Defaults {
            vocab_size: 151_936,
            hidden_size: 4096,
            intermediate_size: 22_016,
            layers: 32,
            heads: 32,
            kv_heads: Some(32),
            positions: 32_768,
            activation: "silu",
            ties_embeddings: false,
            end_token: None,
        },
        _ => Defaults {
            vocab_size: 32_000,
            hidden_size: 4096,
            intermediate_size: 11_008,
            layers: 32,
            heads: 32,
            kv_heads: None,
            positions: 2048,
            activation: "silu",
            ties_embeddings: false,
            end_token: Some(2),
        },
    }
}

fn rotary(family: CausalLmFamily, json: RotaryJson, nulls: Nulls) -> std::result::Result<CausalLmConfig, String> {
    let default = defaults(family);
    let is_starcoder2 = family == CausalLmFamily::StarCoder2;
    let width = json.hidden_size.unwrap_or(default.hidden_size);
    let heads = json.num_attention_heads.unwrap_or(default.heads);
    let default_kv_heads = default.kv_heads.filter(|_| !nulls.kv_heads);
    let kv_heads = json.num_key_value_heads.or(default_kv_heads).unwrap_or(heads);
    if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(format!(
            "`num_attention_heads` {heads} is not a multiple of `num_key_value_heads` {kv_heads}"
        ));
    }
    let head_width = match json.head_dim {
        Some(width) => width,
        None if width.is_multiple_of(heads) => width / heads,
        None => {
            return Err(format!(
                "`hidden_size` {width} is not a multiple of `num_attention_heads` {heads}, and there is no `head_dim`"
            ));
        }
    };
    let max_positions = json.max_position_embeddings.unwrap_or(default.positions);
    if let Some(share) = json.partial_rotary_factor.filter(|share| *share != 1.0) {
        return Err(format!(
            "`partial_rotary_factor` {share} is not supported: expected 1, or no such key"
        ));
    }
    let section = json
        .rope_scaling
        .as_ref()
        .filter(|section| **section != RopeJson::default())
        .or(json.rope_parameters.as_ref());
    let layers = json.num_hidden_layers.unwrap_or(default.layers);
    let (norm, eps) = match is_starcoder2 {
        true => (NormKind::Layer, json.norm_epsilon.unwrap_or(1e-5)),
        false => (NormKind::Rms, json.rms_norm_eps.unwrap_or(1e-6)),
    };
    let [qkv_bias, attention_output_bias, feed_forward_bias] = match family {
        CausalLmFamily::StarCoder2 => [json.use_bias.unwrap_or(true); 3],
        CausalLmFamily::Qwen2 => [true, false, false],
        _ => {
            let attention = json.attention_bias.unwrap_or(false);
            [attention, attention, json.mlp_bias.unwrap_or(false)]
        }
    };
    let vocab_size = json.vocab_size.unwrap_or(default.vocab_size);
    let rotary = rotary_positions(
        section,
        BesideSection {
            theta: json.rope_theta,
            original: json.original_max_position_embeddings,
        },
        head_width.min(MAX_SIZE),
        max_positions,
    )?;
    Ok(CausalLmConfig {
        family,
        vocab_size,
        width,
        inner_width: json.intermediate_size.unwrap_or(default.intermediate_size),
        layers,
        heads,
        kv_heads,
        head_width,
        max_positions: rotary.context(max_positions),
        norm,
        norm_eps: eps,
        feed_forward: match is_starcoder2 {
            true => FeedForwardKind::Plain,
            false => FeedForwardKind::Gated,
        },
        activation: activation("hidden_act", json.hidden_act.as_deref().unwrap_or(default.activation))?,
        positions: PositionKind::Rotary(rotary),
        qkv_bias,
        attention_output_bias,
        feed_forward_bias,
        scales_scores: true,
        windows: windows(family, &json, layers, nulls.sliding_window)?,
        ties_embeddings: json.tie_word_embeddings.unwrap_or(default.ties_embeddings),
        eos_token_ids: eos_token_ids(json.eos_token_id.or(default.end_token.map(EndTokens::One)))?,
        padding_id: json.pad_token_id.and_then(|id| padding_id(id, vocab_size)),
    })
}

/// The token of `pad_token_id`, which PyTorch counts from the end if it is negative: old configs of Llama have -1. A token that the model does
/// not have is in no text.
fn padding_id(id: i64, vocab_size: usize) -> Option<u32> {
    let count = i64::try_from(vocab_size).ok()?;
    let id = if id < 0 { id.checked_add(count)? } else { id };
    u32::try_from(id).ok().filter(|id| (*id as usize) < vocab_size)
}

/// The sliding window of each block.
fn windows(
    family: CausalLmFamily,
    json: &RotaryJson,
    layers: usize,
    is_null: bool,
) -> std::result::Result<Vec<Option<usize>>, String> {
    let layers = layers.min(MAX_LAYERS);
    let positive = |window: usize| match window {
        0 => Err("`sliding_window` is 0: expected a positive number, or null".to_owned()),
        window => Ok(window),
    };
    match family {
        CausalLmFamily::StarCoder2 => {
            let window = json.sliding_window.map(positive).transpose()?;
            Ok(vec![window; layers])
        }
        CausalLmFamily::Qwen2 => {
            let window = match json.use_sliding_window.unwrap_or(false) && !is_null {
                true => Some(positive(json.sliding_window.unwrap_or(4096))?),
                false => None,
            };
            let Some(types) = &json.layer_types else {
                let first = json.max_window_layers.unwrap_or(28);
                return Ok((0..layers).map(|layer| window.filter(|_| layer >= first)).collect());
            };
            if types.len() != layers {
                return Err(format!(
                    "`layer_types` has {} entries, and `num_hidden_layers` is {layers}",
                    types.len()
                ));
            }
            let of_type = |name: &String| match (name.as_str(), window) {
                ("full_attention", _) => Ok(None),
                ("sliding_attention", Some(window)) => Ok(Some(window)),
                ("sliding_attention", None) => {
                    Err("`layer_types` has `sliding_attention`, but `use_sliding_window` is false".to_owned())
                }
                (other, _) => Err(format!(
                    "`layer_types` has `{other}`: expected `full_attention` or `sliding_attention`"
                )),
            };
            types.iter().map(of_type).collect()
        }
        _ => Ok(vec![None; layers]),
    }
}

fn activation(key: &str, name: &str) -> std::result::Result<Activation, String> {
    Activation::from_name(name).ok_or_else(|| {
        format!(
            "`{key}: {name}` is not supported: expected `silu`, `gelu`, `gelu_new`, `gelu_pytorch_tanh` or `quick_gelu`"
        )
    })
}

fn eos_token_ids(ids: Option<EndTokens>) -> std::result::Result<Vec<u32>, String> {
    let ids = match ids {
        Some(EndTokens::One(id)) => vec![id],
        Some(EndTokens::Many(ids)) => ids,
        None => Vec::new(),
    };
    match ids.len() <= MAX_END_TOKENS {
        true => Ok(ids),
        false => Err(format!(
            "`eos_token_id` has {} ids: expected at most {MAX_END_TOKENS}",
            ids.len()
        )),
    }
}

/// Checks that all sizes are within their limits.
///
/// # Errors
/// A sentence that names the size.
pub(super) fn check_sizes(config: &CausalLmConfig) -> std::result::Result<(), String> {
    for (what, size) in [
        ("the vocabulary (`vocab_size`)", config.vocab_size),
        ("the width (`hidden_size`, `n_embd`)", config.width),
        (
            "the feed-forward width (`intermediate_size`, `n_inner`)",
            config.inner_width,
        ),
        ("the number of heads", config.heads),
        ("the width of a head", config.head_width),
        (
            "the width of all heads together",
            config.heads.saturating_mul(config.head_width),
        ),
        (
            "the number of positions (`max_position_embeddings`, `n_positions`)",
            config.max_positions,
        ),
    ] {
        if size == 0 || size > MAX_SIZE {
            return Err(format!("{what} is {size}: expected 1 to {MAX_SIZE}"));
        }
    }
    if config.layers == 0 || config.layers > MAX_LAYERS {
        return Err(format!(
            "the number of layers is {}: expected 1 to {MAX_LAYERS}",
            config.layers
        ));
    }
    if !config.norm_eps.is_finite() || config.norm_eps < 0.0 {
        return Err(format!(
            "the epsilon of the norms is {}: expected a positive number",
            config.norm_eps
        ));
    }
    Ok(())
}
