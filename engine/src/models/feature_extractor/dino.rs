//! The network of version 6 of ai-toolkit's feature extractors (`DiffusionFeatureExtractor6` in
//! `toolkit/models/diffusion_feature_extraction.py`, 27a03a91): DINOv3 (O. Siméoni and others, 2025), as transformers' `DINOv3ViTModel`.

use super::vision_layer::{
    IMAGENET_DEVIATION, IMAGENET_MEAN, LayerNames, LayerSizes, NormKind, VisionLayer, activation_of, from_zero_to_one,
    run_layers, scaled_size, standardised,
};
use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::models::config::{check_sizes, from_value};
use crate::nn::{Conv2d, Interpolation, LayerNorm, Rotary, RotaryPairs, interpolate};
use crate::weights::{Index, Weights};
use candle_core::{DType, Device, Tensor};
use serde::Deserialize;
use serde_json::Value;
use std::f64::consts::TAU;
use std::sync::Arc;

/// `model_type` in the config of this network.
pub(super) const MODEL_TYPE: &str = "dinov3_vit";

/// The most pixels of an image. Larger ones are scaled.
pub(super) const MAX_PIXELS: usize = 512 * 512;

const NAMES: LayerNames = LayerNames {
    norms: ["norm1", "norm2"],
    attention: [
        "attention.q_proj",
        "attention.k_proj",
        "attention.v_proj",
        "attention.o_proj",
    ],
    mlp: ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
    head_norms: None,
    scales: [Some("layer_scale1.lambda1"), Some("layer_scale2.lambda1")],
};

/// `config.json` of DINOv3. Missing keys have transformers' defaults.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
struct Config {
    patch_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_register_tokens: usize,
    hidden_act: String,
    layer_norm_eps: f64,
    rope_theta: f64,
    query_bias: bool,
    key_bias: bool,
    value_bias: bool,
    proj_bias: bool,
    mlp_bias: bool,
    use_gated_mlp: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            patch_size: 16,
            hidden_size: 384,
            intermediate_size: 1536,
            num_hidden_layers: 12,
            num_attention_heads: 6,
            num_register_tokens: 0,
            hidden_act: "gelu".into(),
            layer_norm_eps: 1e-5,
            rope_theta: 100.0,
            query_bias: true,
            key_bias: false,
            value_bias: true,
            proj_bias: true,
            mlp_bias: true,
            use_gated_mlp: false,
        }
    }
}

impl Config {
    fn from_json(json: &Value) -> std::result::Result<Self, String> {
        let config: Self = from_value(json.clone())?;
        check_sizes([
            ("patch_size", config.patch_size),
            ("hidden_size", config.hidden_size),
            ("intermediate_size", config.intermediate_size),
            ("num_hidden_layers", config.num_hidden_layers),
            ("num_attention_heads", config.num_attention_heads),
            ("num_register_tokens", config.num_register_tokens.max(1)),
        ])?;
        // Each of two coordinates rotates pairs of features.
        if !config.hidden_size.is_multiple_of(4 * config.num_attention_heads) {
            return Err(format!(
                "`hidden_size` is {}, expected a multiple of 4 times `num_attention_heads` ({})",
                config.hidden_size, config.num_attention_heads
            ));
        }
        match config.rope_theta > 0.0 && config.rope_theta.is_finite() {
            true => Ok(config),
            false => Err(format!(
                "`rope_theta` is {}, expected a number above 0",
                config.rope_theta
            )),
        }
    }

    fn layer(&self) -> std::result::Result<LayerSizes, String> {
        Ok(LayerSizes {
            width: self.hidden_size,
            hidden: self.intermediate_size,
            heads: self.num_attention_heads,
            kv_heads: self.num_attention_heads,
            norm: NormKind::Layer,
            eps: self.layer_norm_eps,
            activation: activation_of(&self.hidden_act)?,
            is_gated: self.use_gated_mlp,
            attention_bias: [self.query_bias, self.key_bias, self.value_bias, self.proj_bias],
            mlp_bias: self.mlp_bias,
        })
    }
}

/// The network.
#[derive(Clone, Debug)]
pub struct DinoFeatures {
    config: Config,
    dtype: DType,
    patches: Conv2d,
    /// The class token and the register tokens, [1, tokens, width].
    first: Tensor,
    layers: Vec<Arc<VisionLayer>>,
    norm: LayerNorm,
    checkpointing: Checkpointing,
}

/// The names of files as transformers 4.56 wrote them, for those of later ones.
pub(super) fn current_name(name: &str) -> String {
    name.strip_prefix("model.layer.")
        .map_or_else(|| name.to_owned(), |rest| format!("layer.{rest}"))
}

impl DinoFeatures {
    /// Reads the network. `config`: its `config.json`.
    ///
    /// # Errors
    /// When the config is not supported, or a tensor is missing or has another shape.
    pub fn new(index: &Index, config: &Value, dtype: DType, device: &Device) -> Result<Self> {
        let index = index.renamed(|name, shape| Some((current_name(name), shape.to_vec())));
        let weights = Weights::from_index(index, dtype, device);
        let of_config = |message| weights.config_error(message);
        let config = Config::from_json(config).map_err(of_config)?;
        let sizes = config.layer().map_err(of_config)?;
        let (width, patch) = (config.hidden_size, config.patch_size);
        let embeddings = weights.pp("embeddings");
        let class = embeddings.get((1, 1, width), "cls_token")?;
        let first = match config.num_register_tokens {
            0 => class,
            count => Tensor::cat(&[class, embeddings.get((1, count, width), "register_tokens")?], 1)?,
        };
        let layers = (0..config.num_hidden_layers)
            .map(|i| VisionLayer::new(&weights.pp("layer").pp(i), &NAMES, &sizes).map(Arc::new));
        Ok(Self {
            patches: Conv2d::new(&embeddings.pp("patch_embeddings"), 3, width, patch, patch, 0)?,
            first,
            layers: layers.collect::<Result<_>>()?,
            norm: LayerNorm::new(&weights.pp("norm"), width, config.layer_norm_eps)?,
            dtype,
            config,
            checkpointing: Checkpointing::Off,
        })
    }

    /// Recomputes each layer in the backward pass, or none.
    pub(super) fn set_checkpointing(&mut self, checkpointing: Checkpointing) {
        self.checkpointing = checkpointing;
    }

    /// The class token of images [b, 3, height, width] from -1 to 1, float32: [b, width], float32.
    ///
    /// # Errors
    /// When the shapes do not match, or a side is smaller than a patch.
    pub fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let images = from_zero_to_one(images)?;
        let (batch, _, height, width) = images.dims4()?;
        let size = scaled_size((height, width), self.config.patch_size, MAX_PIXELS);
        let images = interpolate(&images, size, Interpolation::Bilinear)?;
        let images = standardised(&images, IMAGENET_MEAN, IMAGENET_DEVIATION)?.to_dtype(self.dtype)?;
        let patches = self.patches.forward(&images)?;
        let (_, _, rows, columns) = patches.dims4()?;
        let patches = patches.flatten_from(2)?.transpose(1, 2)?;
        let first = self
            .first
            .broadcast_as((batch, self.first.dim(1)?, self.first.dim(2)?))?;
        let x = Tensor::cat(&[&first.contiguous()?, &patches.contiguous()?], 1)?;
        let rotary = self.rotary((rows, columns))?;
        let x = run_layers(&self.layers, x, Some(&rotary), self.checkpointing)?;
        let class = x.narrow(1, 0, 1)?.contiguous()?;
        Ok(self.norm.forward(&class)?.squeeze(1)?.to_dtype(DType::F32)?)
    }

    /// The rotations of the tokens: by the place of the middle of each patch, from -1 to 1 along each axis. Other tokens are not rotated.
    fn rotary(&self, (rows, columns): (usize, usize)) -> candle_core::Result<Rotary> {
        let middle = |i: usize, count: usize| TAU * (2.0 * (i as f64 + 0.5) / count as f64 - 1.0);
        let first = (0..=self.config.num_register_tokens).map(|_| vec![0.0; 2]);
        let patches =
            (0..rows).flat_map(|row| (0..columns).map(move |column| vec![middle(row, rows), middle(column, columns)]));
        let positions: Vec<Vec<f64>> = first.chain(patches).collect();
        let width = self.config.hidden_size / self.config.num_attention_heads / 2;
        Rotary::for_axes(&positions, &[width; 2], self.config.rope_theta, RotaryPairs::Halves)
    }
}
