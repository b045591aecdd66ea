//! A part of a model whose layers adapters can change.

use super::part_role::PartRole;
use crate::nn::VisitLayers;

/// The part that a transformer is: its folder, and the beginning of its tensors' names among the trained ones.
pub(super) const TRANSFORMER: &str = "transformer";

/// The names and the scale of LoRAs in saved files, as ai-toolkit has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterNames {
    /// sd-scripts' names, for U-Nets: `lora_unet_down_blocks_0_….lora_down.weight`, with `.alpha`.
    Kohya,
    /// peft's names, for transformers: `transformer.transformer_blocks.0.….lora_A.weight`. Without alpha, as it is the rank.
    Peft,
}

impl AdapterNames {
    /// The suffixes of the two matrices.
    #[must_use]
    pub fn matrices(self) -> [&'static str; 2] {
        match self {
            Self::Kohya => ["lora_down.weight", "lora_up.weight"],
            Self::Peft => ["lora_A.weight", "lora_B.weight"],
        }
    }
}

/// A part whose layers adapters can change.
pub struct Part<'a> {
    /// Its name, which is that of its folder in a diffusers model: `unet`, `text_encoder_2`.
    pub id: &'static str,
    /// Whether it encodes prompts or predicts.
    pub role: PartRole,
    /// The beginning of the names of its layers in saved LoRA files: `lora_unet`, `lora_te2`.
    pub lora_prefix: &'static str,
    /// How saved LoRA files name its layers.
    pub lora_names: AdapterNames,
    /// The lists of repeated blocks (`transformer_blocks`) outside of which a layer gets no LoRA, unless
    /// `network.transformer_only` is off. Empty: all layers get one.
    pub block_lists: &'static [&'static str],
    /// Its layers.
    pub layers: &'a mut dyn VisitLayers,
}

/// What a part is, without its layers. The fields are those of [`Part`].
#[derive(Clone, Copy, Debug)]
pub struct PartInfo {
    pub(super) id: &'static str,
    pub(super) role: PartRole,
    pub(super) lora_prefix: &'static str,
    pub(super) lora_names: AdapterNames,
    pub(super) block_lists: &'static [&'static str],
}

impl PartInfo {
    /// A transformer whose repeated blocks are in these lists.
    pub(super) const fn transformer(lora_prefix: &'static str, block_lists: &'static [&'static str]) -> Self {
        Self {
            id: TRANSFORMER,
            role: PartRole::Denoiser,
            lora_prefix,
            lora_names: AdapterNames::Peft,
            block_lists,
        }
    }

    /// A text encoder beside a transformer.
    pub(super) const fn text_encoder(id: &'static str) -> Self {
        Self {
            id,
            role: PartRole::TextEncoder,
            lora_prefix: id,
            lora_names: AdapterNames::Peft,
            block_lists: &[],
        }
    }

    /// The part with these layers.
    pub(super) fn with(self, layers: &mut dyn VisitLayers) -> Part<'_> {
        Part {
            id: self.id,
            role: self.role,
            lora_prefix: self.lora_prefix,
            lora_names: self.lora_names,
            block_lists: self.block_lists,
            layers,
        }
    }
}
