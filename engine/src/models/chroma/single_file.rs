//! Chroma's transformer in one file without a config: with the names of the original release (lodestones' files, ComfyUI) or of diffusers,
//! with or without a prefix. Its sizes are those of its tensors. The blocks have FLUX.1's names; those of the approximator are diffusers'
//! `convert_chroma_transformer_checkpoint_to_diffusers`.

use super::transformer::{APPROXIMATOR, ChromaConfig};
use crate::error::Result;
use crate::models::flux::single_file::{Release, axes_of, from_original, original_prefix, without_prefixes};
use crate::models::single_file::{count_blocks, file_error, side};
use crate::weights::Index;
use serde_json::{Value, json};

const CHROMA: Release = Release {
    family: "Chroma",
    has_modulation: false,
};
/// The lists of blocks, double and single ones, by diffusers' names.
const BLOCKS: [&str; 2] = ["transformer_blocks", "single_transformer_blocks"];

/// Whether the tensors have the names of the original release.
pub fn has_original_names(index: &Index) -> bool {
    original_prefix(index).is_some()
}

/// The transformer's tensors among those of a file, under diffusers' names. They have the original names or those of diffusers.
///
/// # Errors
/// When there is no transformer of Chroma, or a tensor with an original name is missing or has a shape that does not fit the others.
pub fn with_diffusers_names(index: &Index) -> Result<Index> {
    let Some(prefix) = original_prefix(index) else {
        return without_prefixes(index, CHROMA);
    };
    let blocks = from_original(index, prefix, CHROMA)?;
    let of_approximator = |name: &str, shape: &[usize]| {
        let name = name.strip_prefix(prefix)?.strip_prefix(APPROXIMATOR)?;
        Some((format!("{APPROXIMATOR}{}", approximator_name(name)), shape.to_vec()))
    };
    Ok(blocks.merged(index.renamed(of_approximator)))
}

/// diffusers' name of a tensor of the approximator, from the original one; both without the approximator's.
fn approximator_name(name: &str) -> String {
    let name = name
        .replace(".in_layer.", ".linear_1.")
        .replace(".out_layer.", ".linear_2.");
    match name.strip_suffix(".scale") {
        Some(norm) => format!("{norm}.weight"),
        None => name,
    }
}

/// The config of a transformer whose tensors have diffusers' names.
///
/// # Errors
/// When a tensor is missing that shows a size.
pub fn config_of(index: &Index) -> Result<ChromaConfig> {
    let side = |name: &str, axis: usize| side(index, CHROMA.family, name, axis);
    let [double, single] = BLOCKS.map(|blocks| count_blocks(index, blocks));
    let [of_double, of_single] = BLOCKS;
    let first = if double > 0 { of_double } else { of_single };
    let head_width = side(&format!("{first}.0.attn.norm_q.weight"), 0)?;
    let width = side("x_embedder.weight", 0)?;
    if width % head_width != 0 {
        return Err(file_error(
            index,
            format!("{width} features cannot be split into heads of {head_width}"),
        ));
    }
    Ok(ChromaConfig {
        in_channels: side("x_embedder.weight", 1)?,
        out_channels: Some(side("proj_out.weight", 0)?),
        num_layers: double,
        num_single_layers: single,
        attention_head_dim: head_width,
        num_attention_heads: width / head_width,
        joint_attention_dim: side("context_embedder.weight", 1)?,
        axes_dims_rope: axes_of(head_width),
        patch_size: 1,
        approximator_num_channels: side(&format!("{APPROXIMATOR}.in_proj.weight"), 1)?,
        approximator_hidden_dim: side(&format!("{APPROXIMATOR}.in_proj.weight"), 0)?,
        approximator_layers: count_blocks(index, &format!("{APPROXIMATOR}.layers")),
    })
}

/// A config as diffusers writes it to `transformer/config.json`.
#[must_use]
pub fn config_json(config: &ChromaConfig) -> Value {
    json!({
        "_class_name": "ChromaTransformer2DModel",
        "_diffusers_version": "0.42.1",
        "approximator_hidden_dim": config.approximator_hidden_dim,
        "approximator_layers": config.approximator_layers,
        "approximator_num_channels": config.approximator_num_channels,
        "attention_head_dim": config.attention_head_dim,
        "axes_dims_rope": config.axes_dims_rope,
        "in_channels": config.in_channels,
        "joint_attention_dim": config.joint_attention_dim,
        "num_attention_heads": config.num_attention_heads,
        "num_layers": config.num_layers,
        "num_single_layers": config.num_single_layers,
        "out_channels": config.out_channels.filter(|out| *out != config.in_channels),
        "patch_size": config.patch_size,
    })
}
