//! What the published configs of Stable Diffusion families are written with.

use crate::plan::shapes::{BlockShapes, MAX_BLOCKS, ModelShapes, UNetShapes, VaeShapes};

/// What the planner knows about a family of models like Stable Diffusion.
pub(in crate::plan) struct UNetFamily {
    /// The shapes of its published model.
    pub(in crate::plan) shapes: ModelShapes,
    /// The beginning of the names of its text encoders' layers in LoRA files.
    pub(in crate::plan) text_prefixes: &'static [&'static str],
    /// Whether the text is taken before the last layer.
    pub(in crate::plan) penultimate: bool,
    /// Whether the autoencoder computes in float32 where the rest is in float16.
    pub(in crate::plan) vae_overflows_in_f16: bool,
}

/// A U-Net for 4 latent channels with two layers a block, without blocks.
pub(super) const fn unet(context: u32, linear_projection: bool, blocks: [BlockShapes; MAX_BLOCKS]) -> UNetShapes {
    UNetShapes {
        in_channels: 4,
        out_channels: 4,
        conv_in_kernel: 3,
        conv_out_kernel: 3,
        downsample_padding: 1,
        context,
        linear_projection,
        upcast_attention: false,
        mid_block: true,
        additional: 0,
        blocks,
    }
}

/// A block. `transformer_layers` of 0: it has no attention.
pub(super) const fn block(channels: u32, heads: u32, transformer_layers: u32) -> BlockShapes {
    BlockShapes {
        channels,
        layers: 2,
        heads,
        transformer_layers,
        down_attention: transformer_layers > 0,
        up_attention: transformer_layers > 0,
    }
}

pub(super) const NO_BLOCK: BlockShapes = BlockShapes {
    channels: 0,
    layers: 0,
    heads: 0,
    transformer_layers: 0,
    down_attention: false,
    up_attention: false,
};

/// The autoencoder that all these families use.
pub(super) const fn vae(sample_size: u32) -> VaeShapes {
    VaeShapes {
        in_channels: 3,
        out_channels: 3,
        latent_channels: 4,
        layers: 2,
        channels: [128, 256, 512, 512, 0, 0],
        mid_attention: true,
        sample_size,
    }
}
