//! Vision transformers whose features are compared, as `engine/src/models/feature_extractor/vision_layer.rs`.

use super::block_sequence::BlockSequence;
use super::build::{Builder, LayerSizes};
use super::layers::Layer;
use super::meter::MetaTensor;
use super::norm::Norm;
use super::tape::Walk;
use super::tensors::{Activation, AttentionOptions, NormActivation};
use std::rc::Rc;

/// The sizes of a vision transformer.
#[derive(Clone, Copy, Debug)]
pub(in crate::plan) struct VisionSizes {
    pub(super) width: f64,
    hidden: f64,
    heads: f64,
    /// Layers that run.
    layers: usize,
    /// Pixels along a side of a patch.
    patch: f64,
    /// The most patches of an image; larger images are scaled.
    max_patches: f64,
    /// Tokens before those of the patches.
    first_tokens: f64,
    /// Numbers of the table of positions.
    positions: f64,
    /// Whether the MLP has gates.
    is_gated: bool,
    /// Whether queries and keys are rotated.
    is_rotated: bool,
    /// Whether what a layer adds has a factor for each feature.
    has_scales: bool,
    /// Whether every image is scaled to the most patches.
    is_square: bool,
    /// Whether there is a norm after the layers.
    has_norm: bool,
    /// Whether the features are those of the first token alone.
    is_pooled: bool,
}

/// SigLIP 2 so400m for squares of 512 pixels: its published config.
pub(in crate::plan) const SIGLIP2_SQUARE: VisionSizes = VisionSizes {
    layers: 27,
    positions: 1024.0 * 1152.0,
    is_square: true,
    has_norm: true,
    ..SIGLIP2_NAFLEX
};

/// SigLIP 2 so400m for images of any shape, without its last layer: its published config.
pub(in crate::plan) const SIGLIP2_NAFLEX: VisionSizes = VisionSizes {
    width: 1152.0,
    hidden: 4304.0,
    heads: 16.0,
    layers: 26,
    patch: 16.0,
    max_patches: 1024.0,
    first_tokens: 0.0,
    positions: 256.0 * 1152.0,
    is_gated: false,
    is_rotated: false,
    has_scales: false,
    is_square: false,
    has_norm: false,
    is_pooled: false,
};

/// The vision transformer of TIPSv2 B/14: its published config.
pub(in crate::plan) const TIPS_B14: VisionSizes = VisionSizes {
    width: 768.0,
    hidden: 3072.0,
    heads: 12.0,
    layers: 12,
    patch: 14.0,
    max_patches: 5349.0,
    first_tokens: 2.0,
    positions: 1025.0 * 768.0,
    is_gated: false,
    is_rotated: false,
    has_scales: true,
    is_square: false,
    has_norm: true,
    is_pooled: false,
};

/// Sapiens 2 1B: its published sizes. Its middle layers have half as many heads of keys and values, which counts little.
pub(in crate::plan) const SAPIENS2_1B: VisionSizes = VisionSizes {
    width: 1536.0,
    hidden: 6144.0,
    heads: 24.0,
    layers: 40,
    patch: 16.0,
    max_patches: 4096.0,
    first_tokens: 9.0,
    positions: 0.0,
    is_gated: true,
    is_rotated: true,
    has_scales: true,
    is_square: false,
    has_norm: true,
    is_pooled: false,
};

/// DINOv3 ViT-H+/16: its published config.
pub(in crate::plan) const DINOV3_H_PLUS: VisionSizes = VisionSizes {
    width: 1280.0,
    hidden: 5120.0,
    heads: 20.0,
    layers: 32,
    patch: 16.0,
    max_patches: 1024.0,
    first_tokens: 5.0,
    positions: 0.0,
    is_gated: true,
    is_rotated: true,
    has_scales: true,
    is_square: false,
    has_norm: true,
    is_pooled: true,
};

struct VisionLayer {
    norms: [Norm; 2],
    /// q, k, v, out.
    attention: [Layer; 4],
    gate: Option<Layer>,
    mlp: [Layer; 2],
    has_scales: bool,
    options: AttentionOptions,
}

/// A vision transformer.
pub(in crate::plan) struct VisionTransformer {
    sizes: VisionSizes,
    patches: Layer,
    layers: Vec<Rc<VisionLayer>>,
    norm: Option<Norm>,
}

impl VisionTransformer {
    pub(in crate::plan) fn new(b: &mut Builder, sizes: VisionSizes) -> Self {
        let VisionSizes { width, hidden, .. } = sizes;
        let patches = LayerSizes {
            stride: sizes.patch,
            padding: 0.0,
            ..LayerSizes::conv(3.0, width, sizes.patch)
        };
        let patches = b.layer("patches", patches);
        b.tensor("positions", sizes.positions);
        b.tensor("tokens", sizes.first_tokens * width);
        let layers = (0..sizes.layers).map(|_| {
            let mut linear =
                |inputs: f64, outputs: f64| b.layer("layer.linear", LayerSizes::linear(inputs, outputs, true));
            let attention = [0; 4].map(|_| linear(width, width));
            let gate = sizes.is_gated.then(|| linear(width, hidden));
            let mlp = [linear(width, hidden), linear(hidden, width)];
            if sizes.has_scales {
                b.tensor("layer.scales", 2.0 * width);
            }
            Rc::new(VisionLayer {
                norms: [0; 2].map(|_| b.norm("layer.norm", width)),
                attention,
                gate,
                mlp,
                has_scales: sizes.has_scales,
                options: AttentionOptions {
                    heads: sizes.heads,
                    causal: false,
                    upcast: false,
                    has_bias: false,
                },
            })
        });
        let layers = layers.collect();
        Self {
            patches,
            layers,
            norm: sizes.has_norm.then(|| b.norm("norm", width)),
            sizes,
        }
    }

    /// The features of images [b, 3, height, width].
    pub(super) fn forward(&self, walk: &Walk, images: &MetaTensor, checkpointed: bool) -> Option<MetaTensor> {
        let x = self.after_parts(walk, images, checkpointed, 1)?.pop()?;
        let x = match self.sizes.is_pooled {
            true => walk.first_token(&x),
            false => x,
        };
        Some(self.normalised(walk, &x))
    }

    /// The tokens, after the norm that the network has.
    pub(super) fn normalised(&self, walk: &Walk, x: &MetaTensor) -> MetaTensor {
        match self.norm {
            Some(norm) => walk.norm(x, norm, NormActivation::None),
            None => x.clone(),
        }
    }

    /// The number of patches of images.
    pub(super) fn patches_of(&self, images: &MetaTensor) -> f64 {
        let [_, _, height, width] = images.dims;
        let patch = self.sizes.patch;
        match self.sizes.is_square {
            true => self.sizes.max_patches,
            false => (height * width / (patch * patch)).min(self.sizes.max_patches).max(1.0),
        }
    }

    /// The tokens after each of this many equal parts of the layers.
    pub(super) fn after_parts(
        &self,
        walk: &Walk,
        images: &MetaTensor,
        checkpointed: bool,
        parts: usize,
    ) -> Option<Vec<MetaTensor>> {
        let VisionSizes { width, patch, .. } = self.sizes;
        let (batch, patches) = (images.dims[0], self.patches_of(images));
        // From 0 to 1, clamped, less the mean, divided by the deviation: candle's operations.
        let mut pixels = images.clone();
        for _ in 0..5 {
            pixels = walk.activation(&pixels, Activation::Silu);
        }
        let side = patches.sqrt() * patch;
        let pixels = walk.rearranged(&pixels, [batch, 3.0, side, side]);
        let x = walk.conv(&self.patches, &pixels);
        drop(pixels);
        let tokens = patches + self.sizes.first_tokens;
        let x = walk.rearranged(&x, [batch, tokens, width, 1.0]);
        let rotary = self
            .sizes
            .is_rotated
            .then(|| walk.rotary(tokens, width / self.sizes.heads));
        let mut sequence = BlockSequence::default();
        let mut at = sequence.input(x);
        let mut ends = Vec::new();
        for (i, layer) in self.layers.iter().enumerate() {
            let (layer, rotary) = (Rc::clone(layer), rotary.clone());
            at = sequence.add(&[at], move |walk, inputs| {
                layer.forward(walk, &inputs[0], rotary.as_ref())
            });
            if (i + 1) % (self.layers.len() / parts).max(1) == 0 {
                ends.push(at);
            }
        }
        sequence.run_all(walk, checkpointed, &ends)
    }
}

impl VisionLayer {
    fn forward(&self, walk: &Walk, x: &MetaTensor, rotary: Option<&super::tokens::Rotary>) -> MetaTensor {
        let h = walk.norm(x, self.norms[0], NormActivation::None);
        let [to_q, to_k, to_v, to_out] = &self.attention;
        let rotated = |x: MetaTensor| match rotary {
            Some(rotary) => walk.rotate(&x, rotary),
            None => x,
        };
        let (q, k) = (rotated(walk.linear(to_q, &h)), rotated(walk.linear(to_k, &h)));
        let attended = walk.attention(&q, &k, &walk.linear(to_v, &h), self.options);
        drop((q, k));
        let x = self.plus(walk, x, &walk.linear(to_out, &attended));
        drop(attended);
        let h = walk.norm(&x, self.norms[1], NormActivation::None);
        let [up, down] = &self.mlp;
        let inner = match &self.gate {
            Some(gate) => {
                let gates = walk.activation(&walk.linear(gate, &h), Activation::Silu);
                walk.product(&gates, &walk.linear(up, &h))
            }
            None => walk.activation(&walk.linear(up, &h), Activation::GeluTanh),
        };
        self.plus(walk, &x, &walk.linear(down, &inner))
    }

    fn plus(&self, walk: &Walk, x: &MetaTensor, change: &MetaTensor) -> MetaTensor {
        if !self.has_scales {
            return walk.add(x, change);
        }
        let [batch, _, width, _] = x.dims;
        walk.gated_residual(x, &walk.tensor([batch, 1.0, width, 1.0], false), change)
    }
}
