//! A model with random weights, to measure the memory of jobs on a machine where no model was downloaded.

use crate::error::{EngineError, Result};
use crate::models::config::from_value;
use crate::models::unet::UNet2DConditionModel;
use crate::models::vae::AutoencoderKl;
use crate::weights::Weights;
use candle_core::{DType, Device, Tensor};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;

/// The size of a [`write_random_parts`] model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RandomModelSize {
    /// The blocks and channels of Stable Diffusion 1.5: 1.9 GB of files.
    Full,
    /// Half of the channels in the U-Net: 0.6 GB.
    Half,
    /// A quarter of the channels in the U-Net and in the VAE: 0.1 GB.
    Quarter,
}

impl RandomModelSize {
    fn divisors(self) -> (usize, usize) {
        match self {
            Self::Full => (1, 1),
            Self::Half => (2, 1),
            Self::Quarter => (4, 4),
        }
    }
}

/// Replaces `unet` and `vae` of a diffusers folder of Stable Diffusion 1.x by random ones in float16, in the structure of
/// Stable Diffusion 1.5. Text encoder, tokenizer and scheduler stay; `text_width` is the width of the text encoder.
///
/// # Errors
/// When a file cannot be written.
pub fn write_random_parts(folder: &Path, size: RandomModelSize, text_width: usize) -> Result<()> {
    let (unet_divisor, vae_divisor) = size.divisors();
    let channels = |channels: [usize; 4], divisor: usize| channels.map(|count| count / divisor);
    let unet = json!({
        "_class_name": "UNet2DConditionModel",
        "sample_size": 64,
        "block_out_channels": channels([320, 640, 1280, 1280], unet_divisor),
        "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
        "layers_per_block": 2,
        "attention_head_dim": 8,
        "cross_attention_dim": text_width,
        "norm_num_groups": 32 / unet_divisor,
    });
    let vae = json!({
        "_class_name": "AutoencoderKL",
        "sample_size": 512,
        "block_out_channels": channels([128, 256, 512, 512], vae_divisor),
        "down_block_types": vec!["DownEncoderBlock2D"; 4],
        "up_block_types": vec!["UpDecoderBlock2D"; 4],
        "layers_per_block": 2,
        "latent_channels": 4,
        "norm_num_groups": 32 / vae_divisor,
        "scaling_factor": 0.18215,
    });
    write_part(folder, "unet", &unet, |weights| {
        UNet2DConditionModel::new(weights, &parsed(&unet)?).map(drop)
    })?;
    write_part(folder, "vae", &vae, |weights| {
        AutoencoderKl::new(weights, &parsed(&vae)?).map(drop)
    })
}

fn parsed<T: DeserializeOwned>(config: &Value) -> Result<T> {
    from_value(config.clone()).map_err(EngineError::Internal)
}

/// Writes the config of a part, and random values for all tensors that `build` asks for.
fn write_part(folder: &Path, part: &str, config: &Value, build: impl FnOnce(&Weights) -> Result<()>) -> Result<()> {
    let folder = folder.join(part);
    let io = |error: std::io::Error| EngineError::io(&folder, error);
    std::fs::create_dir_all(&folder).map_err(io)?;
    std::fs::write(folder.join("config.json"), format!("{config:#}")).map_err(io)?;
    let weights = Weights::init(1, &Device::Cpu);
    build(&weights)?;
    let halved = weights.vars().into_iter();
    let halved = halved.map(|(name, var)| Ok((name, var.as_tensor().to_dtype(DType::F16)?)));
    let tensors: HashMap<String, Tensor> = halved.collect::<Result<_>>()?;
    candle_core::safetensors::save(&tensors, folder.join("diffusion_pytorch_model.safetensors"))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_random_model_can_be_loaded() {
        let folder = tempfile::tempdir().unwrap();
        write_random_parts(folder.path(), RandomModelSize::Quarter, 64).unwrap();
        for part in ["unet", "vae"] {
            let weights = Weights::open(folder.path().join(part), DType::F32, &Device::Cpu).unwrap();
            let config = crate::models::config::read_json(&folder.path().join(part).join("config.json")).unwrap();
            if part == "unet" {
                UNet2DConditionModel::new(&weights, &parsed(&config).unwrap()).unwrap();
            } else {
                AutoencoderKl::new(&weights, &parsed(&config).unwrap()).unwrap();
            }
        }
    }
}
