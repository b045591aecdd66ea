//! Stable Diffusion 3.5. The published shapes are those of large.

use super::parts::{CLIP_G, CLIP_L, FAMILY_DEFAULTS, Family, NO_TRANSFORMER, T5_XXL, VAE_16};
use crate::plan::shapes::{ModelShapes, TextShapes, TransformerKind, TransformerShapes};
use crate::plan::walk::build::LoraLayers;

pub(super) static SD3: Family = Family {
    shapes: ModelShapes {
        transformer: TransformerShapes {
            kind: TransformerKind::Sd3,
            in_channels: 16,
            patch: 2,
            blocks: 38,
            heads: 38,
            head_width: 64,
            context: 4096,
            pooled: 2048,
            qk_norm: true,
            positions: 192,
            ..NO_TRANSFORMER
        },
        language: T5_XXL,
        text: [
            TextShapes {
                projection: 768,
                ..CLIP_L
            },
            CLIP_G,
        ],
        vae: VAE_16,
        ..FAMILY_DEFAULTS.shapes
    },
    text_prefixes: &["text_encoder", "text_encoder_2"],
    penultimate: true,
    denoiser_prefix: "transformer",
    lora_layers: LoraLayers::Blocks(&["transformer_blocks"]),
    never_quantised: &[
        "pos_embed.proj",
        "context_embedder",
        "time_text_embed.*",
        "norm_out.*",
        "proj_out",
    ],
    prompt_tokens: [256.0; 2],
    ..FAMILY_DEFAULTS
};
