//! FLUX.1's transformer in one file without a config: with the names of the original release (Black Forest Labs) or of diffusers,
//! with or without a prefix. Its sizes are those of its tensors.

use super::original_names::{DOUBLE_BLOCKS, SINGLE_BLOCKS, layers_of_model, norms_of_model};
use super::transformer::FluxConfig;
use crate::error::Result;
use crate::models::mmdit::SINUSOIDS;
use crate::models::single_file::{PREFIXES, count_blocks, file_error, side, without_prefix};
use crate::weights::Index;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A family whose single files have these names.
#[derive(Clone, Copy, Debug)]
pub(in crate::models) struct Release {
    /// For errors.
    pub(in crate::models) family: &'static str,
    /// Whether each block has layers that make its modulation, with the embeddings of what it follows.
    pub(in crate::models) has_modulation: bool,
}

const FLUX: Release = Release {
    family: "FLUX.1",
    has_modulation: true,
};
/// The beginnings of the names of layers outside the blocks that only a modulation in the blocks has.
const MODULATION_INPUTS: [&str; 4] = [
    "time_in.",
    "vector_in.",
    "guidance_in.",
    "final_layer.adaLN_modulation.",
];
/// The last part of the name of a norm's tensor: that of the release, and that of later versions of ComfyUI.
const NORM_TENSORS: [&str; 2] = ["scale", "weight"];

/// Whether the tensors have the names of the original release.
pub fn has_original_names(index: &Index) -> bool {
    original_prefix(index).is_some()
}

fn first_prefix_of(index: &Index, blocks: &str) -> Option<&'static str> {
    let mut prefixes = PREFIXES.into_iter();
    prefixes.find(|prefix| count_blocks(index, &format!("{prefix}{blocks}")) > 0)
}

/// What stands before the names of the original release; `None`: the tensors have other names.
pub(in crate::models) fn original_prefix(index: &Index) -> Option<&'static str> {
    first_prefix_of(index, DOUBLE_BLOCKS.0).or_else(|| first_prefix_of(index, SINGLE_BLOCKS.0))
}

/// The transformer's tensors among those of a file, under diffusers' names. They have the original names or those of diffusers.
/// A layer that is several layers in diffusers is split by rows.
///
/// # Errors
/// When there is no transformer of FLUX.1, or a tensor with an original name is missing or has a shape that does not fit the others.
pub fn with_diffusers_names(index: &Index) -> Result<Index> {
    match original_prefix(index) {
        Some(prefix) => from_original(index, prefix, FLUX),
        None => without_prefixes(index, FLUX),
    }
}

/// The tensors of a file with diffusers' names, without what stands before them.
///
/// # Errors
/// When there are no blocks.
pub(in crate::models) fn without_prefixes(index: &Index, release: Release) -> Result<Index> {
    let prefix = first_prefix_of(index, DOUBLE_BLOCKS.1).or_else(|| first_prefix_of(index, SINGLE_BLOCKS.1));
    let prefix = prefix.ok_or_else(|| {
        file_error(
            index,
            format!(
                "it has no transformer of {}: expected tensors such as `{}.0.img_attn.qkv.weight` or `{}.0.attn.to_q.weight`",
                release.family, DOUBLE_BLOCKS.0, DOUBLE_BLOCKS.1
            ),
        )
    })?;
    Ok(without_prefix(index, prefix))
}

/// The sizes that the original names of a file have.
struct Sizes {
    width: usize,
    head_width: usize,
    in_channels: usize,
    out_channels: usize,
    text: usize,
    /// 0 without modulation in the blocks.
    pooled: usize,
    has_guidance: bool,
}

impl Sizes {
    fn of(index: &Index, prefix: &str, release: Release) -> Result<Self> {
        let side = |name: &str, axis: usize| side(index, release.family, &format!("{prefix}{name}"), axis);
        let norm = |name: &str| {
            let names = NORM_TENSORS.map(|last| format!("{name}.{last}"));
            let found = names.iter().find(|name| index.contains(&format!("{prefix}{name}")));
            side(found.unwrap_or(&names[0]), 0)
        };
        let is_double = count_blocks(index, &format!("{prefix}{}", DOUBLE_BLOCKS.0)) > 0;
        Ok(Self {
            width: side("img_in.weight", 0)?,
            head_width: match is_double {
                true => norm("double_blocks.0.img_attn.norm.query_norm")?,
                false => norm("single_blocks.0.norm.query_norm")?,
            },
            in_channels: side("img_in.weight", 1)?,
            out_channels: side("final_layer.linear.weight", 0)?,
            text: side("txt_in.weight", 1)?,
            pooled: match release.has_modulation {
                true => side("vector_in.in_layer.weight", 1)?,
                false => 0,
            },
            has_guidance: index.contains(&format!("{prefix}guidance_in.in_layer.weight")),
        })
    }

    /// Rows and columns of a linear layer's weight, by its original name.
    fn of_layer(&self, name: &str) -> [usize; 2] {
        let width = self.width;
        let inner = match name.split_once("_blocks.") {
            Some((_, rest)) => rest.split_once('.').map_or(rest, |(_, inner)| inner),
            None => name,
        };
        match inner {
            "img_in" => [width, self.in_channels],
            "txt_in" => [width, self.text],
            "time_in.in_layer" | "guidance_in.in_layer" => [width, SINUSOIDS],
            "vector_in.in_layer" => [width, self.pooled],
            "final_layer.linear" => [self.out_channels, width],
            "final_layer.adaLN_modulation.1" => [2 * width, width],
            "img_mod.lin" | "txt_mod.lin" => [6 * width, width],
            "modulation.lin" | "img_attn.qkv" | "txt_attn.qkv" => [3 * width, width],
            "img_mlp.0" | "txt_mlp.0" => [4 * width, width],
            "img_mlp.2" | "txt_mlp.2" => [width, 4 * width],
            "linear1" => [7 * width, width],
            "linear2" => [width, 5 * width],
            _ => [width, width],
        }
    }
}

/// The embeddings, blocks and the output layer under diffusers' names. `prefix`: as [`original_prefix`] returns it.
///
/// # Errors
/// When a tensor is missing or has a shape that does not fit the others.
pub(in crate::models) fn from_original(index: &Index, prefix: &str, release: Release) -> Result<Index> {
    let sizes = Sizes::of(index, prefix, release)?;
    let double = count_blocks(index, &format!("{prefix}{}", DOUBLE_BLOCKS.0));
    let single = count_blocks(index, &format!("{prefix}{}", SINGLE_BLOCKS.0));
    let (mut whole, mut parts) = (BTreeMap::new(), BTreeMap::new());
    for layer in layers_of_model(double, single) {
        if layer.name.starts_with("guidance_in.") && !sizes.has_guidance
            || !release.has_modulation && is_of_modulation(&layer.name)
        {
            continue;
        }
        let [rows, columns] = sizes.of_layer(&layer.name);
        for (kind, shape) in [("weight", vec![rows, columns]), ("bias", vec![rows])] {
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
    for (original, diffusers) in norms_of_model(double, single) {
        let names = NORM_TENSORS.map(|last| format!("{prefix}{original}.{last}"));
        let name = names.iter().find(|name| index.contains(name)).unwrap_or(&names[0]);
        index.check_shape(name, &sizes.head_width.into())?;
        whole.insert(name.clone(), format!("{diffusers}.weight"));
    }
    let renamed = index.renamed(|name, shape| Some((whole.get(name)?.clone(), shape.to_vec())));
    Ok(renamed.merged(index.views(|name, _| parts.get(name).cloned().unwrap_or_default())))
}

/// Whether a layer makes the modulation of blocks or is one of its inputs.
fn is_of_modulation(name: &str) -> bool {
    let ends = ["_mod.lin", ".modulation.lin"];
    MODULATION_INPUTS.iter().any(|start| name.starts_with(start)) || ends.iter().any(|end| name.ends_with(end))
}

/// The config of a transformer whose tensors have diffusers' names.
///
/// # Errors
/// When a tensor is missing that shows a size.
pub fn config_of(index: &Index) -> Result<FluxConfig> {
    let side = |name: &str, axis: usize| side(index, FLUX.family, name, axis);
    let (double, single) = (
        count_blocks(index, DOUBLE_BLOCKS.1),
        count_blocks(index, SINGLE_BLOCKS.1),
    );
    let first = if double > 0 { DOUBLE_BLOCKS.1 } else { SINGLE_BLOCKS.1 };
    let head_width = side(&format!("{first}.0.attn.norm_q.weight"), 0)?;
    let width = side("x_embedder.weight", 0)?;
    if width % head_width != 0 {
        return Err(file_error(
            index,
            format!("{width} features cannot be split into heads of {head_width}"),
        ));
    }
    Ok(FluxConfig {
        in_channels: side("x_embedder.weight", 1)?,
        out_channels: Some(side("proj_out.weight", 0)?),
        num_layers: double,
        num_single_layers: single,
        attention_head_dim: head_width,
        num_attention_heads: width / head_width,
        joint_attention_dim: side("context_embedder.weight", 1)?,
        pooled_projection_dim: side("time_text_embed.text_embedder.linear_1.weight", 1)?,
        guidance_embeds: index.contains("time_text_embed.guidance_embedder.linear_1.weight"),
        axes_dims_rope: axes_of(head_width),
        patch_size: 1,
    })
}

/// `axes_dims_rope` for heads of this width: 16, 56 and 56 of 128 in every published model.
pub(in crate::models) fn axes_of(head_width: usize) -> Vec<usize> {
    let side_axis = head_width.saturating_mul(7) / 16 / 2 * 2;
    vec![head_width - 2 * side_axis, side_axis, side_axis]
}

/// A config as diffusers writes it to `transformer/config.json`.
#[must_use]
pub fn config_json(config: &FluxConfig) -> Value {
    json!({
        "_class_name": "FluxTransformer2DModel",
        "_diffusers_version": "0.42.1",
        "attention_head_dim": config.attention_head_dim,
        "axes_dims_rope": config.axes_dims_rope,
        "guidance_embeds": config.guidance_embeds,
        "in_channels": config.in_channels,
        "joint_attention_dim": config.joint_attention_dim,
        "num_attention_heads": config.num_attention_heads,
        "num_layers": config.num_layers,
        "num_single_layers": config.num_single_layers,
        "out_channels": config.out_channels.filter(|out| *out != config.in_channels),
        "patch_size": config.patch_size,
        "pooled_projection_dim": config.pooled_projection_dim,
    })
}
