//! Chroma. The published shapes are those of Chroma1-HD and Chroma1-Base.

use super::parts::{FAMILY_DEFAULTS, Family, NO_TEXT, NO_TRANSFORMER, T5_XXL, VAE_16};
use crate::plan::shapes::{ModelShapes, TransformerKind, TransformerShapes};
use crate::plan::walk::build::LoraLayers;

pub(super) static CHROMA: Family = Family {
    shapes: ModelShapes {
        transformer: TransformerShapes {
            kind: TransformerKind::Chroma,
            in_channels: 16,
            patch: 2,
            blocks: 19,
            single_blocks: 38,
            heads: 24,
            head_width: 128,
            context: 4096,
            qk_norm: true,
            approximator_layers: 5,
            approximator_width: 5120,
            ..NO_TRANSFORMER
        },
        language: T5_XXL,
        text: [NO_TEXT; 2],
        vae: VAE_16,
        ..FAMILY_DEFAULTS.shapes
    },
    text_prefixes: &[],
    denoiser_prefix: "transformer",
    lora_layers: LoraLayers::Blocks(&["transformer_blocks", "single_transformer_blocks"]),
    never_quantised: &[
        "x_embedder",
        "context_embedder",
        "distilled_guidance_layer.*",
        "proj_out",
    ],
    prompt_tokens: [512.0; 2],
    ..FAMILY_DEFAULTS
};
