//! The vision transformer of TIPSv2, of the kind of DINOv2 with registers (T. Darcet and others, 2023).

use super::super::channels::{channels_of, weights_error};
use super::super::vision_layer::{LayerNames, LayerSizes, NormKind, VisionLayer, run_layers_with_results, scaled_size};
use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::nn::{Activation, Conv2d, Interpolation, LayerNorm, interpolate, to_tokens};
use crate::weights::{Index, View, Weights};
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;

/// The tensor that tells a file with this network from others.
pub(crate) const FIRST_TENSOR: &str = "vision_encoder.patch_embed.proj.weight";

/// The features of a head, which no tensor tells.
const HEAD_WIDTH: usize = 64;

/// The most pixels of an image. Larger ones are scaled.
const MAX_PIXELS: usize = 1024 * 1024;

const EPSILON: f64 = 1e-6;

/// After how many parts of the layers, of equal size, features are taken.
pub(super) const TAKEN: usize = 4;

const NAMES: LayerNames = LayerNames {
    norms: ["norm1", "norm2"],
    attention: ["attn.q", "attn.k", "attn.v", "attn.proj"],
    head_norms: None,
    mlp: ["mlp.gate", "mlp.fc1", "mlp.fc2"],
    scales: [Some("ls1.gamma"), Some("ls2.gamma")],
};

/// What the network finds after a part of its layers.
#[derive(Clone, Debug)]
pub(super) struct Taken {
    /// The class token, [b, width].
    pub(super) class: Tensor,
    /// [b, patches, width].
    pub(super) patches: Tensor,
}

/// What the network finds in images.
pub(super) struct Encoded {
    pub(super) taken: Vec<Taken>,
    /// The height and width of the scaled images.
    pub(super) size: (usize, usize),
    /// The rows and columns of the patches.
    pub(super) grid: (usize, usize),
}

/// The network.
#[derive(Clone, Debug)]
pub(super) struct Encoder {
    patch: usize,
    dtype: DType,
    patches: Conv2d,
    /// The class token with its position, and the registers, [1, tokens, width].
    first: Tensor,
    /// The positions of a square image, [1, width, side, side], float32.
    positions: Tensor,
    layers: Vec<Arc<VisionLayer>>,
    norm: LayerNorm,
}

/// The queries, keys and values of tensors that hold all three.
fn split(name: &str, shape: &[usize]) -> Vec<(String, View)> {
    let Some((block, kind)) = name.split_once(".attn.qkv.") else {
        return Vec::new();
    };
    let count = shape.first().map_or(0, |rows| rows / 3);
    let part = |(i, part): (usize, &str)| {
        let start = i * count;
        (format!("{block}.attn.{part}.{kind}"), View::Rows { start, count })
    };
    ["q", "k", "v"].into_iter().enumerate().map(part).collect()
}

impl Encoder {
    /// Reads the network. Its sizes are those of its tensors.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape than its neighbours need.
    pub(super) fn new(index: &Index, dtype: DType, device: &Device) -> Result<Self> {
        let wrong = |reason: String| weights_error(index, reason);
        let (_, width) = channels_of(index, FIRST_TENSOR)?;
        let patch = index.shape(FIRST_TENSOR).map_or(0, |shape| shape[2]);
        if patch == 0 || !width.is_multiple_of(HEAD_WIDTH) {
            return Err(wrong(format!(
                "tensor `{FIRST_TENSOR}` makes {width} features of patches of {patch} pixels: expected a multiple of {HEAD_WIDTH}, and at least 1 pixel"
            )));
        }
        let places = match index.shape("vision_encoder.pos_embed") {
            Some([1, places, _]) if *places > 1 && (places - 1).isqrt().pow(2) == places - 1 => places - 1,
            found => {
                return Err(wrong(format!(
                    "tensor `vision_encoder.pos_embed` has the shape {found:?}: expected [1, 1 + a square, {width}]"
                )));
            }
        };
        let registers = match index.shape("vision_encoder.register_tokens") {
            Some([1, count, _]) => *count,
            _ => 0,
        };
        let depth = (0..)
            .take_while(|i| index.contains(&format!("vision_encoder.blocks.{i}.norm1.weight")))
            .count();
        if depth == 0 || !depth.is_multiple_of(TAKEN) {
            return Err(wrong(format!(
                "the vision transformer has {depth} layers (`vision_encoder.blocks.0`, …): expected a multiple of {TAKEN}"
            )));
        }
        let hidden = match index.shape("vision_encoder.blocks.0.mlp.fc1.weight") {
            Some([hidden, _]) => *hidden,
            _ => return Err(index.missing_error("vision_encoder.blocks.0.mlp.fc1.weight")),
        };
        let sizes = LayerSizes {
            width,
            hidden,
            heads: width / HEAD_WIDTH,
            kv_heads: width / HEAD_WIDTH,
            norm: NormKind::Layer,
            eps: EPSILON,
            activation: Activation::Gelu,
            is_gated: false,
            attention_bias: [true; 4],
            mlp_bias: true,
        };
        let weights = Weights::from_index(index.clone().merged(index.views(split)), dtype, device).pp("vision_encoder");
        let positions = weights.get((1, places + 1, width), "pos_embed")?;
        let class = (weights.get((1, 1, width), "cls_token")? + positions.narrow(1, 0, 1)?)?;
        let first = match registers {
            0 => class,
            count => Tensor::cat(&[class, weights.get((1, count, width), "register_tokens")?], 1)?,
        };
        let side = places.isqrt();
        let positions = positions
            .narrow(1, 1, places)?
            .to_dtype(DType::F32)?
            .transpose(1, 2)?
            .contiguous()?
            .reshape((1, width, side, side))?;
        let layers = (0..depth).map(|i| VisionLayer::new(&weights.pp("blocks").pp(i), &NAMES, &sizes).map(Arc::new));
        Ok(Self {
            patch,
            dtype,
            patches: Conv2d::new(&weights.pp("patch_embed.proj"), 3, width, patch, patch, 0)?,
            first,
            positions,
            layers: layers.collect::<Result<_>>()?,
            norm: LayerNorm::new(&weights.pp("norm"), width, EPSILON)?,
        })
    }

    /// The features of a token.
    pub(super) fn width(&self) -> usize {
        self.positions.dims().get(1).copied().unwrap_or(0)
    }

    /// What the network finds in images [b, 3, height, width] from -1 to 1, float32.
    ///
    /// # Errors
    /// When the shapes do not match, or a side is smaller than a patch.
    pub(super) fn forward(&self, images: &Tensor, checkpointing: Checkpointing) -> Result<Encoded> {
        let (batch, _, height, width) = images.dims4()?;
        let size = scaled_size((height, width), self.patch, MAX_PIXELS);
        let images = ((images + 1.0)? * 0.5)?;
        let images = interpolate(&images, size, Interpolation::Bilinear)?.to_dtype(self.dtype)?;
        let patches = self.patches.forward(&images)?;
        let (_, _, rows, columns) = patches.dims4()?;
        let patches = to_tokens(&patches)?;
        let positions = interpolate(&self.positions, (rows, columns), Interpolation::BilinearAntialiased)?;
        let positions = to_tokens(&positions)?.to_dtype(self.dtype)?;
        let patches = patches.broadcast_add(&positions)?;
        let (_, tokens, width) = self.first.dims3()?;
        let first = self.first.broadcast_as((batch, tokens, width))?.contiguous()?;
        let x = Tensor::cat(&[&first, &patches], 1)?;
        let part = self.layers.len() / TAKEN;
        let ends: Vec<usize> = (1..=TAKEN).map(|i| i * part - 1).collect();
        let taken = run_layers_with_results(&self.layers, x, None, checkpointing, &ends)?;
        let taken = taken.iter().map(|x| -> Result<Taken> {
            let x = self.norm.forward(x)?;
            Ok(Taken {
                class: x.narrow(1, 0, 1)?.squeeze(1)?.contiguous()?,
                patches: x.narrow(1, tokens, rows * columns)?.contiguous()?,
            })
        });
        Ok(Encoded {
            taken: taken.collect::<Result<_>>()?,
            size,
            grid: (rows, columns),
        })
    }
}
