//! The names of layers and tensors in each dialect of adapter files.

use super::super::names::{flatten, old_prefix, saved_name};
use crate::families::{AdapterNames, Part, PartRole};
use crate::models::unet::OriginalNames;
use crate::models::{chroma, flux, sd3, zimage};
use aitk_common::job::arch::ArchName;
use std::collections::HashSet;

/// A dialect of adapter files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// ai-toolkit and aitk.
    AiToolkit,
    /// kohya's sd-scripts; also A1111 and Forge.
    SdScripts,
    /// diffusers and peft.
    Diffusers,
    /// ComfyUI.
    ComfyUi,
    /// LyCORIS without sd-scripts.
    Lycoris,
}

impl Dialect {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::AiToolkit,
        Self::SdScripts,
        Self::Diffusers,
        Self::ComfyUi,
        Self::Lycoris,
    ];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::AiToolkit => "ai-toolkit",
            Self::SdScripts => "sd-scripts",
            Self::Diffusers => "diffusers",
            Self::ComfyUi => "comfyui",
            Self::Lycoris => "lycoris",
        }
    }
}

/// A part of a model: how its layers are named.
#[derive(Clone, Debug)]
pub(super) struct PartLayers {
    pub(super) id: &'static str,
    role: PartRole,
    names: AdapterNames,
    lora_prefix: &'static str,
    /// The dotted diffusers path and the number of rows of each layer.
    pub(super) layers: Vec<(String, usize)>,
}

/// A layer in a file: its name without the suffix of a tensor, and the layers of the model that it stands for.
#[derive(Clone, Debug)]
pub(super) struct NamedLayer {
    pub(super) stem: String,
    /// Paths, in the order of their rows.
    pub(super) paths: Vec<String>,
    /// Whether the two halves of the rows are in the other order than in the model.
    pub(super) halves_swapped: bool,
}

impl PartLayers {
    pub(super) fn of(part: &Part<'_>, layers: Vec<(String, usize)>) -> Self {
        Self {
            id: part.id,
            role: part.role,
            names: part.lora_names,
            lora_prefix: part.lora_prefix,
            layers,
        }
    }

    /// Whether files of this dialect have the names of peft for the tensors of a LoRA, and no alpha.
    pub(super) fn has_peft_names(&self, dialect: Dialect) -> bool {
        match dialect {
            Dialect::AiToolkit => self.names == AdapterNames::Peft,
            Dialect::Diffusers => true,
            Dialect::SdScripts | Dialect::ComfyUi | Dialect::Lycoris => false,
        }
    }

    /// The layers that a file of this dialect has for this part of a model of this family.
    pub(super) fn named(&self, dialect: Dialect, arch: ArchName) -> Vec<NamedLayer> {
        let each = |stem: &dyn Fn(&str) -> String| {
            let layers = self.layers.iter().map(|(path, _)| NamedLayer {
                stem: stem(path),
                paths: vec![path.clone()],
                halves_swapped: false,
            });
            layers.collect()
        };
        let is_text = self.role == PartRole::TextEncoder;
        match dialect {
            Dialect::AiToolkit => each(&|path| saved_name(self.names, self.role, self.lora_prefix, path)),
            Dialect::Diffusers => each(&|path| saved_name(AdapterNames::Peft, self.role, self.id, path)),
            Dialect::SdScripts | Dialect::Lycoris if is_text => {
                let prefix = match self.names {
                    AdapterNames::Kohya => self.lora_prefix,
                    AdapterNames::Peft => old_prefix(self.id),
                };
                each(&|path| saved_name(AdapterNames::Kohya, self.role, prefix, path))
            }
            Dialect::ComfyUi if is_text => {
                let prefix = match (self.id, arch) {
                    ("text_encoder_2", _) => "text_encoders.clip_g.transformer",
                    // OpenCLIP's ViT-H, for which ComfyUI has a name of its own.
                    (_, ArchName::Sd2) => "text_encoders.clip_h.transformer",
                    _ => "text_encoders.clip_l.transformer",
                };
                each(&|path| saved_name(AdapterNames::Peft, self.role, prefix, path))
            }
            Dialect::Lycoris => each(&|path| format!("lycoris_{}", flatten(path))),
            // Of U-Nets sd-scripts has diffusers' names, but for XL.
            Dialect::SdScripts if self.names == AdapterNames::Kohya && arch != ArchName::Sdxl => {
                each(&|path| format!("lora_unet_{}", flatten(path)))
            }
            Dialect::SdScripts => self.original(&|name| format!("lora_unet_{}", flatten(name))),
            Dialect::ComfyUi => self.original(&|name| format!("diffusion_model.{name}")),
        }
    }

    /// The layers of the original release; those that it does not have by their own names.
    fn original(&self, stem: &dyn Fn(&str) -> String) -> Vec<NamedLayer> {
        let paths: Vec<&str> = self.layers.iter().map(|(path, _)| path.as_str()).collect();
        let of_unet = OriginalNames::new(paths.iter().copied());
        let joined = flux::original_layers(&paths)
            .into_iter()
            .chain(chroma::original_layers(&paths))
            .chain(sd3::original_layers(&paths))
            .chain(zimage::original_layers(&paths));
        let mut named = Vec::new();
        // Names of other programs for the same layers follow those of the release.
        let mut has: HashSet<String> = HashSet::new();
        for layer in joined {
            if layer.parts.iter().any(|path| has.contains(path)) {
                continue;
            }
            has.extend(layer.parts.iter().cloned());
            named.push(NamedLayer {
                stem: stem(&layer.name),
                paths: layer.parts,
                halves_swapped: layer.halves_swapped,
            });
        }
        for path in paths.into_iter().filter(|path| !has.contains(*path)) {
            let original = of_unet.as_ref().and_then(|names| names.of_layer(path));
            named.push(NamedLayer {
                stem: stem(original.as_deref().unwrap_or(path)),
                paths: vec![path.to_owned()],
                halves_swapped: false,
            });
        }
        named
    }
}
