//! The config of the autoencoder.

use crate::models::config::check_sizes;
use serde::Deserialize;

/// The most levels: one halves the sides of the image.
const MAX_LEVELS: usize = 16;

/// `vae/config.json`. Missing keys have the values of SD 1.x.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the keys are diffusers' own, documented there")]
pub struct VaeConfig {
    pub in_channels: usize,
    pub out_channels: usize,
    pub block_out_channels: Vec<usize>,
    pub layers_per_block: usize,
    pub latent_channels: usize,
    pub norm_num_groups: usize,
    pub act_fn: String,
    pub down_block_types: Vec<String>,
    pub up_block_types: Vec<String>,
    pub scaling_factor: f64,
    pub shift_factor: Option<f64>,
    pub latents_mean: Option<Vec<f64>>,
    pub latents_std: Option<Vec<f64>>,
    pub use_quant_conv: bool,
    pub use_post_quant_conv: bool,
    pub mid_block_add_attention: bool,
    /// Whether float16 overflows in this VAE, so that it has to compute in float32.
    pub force_upcast: bool,
    pub sample_size: SampleSize,
}

/// `sample_size`: one number for both sides, or height and width, of which the height is used.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
#[expect(missing_docs, reason = "see the enum")]
pub enum SampleSize {
    One(usize),
    Two(Vec<usize>),
}

impl SampleSize {
    pub(super) fn side(&self) -> usize {
        match self {
            Self::One(side) => *side,
            Self::Two(sides) => sides.first().copied().unwrap_or(0),
        }
    }
}

impl Default for VaeConfig {
    fn default() -> Self {
        Self {
            in_channels: 3,
            out_channels: 3,
            block_out_channels: vec![128, 256, 512, 512],
            layers_per_block: 2,
            latent_channels: 4,
            norm_num_groups: 32,
            act_fn: "silu".into(),
            down_block_types: Vec::new(),
            up_block_types: Vec::new(),
            scaling_factor: 0.18215,
            shift_factor: None,
            latents_mean: None,
            latents_std: None,
            use_quant_conv: true,
            use_post_quant_conv: true,
            mid_block_add_attention: true,
            force_upcast: true,
            sample_size: SampleSize::One(512),
        }
    }
}

impl VaeConfig {
    /// Checks that this crate supports the config.
    pub(super) fn check(&self) -> Result<(), String> {
        let known = |types: &[String], name: &str| types.iter().all(|t| t == name);
        if self.block_out_channels.is_empty() || self.block_out_channels.contains(&0) {
            return Err("`block_out_channels` is empty or has a 0".into());
        }
        let levels = self.block_out_channels.len();
        if levels > MAX_LEVELS {
            return Err(format!(
                "`block_out_channels` has {levels} numbers, expected at most {MAX_LEVELS}"
            ));
        }
        check_sizes(
            self.block_out_channels
                .iter()
                .map(|channels| ("block_out_channels", *channels))
                .chain([
                    ("in_channels", self.in_channels),
                    ("out_channels", self.out_channels),
                    ("latent_channels", self.latent_channels),
                    ("layers_per_block", self.layers_per_block.max(1)),
                    ("norm_num_groups", self.norm_num_groups),
                ]),
        )?;
        if !known(&self.down_block_types, "DownEncoderBlock2D") || !known(&self.up_block_types, "UpDecoderBlock2D") {
            return Err("only DownEncoderBlock2D and UpDecoderBlock2D are supported".into());
        }
        if !matches!(self.act_fn.as_str(), "silu" | "swish") {
            return Err(format!("act_fn `{}` is not supported", self.act_fn));
        }
        // Latents are multiplied by it, and later divided by it.
        if self.scaling_factor == 0.0 || !self.scaling_factor.is_finite() {
            let found = self.scaling_factor;
            return Err(format!(
                "`scaling_factor` is {found}, expected a number such as 0.18215, not 0"
            ));
        }
        Ok(())
    }
}
