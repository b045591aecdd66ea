//! Stable Diffusion 2.x.

use super::parts::{NO_BLOCK, UNetFamily, block, unet, vae};
use crate::plan::shapes::{BlockShapes, ModelShapes, TextShapes, UNetShapes};

pub(super) static SD2: UNetFamily = UNetFamily {
    shapes: ModelShapes {
        unet: UNetShapes {
            // Of 2.1 for 768 pixels; 2.0 and the base models compute scores in the dtype of the model.
            upcast_attention: true,
            ..unet(
                1024,
                true,
                [
                    block(320, 5, 1),
                    block(640, 10, 1),
                    block(1280, 20, 1),
                    LAST,
                    NO_BLOCK,
                    NO_BLOCK,
                ],
            )
        },
        text: [TEXT, TextShapes { width: 0, ..TEXT }],
        vae: vae(768),
    },
    text_prefixes: &["lora_te"],
    penultimate: false,
    vae_overflows_in_f16: false,
};

/// No attention; the middle block has the same number of transformer blocks.
const LAST: BlockShapes = BlockShapes {
    transformer_layers: 1,
    ..block(1280, 20, 0)
};

const TEXT: TextShapes = TextShapes {
    width: 1024,
    intermediate: 4096,
    layers: 23,
    heads: 16,
    vocabulary: 49408,
    positions: 77,
    projection: 0,
};
