//! SigLIP (X. Zhai and others, 2023; SigLIP 2: M. Tschannen and others, 2025) for square images, as transformers' `SiglipVisionModel`: the
//! vision transformer of version 3 of ai-toolkit's feature extractors.

use super::siglip::{NAMES, layer_sizes, vision_name};
use super::vision_layer::{LayerSizes, VisionLayer, check_heads, run_layers};
use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::models::config::{check_sizes, from_value};
use crate::nn::{Conv2d, Interpolation, LayerNorm, add, interpolate, to_tokens};
use crate::weights::{Index, Weights};
use candle_core::{DType, Device, Tensor};
use serde::Deserialize;
use serde_json::Value;
use std::sync::Arc;

/// `model_type` in the configs of this network: with its text encoder, and alone.
pub(super) const MODEL_TYPES: [&str; 2] = ["siglip", "siglip_vision_model"];

/// `vision_config` of SigLIP. Missing keys have transformers' defaults.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
struct Config {
    image_size: usize,
    patch_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    hidden_act: String,
    layer_norm_eps: f64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            image_size: 224,
            patch_size: 16,
            hidden_size: 768,
            intermediate_size: 3072,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            hidden_act: "gelu_pytorch_tanh".into(),
            layer_norm_eps: 1e-6,
        }
    }
}

impl Config {
    fn from_json(json: &Value) -> std::result::Result<Self, String> {
        let config: Self = from_value(json.get("vision_config").unwrap_or(json).clone())?;
        check_sizes([
            ("image_size", config.image_size),
            ("patch_size", config.patch_size),
            ("hidden_size", config.hidden_size),
            ("intermediate_size", config.intermediate_size),
            ("num_hidden_layers", config.num_hidden_layers),
            ("num_attention_heads", config.num_attention_heads),
        ])?;
        check_heads(config.hidden_size, config.num_attention_heads)?;
        match config.image_size >= config.patch_size {
            true => Ok(config),
            false => Err(format!(
                "`image_size` is {}, expected at least `patch_size` ({})",
                config.image_size, config.patch_size
            )),
        }
    }

    fn layer(&self) -> std::result::Result<LayerSizes, String> {
        layer_sizes(
            [self.hidden_size, self.intermediate_size, self.num_attention_heads],
            self.layer_norm_eps,
            &self.hidden_act,
        )
    }
}

/// The network.
#[derive(Clone, Debug)]
pub struct SquareSiglipFeatures {
    image_size: usize,
    dtype: DType,
    patches: Conv2d,
    /// [1, patches, width].
    positions: Tensor,
    layers: Vec<Arc<VisionLayer>>,
    norm: LayerNorm,
    checkpointing: Checkpointing,
}

impl SquareSiglipFeatures {
    /// Reads the network. `config`: its `config.json`.
    ///
    /// # Errors
    /// When the config is not supported, or a tensor is missing or has another shape.
    pub fn new(index: &Index, config: &Value, dtype: DType, device: &Device) -> Result<Self> {
        let weights = Weights::from_index(index.renamed(vision_name), dtype, device);
        let of_config = |message| weights.config_error(message);
        let config = Config::from_json(config).map_err(of_config)?;
        let sizes = config.layer().map_err(of_config)?;
        let (width, patch) = (config.hidden_size, config.patch_size);
        let places = (config.image_size / patch).pow(2);
        let embeddings = weights.pp("embeddings");
        let positions = embeddings.pp("position_embedding").get((places, width), "weight")?;
        let layers = (0..config.num_hidden_layers)
            .map(|i| VisionLayer::new(&weights.pp("encoder.layers").pp(i), &NAMES, &sizes).map(Arc::new));
        Ok(Self {
            image_size: config.image_size,
            dtype,
            patches: Conv2d::new(&embeddings.pp("patch_embedding"), 3, width, patch, patch, 0)?,
            positions: positions.unsqueeze(0)?,
            layers: layers.collect::<Result<_>>()?,
            norm: LayerNorm::new(&weights.pp("post_layernorm"), width, config.layer_norm_eps)?,
            checkpointing: Checkpointing::Off,
        })
    }

    /// Recomputes each layer in the backward pass, or none.
    pub(super) fn set_checkpointing(&mut self, checkpointing: Checkpointing) {
        self.checkpointing = checkpointing;
    }

    /// The patches of images [b, 3, height, width] from -1 to 1, float32: [b, patches, width], float32. Images become squares.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(&self, images: &Tensor) -> Result<Tensor> {
        // Numbers from -1 to 1 are those from 0 to 1, less the mean 0.5 and divided by the deviation 0.5.
        let images = interpolate(images, (self.image_size, self.image_size), Interpolation::Bicubic)?;
        let patches = to_tokens(&self.patches.forward(&images.to_dtype(self.dtype)?)?)?;
        let positions = self.positions.broadcast_as(patches.shape())?.contiguous()?;
        let x = run_layers(&self.layers, add(&patches, &positions)?, None, self.checkpointing)?;
        Ok(self.norm.forward(&x)?.to_dtype(DType::F32)?)
    }
}
