//! The names of a model's layers in every dialect of LoRA files.

use crate::families::{AdapterNames, Part, PartRole};
use crate::models::unet::OriginalNames;
use crate::models::{chroma, flux, sd3, zimage};
use std::collections::HashMap;

/// A layer: the part of the model that it is in, and its dotted diffusers path.
pub type LayerKey = (&'static str, String);

/// The beginning and the length of ranges of rows, in their order.
pub(super) type RowRanges = Vec<(usize, usize)>;

/// What a name in a file stands for: a layer of the model, or a layer of the original release that consists of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedLayers {
    /// The part of the model.
    pub part: &'static str,
    /// The dotted diffusers path and the number of rows (outputs) of each layer, in the order of the rows in the file.
    pub layers: Vec<(String, usize)>,
    /// Whether the two halves of the rows in the file are in the other order than in the model.
    pub halves_swapped: bool,
}

impl NamedLayers {
    /// The number of rows of all layers.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.layers.iter().map(|(_, rows)| rows).sum()
    }

    /// The rows in the file that each layer has.
    pub(super) fn row_ranges(&self) -> Vec<RowRanges> {
        let mut start = 0;
        let ranges = self.layers.iter().map(|(_, rows)| {
            start += rows;
            match (self.halves_swapped, rows / 2) {
                (true, half) => vec![(half, rows - half), (0, half)],
                (false, _) => vec![(start - rows, *rows)],
            }
        });
        ranges.collect()
    }

    /// The rows in the file that each layer has; `None` where it has them all as they are.
    pub(super) fn rows_if_converted(&self) -> Vec<Option<RowRanges>> {
        match self.is_converted() {
            true => self.row_ranges().into_iter().map(Some).collect(),
            false => vec![None],
        }
    }

    /// Whether the tensors in the file are not those of one layer of the model as they are.
    #[must_use]
    pub fn is_converted(&self) -> bool {
        self.halves_swapped || self.layers.len() > 1
    }
}

/// The prefixes of a part's layers in files of other programs.
fn prefixes(part: &str) -> &'static [&'static str] {
    match part {
        "text_encoder" => &[
            "lora_te1_",
            "lora_te1.",
            "lora_te_",
            "text_encoder.",
            "base_model.model.text_encoder.",
            "text_encoders.clip_l.transformer.",
            "text_encoders.clip_h.transformer.",
        ],
        "text_encoder_2" => &[
            "lora_te2_",
            "lora_te2.",
            "text_encoder_2.",
            "base_model.model.text_encoder_2.",
            "text_encoders.clip_g.transformer.",
        ],
        "transformer" => &[
            "transformer.",
            "lora_transformer_",
            "lora_unet_",
            "lycoris_",
            "base_model.model.transformer.",
            "diffusion_model.",
            "base_model.model.",
            "",
        ],
        _ => &[
            "lora_unet_",
            "lycoris_unet_",
            "lycoris_",
            "base_model.model.unet.",
            "unet.",
            "unet_",
            "diffusion_model.",
            "base_model.model.",
            "",
        ],
    }
}

pub(super) fn flatten(path: &str) -> String {
    path.replace('.', "_")
}

/// The name that ai-toolkit gives to a text encoder whose saved LoRA has dotted names: filters of configs match it, and versions
/// of aitk up to November 2026 saved it.
fn toolkit_prefix(part_prefix: &str) -> Option<&'static str> {
    match part_prefix {
        "text_encoder" => Some("lora_te1"),
        "text_encoder_2" => Some("lora_te2"),
        _ => None,
    }
}

/// The name that is saved today for a tensor of a checkpoint that has ai-toolkit's dotted name of a text encoder.
#[must_use]
pub fn saved_since(name: &str) -> Option<String> {
    let (prefix, rest) = name.split_once('.')?;
    let part = ["text_encoder", "text_encoder_2"]
        .into_iter()
        .find(|part| toolkit_prefix(part) == Some(prefix))?;
    Some(format!("{part}.{rest}"))
}

/// The name of a layer of a text encoder in ai-toolkit, where the layer is saved under another name: `lora_te1.text_model.encoder…`
/// for `text_encoder.text_model.encoder…`.
pub(super) fn toolkit_name(saved: &str) -> Option<String> {
    let (prefix, rest) = saved.split_once('.')?;
    Some(format!("{}.{rest}", toolkit_prefix(prefix)?))
}

/// The beginning of the flattened names that ai-toolkit gave to LoKrs of transformers at first (`network.old_lokr_format`).
pub(super) fn old_prefix(part: &str) -> &'static str {
    toolkit_prefix(part).unwrap_or("lycoris")
}

/// The name of a layer in saved LoRA files: `lora_unet_down_blocks_0_…`, or `transformer.transformer_blocks.0.…`. Names of
/// text encoders always contain `text_model`.
pub(super) fn saved_name(names: AdapterNames, role: PartRole, lora_prefix: &str, path: &str) -> String {
    let text_model = match role {
        PartRole::TextEncoder if !path.starts_with("text_model.") => "text_model.",
        _ => "",
    };
    if names == AdapterNames::Peft {
        return format!("{lora_prefix}.{text_model}{path}");
    }
    // diffusers and sd-scripts know these layers of SDXL by their original names only.
    let path = match path {
        "add_embedding.linear_1" => "label_emb.0.0",
        "add_embedding.linear_2" => "label_emb.0.2",
        other => other,
    };
    format!("{lora_prefix}_{}{}", flatten(text_model), flatten(path))
}

/// The layers of one part by the names that files use for them, flattened and without prefix.
#[derive(Debug)]
struct PartNames {
    id: &'static str,
    role: PartRole,
    names: HashMap<String, NamedLayers>,
}

/// The layers of a model by every name that files use for them.
#[derive(Debug, Default)]
pub struct LayerIndex {
    parts: Vec<PartNames>,
}

impl LayerIndex {
    /// Adds all layers of a part, given by their dotted diffusers paths and their numbers of rows.
    pub fn add(&mut self, part: &Part<'_>, layers: &[(String, usize)]) {
        self.add_names(part.id, part.role, layers);
    }

    pub(super) fn add_names(&mut self, id: &'static str, role: PartRole, layers: &[(String, usize)]) {
        let paths: Vec<&str> = layers.iter().map(|(path, _)| path.as_str()).collect();
        let original = OriginalNames::new(paths.iter().copied());
        let mut names = HashMap::new();
        let mut insert = |name: &str, layers: Vec<(String, usize)>, halves_swapped: bool| {
            names.entry(flatten(name)).or_insert(NamedLayers {
                part: id,
                layers,
                halves_swapped,
            });
        };
        for layer in layers {
            let path = layer.0.as_str();
            let mut insert = |name: &str| insert(name, vec![layer.clone()], false);
            insert(path);
            match role {
                // transformers 5 writes names without `text_model.`, other programs with it.
                PartRole::TextEncoder => match path.strip_prefix("text_model.") {
                    Some(rest) => insert(rest),
                    None => insert(&format!("text_model_{path}")),
                },
                PartRole::Denoiser | PartRole::Codec | PartRole::LanguageModel => {
                    if let Some(name) = original.as_ref().and_then(|original| original.of_layer(path)) {
                        insert(&name);
                    }
                }
            }
        }
        if role == PartRole::Denoiser {
            let rows: HashMap<&str, usize> = layers.iter().map(|(path, rows)| (path.as_str(), *rows)).collect();
            let original = flux::original_layers(&paths)
                .into_iter()
                .chain(chroma::original_layers(&paths))
                .chain(sd3::original_layers(&paths))
                .chain(zimage::original_layers(&paths));
            for layer in original {
                let parts = layer.parts.into_iter();
                let parts = parts.filter_map(|part| rows.get(part.as_str()).map(|rows| (part.clone(), *rows)));
                insert(&layer.name, parts.collect(), layer.halves_swapped);
            }
        }
        self.parts.push(PartNames { id, role, names });
    }

    /// Adds the norms of a part that was added, by diffusers' names and, of U-Nets, those of the original releases.
    pub(super) fn add_norms(&mut self, id: &'static str, norms: &[(String, usize)]) {
        let original = OriginalNames::new(norms.iter().map(|(path, _)| path.as_str()));
        for part in self.parts.iter_mut().filter(|part| part.id == id) {
            for norm in norms {
                let original = original.as_ref().and_then(|names| names.of_layer(&norm.0));
                for name in [Some(norm.0.clone()), original].into_iter().flatten() {
                    part.names.entry(flatten(&name)).or_insert_with(|| NamedLayers {
                        part: id,
                        layers: vec![norm.clone()],
                        halves_swapped: false,
                    });
                }
            }
        }
    }

    /// The layers that a stem (a key without its suffix) names.
    #[must_use]
    pub fn resolve(&self, stem: &str) -> Option<&NamedLayers> {
        self.parts.iter().find_map(|part| {
            prefixes(part.id).iter().find_map(|prefix| {
                let rest = stem.strip_prefix(prefix)?;
                let rest = rest.strip_prefix("base_model.model.").unwrap_or(rest);
                part.names.get(&normalize(part.role, rest))
            })
        })
    }
}

/// Converts a name of an early diffusers version to the current one, and flattens it.
fn normalize(role: PartRole, stem: &str) -> String {
    let mut flat = flatten(&stem.replace(".processor.", ".").replace(".base_layer", ""));
    if role == PartRole::TextEncoder {
        for (old, new) in [
            ("to_q", "q_proj"),
            ("to_k", "k_proj"),
            ("to_v", "v_proj"),
            ("to_out", "out_proj"),
        ] {
            if let Some(front) = flat.strip_suffix(old) {
                flat = format!("{front}{new}");
            }
        }
    } else if flat.ends_with("_to_out") {
        flat.push_str("_0");
    }
    flat
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn index() -> LayerIndex {
        let mut index = LayerIndex::default();
        let unet = [
            "conv_in",
            "down_blocks.0.resnets.0.conv1",
            "down_blocks.0.resnets.1.conv1",
            "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q",
            "down_blocks.1.attentions.1.transformer_blocks.0.attn2.to_out.0",
            "mid_block.attentions.0.proj_in",
            "up_blocks.1.attentions.2.proj_out",
        ];
        index.add_names("unet", PartRole::Denoiser, &unet.map(|path| (path.to_owned(), 8)));
        let text = [("text_model.encoder.layers.0.self_attn.q_proj".to_owned(), 8)];
        index.add_names("text_encoder", PartRole::TextEncoder, &text);
        index.add_names("text_encoder_2", PartRole::TextEncoder, &text);
        index
    }

    fn path<'a>(index: &'a LayerIndex, stem: &str) -> &'a str {
        let found = index.resolve(stem).unwrap_or_else(|| panic!("{stem}"));
        assert_eq!((found.layers.len(), found.halves_swapped), (1, false));
        &found.layers[0].0
    }

    #[test]
    fn text_encoders_keep_their_names_of_ai_toolkit_for_filters_and_old_checkpoints() {
        let (saved, toolkit) = ("text_encoder_2.text_model.encoder", "lora_te2.text_model.encoder");
        assert_eq!(toolkit_name(saved).as_deref(), Some(toolkit));
        assert_eq!(saved_since(toolkit).as_deref(), Some(saved));
        for other in [
            "transformer.transformer_blocks.0",
            "lora_te1_text_model_encoder",
            "lora_te3.x",
            "lora_te1",
        ] {
            assert_eq!(saved_since(other), None, "{other}");
            assert_eq!(toolkit_name(other), None, "{other}");
        }
    }

    /// LyCORIS saves the norms of SDXL (`train_norm`) with the names of the original release.
    #[test]
    fn norms_have_the_names_of_the_original_release_too() {
        let mut index = index();
        let norms = [
            "down_blocks.0.resnets.0.norm1",
            "down_blocks.0.resnets.1.norm2",
            "down_blocks.0.attentions.0.norm",
            "down_blocks.0.attentions.0.transformer_blocks.0.norm3",
            "mid_block.resnets.1.norm1",
            "conv_norm_out",
        ];
        index.add_norms("unet", &norms.map(|path| (path.to_owned(), 8)));
        let original = [
            "input_blocks_1_0_in_layers_0",
            "input_blocks_2_0_out_layers_0",
            "input_blocks_1_1_norm",
            "input_blocks_1_1_transformer_blocks_0_norm3",
            "middle_block_2_in_layers_0",
            "out_0",
        ];
        for (norm, original) in norms.into_iter().zip(original) {
            for name in [flatten(norm), original.to_owned()] {
                assert_eq!(path(&index, &format!("lora_unet_{name}")), norm);
            }
        }
    }

    #[test]
    fn names_of_every_dialect_resolve_to_the_same_layer() {
        let index = index();
        let q = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q";
        for stem in [
            "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q",
            "lora_unet_input_blocks_1_1_transformer_blocks_0_attn1_to_q",
            "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q",
            "base_model.model.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q",
            "base_model.model.unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q",
            "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.processor.to_q",
            "down_blocks.0.attentions.0.transformer_blocks.0.attn1.processor.to_q",
            "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q",
            "lycoris_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q",
        ] {
            assert_eq!(path(&index, stem), q, "{stem}");
        }
        let out = "down_blocks.1.attentions.1.transformer_blocks.0.attn2.to_out.0";
        for stem in [
            "lora_unet_input_blocks_5_1_transformer_blocks_0_attn2_to_out_0",
            "unet.down_blocks.1.attentions.1.transformer_blocks.0.attn2.processor.to_out",
        ] {
            assert_eq!(path(&index, stem), out, "{stem}");
        }
        for stem in [
            "lora_te_text_model_encoder_layers_0_self_attn_q_proj",
            "lora_te1_text_model_encoder_layers_0_self_attn_q_proj",
            "text_encoder.text_model.encoder.layers.0.self_attn.q_proj",
            "text_encoder.text_model.encoder.layers.0.self_attn.to_q",
            "text_encoder.encoder.layers.0.self_attn.q_proj",
            "text_encoders.clip_l.transformer.text_model.encoder.layers.0.self_attn.q_proj",
            "text_encoders.clip_h.transformer.text_model.encoder.layers.0.self_attn.q_proj",
        ] {
            assert_eq!(index.resolve(stem).unwrap().part, "text_encoder", "{stem}");
        }
        for stem in [
            "lora_te2_text_model_encoder_layers_0_self_attn_q_proj",
            "lora_te2.text_model.encoder.layers.0.self_attn.q_proj",
            "text_encoder_2.text_model.encoder.layers.0.self_attn.q_proj",
            "text_encoders.clip_g.transformer.text_model.encoder.layers.0.self_attn.q_proj",
        ] {
            assert_eq!(index.resolve(stem).unwrap().part, "text_encoder_2", "{stem}");
        }
        assert_eq!(
            path(&index, "lora_unet_output_blocks_5_1_proj_out"),
            "up_blocks.1.attentions.2.proj_out"
        );
        assert_eq!(
            path(&index, "lora_unet_middle_block_1_proj_in"),
            "mid_block.attentions.0.proj_in"
        );
        assert!(index.resolve("lora_unet_nothing").is_none());
    }
}
