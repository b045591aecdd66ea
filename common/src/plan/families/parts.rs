//! What the published configs of the families are written with.

use crate::plan::shapes::{
    BlockShapes, LanguageKind, LanguageShapes, MAX_BLOCKS, ModelShapes, TextShapes, TransformerKind, TransformerShapes,
    UNetShapes, VaeShapes,
};
use crate::plan::walk::build::LoraLayers;

/// What the planner knows about a family of models.
pub(in crate::plan) struct Family {
    /// The shapes of its published model.
    pub(in crate::plan) shapes: ModelShapes,
    /// The beginning of the names of its text encoders' layers in LoRA files.
    pub(in crate::plan) text_prefixes: &'static [&'static str],
    /// Whether the text is taken before the last layer.
    pub(in crate::plan) penultimate: bool,
    /// Whether the autoencoder computes in float32 where the rest is in float16.
    pub(in crate::plan) vae_overflows_in_f16: bool,
    /// The beginning of the names of its denoiser's layers in LoRA files.
    pub(in crate::plan) denoiser_prefix: &'static str,
    /// The layers of its denoiser that get an adapter, unless `network.transformer_only` is off.
    pub(in crate::plan) lora_layers: LoraLayers,
    /// Layers of its denoiser that are never quantised.
    pub(in crate::plan) never_quantised: &'static [&'static str],
    /// The guidance scale above which classifier-free guidance is used; infinite for distilled models.
    pub(in crate::plan) guided_above: f64,
    /// The tokens of every prompt for the language model, and of models with short prompts ([`TransformerShapes::short_prompts`]).
    pub(in crate::plan) prompt_tokens: [f64; 2],
}

/// What all families like Stable Diffusion have in common.
pub(super) const FAMILY_DEFAULTS: Family = Family {
    shapes: ModelShapes {
        unet: unet(0, false, [NO_BLOCK; MAX_BLOCKS]),
        transformer: NO_TRANSFORMER,
        language: NO_LANGUAGE,
        text: [NO_TEXT; 2],
        vae: vae(512),
    },
    text_prefixes: &["lora_te"],
    penultimate: false,
    vae_overflows_in_f16: false,
    denoiser_prefix: "lora_unet",
    lora_layers: LoraLayers::All,
    never_quantised: &["conv_in", "conv_out", "time_embedding.*", "add_embedding.*"],
    guided_above: 1.0,
    prompt_tokens: [0.0; 2],
};

pub(super) const NO_TRANSFORMER: TransformerShapes = TransformerShapes {
    kind: TransformerKind::None,
    in_channels: 0,
    patch: 0,
    blocks: 0,
    single_blocks: 0,
    dual_blocks: 0,
    heads: 0,
    head_width: 0,
    context: 0,
    pooled: 0,
    guidance: false,
    qk_norm: false,
    positions: 0,
    approximator_layers: 0,
    approximator_width: 0,
    short_prompts: false,
};

pub(super) const NO_LANGUAGE: LanguageShapes = LanguageShapes {
    kind: LanguageKind::None,
    width: 0,
    heads: 0,
    kv_heads: 0,
    head_width: 0,
    intermediate: 0,
    layers: 0,
    vocabulary: 0,
    positions: 0,
    window: 0,
    learned_positions: false,
    gated: false,
    untied: false,
};

pub(super) const NO_TEXT: TextShapes = TextShapes {
    width: 0,
    intermediate: 0,
    layers: 0,
    heads: 0,
    vocabulary: 0,
    positions: 0,
    projection: 0,
};

/// CLIP-L, without a projection.
pub(super) const CLIP_L: TextShapes = TextShapes {
    width: 768,
    intermediate: 3072,
    layers: 12,
    heads: 12,
    vocabulary: 49408,
    positions: 77,
    projection: 0,
};

/// CLIP-G.
pub(super) const CLIP_G: TextShapes = TextShapes {
    width: 1280,
    intermediate: 5120,
    layers: 32,
    heads: 20,
    projection: 1280,
    ..CLIP_L
};

/// T5 v1.1 XXL.
pub(super) const T5_XXL: LanguageShapes = LanguageShapes {
    kind: LanguageKind::T5,
    width: 4096,
    heads: 64,
    kv_heads: 64,
    head_width: 64,
    intermediate: 10_240,
    layers: 24,
    vocabulary: 32_128,
    ..NO_LANGUAGE
};

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

/// The autoencoder of families with a transformer.
pub(super) const VAE_16: VaeShapes = VaeShapes {
    latent_channels: 16,
    ..vae(1024)
};

/// The autoencoder of families with a U-Net.
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
