//! The network of version 9 of ai-toolkit's feature extractors (`DiffusionFeatureExtractor9` in
//! `toolkit/models/diffusion_feature_extraction.py` and `Sapiens2` in `toolkit/models/sapiens2.py`, 27a03a91): the vision transformer of
//! Sapiens 2.

use super::channels::{channels_of, weights_error};
use super::vision_layer::{
    IMAGENET_DEVIATION, IMAGENET_MEAN, LayerNames, LayerSizes, NormKind, VisionLayer, run_layers, scaled_size,
    standardised,
};
use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::nn::{Activation, Conv2d, Interpolation, RmsNorm, Rotary, RotaryPairs, interpolate, to_image, to_tokens};
use crate::weights::{Index, View, Weights};
use candle_core::{DType, Device, Tensor};
use std::f32::consts::TAU;
use std::sync::Arc;

/// The tensor that tells a file of this network from others.
pub(super) const FIRST_TENSOR: &str = "patch_embed.projection.weight";

/// The most pixels of an image. Larger ones are scaled.
const MAX_PIXELS: usize = 1024 * 1024;

const EPSILON: f64 = 1e-6;

const NAMES: LayerNames = LayerNames {
    norms: ["ln1", "ln2"],
    attention: ["attn.wq", "attn.wk", "attn.wv", "attn.proj"],
    head_norms: Some(["attn.q_norm", "attn.k_norm"]),
    mlp: ["ffn.gate", "ffn.up", "ffn.w3"],
    scales: [Some("attn.gamma.weight"), None],
};

/// The network.
#[derive(Clone, Debug)]
pub struct SapiensFeatures {
    patch: usize,
    dtype: DType,
    patches: Conv2d,
    /// The class token and the storage tokens, [1, tokens, width].
    first: Tensor,
    /// The periods of the rotations along each axis, a quarter of the features of a head.
    periods: Vec<f32>,
    /// Whether the angles of the rotations, their cosines and their sines are rounded to bf16.
    rounds_angles: bool,
    layers: Vec<Arc<VisionLayer>>,
    norm: RmsNorm,
    checkpointing: Checkpointing,
}

/// The gates and the first layer of an MLP, of tensors that hold both.
fn split(name: &str, shape: &[usize]) -> Vec<(String, View)> {
    let Some((block, kind)) = name.split_once(".ffn.w12.") else {
        return Vec::new();
    };
    let count = shape.first().map_or(0, |rows| rows / 2);
    let part = |name: &str, start| (format!("{block}.ffn.{name}.{kind}"), View::Rows { start, count });
    vec![part("gate", 0), part("up", count)]
}

impl SapiensFeatures {
    /// Reads the network. Its sizes are those of its tensors: those of `facebook/sapiens2-pretrain-1b` have 40 layers of 1,536 features.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape than its neighbours need.
    pub fn new(index: &Index, dtype: DType, device: &Device) -> Result<Self> {
        let rows_of = |name: &str| match index.shape(name) {
            None => Err(index.missing_error(name)),
            Some([rows, ..]) if *rows > 0 => Ok(*rows),
            Some(found) => Err(weights_error(
                index,
                format!("tensor `{name}` has shape {found:?}: expected sizes above 0"),
            )),
        };
        let (_, width) = channels_of(index, FIRST_TENSOR)?;
        let patch = index.shape(FIRST_TENSOR).map_or(0, |shape| shape[2]);
        let head = rows_of("blocks.0.attn.q_norm.weight")?;
        if patch == 0 || !width.is_multiple_of(head) || !head.is_multiple_of(4) {
            return Err(weights_error(
                index,
                format!(
                    "patches of {patch} pixels have {width} features, and heads {head}: expected at least 1 pixel, and heads whose features divide \
                     those and are a multiple of 4"
                ),
            ));
        }
        let heads = width / head;
        let hidden = rows_of("blocks.0.ffn.w12.weight")? / 2;
        let weights = Weights::from_index(index.clone().merged(index.views(split)), dtype, device);
        let depth = (0..)
            .take_while(|i| index.contains(&format!("blocks.{i}.ln1.weight")))
            .count();
        let layer = |i: usize| -> Result<Arc<VisionLayer>> {
            let name = format!("blocks.{i}.attn.wk.weight");
            let kv_width = rows_of(&name)?;
            let kv_heads = kv_width / head;
            if !kv_width.is_multiple_of(head) || !heads.is_multiple_of(kv_heads.max(1)) {
                return Err(weights_error(
                    index,
                    format!(
                        "tensor `{name}` has {kv_width} rows: expected heads of {head} whose number divides {heads}"
                    ),
                ));
            }
            let sizes = LayerSizes {
                width,
                hidden,
                heads,
                kv_heads,
                norm: NormKind::Rms,
                eps: EPSILON,
                activation: Activation::Silu,
                is_gated: true,
                attention_bias: [true; 4],
                mlp_bias: true,
            };
            VisionLayer::new(&weights.pp("blocks").pp(i), &NAMES, &sizes).map(Arc::new)
        };
        let layers = (0..depth).map(layer).collect::<Result<_>>()?;
        let class = weights.get((1, 1, width), "cls_token")?;
        let first = match index.shape("storage_tokens") {
            Some([1, count, _]) => Tensor::cat(&[class, weights.get((1, *count, width), "storage_tokens")?], 1)?,
            _ => class,
        };
        let periods = weights.pp("rope_embed").get(head / 4, "periods")?;
        let periods = periods
            .to_device(&Device::Cpu)?
            .to_dtype(DType::F32)?
            .to_vec1::<f32>()?;
        Ok(Self {
            patch,
            patches: Conv2d::new(&weights.pp("patch_embed.projection"), 3, width, patch, patch, 0)?,
            first,
            periods: rounded(periods)?,
            rounds_angles: true,
            layers,
            norm: RmsNorm::new(&weights.pp("ln1"), width, EPSILON)?,
            dtype,
            checkpointing: Checkpointing::Off,
        })
    }

    /// Computes the angles of the rotations in float32, from places and periods in bf16: PyTorch does so where its weights have another type than
    /// bf16.
    #[must_use]
    pub(in crate::models) fn with_float32_angles(self) -> Self {
        Self {
            rounds_angles: false,
            ..self
        }
    }

    /// The side of a patch, in pixels.
    pub(in crate::models) fn patch_size(&self) -> usize {
        self.patch
    }

    /// Recomputes each layer in the backward pass, or none.
    pub(super) fn set_checkpointing(&mut self, checkpointing: Checkpointing) {
        self.checkpointing = checkpointing;
    }

    /// All tokens of images [b, 3, height, width] from -1 to 1, float32: [b, tokens, width], float32.
    ///
    /// # Errors
    /// When the shapes do not match, or a side is smaller than a patch.
    pub fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let (_, _, height, width) = images.dims4()?;
        let images = standardised(&((images + 1.0)? * 0.5)?, IMAGENET_MEAN, IMAGENET_DEVIATION)?;
        let size = scaled_size((height, width), self.patch, MAX_PIXELS);
        let (tokens, _) = self.tokens(&interpolate(&images, size, Interpolation::Bilinear)?)?;
        Ok(tokens)
    }

    /// The features of the patches of standardised images [b, 3, height, width], whose sides are multiples of a patch's: [b, width of the
    /// transformer, rows of patches, columns], float32.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub(in crate::models) fn feature_map(&self, images: &Tensor) -> Result<Tensor> {
        let (tokens, (rows, columns)) = self.tokens(images)?;
        let (batch, count, width) = tokens.dims3()?;
        let others = count.saturating_sub(rows * columns);
        let of_patches = tokens.narrow(1, others, rows * columns)?.contiguous()?;
        Ok(to_image(&of_patches, &[batch, width, rows, columns])?)
    }

    /// All tokens of standardised images [b, 3, height, width], and the rows and columns of patches.
    fn tokens(&self, images: &Tensor) -> Result<(Tensor, (usize, usize))> {
        let patches = self.patches.forward(&images.to_dtype(self.dtype)?)?;
        let (batch, _, rows, columns) = patches.dims4()?;
        let (_, tokens, width) = self.first.dims3()?;
        let first = self.first.broadcast_as((batch, tokens, width))?.contiguous()?;
        let x = Tensor::cat(&[&first, &to_tokens(&patches)?], 1)?;
        let rotary = self.rotary(tokens, (rows, columns))?;
        let x = run_layers(&self.layers, x, Some(&rotary), self.checkpointing)?;
        Ok((self.norm.forward(&x)?.to_dtype(DType::F32)?, (rows, columns)))
    }

    /// The rotations of the tokens, by the place of the middle of each patch, from -1 to 1 along each axis. The first `others` tokens are not
    /// rotated.
    fn rotary(&self, others: usize, (rows, columns): (usize, usize)) -> candle_core::Result<Rotary> {
        let (of_rows, of_columns) = (self.angles(rows)?, self.angles(columns)?);
        let quarter = self.periods.len().max(1);
        let table = |function: fn(f32) -> f32, at_zero: f32| -> candle_core::Result<Vec<f32>> {
            let of = |angles: &[f32]| self.in_angle_type(angles.iter().map(|angle| function(*angle)).collect());
            let (of_rows, of_columns) = (of(&of_rows)?, of(&of_columns)?);
            let mut table = vec![at_zero; others * 2 * quarter];
            for row in of_rows.chunks(quarter) {
                for column in of_columns.chunks(quarter) {
                    table.extend(row.iter().chain(column));
                }
            }
            Ok(table)
        };
        let (cosines, sines) = (table(f32::cos, 1.0)?, table(f32::sin, 0.0)?);
        Rotary::from_tables(others + rows * columns, cosines, sines, RotaryPairs::Halves)
    }

    fn in_angle_type(&self, values: Vec<f32>) -> candle_core::Result<Vec<f32>> {
        match self.rounds_angles {
            true => rounded(values),
            false => Ok(values),
        }
    }

    /// The angles for each of `count` patches along an axis and each period. The network was trained with angles whose computation rounds to
    /// bf16 after each operation.
    fn angles(&self, count: usize) -> candle_core::Result<Vec<f32>> {
        let middles = rounded((0..count).map(|i| i as f32 + 0.5).collect())?;
        let shares = rounded(middles.into_iter().map(|middle| middle / count as f32).collect())?;
        let places = rounded(shares.into_iter().map(|share| 2.0 * share - 1.0).collect())?;
        let turns = rounded(places.into_iter().map(|place| TAU * place).collect())?;
        let angles = turns
            .iter()
            .flat_map(|turn| self.periods.iter().map(move |period| turn / period));
        self.in_angle_type(angles.collect())
    }
}

/// Numbers, each rounded to bf16.
fn rounded(values: Vec<f32>) -> candle_core::Result<Vec<f32>> {
    let count = values.len();
    Tensor::from_vec(values, count, &Device::Cpu)?
        .to_dtype(DType::BF16)?
        .to_dtype(DType::F32)?
        .to_vec1()
}
