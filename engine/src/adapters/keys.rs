//! Tensor names of LoRA files: which layer and which of its parts a key means, in every dialect that is in use.
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

/// A part of the pipeline that can carry a LoRA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Component {
    /// The text encoder (`lora_te`).
    TextEncoder,
    /// The U-Net (`lora_unet`).
    Unet,
}

impl Component {
    /// The prefix of saved names.
    #[must_use]
    pub fn prefix(self) -> &'static str {
        match self {
            Self::TextEncoder => "lora_te",
            Self::Unet => "lora_unet",
        }
    }
}

/// `lora_unet_down_blocks_0_…`; the text encoder always with its `text_model_` level.
pub(super) fn saved_name(component: Component, path: &str) -> String {
    let level = match component {
        Component::TextEncoder if !path.starts_with("text_model.") => "text_model_",
        _ => "",
    };
    format!("{}_{level}{}", component.prefix(), flatten(path))
}

/// Which tensor of a layer a key names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Down,
    Up,
    Mid,
    Alpha,
    /// A scalar that LyCORIS trains; multiplies the change.
    Scalar,
}

/// What a key's ending says.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Ending<'a> {
    /// A LoRA part of the layer `stem`.
    Part(&'a str, Part),
    /// A part of another network type, by its name.
    Foreign(&'static str),
    /// Not a LoRA key.
    Unknown,
}

const ENDINGS: [(&str, Part); 21] = [
    (".lora_down.weight", Part::Down),
    (".lora_up.weight", Part::Up),
    (".lora_mid.weight", Part::Mid),
    (".lora_A.default.weight", Part::Down),
    (".lora_B.default.weight", Part::Up),
    (".lora_A.default_0.weight", Part::Down),
    (".lora_B.default_0.weight", Part::Up),
    (".lora_A.weight", Part::Down),
    (".lora_B.weight", Part::Up),
    (".lora_A", Part::Down),
    (".lora_B", Part::Up),
    (".lora_linear_layer.down.weight", Part::Down),
    (".lora_linear_layer.up.weight", Part::Up),
    (".lora.down.weight", Part::Down),
    (".lora.up.weight", Part::Up),
    ("_lora.down.weight", Part::Down),
    ("_lora.up.weight", Part::Up),
    (".lora_magnitude_vector.alpha", Part::Alpha),
    (".lora.alpha", Part::Alpha),
    (".alpha", Part::Alpha),
    (".scalar", Part::Scalar),
];

const FOREIGN: [(&str, &str); 10] = [
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

/// Splits a key into layer and part.
pub(super) fn ending(key: &str) -> Ending<'_> {
    for (end, part) in ENDINGS {
        if let Some(stem) = key.strip_suffix(end) {
            return Ending::Part(stem, part);
        }
    }
    match FOREIGN.iter().find(|(mark, _)| key.contains(mark)) {
        Some((_, name)) => Ending::Foreign(name),
        None => Ending::Unknown,
    }
}

/// The layers of a model under every name that files give them.
#[derive(Debug, Default)]
pub struct LayerIndex {
    /// Dotted or flattened name, with the component's canonical prefix -> layer.
    names: HashMap<String, (Component, String)>,
}

fn flatten(path: &str) -> String {
    path.replace('.', "_")
}

impl LayerIndex {
    /// Indexes all layers of a component by their dotted diffusers paths.
    pub fn add(&mut self, component: Component, paths: &[String]) {
        let per_block = resnets_per_block(paths);
        for path in paths {
            let target = (component, path.clone());
            let prefix = component.prefix();
            let mut put = |name: String| {
                self.names
                    .entry(format!("{prefix}.{name}"))
                    .or_insert_with(|| target.clone());
            };
            put(flatten(path));
            match component {
                Component::Unet => {
                    if let Some(original) = original_name(path, per_block) {
                        put(original);
                    }
                }
                // transformers 5 writes the text model without its `text_model.` level, everyone else with it.
                Component::TextEncoder => match path.strip_prefix("text_model.") {
                    Some(rest) => put(flatten(rest)),
                    None => put(format!("text_model_{}", flatten(path))),
                },
            }
        }
    }

    /// The layer that a stem (a key without its ending) means.
    #[must_use]
    pub fn resolve(&self, stem: &str) -> Option<&(Component, String)> {
        const TEXT: [&str; 4] = [
            "lora_te1_",
            "lora_te_",
            "text_encoder.",
            "base_model.model.text_encoder.",
        ];
        const UNET: [&str; 7] = [
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
                .get(&format!("{}.{}", component.prefix(), modern(component, rest)))
        };
        if let Some(rest) = TEXT.iter().find_map(|p| stem.strip_prefix(p)) {
            return find(Component::TextEncoder, rest);
        }
        for prefix in UNET {
            if let Some(found) = stem.strip_prefix(prefix).and_then(|rest| find(Component::Unet, rest)) {
                return Some(found);
            }
        }
        find(Component::Unet, stem)
    }
}

/// Early diffusers names turned into today's, flattened.
fn modern(component: Component, stem: &str) -> String {
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

/// How many resnets a down block has: one more than its highest index.
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

/// The name of a U-Net layer in the original Stable Diffusion checkpoints, flattened: `input_blocks_1_1_proj_in`.
fn original_name(path: &str, per_block: usize) -> Option<String> {
    match path {
        "conv_in" => return Some("input_blocks_0_0".into()),
        "conv_out" => return Some("out_2".into()),
        "time_embedding.linear_1" => return Some("time_embed_0".into()),
        "time_embedding.linear_2" => return Some("time_embed_2".into()),
        _ => {}
    }
    let parts: Vec<&str> = path.split('.').collect();
    let (place, kind, rest) = match parts.as_slice() {
        ["mid_block", kind, n, rest @ ..] => {
            let n: usize = n.parse().ok()?;
            let slot = match *kind {
                "resnets" => 2 * n,
                "attentions" => 2 * n + 1,
                _ => return None,
            };
            (format!("middle_block_{slot}"), *kind, rest)
        }
        [side @ ("down_blocks" | "up_blocks"), block, kind, n, rest @ ..] => {
            let (block, n): (usize, usize) = (block.parse().ok()?, n.parse().ok()?);
            match (*side, *kind) {
                ("down_blocks", "resnets" | "attentions") => {
                    let slot = usize::from(*kind == "attentions");
                    (
                        format!("input_blocks_{}_{slot}", 1 + block * (per_block + 1) + n),
                        *kind,
                        rest,
                    )
                }
                ("down_blocks", "downsamplers") => {
                    return Some(format!("input_blocks_{}_0_op", (block + 1) * (per_block + 1)));
                }
                ("up_blocks", "resnets" | "attentions") => {
                    let slot = usize::from(*kind == "attentions");
                    (
                        format!("output_blocks_{}_{slot}", block * (per_block + 1) + n),
                        *kind,
                        rest,
                    )
                }
                // The upsampler comes after the attention, where the block has one; the first up block of
                // Stable Diffusion 1.x has none.
                ("up_blocks", "upsamplers") => {
                    let slot = if block == 0 { 1 } else { 2 };
                    return Some(format!(
                        "output_blocks_{}_{slot}_conv",
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
    Some(format!("{place}_{inner}"))
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
    fn every_dialect_names_the_same_layer() {
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
    fn endings_are_told_apart() {
        assert_eq!(ending("a.b.lora_A.weight"), Ending::Part("a.b", Part::Down));
        assert_eq!(ending("a.to_q_lora.up.weight"), Ending::Part("a.to_q", Part::Up));
        assert_eq!(ending("a.alpha"), Ending::Part("a", Part::Alpha));
        assert_eq!(ending("a.lokr_w1"), Ending::Foreign("LoKr"));
        assert_eq!(ending("conv.weight"), Ending::Unknown);
    }
}
