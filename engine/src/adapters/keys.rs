//! The tensor names of LoRA files: which layer and which of its tensors a key names, in every known dialect.
//!
//! | dialect | example |
//! |---|---|
//! | ai-toolkit, sd-scripts | `lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight`, `lora_te_text_model_…`, `.alpha` |
//! | sd-scripts, original paths | `lora_unet_input_blocks_1_1_proj_in.lora_down.weight` |
//! | diffusers / peft | `unet.down_blocks.0.attentions.0.proj_in.lora_A.weight`, `….lora.down.weight` |
//! | bare peft | `base_model.model.down_blocks.0.attentions.0.proj_in.lora_A.weight` |
//! | early diffusers | `unet.….attn1.processor.to_q_lora.down.weight`, `text_encoder.….to_q_lora.down.weight` |
//! | LyCORIS | `lycoris_…` and `.lora_mid.weight` |

use std::collections::HashMap;

/// A component of the pipeline that can have a LoRA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Component {
    /// The text encoder (`lora_te`).
    TextEncoder,
    /// The U-Net (`lora_unet`).
    Unet,
}

impl Component {
    /// The prefix of the names in saved files.
    #[must_use]
    pub fn prefix(self) -> &'static str {
        match self {
            Self::TextEncoder => "lora_te",
            Self::Unet => "lora_unet",
        }
    }
}

/// The name of a layer in sd-scripts' files: `lora_unet_down_blocks_0_…`. Names of the text encoder always contain
/// `text_model_`.
pub(super) fn kohya_name(component: Component, path: &str) -> String {
    let text_model_prefix = match component {
        Component::TextEncoder if !path.starts_with("text_model.") => "text_model_",
        _ => "",
    };
    format!("{}_{text_model_prefix}{}", component.prefix(), flatten(path))
}

/// Which tensor of a LoRA layer a key names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TensorRole {
    Down,
    Up,
    Mid,
    Alpha,
    /// A scalar that LyCORIS trains; it multiplies the update.
    Scalar,
}

/// A key split into layer and tensor by its suffix.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ParsedKey<'a> {
    /// A LoRA tensor: the key without its suffix, and the tensor's role.
    Lora(&'a str, TensorRole),
    /// A tensor of an unsupported network type, by the type's name.
    OtherNetwork(&'static str),
    /// Not a key of a known network type.
    Unknown,
}

const SUFFIXES: [(&str, TensorRole); 21] = [
    (".lora_down.weight", TensorRole::Down),
    (".lora_up.weight", TensorRole::Up),
    (".lora_mid.weight", TensorRole::Mid),
    (".lora_A.default.weight", TensorRole::Down),
    (".lora_B.default.weight", TensorRole::Up),
    (".lora_A.default_0.weight", TensorRole::Down),
    (".lora_B.default_0.weight", TensorRole::Up),
    (".lora_A.weight", TensorRole::Down),
    (".lora_B.weight", TensorRole::Up),
    (".lora_A", TensorRole::Down),
    (".lora_B", TensorRole::Up),
    (".lora_linear_layer.down.weight", TensorRole::Down),
    (".lora_linear_layer.up.weight", TensorRole::Up),
    (".lora.down.weight", TensorRole::Down),
    (".lora.up.weight", TensorRole::Up),
    ("_lora.down.weight", TensorRole::Down),
    ("_lora.up.weight", TensorRole::Up),
    (".lora_magnitude_vector.alpha", TensorRole::Alpha),
    (".lora.alpha", TensorRole::Alpha),
    (".alpha", TensorRole::Alpha),
    (".scalar", TensorRole::Scalar),
];

const OTHER_NETWORKS: [(&str, &str); 10] = [
    (".lora_B.bias", "LoRA with biases"),
    (".hada_", "LoHa"),
    (".lokr_", "LoKr"),
    (".oft_", "OFT"),
    (".dora_scale", "DoRA"),
    (".magnitude", "DoRA"),
    (".lora_magnitude_vector", "DoRA"),
    (".a1.weight", "GLoRA"),
    (".diff", "a full-weight difference"),
    (".w_norm", "a norm difference"),
];

/// Splits a key into layer and tensor.
pub(super) fn parse_key(key: &str) -> ParsedKey<'_> {
    for (suffix, role) in SUFFIXES {
        if let Some(stem) = key.strip_suffix(suffix) {
            return ParsedKey::Lora(stem, role);
        }
    }
    match OTHER_NETWORKS.iter().find(|(marker, _)| key.contains(marker)) {
        Some((_, name)) => ParsedKey::OtherNetwork(name),
        None => ParsedKey::Unknown,
    }
}

/// The layers of a model by every name that files use for them.
#[derive(Debug, Default)]
pub struct LayerIndex {
    /// From the flattened name, with the component's prefix, to the layer.
    names: HashMap<String, (Component, String)>,
}

fn flatten(path: &str) -> String {
    path.replace('.', "_")
}

impl LayerIndex {
    /// Adds all layers of a component, given by their dotted diffusers paths.
    pub fn add(&mut self, component: Component, paths: &[String]) {
        let per_block = resnets_per_block(paths);
        for path in paths {
            let target = (component, path.clone());
            let prefix = component.prefix();
            let mut insert = |name: String| {
                self.names
                    .entry(format!("{prefix}.{name}"))
                    .or_insert_with(|| target.clone());
            };
            insert(flatten(path));
            match component {
                Component::Unet => {
                    if let Some(original) = original_checkpoint_name(path, per_block) {
                        insert(original);
                    }
                }
                // transformers 5 writes names without `text_model.`, other programs with it.
                Component::TextEncoder => match path.strip_prefix("text_model.") {
                    Some(rest) => insert(flatten(rest)),
                    None => insert(format!("text_model_{}", flatten(path))),
                },
            }
        }
    }

    /// The layer that a stem (a key without its suffix) names.
    #[must_use]
    pub fn resolve(&self, stem: &str) -> Option<&(Component, String)> {
        const TEXT_PREFIXES: [&str; 4] = [
            "lora_te1_",
            "lora_te_",
            "text_encoder.",
            "base_model.model.text_encoder.",
        ];
        const UNET_PREFIXES: [&str; 7] = [
            "lora_unet_",
            "lycoris_unet_",
            "lycoris_",
            "base_model.model.unet.",
            "unet.",
            "diffusion_model.",
            "base_model.model.",
        ];
        let find = |component: Component, rest: &str| {
            let rest = rest.strip_prefix("base_model.model.").unwrap_or(rest);
            self.names
                .get(&format!("{}.{}", component.prefix(), normalize(component, rest)))
        };
        if let Some(rest) = TEXT_PREFIXES.iter().find_map(|p| stem.strip_prefix(p)) {
            return find(Component::TextEncoder, rest);
        }
        for prefix in UNET_PREFIXES {
            if let Some(found) = stem.strip_prefix(prefix).and_then(|rest| find(Component::Unet, rest)) {
                return Some(found);
            }
        }
        find(Component::Unet, stem)
    }
}

/// Converts a name of an early diffusers version to the current one, and flattens it.
fn normalize(component: Component, stem: &str) -> String {
    let mut flat = flatten(&stem.replace(".processor.", ".").replace(".base_layer", ""));
    if component == Component::TextEncoder {
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

/// The number of resnets per down block: the highest index + 1.
fn resnets_per_block(paths: &[String]) -> usize {
    paths
        .iter()
        .filter_map(|p| {
            p.strip_prefix("down_blocks.0.resnets.")?
                .split('.')
                .next()?
                .parse::<usize>()
                .ok()
        })
        .max()
        .map_or(2, |n| n + 1)
}

/// The flattened name of a U-Net layer in original Stable Diffusion checkpoints: `input_blocks_1_1_proj_in`.
fn original_checkpoint_name(path: &str, per_block: usize) -> Option<String> {
    match path {
        "conv_in" => return Some("input_blocks_0_0".into()),
        "conv_out" => return Some("out_2".into()),
        "time_embedding.linear_1" => return Some("time_embed_0".into()),
        "time_embedding.linear_2" => return Some("time_embed_2".into()),
        _ => {}
    }
    let parts: Vec<&str> = path.split('.').collect();
    let (block_name, kind, rest) = match parts.as_slice() {
        ["mid_block", kind, n, rest @ ..] => {
            let n: usize = n.parse().ok()?;
            let position = match *kind {
                "resnets" => 2 * n,
                "attentions" => 2 * n + 1,
                _ => return None,
            };
            (format!("middle_block_{position}"), *kind, rest)
        }
        [block_list @ ("down_blocks" | "up_blocks"), block, kind, n, rest @ ..] => {
            let (block, n): (usize, usize) = (block.parse().ok()?, n.parse().ok()?);
            match (*block_list, *kind) {
                ("down_blocks", "resnets" | "attentions") => {
                    let position = usize::from(*kind == "attentions");
                    (
                        format!("input_blocks_{}_{position}", 1 + block * (per_block + 1) + n),
                        *kind,
                        rest,
                    )
                }
                ("down_blocks", "downsamplers") => {
                    return Some(format!("input_blocks_{}_0_op", (block + 1) * (per_block + 1)));
                }
                ("up_blocks", "resnets" | "attentions") => {
                    let position = usize::from(*kind == "attentions");
                    (
                        format!("output_blocks_{}_{position}", block * (per_block + 1) + n),
                        *kind,
                        rest,
                    )
                }
                // The upsampler follows the attention. The first up block of Stable Diffusion 1.x has no attention.
                ("up_blocks", "upsamplers") => {
                    let position = if block == 0 { 1 } else { 2 };
                    return Some(format!(
                        "output_blocks_{}_{position}_conv",
                        (block + 1) * (per_block + 1) - 1
                    ));
                }
                _ => return None,
            }
        }
        _ => return None,
    };
    let inner = rest.join("_");
    let inner = if kind == "resnets" {
        match inner.as_str() {
            "conv1" => "in_layers_2".to_owned(),
            "conv2" => "out_layers_3".to_owned(),
            "time_emb_proj" => "emb_layers_1".to_owned(),
            "conv_shortcut" => "skip_connection".to_owned(),
            _ => return None,
        }
    } else {
        inner
    };
    Some(format!("{block_name}_{inner}"))
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
        index.add(Component::Unet, &unet.map(String::from));
        index.add(
            Component::TextEncoder,
            &["text_model.encoder.layers.0.self_attn.q_proj".to_owned()],
        );
        index
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
            assert_eq!(index.resolve(stem).unwrap().1, q, "{stem}");
        }
        let out = "down_blocks.1.attentions.1.transformer_blocks.0.attn2.to_out.0";
        for stem in [
            "lora_unet_input_blocks_5_1_transformer_blocks_0_attn2_to_out_0",
            "unet.down_blocks.1.attentions.1.transformer_blocks.0.attn2.processor.to_out",
        ] {
            assert_eq!(index.resolve(stem).unwrap().1, out, "{stem}");
        }
        for stem in [
            "lora_te_text_model_encoder_layers_0_self_attn_q_proj",
            "lora_te1_text_model_encoder_layers_0_self_attn_q_proj",
            "text_encoder.text_model.encoder.layers.0.self_attn.q_proj",
            "text_encoder.text_model.encoder.layers.0.self_attn.to_q",
            "text_encoder.encoder.layers.0.self_attn.q_proj",
        ] {
            assert_eq!(index.resolve(stem).unwrap().0, Component::TextEncoder, "{stem}");
        }
        assert_eq!(
            index.resolve("lora_unet_output_blocks_5_1_proj_out").unwrap().1,
            "up_blocks.1.attentions.2.proj_out"
        );
        assert_eq!(
            index.resolve("lora_unet_middle_block_1_proj_in").unwrap().1,
            "mid_block.attentions.0.proj_in"
        );
        assert!(index.resolve("lora_unet_nothing").is_none());
    }

    #[test]
    fn keys_are_parsed_by_their_suffix() {
        assert_eq!(parse_key("a.b.lora_A.weight"), ParsedKey::Lora("a.b", TensorRole::Down));
        assert_eq!(
            parse_key("a.to_q_lora.up.weight"),
            ParsedKey::Lora("a.to_q", TensorRole::Up)
        );
        assert_eq!(parse_key("a.alpha"), ParsedKey::Lora("a", TensorRole::Alpha));
        assert_eq!(parse_key("a.lokr_w1"), ParsedKey::OtherNetwork("LoKr"));
        assert_eq!(parse_key("conv.weight"), ParsedKey::Unknown);
    }
}
