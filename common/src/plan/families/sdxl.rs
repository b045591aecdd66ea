//! Stable Diffusion XL.

use super::parts::{NO_BLOCK, UNetFamily, block, unet, vae};
use crate::plan::shapes::{ModelShapes, TextShapes, UNetShapes};

pub(super) static SDXL: UNetFamily = UNetFamily {
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
        text: [TEXT, TEXT_2],
        vae: vae(1024),
    },
    text_prefixes: &["lora_te1", "lora_te2"],
    penultimate: true,
    vae_overflows_in_f16: true,
};

const TEXT: TextShapes = TextShapes {
    width: 768,
    intermediate: 3072,
    layers: 12,
    heads: 12,
    vocabulary: 49408,
    positions: 77,
    projection: 0,
};

const TEXT_2: TextShapes = TextShapes {
    width: 1280,
    intermediate: 5120,
    layers: 32,
    heads: 20,
    projection: 1280,
    ..TEXT
};
