//! Stable Diffusion 2.x.

use super::parts::{FAMILY_DEFAULTS, Family, NO_BLOCK, NO_TEXT, block, unet, vae};
use crate::plan::shapes::{BlockShapes, ModelShapes, TextShapes, UNetShapes};

pub(super) static SD2: Family = Family {
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
        text: [TEXT, NO_TEXT],
        vae: vae(768),
        ..FAMILY_DEFAULTS.shapes
    },
    ..FAMILY_DEFAULTS
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
