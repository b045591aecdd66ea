//! The transformer of Stable Diffusion 3 and 3.5 in one file without a config: with the names of Stability's files or of diffusers, with or
//! without a prefix. Its sizes are those of its tensors.

use super::original_names::{BLOCKS, POSITIONS, layers_of_model, norms_of_model};
use super::transformer::Sd3Config;
use crate::error::Result;
use crate::models::mmdit::SINUSOIDS;
use crate::models::single_file::{PREFIXES, count_blocks, file_error, side, without_prefix};
use crate::weights::Index;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// For errors.
const FAMILY: &str = "Stable Diffusion 3.5";
/// Features of a head of a model without norms over heads, which show it (Stable Diffusion 3).
const HEAD_WIDTH: usize = 64;
/// Rows and columns of the latents that every published model was trained on.
const SAMPLE_SIZE: usize = 128;

/// Whether the tensors have the names of Stability's files.
pub fn has_original_names(index: &Index) -> bool {
    original_prefix(index).is_some()
}

fn original_prefix(index: &Index) -> Option<&'static str> {
    let mut prefixes = PREFIXES.into_iter();
    prefixes.find(|prefix| count_blocks(index, &format!("{prefix}{}", BLOCKS.0)) > 0)
}

/// The transformer's tensors among those of a file, under diffusers' names. They have the original names or those of diffusers.
/// A layer that is several layers in diffusers is split by rows.
///
/// # Errors
/// When there is no transformer of Stable Diffusion 3, or a tensor with an original name is missing or has a shape that does not fit the
/// others.
pub fn with_diffusers_names(index: &Index) -> Result<Index> {
    if let Some(prefix) = original_prefix(index) {
        return from_original(index, prefix);
    }
    let mut prefixes = PREFIXES.into_iter();
    let prefix = prefixes.find(|prefix| count_blocks(index, &format!("{prefix}{}", BLOCKS.1)) > 0);
    let prefix = prefix.ok_or_else(|| {
        file_error(
            index,
            format!(
                "it has no transformer of {FAMILY}: expected tensors such as `{}.0.x_block.attn.qkv.weight` or `{}.0.attn.to_q.weight`",
                BLOCKS.0, BLOCKS.1
            ),
        )
    })?;
    Ok(with_whole_table(&without_prefix(index, prefix)))
}

/// The table of positions has three dimensions. Quantised GGUF files may lack the first, which is 1.
fn with_whole_table(index: &Index) -> Index {
    index.renamed(|name, shape| {
        let is_flat = name == POSITIONS.1 && shape.len() == 2;
        let shape = if is_flat {
            [&[1], shape].concat()
        } else {
            shape.to_vec()
        };
        Some((name.to_owned(), shape))
    })
}

/// The sizes that the original names of a file have.
struct Sizes {
    width: usize,
    head_width: Option<usize>,
    channels: usize,
    patch: usize,
    text: usize,
    pooled: usize,
    blocks: usize,
}

impl Sizes {
    fn of(index: &Index, prefix: &str) -> Result<Self> {
        let side = |name: &str, axis: usize| side(index, FAMILY, &format!("{prefix}{name}"), axis);
        let has_norms = index
            .tensors()
            .any(|(name, _)| name.starts_with(&format!("{prefix}{}.", BLOCKS.0)) && name.contains(".ln_"));
        Ok(Self {
            width: side("x_embedder.proj.weight", 0)?,
            head_width: match has_norms {
                true => Some(side(&format!("{}.0.x_block.attn.ln_q.weight", BLOCKS.0), 0)?),
                false => None,
            },
            channels: side("x_embedder.proj.weight", 1)?,
            patch: side("x_embedder.proj.weight", 2)?,
            text: side("context_embedder.weight", 1)?,
            pooled: side("y_embedder.mlp.0.weight", 1)?,
            blocks: count_blocks(index, &format!("{prefix}{}", BLOCKS.0)),
        })
    }

    /// The shape of a layer's weight, by its original name.
    fn of_layer(&self, name: &str, is_dual: bool) -> Vec<usize> {
        let width = self.width;
        let block = name.strip_prefix(BLOCKS.0).and_then(|rest| {
            let (number, inner) = rest.strip_prefix('.')?.split_once('.')?;
            Some((number.parse::<usize>().ok()? + 1 == self.blocks, inner))
        });
        let (is_last, inner) = block.unwrap_or((false, name));
        let [rows, columns] = match inner {
            "x_embedder.proj" => return vec![width, self.channels, self.patch, self.patch],
            "t_embedder.mlp.0" => [width, SINUSOIDS],
            "y_embedder.mlp.0" => [width, self.pooled],
            "context_embedder" => [width, self.text],
            "final_layer.linear" => [self.channels * self.patch * self.patch, width],
            "final_layer.adaLN_modulation.1" => [2 * width, width],
            "x_block.adaLN_modulation.1" if is_dual => [9 * width, width],
            "context_block.adaLN_modulation.1" if is_last => [2 * width, width],
            "x_block.adaLN_modulation.1" | "context_block.adaLN_modulation.1" => [6 * width, width],
            "x_block.attn.qkv" | "x_block.attn2.qkv" | "context_block.attn.qkv" => [3 * width, width],
            "x_block.mlp.fc1" | "context_block.mlp.fc1" => [4 * width, width],
            "x_block.mlp.fc2" | "context_block.mlp.fc2" => [width, 4 * width],
            _ => [width, width],
        };
        vec![rows, columns]
    }
}

fn from_original(index: &Index, prefix: &str) -> Result<Index> {
    let sizes = Sizes::of(index, prefix)?;
    let is_dual = |block: usize| {
        let second = format!("{prefix}{}.{block}.x_block.attn2.", BLOCKS.0);
        index.tensors().any(|(name, _)| name.starts_with(&second))
    };
    let dual: Vec<bool> = (0..sizes.blocks).map(is_dual).collect();
    let is_dual = |block: usize| dual.get(block).copied().unwrap_or(false);
    let block_of = |name: &str| {
        name.strip_prefix(BLOCKS.0)?
            .strip_prefix('.')?
            .split_once('.')?
            .0
            .parse()
            .ok()
    };
    let (mut whole, mut parts) = (BTreeMap::new(), BTreeMap::new());
    for layer in layers_of_model(sizes.blocks, is_dual) {
        let shape = sizes.of_layer(&layer.name, block_of(&layer.name).is_some_and(is_dual));
        let rows = shape.first().copied().unwrap_or(0);
        for (kind, shape) in [("weight", shape), ("bias", vec![rows])] {
            let name = format!("{prefix}{}.{kind}", layer.name);
            index.check_shape(&name, &shape.as_slice().into())?;
            match layer.parts.as_slice() {
                [only] if !layer.halves_swapped => {
                    whole.insert(name, format!("{only}.{kind}"));
                }
                _ => {
                    parts.insert(name, layer.views(kind, sizes.width, rows));
                }
            }
        }
    }
    if let Some(head_width) = sizes.head_width {
        for (original, diffusers) in norms_of_model(sizes.blocks, is_dual) {
            let name = format!("{prefix}{original}.weight");
            index.check_shape(&name, &head_width.into())?;
            whole.insert(name, format!("{diffusers}.weight"));
        }
    }
    let table = format!("{prefix}{}", POSITIONS.0);
    if !index.contains(&table) {
        return Err(index.missing_error(&table));
    }
    whole.insert(table, POSITIONS.1.to_owned());
    let renamed = index.renamed(|name, shape| Some((whole.get(name)?.clone(), shape.to_vec())));
    let split = index.views(|name, _| parts.get(name).cloned().unwrap_or_default());
    Ok(with_whole_table(&renamed.merged(split)))
}

/// The config of a transformer whose tensors have diffusers' names.
///
/// # Errors
/// When a tensor is missing that shows a size, or has a shape that no such model has.
pub fn config_of(index: &Index) -> Result<Sd3Config> {
    let side = |name: &str, axis: usize| side(index, FAMILY, name, axis);
    let blocks = count_blocks(index, BLOCKS.1);
    let norm = format!("{}.0.attn.norm_q.weight", BLOCKS.1);
    let has_norms = index.contains(&norm);
    let head_width = if has_norms { side(&norm, 0)? } else { HEAD_WIDTH };
    let width = side("pos_embed.proj.weight", 0)?;
    if width % head_width != 0 {
        return Err(file_error(
            index,
            format!("{width} features cannot be split into heads of {head_width}"),
        ));
    }
    let positions = side(POSITIONS.1, 1)?;
    let table = positions.isqrt();
    if table * table != positions {
        return Err(file_error(
            index,
            format!(
                "tensor `{}` has positions for {positions} tokens: expected a square number",
                POSITIONS.0
            ),
        ));
    }
    let channels = side("pos_embed.proj.weight", 1)?;
    let is_dual = |block: &usize| index.contains(&format!("{}.{block}.attn2.to_q.weight", BLOCKS.1));
    Ok(Sd3Config {
        sample_size: SAMPLE_SIZE,
        patch_size: side("pos_embed.proj.weight", 2)?,
        in_channels: channels,
        out_channels: Some(channels),
        num_layers: blocks,
        attention_head_dim: head_width,
        num_attention_heads: width / head_width,
        joint_attention_dim: side("context_embedder.weight", 1)?,
        caption_projection_dim: width,
        pooled_projection_dim: side("time_text_embed.text_embedder.linear_1.weight", 1)?,
        pos_embed_max_size: table,
        dual_attention_layers: (0..blocks).filter(is_dual).collect(),
        qk_norm: has_norms.then(|| "rms_norm".to_owned()),
    })
}

/// A config as diffusers writes it to `transformer/config.json`.
#[must_use]
pub fn config_json(config: &Sd3Config) -> Value {
    json!({
        "_class_name": "SD3Transformer2DModel",
        "_diffusers_version": "0.42.1",
        "attention_head_dim": config.attention_head_dim,
        "caption_projection_dim": config.caption_projection_dim,
        "dual_attention_layers": config.dual_attention_layers,
        "in_channels": config.in_channels,
        "joint_attention_dim": config.joint_attention_dim,
        "num_attention_heads": config.num_attention_heads,
        "num_layers": config.num_layers,
        "out_channels": config.out_channels,
        "patch_size": config.patch_size,
        "pooled_projection_dim": config.pooled_projection_dim,
        "pos_embed_max_size": config.pos_embed_max_size,
        "qk_norm": config.qk_norm,
        "sample_size": config.sample_size,
    })
}
