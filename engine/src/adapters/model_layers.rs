//! The layers of a model that a LoRA can change, with their own weights.

use super::names::saved_name;
use crate::error::Result;
use crate::families::{AdapterNames, Part, PartRole};
use crate::weights::Weight;

/// A layer of a model.
#[derive(Clone, Debug)]
pub struct ModelLayer {
    /// The part that it is in: `unet`.
    pub part: &'static str,
    /// What the part does.
    pub role: PartRole,
    /// Its dotted diffusers path.
    pub path: String,
    /// How saved LoRA files name the layers of the part.
    pub names: AdapterNames,
    /// Its name in saved LoRA files, without the suffix of a tensor.
    pub saved_name: String,
    /// Its weight, [out, in] or [out, in, kh, kw].
    pub weight: Weight,
}

impl ModelLayer {
    /// Whether its names in files are sd-scripts', which have an alpha.
    #[must_use]
    pub fn has_alpha(&self) -> bool {
        self.names == AdapterNames::Kohya
    }

    /// Whether LoRAs usually change it: of a text encoder only the layers of the attention and of the MLP are.
    #[must_use]
    pub fn is_usual_target(&self) -> bool {
        self.role != PartRole::TextEncoder || self.path.contains("self_attn.") || self.path.contains("mlp.")
    }
}

/// The layers of these parts, always in the same order. Streamed weights stay in their files.
///
/// # Errors
/// When a part cannot be visited.
pub fn model_layers(parts: &mut [Part<'_>]) -> Result<Vec<ModelLayer>> {
    let mut found = Vec::new();
    for part in parts.iter_mut() {
        let (id, role, names, prefix) = (part.id, part.role, part.lora_names, part.lora_prefix);
        part.layers.visit_layers(&mut |path, layer| {
            found.push(ModelLayer {
                part: id,
                role,
                path: path.to_owned(),
                names,
                saved_name: saved_name(names, role, prefix, path),
                weight: layer.weight().clone(),
            });
            Ok(())
        })?;
    }
    Ok(found)
}
