//! The layers of Stability's files of Stable Diffusion 3.5, which LoRAs of sd-scripts and ComfyUI name too, and the layers of diffusers'
//! model that each of them consists of.

use crate::models::original_layer::OriginalLayer;
use std::collections::HashSet;

/// Layers outside the blocks: the original name, and diffusers' name.
const OUTER_LAYERS: [(&str, &str); 8] = [
    ("x_embedder.proj", "pos_embed.proj"),
    ("t_embedder.mlp.0", "time_text_embed.timestep_embedder.linear_1"),
    ("t_embedder.mlp.2", "time_text_embed.timestep_embedder.linear_2"),
    ("y_embedder.mlp.0", "time_text_embed.text_embedder.linear_1"),
    ("y_embedder.mlp.2", "time_text_embed.text_embedder.linear_2"),
    ("context_embedder", "context_embedder"),
    ("final_layer.linear", "proj_out"),
    (MODULATION_OUT, "norm_out.linear"),
];
/// Originally gives the shift before the scale; in diffusers the scale comes first.
const MODULATION_OUT: &str = "final_layer.adaLN_modulation.1";
/// The same of the text in the last block.
const MODULATION_TEXT: &str = "context_block.adaLN_modulation.1";

/// Layers of a block: the original name, and the layers of diffusers that it consists of, in the order of their rows.
const BLOCK: [(&str, &[&str]); 12] = [
    ("x_block.adaLN_modulation.1", &["norm1.linear"]),
    ("x_block.attn.qkv", &["attn.to_q", "attn.to_k", "attn.to_v"]),
    ("x_block.attn.proj", &["attn.to_out.0"]),
    ("x_block.attn2.qkv", &["attn2.to_q", "attn2.to_k", "attn2.to_v"]),
    ("x_block.attn2.proj", &["attn2.to_out.0"]),
    ("x_block.mlp.fc1", &["ff.net.0.proj"]),
    ("x_block.mlp.fc2", &["ff.net.2"]),
    (MODULATION_TEXT, &["norm1_context.linear"]),
    (
        "context_block.attn.qkv",
        &["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"],
    ),
    ("context_block.attn.proj", &["attn.to_add_out"]),
    ("context_block.mlp.fc1", &["ff_context.net.0.proj"]),
    ("context_block.mlp.fc2", &["ff_context.net.2"]),
];

/// The scales of norms over heads of a block: the original name, and diffusers' name.
const BLOCK_NORMS: [(&str, &str); 6] = [
    ("x_block.attn.ln_q", "attn.norm_q"),
    ("x_block.attn.ln_k", "attn.norm_k"),
    ("x_block.attn2.ln_q", "attn2.norm_q"),
    ("x_block.attn2.ln_k", "attn2.norm_k"),
    ("context_block.attn.ln_q", "attn.norm_added_q"),
    ("context_block.attn.ln_k", "attn.norm_added_k"),
];
/// What the names of layers begin with that the last block does not have: of the text, it has keys and values only.
const NOT_LAST: [&str; 2] = ["context_block.attn.proj", "context_block.mlp."];
/// What the names of the second attention's layers begin with.
const SECOND_ATTENTION: &str = "x_block.attn2.";

/// The beginning of the names of blocks: the original one, and diffusers'.
pub(super) const BLOCKS: (&str, &str) = ("joint_blocks", "transformer_blocks");

/// The table of positions: the original name, and diffusers' name.
pub(super) const POSITIONS: (&str, &str) = ("pos_embed", "pos_embed.pos_embed");

fn outer_layers() -> impl Iterator<Item = OriginalLayer> {
    OUTER_LAYERS.iter().map(|(name, path)| OriginalLayer {
        name: (*name).to_owned(),
        parts: vec![(*path).to_owned()],
        halves_swapped: *name == MODULATION_OUT,
    })
}

fn layers_of_block(index: usize, is_last: bool) -> impl Iterator<Item = OriginalLayer> {
    BLOCK.iter().map(move |(name, parts)| OriginalLayer {
        name: format!("{}.{index}.{name}", BLOCKS.0),
        parts: parts
            .iter()
            .map(|part| format!("{}.{index}.{part}", BLOCKS.1))
            .collect(),
        halves_swapped: is_last && *name == MODULATION_TEXT,
    })
}

/// The layers of Stability's files of a model with this number of blocks. `is_dual`: whether a block has a second attention.
pub(super) fn layers_of_model(blocks: usize, is_dual: impl Fn(usize) -> bool) -> Vec<OriginalLayer> {
    let of_blocks = (0..blocks).flat_map(|index| {
        let (is_last, is_dual) = (index + 1 == blocks, is_dual(index));
        let start = format!("{}.{index}.", BLOCKS.0);
        layers_of_block(index, is_last).filter(move |layer| {
            let name = layer.name.strip_prefix(&start).unwrap_or_default();
            let is_left_out = is_last && NOT_LAST.iter().any(|not_last| name.starts_with(not_last));
            !is_left_out && (is_dual || !name.starts_with(SECOND_ATTENTION))
        })
    });
    outer_layers().chain(of_blocks).collect()
}

/// The norms of queries and keys of such a model: the original name and diffusers' name, without `weight`.
pub(super) fn norms_of_model(blocks: usize, is_dual: impl Fn(usize) -> bool) -> Vec<(String, String)> {
    let of_blocks = (0..blocks).flat_map(|index| {
        let is_dual = is_dual(index);
        let norms = BLOCK_NORMS.iter();
        let norms = norms.filter(move |(name, _)| is_dual || !name.starts_with(SECOND_ATTENTION));
        norms.map(move |(name, ours)| {
            (
                format!("{}.{index}.{name}", BLOCKS.0),
                format!("{}.{index}.{ours}", BLOCKS.1),
            )
        })
    });
    of_blocks.collect()
}

/// The layers of Stability's files that a model with these layers (diffusers' paths) has. Empty if the model is not Stable Diffusion 3.
#[must_use]
pub fn original_layers(paths: &[&str]) -> Vec<OriginalLayer> {
    let known: HashSet<&str> = paths.iter().copied().collect();
    if !known.contains("pos_embed.proj") || !known.contains("transformer_blocks.0.attn.add_q_proj") {
        return Vec::new();
    }
    let blocks = (0..).take_while(|index| known.contains(format!("transformer_blocks.{index}.norm1.linear").as_str()));
    let blocks = blocks.flat_map(|index| {
        // The text of the last block has no feed-forward layers.
        let is_last = !known.contains(format!("transformer_blocks.{index}.attn.to_add_out").as_str());
        layers_of_block(index, is_last)
    });
    outer_layers()
        .chain(blocks)
        .filter(|layer| layer.parts.iter().all(|part| known.contains(part.as_str())))
        .collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::testing::fixtures;
    use serde_json::Value;
    use std::collections::BTreeMap;

    #[test]
    fn the_names_are_those_that_diffusers_converts() {
        let text = std::fs::read_to_string(fixtures().join("models/sd35_original_names.json")).unwrap();
        let expected: BTreeMap<String, Value> = serde_json::from_str(&text).unwrap();
        let expected: Vec<OriginalLayer> = expected
            .into_iter()
            .map(|(name, entry)| OriginalLayer {
                name,
                parts: serde_json::from_value(entry["diffusers"].clone()).unwrap(),
                halves_swapped: entry["swap_halves"] == true,
            })
            .collect();
        let paths: Vec<&str> = expected
            .iter()
            .flat_map(|layer| &layer.parts)
            .map(String::as_str)
            .collect();
        let mut found = original_layers(&paths);
        found.sort_by(|a, b| a.name.cmp(&b.name));
        assert_eq!(found, expected);
        // FLUX.1 has blocks with the same names, and no table of positions.
        assert!(original_layers(&["transformer_blocks.0.attn.add_q_proj", "x_embedder"]).is_empty());
        assert!(crate::models::flux::original_layers(&paths).is_empty());
    }
}
