//! The network of versions 4 and 5 of ai-toolkit's feature extractors (`DiffusionFeatureExtractor4` in
//! `toolkit/models/diffusion_feature_extraction.py`, 27a03a91): SigLIP 2 for images of any shape (M. Tschannen and others, 2025), as
//! transformers' `Siglip2VisionModel`.

use super::vision_layer::{
    LayerNames, LayerSizes, NormKind, VisionLayer, activation_of, check_heads, from_zero_to_one, run_layers,
    standardised,
};
use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::models::config::{check_sizes, from_value};
use crate::nn::{Interpolation, Linear, add, interpolate};
use crate::weights::{Index, Weights};
use candle_core::{DType, Device, Tensor};
use serde::Deserialize;
use serde_json::Value;
use std::sync::Arc;

/// `model_type` in the configs of this network: with its text encoder, and alone.
pub(super) const MODEL_TYPES: [&str; 2] = ["siglip2", "siglip2_vision_model"];

/// The mean and the deviation that are taken from each colour.
const HALF: [f32; 3] = [0.5; 3];

/// The most patches of an image.
const MAX_PATCHES: usize = 1024;

/// The names of the tensors of a layer of SigLIP.
pub(super) const NAMES: LayerNames = LayerNames {
    norms: ["layer_norm1", "layer_norm2"],
    attention: [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.out_proj",
    ],
    mlp: ["mlp.gate", "mlp.fc1", "mlp.fc2"],
    head_norms: None,
    scales: [None; 2],
};

/// `vision_config` of SigLIP 2. Missing keys have transformers' defaults.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
struct Config {
    patch_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_patches: usize,
    hidden_act: String,
    layer_norm_eps: f64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            patch_size: 16,
            hidden_size: 768,
            intermediate_size: 3072,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            num_patches: 256,
            hidden_act: "gelu_pytorch_tanh".into(),
            layer_norm_eps: 1e-6,
        }
    }
}

impl Config {
    fn from_json(json: &Value) -> std::result::Result<Self, String> {
        let config: Self = from_value(json.get("vision_config").unwrap_or(json).clone())?;
        check_sizes([
            ("patch_size", config.patch_size),
            ("hidden_size", config.hidden_size),
            ("intermediate_size", config.intermediate_size),
            ("num_hidden_layers", config.num_hidden_layers),
            ("num_attention_heads", config.num_attention_heads),
            ("num_patches", config.num_patches),
        ])?;
        check_heads(config.hidden_size, config.num_attention_heads)?;
        match config.side().pow(2) == config.num_patches {
            true => Ok(config),
            false => Err(format!("`num_patches` is {}, expected a square", config.num_patches)),
        }
    }

    /// Positions along each axis of the table.
    fn side(&self) -> usize {
        self.num_patches.isqrt()
    }

    fn layer(&self) -> std::result::Result<LayerSizes, String> {
        layer_sizes(
            [self.hidden_size, self.intermediate_size, self.num_attention_heads],
            self.layer_norm_eps,
            &self.hidden_act,
        )
    }
}

/// The sizes of a layer of SigLIP, of these `hidden_size`, `intermediate_size` and `num_attention_heads`.
///
/// # Errors
/// When the activation is not supported.
pub(super) fn layer_sizes(
    [width, hidden, heads]: [usize; 3],
    eps: f64,
    activation: &str,
) -> std::result::Result<LayerSizes, String> {
    Ok(LayerSizes {
        width,
        hidden,
        heads,
        kv_heads: heads,
        norm: NormKind::Layer,
        eps,
        activation: activation_of(activation)?,
        is_gated: false,
        attention_bias: [true; 4],
        mlp_bias: true,
    })
}

/// The network.
#[derive(Clone, Debug)]
pub struct SiglipFeatures {
    patch_size: usize,
    dtype: DType,
    patches: Linear,
    /// The positions of a square image, [1, width, side, side], float32.
    positions: Tensor,
    /// Without the last one: the features are those before it.
    layers: Vec<Arc<VisionLayer>>,
    checkpointing: Checkpointing,
}

/// The names of the vision transformer alone for those beside its text encoder.
pub(super) fn vision_name(name: &str, shape: &[usize]) -> Option<(String, Vec<usize>)> {
    let name = name.strip_prefix("vision_model.").unwrap_or(name);
    Some((name.to_owned(), shape.to_vec()))
}

impl SiglipFeatures {
    /// Reads the network. `config`: its `config.json`.
    ///
    /// # Errors
    /// When the config is not supported, or a tensor is missing or has another shape.
    pub fn new(index: &Index, config: &Value, dtype: DType, device: &Device) -> Result<Self> {
        let weights = Weights::from_index(index.renamed(vision_name), dtype, device);
        let of_config = |message| weights.config_error(message);
        let config = Config::from_json(config).map_err(of_config)?;
        let sizes = config.layer().map_err(of_config)?;
        let (width, side) = (config.hidden_size, config.side());
        let embeddings = weights.pp("embeddings");
        let positions = embeddings
            .pp("position_embedding")
            .get((config.num_patches, width), "weight")?;
        let positions = positions
            .to_dtype(DType::F32)?
            .t()?
            .contiguous()?
            .reshape((1, width, side, side))?;
        let layers = (0..config.num_hidden_layers - 1)
            .map(|i| VisionLayer::new(&weights.pp("encoder.layers").pp(i), &NAMES, &sizes).map(Arc::new));
        Ok(Self {
            patch_size: config.patch_size,
            dtype,
            patches: Linear::new(
                &embeddings.pp("patch_embedding"),
                3 * config.patch_size * config.patch_size,
                width,
                true,
            )?,
            positions,
            layers: layers.collect::<Result<_>>()?,
            checkpointing: Checkpointing::Off,
        })
    }

    /// Recomputes each layer in the backward pass, or none.
    pub(super) fn set_checkpointing(&mut self, checkpointing: Checkpointing) {
        self.checkpointing = checkpointing;
    }

    /// The patches of images [b, 3, height, width] from -1 to 1, float32, before the last layer: [b, patches, width], float32.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let images = standardised(&from_zero_to_one(images)?, HALF, HALF)?;
        let (batch, _, height, width) = images.dims4()?;
        let patch = self.patch_size;
        let [height, width] = scaled_size([height, width], patch);
        let (rows, columns) = (height / patch, width / patch);
        let images = interpolate(&images, (height, width), Interpolation::Bilinear)?;
        // ai-toolkit has the numbers of a patch in the order of its colours, rows and columns (`unfold`). SigLIP 2 was trained with the
        // order of rows, columns and colours; a loss of that order would be another one.
        let patches = images
            .reshape(vec![batch, 3, rows, patch, columns, patch])?
            .permute(vec![0, 2, 4, 1, 3, 5])?
            .contiguous()?
            .reshape((batch, rows * columns, 3 * patch * patch))?;
        let positions = interpolate(&self.positions, (rows, columns), Interpolation::BilinearAntialiased)?;
        let positions = positions.flatten_from(2)?.transpose(1, 2)?.to_dtype(self.dtype)?;
        let positions = positions
            .broadcast_as((batch, rows * columns, positions.dim(2)?))?
            .contiguous()?;
        let x = add(&self.patches.forward(&patches.to_dtype(self.dtype)?)?, &positions)?;
        let x = run_layers(&self.layers, x, None, self.checkpointing)?;
        Ok(x.to_dtype(DType::F32)?)
    }
}

/// The height and width to which an image is scaled: the largest multiples of the side of a patch, rounded up, with at most
/// [`MAX_PATCHES`] patches, found by bisection as in ai-toolkit. Images are not enlarged.
pub(super) fn scaled_size(size: [usize; 2], patch: usize) -> [usize; 2] {
    const STEP: f64 = 1e-5;
    let at =
        |factor: f64| size.map(|side| (((side as f64 * factor) / patch as f64).ceil() as usize * patch).max(patch));
    let (mut low, mut high) = (STEP / 10.0, 1.0);
    while high - low >= STEP {
        let middle = (low + high) / 2.0;
        let [height, width] = at(middle);
        match (height / patch) * (width / patch) <= MAX_PATCHES {
            true => low = middle,
            false => high = middle,
        }
    }
    at(low)
}
