//! Z-Image.

use super::parts::{FAMILY_DEFAULTS, Family, NO_LANGUAGE, NO_TEXT, NO_TRANSFORMER, VAE_16};
use crate::plan::shapes::{LanguageKind, LanguageShapes, ModelShapes, TransformerKind, TransformerShapes};
use crate::plan::walk::build::LoraLayers;

pub(super) static ZIMAGE: Family = Family {
    shapes: ModelShapes {
        transformer: TransformerShapes {
            kind: TransformerKind::ZImage,
            in_channels: 16,
            patch: 2,
            blocks: 30,
            single_blocks: 2,
            heads: 30,
            head_width: 128,
            context: 2560,
            qk_norm: true,
            ..NO_TRANSFORMER
        },
        // Qwen3 4B.
        language: LanguageShapes {
            kind: LanguageKind::Qwen3,
            width: 2560,
            heads: 32,
            kv_heads: 8,
            head_width: 128,
            intermediate: 9728,
            layers: 36,
            vocabulary: 151_936,
            ..NO_LANGUAGE
        },
        text: [NO_TEXT; 2],
        vae: VAE_16,
        ..FAMILY_DEFAULTS.shapes
    },
    text_prefixes: &[],
    denoiser_prefix: "diffusion_model",
    lora_layers: LoraLayers::Blocks(&["layers"]),
    never_quantised: &[
        "all_x_embedder.*",
        "cap_embedder.*",
        "t_embedder.*",
        "all_final_layer.*",
    ],
    // A scale of 0 is no guidance.
    guided_above: 0.0,
    prompt_tokens: [512.0; 2],
    ..FAMILY_DEFAULTS
};
