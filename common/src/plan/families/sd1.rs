//! Stable Diffusion 1.x.

use super::parts::{NO_BLOCK, UNetFamily, block, unet, vae};
use crate::plan::shapes::{BlockShapes, ModelShapes, TextShapes};

pub(super) static SD1: UNetFamily = UNetFamily {
    shapes: ModelShapes {
        unet: unet(
            768,
            false,
            [
                block(320, 8, 1),
                block(640, 8, 1),
                block(1280, 8, 1),
                LAST,
                NO_BLOCK,
                NO_BLOCK,
            ],
        ),
        text: [TEXT, TextShapes { width: 0, ..TEXT }],
        vae: vae(512),
    },
    text_prefixes: &["lora_te"],
    penultimate: false,
    vae_overflows_in_f16: false,
};

/// No attention; the middle block has the same number of transformer blocks.
const LAST: BlockShapes = BlockShapes {
    transformer_layers: 1,
    ..block(1280, 8, 0)
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
