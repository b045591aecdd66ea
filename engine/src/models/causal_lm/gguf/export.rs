//! The metadata and the tensors of a decoder's GGUF file.

use super::super::config::{CausalLmConfig, CausalLmFamily, FeedForwardKind, NormKind};
use super::super::model::CausalLm;
use super::super::tokenizer::TextTokenizer;
use super::architecture::{architecture, names, row_order};
use super::rope_export::RopeExport;
use super::tokenizer_export;
use crate::error::{EngineError, Result};
use crate::nn::Activation;
use crate::weights::{GgufLayout, GgufValue, RowOrder, gguf_type_name};
use aitk_common::job::lm_export::LmExportType;
use candle_core::quantized::GgmlDType;
use candle_core::{Device, Tensor};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

/// Where the numbers of a tensor of the file come from.
#[derive(Clone, Debug)]
enum TensorSource {
    /// A tensor of the model by transformers' name, and the order of its rows in the file.
    Model(String, Option<RowOrder>),
    /// These numbers.
    Numbers(Vec<f32>),
}

/// A GGUF file of a decoder that is about to be written.
#[derive(Clone, Debug)]
pub struct GgufExport {
    layout: GgufLayout,
    sources: BTreeMap<String, TensorSource>,
    /// What a user should know about the file.
    pub notes: Vec<String>,
}

impl GgufExport {
    /// The file of a model that was loaded from a Hugging Face folder. `name`: the name of the model in the file.
    ///
    /// # Errors
    /// When llama.cpp cannot compute the model, or its tokenizer; the error says why.
    pub fn new(model: &CausalLm, folder: &Path, name: &str, dtype: LmExportType) -> Result<Self> {
        let config = model.config();
        let path = folder.join("config.json");
        check_support(config).map_err(|message| EngineError::model_config(&path, message))?;
        let rope = RopeExport::new(config).map_err(|message| EngineError::model_config(&path, message))?;
        let tokenizer = TextTokenizer::open(folder, config.vocab_size)?;
        let mut export = Self {
            layout: GgufLayout::default(),
            sources: BTreeMap::new(),
            notes: Vec::new(),
        };
        export.set_metadata(config, name, dtype, rope.metadata);
        for (key, value) in tokenizer_export::metadata(folder, &tokenizer, config.vocab_size, &config.eos_token_ids)? {
            export.layout.set(key, value);
        }
        export.add_tensors(model, dtype, rope.tables)?;
        export.notes.extend(rope.note);
        if let Some(window) = config.windows.iter().flatten().min() {
            export.notes.push(format!(
                "the model attends to the last {window} tokens (`sliding_window`), and llama.cpp to all tokens: texts that are longer differ there"
            ));
        }
        Ok(export)
    }

    /// The types of the tensors and how many tensors have each, in the order of the file.
    #[must_use]
    pub fn types(&self) -> Vec<(String, usize)> {
        let mut types: Vec<(String, usize)> = Vec::new();
        for (_, dtype, _) in self.layout.tensors() {
            let name = gguf_type_name(dtype);
            match types.iter_mut().find(|(known, _)| known == name) {
                Some((_, count)) => *count += 1,
                None => types.push((name.to_owned(), 1)),
            }
        }
        types
    }

    /// The number of tensors.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sources.len()
    }

    /// Whether there are no tensors.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sources.is_empty()
    }

    /// Writes the file. `tensor` returns a tensor of the model by transformers' name.
    ///
    /// # Errors
    /// As [`GgufLayout::write`].
    pub fn write(&self, out: &mut dyn Write, mut tensor: impl FnMut(&str) -> Result<Tensor>) -> io::Result<()> {
        self.layout.write(out, |name| match self.sources.get(name) {
            Some(TensorSource::Model(source, order)) => {
                let stored = tensor(source)?;
                Ok(match order {
                    Some(order) => order.apply(&stored.detach().contiguous()?)?,
                    None => stored,
                })
            }
            Some(TensorSource::Numbers(numbers)) => Ok(Tensor::from_slice(numbers, numbers.len(), &Device::Cpu)?),
            None => Err(EngineError::Internal(format!("`{name}` has no source"))),
        })
    }

    fn set_metadata(
        &mut self,
        config: &CausalLmConfig,
        name: &str,
        dtype: LmExportType,
        rope: Vec<(&'static str, GgufValue)>,
    ) {
        let arch = architecture(config.family);
        let mut set = |key: &str, value: GgufValue| self.layout.set(key, value);
        set("general.architecture", GgufValue::Text(arch.into()));
        set("general.type", GgufValue::Text("model".into()));
        set("general.name", GgufValue::Text(name.into()));
        set("general.file_type", GgufValue::Unsigned(file_type(dtype)));
        set("general.quantization_version", GgufValue::Unsigned(2));
        let mut set = |key: &str, value: GgufValue| self.layout.set(format!("{arch}.{key}"), value);
        let number = |value: usize| GgufValue::Unsigned(value as u32);
        set("block_count", number(config.layers));
        set("context_length", number(config.max_positions));
        set("embedding_length", number(config.width));
        set("feed_forward_length", number(config.inner_width));
        set("attention.head_count", number(config.heads));
        set("attention.head_count_kv", number(config.kv_heads));
        set("attention.key_length", number(config.head_width));
        set("attention.value_length", number(config.head_width));
        let epsilon = match config.norm {
            NormKind::Layer => "attention.layer_norm_epsilon",
            NormKind::Rms => "attention.layer_norm_rms_epsilon",
        };
        set(epsilon, GgufValue::Float(config.norm_eps as f32));
        set("vocab_size", number(config.vocab_size));
        for (key, value) in rope {
            set(key, value);
        }
        // llama.cpp does not use it for these models; this engine does when it reads the file.
        if let Some(window) = config.windows.iter().flatten().min() {
            set("attention.sliding_window", number(*window));
            let uses = config
                .windows
                .iter()
                .map(|window| i32::from(window.is_some()))
                .collect();
            set("attention.sliding_window_pattern", GgufValue::Integers(uses));
        }
    }

    fn add_tensors(
        &mut self,
        model: &CausalLm,
        dtype: LmExportType,
        tables: Vec<(&'static str, Vec<f32>)>,
    ) -> Result<()> {
        let config = model.config();
        let names = names(config.family);
        for (name, factors) in tables {
            self.layout.add(name, GgmlDType::F32, [factors.len()]);
            self.sources.insert(name.into(), TensorSource::Numbers(factors));
        }
        for (source, weight) in model.tensors()? {
            let name = names
                .gguf_name(&source)
                .ok_or_else(|| EngineError::Internal(format!("`{source}` has no name in GGUF files")))?;
            let kind = tensor_type(dtype, &name, weight.dims(), config);
            self.layout.add(&name, kind, weight.dims());
            let order = row_order(config, &source).map(RowOrder::inverse);
            self.sources.insert(name, TensorSource::Model(source, order));
        }
        // llama.cpp requires them of StarCoder2.
        if config.family == CausalLmFamily::StarCoder2 && !config.attention_output_bias {
            for layer in 0..config.layers {
                for (name, count) in [
                    ("attn_output", config.width),
                    ("ffn_up", config.inner_width),
                    ("ffn_down", config.width),
                ] {
                    let name = format!("blk.{layer}.{name}.bias");
                    self.layout.add(&name, GgmlDType::F32, [count]);
                    self.sources.insert(name, TensorSource::Numbers(vec![0.0; count]));
                }
            }
        }
        Ok(())
    }
}

/// llama.cpp's number of the number format of most matrices (`LlamaFileType`).
fn file_type(dtype: LmExportType) -> u32 {
    match dtype {
        LmExportType::F32 => 0,
        LmExportType::F16 => 1,
        LmExportType::Q8_0 => 7,
        LmExportType::Q4K => 15,
        LmExportType::BF16 => 32,
    }
}

/// The type of a tensor. Vectors and the table of positions stay float32, as in llama.cpp.
///
/// `q4_k` has 6 bits (`q6_k`) for the table of embeddings, the output layer, and, in the first and last eighth of the blocks and every third one
/// between them, for the values and the second layer of the feed-forward network: the mixture that llama.cpp calls `Q4_K_M`. Rows that are no
/// multiple of 256 have 8 bits; rows that are not a multiple of 32, 16.
fn tensor_type(dtype: LmExportType, name: &str, shape: &[usize], config: &CausalLmConfig) -> GgmlDType {
    let [_, row] = shape else {
        return GgmlDType::F32;
    };
    if name.starts_with("position_embd") {
        return GgmlDType::F32;
    }
    let wanted = match dtype {
        LmExportType::F32 => GgmlDType::F32,
        LmExportType::F16 => GgmlDType::F16,
        LmExportType::BF16 => GgmlDType::BF16,
        LmExportType::Q8_0 => GgmlDType::Q8_0,
        LmExportType::Q4K if needs_more_bits(name, config.layers) => GgmlDType::Q6K,
        LmExportType::Q4K => GgmlDType::Q4K,
    };
    let fits = |kind: GgmlDType| row.is_multiple_of(kind.block_size());
    match wanted {
        kind if fits(kind) => kind,
        _ if fits(GgmlDType::Q8_0) => GgmlDType::Q8_0,
        _ => GgmlDType::F16,
    }
}

/// Whether a matrix of a `q4_k` file has 6 bits.
fn needs_more_bits(name: &str, layers: usize) -> bool {
    let Some((layer, rest)) = name.strip_prefix("blk.").and_then(|name| name.split_once('.')) else {
        return true;
    };
    let layer: usize = layer.parse().unwrap_or(0);
    let eighth = layers / 8;
    let is_chosen = layer < eighth || layer >= layers - eighth || (layer - eighth) % 3 == 2;
    is_chosen && ["attn_v.weight", "attn_qkv.weight", "ffn_down.weight"].contains(&rest)
}

/// Checks that llama.cpp computes what the model does.
fn check_support(config: &CausalLmConfig) -> std::result::Result<(), String> {
    let expected = match config.feed_forward {
        FeedForwardKind::Plain => Activation::GeluTanh,
        FeedForwardKind::Gated => Activation::Silu,
    };
    if config.activation != expected {
        return Err(format!(
            "llama.cpp computes models of this family with the activation {expected:?}, and this one has {:?}: it cannot be exported as GGUF, \
             only as `format: hf`",
            config.activation
        ));
    }
    if !config.scales_scores {
        return Err(
            "`scale_attn_weights` is false, and llama.cpp scales the scores of attention: the model cannot be exported as GGUF, only as \
             `format: hf`"
                .into(),
        );
    }
    let is_square = config.heads * config.head_width == config.width;
    if !is_square && config.norm == NormKind::Layer {
        return Err(format!(
            "its {} heads of {} features are not as wide as a token ({}), which llama.cpp requires of this family: the model cannot be exported \
             as GGUF, only as `format: hf`",
            config.heads, config.head_width, config.width
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::needs_more_bits;

    #[test]
    fn some_blocks_of_q4_k_have_more_bits() {
        let of_layer = |layer: usize, layers| needs_more_bits(&format!("blk.{layer}.ffn_down.weight"), layers);
        let chosen: Vec<usize> = (0..16).filter(|layer| of_layer(*layer, 16)).collect();
        assert_eq!(chosen, [0, 1, 4, 7, 10, 13, 14, 15]);
        assert!(needs_more_bits("output.weight", 16));
        assert!(!needs_more_bits("blk.0.attn_q.weight", 16));
        // Fewer blocks than eight.
        let chosen: Vec<usize> = (0..4).filter(|layer| of_layer(*layer, 4)).collect();
        assert_eq!(chosen, [2]);
    }
}
