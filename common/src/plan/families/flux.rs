//! FLUX.1. The published shapes are those of dev.

use super::parts::{CLIP_L, FAMILY_DEFAULTS, Family, NO_TEXT, NO_TRANSFORMER, T5_XXL, VAE_16};
use crate::plan::shapes::{ModelShapes, TransformerKind, TransformerShapes};
use crate::plan::walk::build::LoraLayers;

pub(super) static FLUX: Family = Family {
    shapes: ModelShapes {
        transformer: TransformerShapes {
            kind: TransformerKind::Flux,
            in_channels: 16,
            patch: 2,
            blocks: 19,
            single_blocks: 38,
            heads: 24,
            head_width: 128,
            context: 4096,
            pooled: 768,
            guidance: true,
            qk_norm: true,
            ..NO_TRANSFORMER
        },
        language: T5_XXL,
        text: [CLIP_L, NO_TEXT],
        vae: VAE_16,
        ..FAMILY_DEFAULTS.shapes
    },
    text_prefixes: &["text_encoder"],
    denoiser_prefix: "transformer",
    lora_layers: LoraLayers::Blocks(&["transformer_blocks", "single_transformer_blocks"]),
    never_quantised: &[
        "x_embedder",
        "context_embedder",
        "time_text_embed.*",
        "norm_out.*",
        "proj_out",
    ],
    guided_above: f64::INFINITY,
    // dev, schnell
    prompt_tokens: [512.0, 256.0],
    ..FAMILY_DEFAULTS
};
