//! DINOv2, a vision transformer (M. Oquab and others, arXiv:2304.07193), as the backbone of Depth Anything.
//!
//! The layers, the names of their tensors and the keys of the config are those of `Dinov2Backbone` of transformers 5.23. It computes in
//! float32.

use crate::error::{EngineError, Result};
use crate::models::config::check_sizes;
use crate::nn::{Activation, Attention, Conv2d, Interpolation, LayerNorm, Linear, add, interpolate, to_tokens};
use crate::weights::Weights;
use candle_core::Tensor;
use serde::Deserialize;
use std::path::Path;

/// `backbone_config` of a config of Depth Anything.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub(super) struct Dinov2Config {
    pub(super) hidden_size: usize,
    pub(super) num_hidden_layers: usize,
    pub(super) num_attention_heads: usize,
    pub(super) mlp_ratio: usize,
    pub(super) hidden_act: String,
    pub(super) layer_norm_eps: f64,
    /// The side of the images that it was trained on.
    pub(super) image_size: usize,
    pub(super) patch_size: usize,
    pub(super) qkv_bias: bool,
    pub(super) use_swiglu_ffn: bool,
    pub(super) apply_layernorm: bool,
    /// The layers whose results are used, counted from 1; 0 is what the first layer gets.
    out_indices: Option<Vec<usize>>,
    /// The same as names, `stage1`, where the numbers are not there.
    out_features: Option<Vec<String>>,
}

impl Default for Dinov2Config {
    /// Those of transformers' `Dinov2Config`.
    fn default() -> Self {
        Self {
            hidden_size: 768,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            mlp_ratio: 4,
            hidden_act: "gelu".into(),
            layer_norm_eps: 1e-6,
            image_size: 224,
            patch_size: 14,
            qkv_bias: true,
            use_swiglu_ffn: false,
            apply_layernorm: true,
            out_indices: None,
            out_features: None,
        }
    }
}

impl Dinov2Config {
    /// The layers whose results are used. Without any in the config the last one, as in transformers; a name that is not known is none.
    pub(super) fn outputs(&self) -> Vec<usize> {
        if let Some(numbers) = &self.out_indices {
            return numbers.clone();
        }
        let number = |name: &String| match name.as_str() {
            "stem" => Some(0),
            name => name.strip_prefix("stage")?.parse().ok(),
        };
        match &self.out_features {
            Some(names) => names.iter().map(number).collect::<Option<_>>().unwrap_or_default(),
            None => vec![self.num_hidden_layers],
        }
    }

    /// Checks the values. `path`: the file, for messages.
    ///
    /// # Errors
    /// When a size is 0 or too large, sizes do not fit together, or the config has a layer that aitk does not have.
    pub(super) fn check(&self, path: &Path) -> Result<Activation> {
        let wrong = |message: String| EngineError::model_config(path, format!("`backbone_config`: {message}"));
        check_sizes([
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("mlp_ratio", self.mlp_ratio),
            ("image_size", self.image_size),
            ("patch_size", self.patch_size),
        ])
        .map_err(wrong)?;
        if !self.hidden_size.is_multiple_of(self.num_attention_heads) {
            return Err(wrong(format!(
                "`hidden_size` {} is not a multiple of `num_attention_heads` {}",
                self.hidden_size, self.num_attention_heads
            )));
        }
        if self.image_size < self.patch_size {
            return Err(wrong(format!(
                "`image_size` {} is smaller than `patch_size` {}",
                self.image_size, self.patch_size
            )));
        }
        if self.use_swiglu_ffn {
            return Err(wrong("`use_swiglu_ffn: true` is not supported".into()));
        }
        let outputs = self.outputs();
        let ascends = outputs.is_sorted_by(|a, b| a < b);
        if !ascends || outputs.last().is_none_or(|last| *last > self.num_hidden_layers) {
            return Err(wrong(format!(
                "`out_indices` or `out_features`: expected ascending numbers of layers, up to {}; found {outputs:?}",
                self.num_hidden_layers
            )));
        }
        Activation::from_name(&self.hidden_act)
            .ok_or_else(|| wrong(format!("`hidden_act` is `{}`, which is not supported", self.hidden_act)))
    }
}

/// Attention, then two linear layers, each scaled and added to its input.
#[derive(Clone, Debug)]
struct Block {
    norm1: LayerNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    out: Linear,
    scale1: Tensor,
    norm2: LayerNorm,
    up: Linear,
    down: Linear,
    scale2: Tensor,
    heads: usize,
    activation: Activation,
}

impl Block {
    fn new(weights: &Weights, config: &Dinov2Config, activation: Activation) -> Result<Self> {
        let width = config.hidden_size;
        let inner = width * config.mlp_ratio;
        let norm = |name: &str| LayerNorm::new(&weights.pp(name), width, config.layer_norm_eps);
        let scale = |name: &str| weights.pp(name).get(width, "lambda1");
        let attention = weights.pp("attention");
        let projection = |name: &str| Linear::new(&attention.pp("attention").pp(name), width, width, config.qkv_bias);
        Ok(Self {
            norm1: norm("norm1")?,
            query: projection("query")?,
            key: projection("key")?,
            value: projection("value")?,
            out: Linear::new(&attention.pp("output").pp("dense"), width, width, true)?,
            scale1: scale("layer_scale1")?,
            norm2: norm("norm2")?,
            up: Linear::new(&weights.pp("mlp").pp("fc1"), width, inner, true)?,
            down: Linear::new(&weights.pp("mlp").pp("fc2"), inner, width, true)?,
            scale2: scale("layer_scale2")?,
            heads: config.num_attention_heads,
            activation,
        })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let h = self.norm1.forward(x)?;
        let (q, k, v) = (self.query.forward(&h)?, self.key.forward(&h)?, self.value.forward(&h)?);
        let h = self.out.forward(&Attention::new(self.heads).forward(&q, &k, &v)?)?;
        let x = add(x, &h.broadcast_mul(&self.scale1)?)?;
        let h = self.activation.forward(&self.up.forward(&self.norm2.forward(&x)?)?)?;
        add(&x, &self.down.forward(&h)?.broadcast_mul(&self.scale2)?)
    }
}

/// The backbone.
#[derive(Clone, Debug)]
pub(super) struct Dinov2 {
    patches: Conv2d,
    /// [1, 1, width].
    class_token: Tensor,
    /// [1, 1, width].
    class_position: Tensor,
    /// [1, width, side, side].
    positions: Tensor,
    blocks: Vec<Block>,
    norm: Option<LayerNorm>,
    outputs: Vec<usize>,
}

impl Dinov2 {
    /// Reads the backbone. `path`: the file of the config, for messages.
    ///
    /// # Errors
    /// When the config is not valid, or a tensor is missing or has another shape.
    pub(super) fn new(weights: &Weights, config: &Dinov2Config, path: &Path) -> Result<Self> {
        let activation = config.check(path)?;
        let (width, side) = (config.hidden_size, config.image_size / config.patch_size);
        let embeddings = weights.pp("embeddings");
        let projection = embeddings.pp("patch_embeddings").pp("projection");
        let positions = embeddings.get((1, side * side + 1, width), "position_embeddings")?;
        let of_patches = positions.narrow(1, 1, side * side)?.reshape((1, side, side, width))?;
        let block = |i: usize| Block::new(&weights.pp("encoder.layer").pp(i), config, activation);
        // What comes after the last layer that is used is not read.
        let outputs = config.outputs();
        let layers = outputs.last().copied().unwrap_or(0);
        Ok(Self {
            patches: Conv2d::new(&projection, 3, width, config.patch_size, config.patch_size, 0)?,
            class_token: embeddings.get((1, 1, width), "cls_token")?,
            class_position: positions.narrow(1, 0, 1)?,
            positions: of_patches.permute((0, 3, 1, 2))?.contiguous()?,
            blocks: (0..layers).map(block).collect::<Result<_>>()?,
            norm: match config.apply_layernorm {
                true => Some(LayerNorm::new(&weights.pp("layernorm"), width, config.layer_norm_eps)?),
                false => None,
            },
            outputs,
        })
    }

    /// The features of images [b, 3, height, width] after the layers that the config names: [b, patches, hidden size], row by row. The sides
    /// are multiples of the patch size.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub(super) fn forward(&self, images: &Tensor) -> Result<Vec<Tensor>> {
        let patches = self.patches.forward(images)?;
        let (batch, width, height_patches, width_patches) = patches.dims4()?;
        let size = (height_patches, width_patches);
        let positions = interpolate(&self.positions, size, Interpolation::Bicubic)?;
        let patches = to_tokens(&patches.broadcast_add(&positions)?)?;
        let class = (&self.class_token + &self.class_position)?.broadcast_as((batch, 1, width))?;
        let mut x = Tensor::cat(&[class.contiguous()?, patches], 1)?;
        let mut features = Vec::with_capacity(self.outputs.len());
        for number in 0..=self.blocks.len() {
            if let Some(block) = number.checked_sub(1).and_then(|index| self.blocks.get(index)) {
                x = block.forward(&x)?;
            }
            if self.outputs.contains(&number) {
                let normal = match &self.norm {
                    Some(norm) => norm.forward(&x)?,
                    None => x.clone(),
                };
                let count = height_patches * width_patches;
                features.push(normal.narrow(1, 1, count)?.contiguous()?);
            }
        }
        Ok(features)
    }
}
