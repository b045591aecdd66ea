//! Opens a decoder in a GGUF file: its config, its tensors under transformers' names, and its tokenizer.

use super::super::config::{CausalLmConfig, CausalLmFamily, FeedForwardKind, NormKind, PositionKind};
use super::super::config_json::{MAX_LAYERS, check_sizes};
use super::super::tokenizer::TextTokenizer;
use super::architecture::{ROPE_TABLES, architecture, names, row_order};
use super::metadata::Metadata;
use super::rope_import::{RopeTables, rotary_positions};
use super::tokenizer_import::tokenizer_json;
use crate::error::{EngineError, Result};
use crate::nn::Activation;
use crate::weights::{Index, View};
use std::path::{Path, PathBuf};

/// A decoder in a GGUF file. No tensor is read yet.
pub(in super::super) struct GgufModel {
    path: PathBuf,
    metadata: Metadata,
    /// Its config.
    pub(in super::super) config: CausalLmConfig,
    /// Its tensors under transformers' names.
    pub(in super::super) index: Index,
}

impl GgufModel {
    /// Opens the model in a file.
    ///
    /// # Errors
    /// When the file is not a GGUF file or damaged, or is not of a model that this release runs; the error says why.
    pub(in super::super) fn open(path: &Path) -> Result<Self> {
        let metadata = Metadata::read(path)?;
        let index = Index::open(path)?;
        index.check_types()?;
        let refuse = |reason: String| EngineError::WeightsFile {
            path: path.to_path_buf(),
            reason,
        };
        let tables = RopeTables::read(&index)?;
        let config = config(&metadata, &index, tables).map_err(refuse)?;
        let index = with_transformers_names(index, &config).map_err(refuse)?;
        Ok(Self {
            path: path.to_path_buf(),
            metadata,
            config,
            index,
        })
    }

    /// The tokenizer of the file; if it has none that can be read, that of `tokenizer.json` or `tokenizer.model` beside it.
    ///
    /// # Errors
    /// When there is none, or it is that of another model.
    pub(in super::super) fn tokenizer(&self) -> Result<TextTokenizer> {
        let vocab_size = self.config.vocab_size;
        let reason = match tokenizer_json(&self.metadata) {
            Ok(json) => return TextTokenizer::from_json(&json, self.path.clone(), vocab_size),
            Err(reason) => reason,
        };
        let folder = self.path.parent().unwrap_or_else(|| Path::new("."));
        if TextTokenizer::is_in(folder) {
            return TextTokenizer::open(folder, vocab_size);
        }
        Err(EngineError::WeightsFile {
            path: self.path.clone(),
            reason: format!(
                "{reason}: put the tokenizer.json of the model beside the file, alone in a folder, and give that folder as `model.name_or_path`"
            ),
        })
    }
}

/// The tensors under transformers' names and in the order of its rows.
fn with_transformers_names(index: Index, config: &CausalLmConfig) -> std::result::Result<Index, String> {
    let names = names(config.family);
    let name_of = |name: &str| names.renamed(name);
    let unknown = index
        .tensors()
        .find(|(name, _)| !ROPE_TABLES.contains(name) && name_of(name).is_none());
    if let Some((name, _)) = unknown {
        return Err(format!(
            "it has the tensor `{name}`, which models of the architecture `{}` do not have in this release: use another file",
            architecture(config.family)
        ));
    }
    let beyond = index
        .tensors()
        .find(|(name, _)| block_number(name).is_some_and(|number| number >= config.layers));
    if let Some((name, _)) = beyond {
        return Err(format!(
            "it has the tensor `{name}`, and its `{}.block_count` is {}: expected the number of its blocks",
            architecture(config.family),
            config.layers
        ));
    }
    let reordered = index.views(|name, _| {
        let found = name_of(name).and_then(|name| {
            let order = row_order(config, &name)?;
            Some((name, View::Reordered(order)))
        });
        found.into_iter().collect()
    });
    let same = index.renamed(|name, shape| {
        let name = name_of(name)?;
        row_order(config, &name).is_none().then(|| (name, shape.to_vec()))
    });
    Ok(same.merged(reordered))
}

/// The number of the block that a tensor belongs to.
fn block_number(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
}

/// The config of a file.
fn config(metadata: &Metadata, index: &Index, tables: RopeTables) -> std::result::Result<CausalLmConfig, String> {
    let known = || {
        CausalLmFamily::ALL
            .map(|family| format!("`{}`", architecture(family)))
            .join(", ")
    };
    let found = metadata.text("general.architecture").unwrap_or_default();
    let family = CausalLmFamily::ALL
        .into_iter()
        .find(|family| architecture(*family) == found);
    let family = family.ok_or_else(|| {
        format!(
            "its `general.architecture` is `{found}`, which is not a language model that this release runs: expected {}",
            known()
        )
    })?;
    let key = |name: &str| format!("{found}.{name}");
    let optional = |name: &str| metadata.number(&key(name));
    let number = |name: &str| optional(name).ok_or_else(|| format!("`{}` is missing or no number from 0", key(name)));
    if optional("expert_count").is_some_and(|count| count > 0) {
        return Err(format!(
            "it has experts (`{}`), which are not supported: use a dense model",
            key("expert_count")
        ));
    }
    let shape = |name: &str| {
        let sides = index.shape(name).map(<[usize]>::to_vec);
        sides.ok_or_else(|| format!("it has no tensor `{name}`: the file is not a whole model"))
    };
    let (width, heads, layers) = (
        number("embedding_length")?,
        number("attention.head_count")?,
        number("block_count")?,
    );
    let kv_heads = optional("attention.head_count_kv").unwrap_or(heads);
    if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(format!(
            "{heads} heads are not a multiple of {kv_heads} heads of keys and values"
        ));
    }
    let head_width = optional("attention.key_length").unwrap_or(width / heads);
    let (positions, max_positions) = match family {
        CausalLmFamily::GptBigCode => (
            PositionKind::Learned,
            shape("position_embd.weight")?.first().copied().unwrap_or(0),
        ),
        _ => {
            let max = number("context_length")?;
            let rotary = rotary_positions(metadata, found, head_width, max, tables)?;
            let max = rotary.context(max);
            (PositionKind::Rotary(rotary), max)
        }
    };
    let is_plain = matches!(family, CausalLmFamily::GptBigCode | CausalLmFamily::StarCoder2);
    let epsilon = match is_plain {
        true => "attention.layer_norm_epsilon",
        false => "attention.layer_norm_rms_epsilon",
    };
    let has_bias = |layer: &str| index.contains(&format!("blk.0.{layer}.bias"));
    let ends = ["eos", "eot"].map(|name| metadata.number(&format!("tokenizer.ggml.{name}_token_id")));
    let mut eos_token_ids: Vec<u32> = ends
        .into_iter()
        .flatten()
        .filter_map(|id| u32::try_from(id).ok())
        .collect();
    let config = CausalLmConfig {
        family,
        vocab_size: shape("token_embd.weight")?.first().copied().unwrap_or(0),
        width,
        inner_width: number("feed_forward_length")?,
        layers,
        heads,
        kv_heads,
        head_width,
        max_positions,
        norm: if is_plain { NormKind::Layer } else { NormKind::Rms },
        norm_eps: metadata
            .float(&key(epsilon))
            .ok_or_else(|| format!("`{}` is missing", key(epsilon)))?,
        feed_forward: if is_plain {
            FeedForwardKind::Plain
        } else {
            FeedForwardKind::Gated
        },
        activation: if is_plain {
            Activation::GeluTanh
        } else {
            Activation::Silu
        },
        positions,
        qkv_bias: has_bias("attn_q") || has_bias("attn_qkv"),
        attention_output_bias: has_bias("attn_output"),
        feed_forward_bias: has_bias("ffn_up"),
        scales_scores: true,
        windows: windows(metadata, found, layers),
        ties_embeddings: !index.contains("output.weight"),
        eos_token_ids: Vec::new(),
        // Its embeddings are not trained.
        padding_id: None,
    };
    check_sizes(&config)?;
    eos_token_ids.retain(|id| (*id as usize) < config.vocab_size);
    Ok(CausalLmConfig {
        eos_token_ids,
        ..config
    })
}

/// The sliding window of each block, which only files of aitk have for these models.
fn windows(metadata: &Metadata, arch: &str, layers: usize) -> Vec<Option<usize>> {
    let window = metadata
        .number(&format!("{arch}.attention.sliding_window"))
        .filter(|window| *window > 0);
    let uses = metadata.wholes(&format!("{arch}.attention.sliding_window_pattern"));
    let of_layer = |layer: usize| match uses {
        Some(uses) => window.filter(|_| uses.get(layer).is_some_and(|uses| *uses != 0)),
        None => window,
    };
    (0..layers.min(MAX_LAYERS)).map(of_layer).collect()
}
