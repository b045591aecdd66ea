//! Stable Diffusion 1.x.

use super::parts::{CLIP_L, FAMILY_DEFAULTS, Family, NO_BLOCK, NO_TEXT, block, unet, vae};
use crate::plan::shapes::{BlockShapes, ModelShapes};

pub(super) static SD1: Family = Family {
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
        text: [CLIP_L, NO_TEXT],
        vae: vae(512),
        ..FAMILY_DEFAULTS.shapes
    },
    ..FAMILY_DEFAULTS
};

/// No attention; the middle block has the same number of transformer blocks.
const LAST: BlockShapes = BlockShapes {
    transformer_layers: 1,
    ..block(1280, 8, 0)
};
