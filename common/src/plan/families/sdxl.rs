//! Stable Diffusion XL.

use super::parts::{CLIP_G, CLIP_L, FAMILY_DEFAULTS, Family, NO_BLOCK, block, unet, vae};
use crate::plan::shapes::{ModelShapes, UNetShapes};

pub(super) static SDXL: Family = Family {
    shapes: ModelShapes {
        unet: UNetShapes {
            additional: 2816,
            ..unet(
                2048,
                true,
                [
                    block(320, 5, 0),
                    block(640, 10, 2),
                    block(1280, 20, 10),
                    NO_BLOCK,
                    NO_BLOCK,
                    NO_BLOCK,
                ],
            )
        },
        text: [CLIP_L, CLIP_G],
        vae: vae(1024),
        ..FAMILY_DEFAULTS.shapes
    },
    text_prefixes: &["lora_te1", "lora_te2"],
    penultimate: true,
    vae_overflows_in_f16: true,
    ..FAMILY_DEFAULTS
};
