//! The linear layers of FLUX.1's original release (Black Forest Labs' single files), and the layers of diffusers' model that
//! each of them consists of.

use crate::models::original_layer::OriginalLayer;
use std::collections::HashSet;

/// Layers outside the blocks: the original name, and diffusers' name.
const OUTER_LAYERS: [(&str, &str); 10] = [
    ("img_in", "x_embedder"),
    ("txt_in", "context_embedder"),
    ("time_in.in_layer", "time_text_embed.timestep_embedder.linear_1"),
    ("time_in.out_layer", "time_text_embed.timestep_embedder.linear_2"),
    ("vector_in.in_layer", "time_text_embed.text_embedder.linear_1"),
    ("vector_in.out_layer", "time_text_embed.text_embedder.linear_2"),
    ("guidance_in.in_layer", "time_text_embed.guidance_embedder.linear_1"),
    ("guidance_in.out_layer", "time_text_embed.guidance_embedder.linear_2"),
    ("final_layer.linear", "proj_out"),
    (MODULATION_OUT, "norm_out.linear"),
];
/// Originally gives the shift before the scale; in diffusers the scale comes first.
const MODULATION_OUT: &str = "final_layer.adaLN_modulation.1";

/// Names of a layer of a block, and the layers of diffusers that it consists of, in the order of their rows.
type BlockLayer = (&'static str, &'static [&'static str]);

const IMAGE_QKV: &[&str] = &["attn.to_q", "attn.to_k", "attn.to_v"];
const TEXT_QKV: &[&str] = &["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"];

const DOUBLE_BLOCK: [BlockLayer; 10] = [
    ("img_mod.lin", &["norm1.linear"]),
    ("txt_mod.lin", &["norm1_context.linear"]),
    ("img_attn.qkv", IMAGE_QKV),
    ("txt_attn.qkv", TEXT_QKV),
    ("img_attn.proj", &["attn.to_out.0"]),
    ("txt_attn.proj", &["attn.to_add_out"]),
    ("img_mlp.0", &["ff.net.0.proj"]),
    ("img_mlp.2", &["ff.net.2"]),
    ("txt_mlp.0", &["ff_context.net.0.proj"]),
    ("txt_mlp.2", &["ff_context.net.2"]),
];
const SINGLE_BLOCK: [BlockLayer; 3] = [
    ("modulation.lin", &["norm.linear"]),
    ("linear1", &["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"]),
    ("linear2", &["proj_out"]),
];

/// The names that XLabs' LoRAs use for layers of double blocks (without `processor.`), as diffusers reads them.
const XLABS_DOUBLE_BLOCK: [BlockLayer; 4] = [
    ("qkv_lora1", IMAGE_QKV),
    ("qkv_lora2", TEXT_QKV),
    ("proj_lora1", &["attn.to_out.0"]),
    ("proj_lora2", &["attn.to_add_out"]),
];
/// The same for single blocks.
const XLABS_SINGLE_BLOCK: [BlockLayer; 2] = [("qkv", IMAGE_QKV), ("proj", &["proj_out"])];

/// The scales of norms over heads, which are tensors of their own: the original name, and diffusers' name.
const DOUBLE_BLOCK_NORMS: [(&str, &str); 4] = [
    ("img_attn.norm.query_norm", "attn.norm_q"),
    ("img_attn.norm.key_norm", "attn.norm_k"),
    ("txt_attn.norm.query_norm", "attn.norm_added_q"),
    ("txt_attn.norm.key_norm", "attn.norm_added_k"),
];
const SINGLE_BLOCK_NORMS: [(&str, &str); 2] = [("norm.query_norm", "attn.norm_q"), ("norm.key_norm", "attn.norm_k")];

/// The beginning of the names of blocks: the original one, and diffusers'.
pub(super) const DOUBLE_BLOCKS: (&str, &str) = ("double_blocks", "transformer_blocks");
pub(super) const SINGLE_BLOCKS: (&str, &str) = ("single_blocks", "single_transformer_blocks");

/// The linear layers of a model of the original release with this number of double and single blocks.
pub(super) fn layers_of_model(double: usize, single: usize) -> Vec<OriginalLayer> {
    let of_blocks = |(original, diffusers): (&'static str, &'static str), count, layers: &'static [BlockLayer]| {
        (0..count).flat_map(move |index| {
            layers
                .iter()
                .map(move |layer| of_block((original, diffusers), index, *layer))
        })
    };
    let blocks = of_blocks(DOUBLE_BLOCKS, double, &DOUBLE_BLOCK);
    let blocks = blocks.chain(of_blocks(SINGLE_BLOCKS, single, &SINGLE_BLOCK));
    outer_layers().chain(blocks).collect()
}

/// The norms of such a model: the original name without its last part (`scale`), and diffusers' name without `weight`.
pub(super) fn norms_of_model(double: usize, single: usize) -> Vec<(String, String)> {
    let of_blocks = |(original, diffusers): (&'static str, &'static str), count, norms: &'static [(&str, &str)]| {
        (0..count).flat_map(move |index| {
            norms.iter().map(move |(from, to)| {
                (
                    format!("{original}.{index}.{from}"),
                    format!("{diffusers}.{index}.{to}"),
                )
            })
        })
    };
    let double = of_blocks(DOUBLE_BLOCKS, double, &DOUBLE_BLOCK_NORMS);
    double
        .chain(of_blocks(SINGLE_BLOCKS, single, &SINGLE_BLOCK_NORMS))
        .collect()
}

fn outer_layers() -> impl Iterator<Item = OriginalLayer> {
    OUTER_LAYERS.iter().map(|(name, path)| OriginalLayer {
        name: (*name).to_owned(),
        parts: vec![(*path).to_owned()],
        halves_swapped: *name == MODULATION_OUT,
    })
}

fn of_block((original, diffusers): (&str, &str), index: usize, (name, parts): BlockLayer) -> OriginalLayer {
    OriginalLayer {
        name: format!("{original}.{index}.{name}"),
        parts: parts.iter().map(|part| format!("{diffusers}.{index}.{part}")).collect(),
        halves_swapped: false,
    }
}

/// The layers of the original release that a model with these layers (diffusers' paths) has, and the names of XLabs for them.
/// Empty if the model is neither FLUX.1 nor Chroma, which has the same layers in its blocks but those that make the modulation.
#[must_use]
pub fn original_layers(paths: &[&str]) -> Vec<OriginalLayer> {
    let known: HashSet<&str> = paths.iter().copied().collect();
    if !known.contains("single_transformer_blocks.0.proj_mlp") {
        return Vec::new();
    }
    let blocks = |names: (&'static str, &'static str), first: &'static str, layers: Vec<BlockLayer>| {
        let known = &known;
        (0..)
            .take_while(move |index| known.contains(format!("{}.{index}.{first}", names.1).as_str()))
            .flat_map(move |index| {
                layers
                    .clone()
                    .into_iter()
                    .map(move |layer| of_block(names, index, layer))
            })
    };
    let double = [&DOUBLE_BLOCK[..], &XLABS_DOUBLE_BLOCK].concat();
    let single = [&SINGLE_BLOCK[..], &XLABS_SINGLE_BLOCK].concat();
    outer_layers()
        .chain(blocks(DOUBLE_BLOCKS, "attn.to_q", double))
        .chain(blocks(SINGLE_BLOCKS, "attn.to_q", single))
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
        let text = std::fs::read_to_string(fixtures().join("models/flux_original_names.json")).unwrap();
        let expected: BTreeMap<String, Value> = serde_json::from_str(&text).unwrap();
        let strip = |name: &Value| name.as_str().unwrap().strip_suffix(".weight").map(str::to_owned);
        let expected: Vec<OriginalLayer> = expected
            .iter()
            .filter_map(|(name, entry)| {
                let parts = entry["diffusers"].as_array().unwrap();
                Some(OriginalLayer {
                    name: name.strip_suffix(".weight")?.to_owned(),
                    parts: parts.iter().map(strip).collect::<Option<_>>()?,
                    halves_swapped: entry["swap_halves"] == true,
                })
            })
            .collect();
        let paths: Vec<&str> = expected
            .iter()
            .flat_map(|layer| &layer.parts)
            .map(String::as_str)
            .collect();
        let mut found = original_layers(&paths);
        let xlabs = |layer: &OriginalLayer| layer.name.contains("_lora") || layer.name.ends_with(['v', 'j']);
        found.retain(|layer| !xlabs(layer) || layer.name.contains("_attn."));
        found.sort_by(|a, b| a.name.cmp(&b.name));
        assert_eq!(found, expected);
        assert!(original_layers(&["transformer_blocks.0.norm1.linear", "x_embedder"]).is_empty());
    }
}
