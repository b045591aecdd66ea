//! Selects layers and tensors by their names, as the engine does.

/// Substrings of names.
#[derive(Clone, Debug, Default)]
pub(super) struct NameFilter {
    /// Empty: all names.
    pub(super) only_if_contains: Vec<String>,
    /// Takes precedence.
    pub(super) ignore_if_contains: Vec<String>,
}

impl NameFilter {
    /// Whether the tensor of this name is selected.
    pub(super) fn selects(&self, name: &str) -> bool {
        let contains_any = |parts: &[String]| parts.iter().any(|part| name.contains(part.as_str()));
        (self.only_if_contains.is_empty() || contains_any(&self.only_if_contains))
            && !contains_any(&self.ignore_if_contains)
    }

    /// Whether the layer of these names gets a LoRA; `only_if_contains` may also match a name in LoRA files.
    pub(super) fn selects_layer(&self, names: &LayerNames) -> bool {
        let only = &self.only_if_contains;
        let is_ignored = |part: &String| names.dotted.iter().any(|name| name.contains(part.as_str()));
        (only.is_empty() || only.iter().any(|part| names.contain(part)))
            && !self.ignore_if_contains.iter().any(is_ignored)
    }
}

/// The names of a layer that filters match, as `engine/src/adapters/adapter_config.rs`.
pub(super) struct LayerNames {
    /// The name in the model, and for a text encoder of a model with a transformer that of ai-toolkit.
    dotted: Vec<String>,
    /// The names in LoRA files, without dots.
    in_files: Vec<String>,
}

impl LayerNames {
    /// Those of the layer of this name in a component whose names in LoRA files begin with `prefix`.
    pub(super) fn new(prefix: &str, name: &str) -> Self {
        let toolkit_prefix = match prefix {
            "text_encoder" => Some("lora_te1"),
            "text_encoder_2" => Some("lora_te2"),
            _ => None,
        };
        let prefixes = [Some(prefix), toolkit_prefix].into_iter().flatten();
        let dotted: Vec<String> = prefixes.map(|prefix| format!("{prefix}.{name}")).collect();
        // Files have the original names of these layers of SDXL.
        let original = match name {
            "add_embedding.linear_1" => Some("label_emb_0_0"),
            "add_embedding.linear_2" => Some("label_emb_0_2"),
            _ => None,
        };
        let flattened = dotted.iter().map(|name| name.replace('.', "_"));
        let in_files = flattened
            .chain(original.map(|name| format!("{prefix}_{name}")))
            .collect();
        Self { dotted, in_files }
    }

    /// Whether a text is in one of them.
    pub(super) fn contain(&self, text: &str) -> bool {
        self.dotted.iter().chain(&self.in_files).any(|name| name.contains(text))
    }
}

/// Whether a name matches a pattern: `*` stands for any text, `?` for one character.
pub(super) fn matches_glob(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n) = (0, 0);
    // Where the last `*` is, and where its text ends so far.
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(c) if *c == '?' || *c == name[n] => {
                p += 1;
                n += 1;
            }
            _ => match star {
                Some((at, end)) => {
                    star = Some((at, end + 1));
                    p = at + 1;
                    n = end + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_has_the_names_of_files_and_of_ai_toolkit_too() {
        let text = LayerNames::new("text_encoder", "text_model.encoder.layers.0.mlp.fc1");
        let unet = LayerNames::new("lora_unet", "add_embedding.linear_1");
        for (names, only, ignored, selected) in [
            (&text, "text_encoder.text_model", "", true),
            (&text, "lora_te1.text_model", "", true),
            (&text, "lora_te1_text_model", "", true),
            (&text, "lora_te2", "", false),
            (&text, "mlp", "lora_te1.", false),
            // Names in files do not exclude a layer.
            (&text, "mlp", "lora_te1_text", true),
            (&unet, "lora_unet_label_emb", "", true),
            (&unet, "lora_unet.add_embedding", "", true),
            (&unet, "text_encoder", "", false),
        ] {
            let filter = NameFilter {
                only_if_contains: vec![only.to_owned()],
                ignore_if_contains: Some(ignored.to_owned())
                    .into_iter()
                    .filter(|text| !text.is_empty())
                    .collect(),
            };
            assert_eq!(filter.selects_layer(names), selected, "{only}, without {ignored}");
        }
    }

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name, matches) in [
            ("down_blocks.*", "down_blocks.0.resnets.0.conv1", true),
            ("*attn*", "mid_block.attentions.0.transformer_blocks.0.attn1.to_q", true),
            ("conv_in", "conv_in", true),
            ("conv_in", "conv_in2", false),
            ("conv_?n", "conv_in", true),
            ("*.0", "a.0.1", false),
            ("*", "", true),
            ("", "a", false),
        ] {
            assert_eq!(matches_glob(pattern, name), matches, "{pattern} {name}");
        }
    }
}
