//! Single-file checkpoints of SD 1.x: the names of the first release (`ldm`) into diffusers' names.

use super::SdConfig;
use crate::error::{EngineError, Result};
use crate::weights::Index;

/// What the U-Net's names begin with.
const UNET: &str = "model.diffusion_model.";

/// The text encoder's, the U-Net's and the autoencoder's tensors of a checkpoint, under diffusers' names.
pub(in crate::models) fn split(index: &Index, config: &SdConfig) -> Result<[Index; 3]> {
    let has = |prefix: &str| index.tensors().any(|(name, _)| name.starts_with(prefix));
    let other_family = [
        ("conditioner.embedders.", "an SDXL checkpoint"),
        (
            "cond_stage_model.model.",
            "a Stable Diffusion 2.x checkpoint in one file (its diffusers folder works)",
        ),
        ("double_blocks.", "a FLUX checkpoint"),
        ("model.diffusion_model.double_blocks.", "a FLUX checkpoint"),
        ("model.diffusion_model.joint_blocks.", "a Stable Diffusion 3 checkpoint"),
        ("lora_unet_", "a LoRA, not a base model"),
        ("unet.down_blocks.", "a LoRA, not a base model"),
    ];
    if let Some((_, what)) = other_family.iter().find(|(prefix, _)| has(prefix)) {
        return Err(EngineError::Unsupported(format!(
            "{}: this is {what}: only Stable Diffusion 1.x checkpoints work now",
            index.path().display()
        )));
    }
    for (prefix, what) in [
        (UNET, "U-Net"),
        ("first_stage_model.", "autoencoder (VAE)"),
        ("cond_stage_model.transformer.", "text encoder"),
    ] {
        if !has(prefix) {
            return Err(EngineError::WeightsFile {
                path: index.path().to_path_buf(),
                reason: format!(
                    "not a complete Stable Diffusion 1.x checkpoint: it has no {what} (`{prefix}…`); a U-Net alone \
                     belongs into the `unet` folder of a diffusers folder"
                ),
            });
        }
    }
    let layers = unet_layers(index, UNET);
    let vae_levels = config.vae.block_out_channels.len();
    let text = index.renamed(|name, shape| {
        Some((
            name.strip_prefix("cond_stage_model.transformer.")?.to_owned(),
            shape.to_vec(),
        ))
    });
    let unet = index.renamed(|name, shape| Some((unet_name(name.strip_prefix(UNET)?, layers)?, shape.to_vec())));
    let vae = index.renamed(|name, shape| {
        let name = vae_name(name.strip_prefix("first_stage_model.")?, vae_levels)?;
        // The attention was written as 1 x 1 convolutions; diffusers has linear layers.
        let linear = name.contains(".attentions.") && name.ends_with(".weight") && shape.len() == 4;
        let shape = if linear { shape[..2].to_vec() } else { shape.to_vec() };
        Some((name, shape))
    });
    Ok([text, unet, vae])
}

/// A U-Net that lies in a file of its own, with or without its prefix in a checkpoint, under diffusers' names; one that has
/// these already as it is.
pub(super) fn unet_alone(index: Index) -> Index {
    let names_of = |prefix: &str| index.contains(&format!("{prefix}input_blocks.0.0.weight"));
    let Some(prefix) = [UNET, ""].into_iter().find(|prefix| names_of(prefix)) else {
        return index;
    };
    let layers = unet_layers(&index, prefix);
    index.renamed(|name, shape| Some((unet_name(name.strip_prefix(prefix)?, layers)?, shape.to_vec())))
}

/// Residual blocks per level: the first downsampler stands right behind those of the first level.
fn unet_layers(index: &Index, prefix: &str) -> usize {
    (1..64)
        .find(|i| index.contains(&format!("{prefix}input_blocks.{i}.0.op.weight")))
        .map_or(2, |i| i - 1)
}

fn unet_name(name: &str, layers: usize) -> Option<String> {
    let parts: Vec<&str> = name.split('.').collect();
    let number = |i: usize| parts.get(i).and_then(|part| part.parse::<usize>().ok());
    let rest = |from: usize| parts.get(from..).map(|parts| parts.join(".")).unwrap_or_default();
    match *parts.first()? {
        "time_embed" => {
            let layer = match number(1)? {
                0 => "linear_1",
                2 => "linear_2",
                _ => return None,
            };
            Some(format!("time_embedding.{layer}.{}", rest(2)))
        }
        "out" => {
            let layer = match number(1)? {
                0 => "conv_norm_out",
                2 => "conv_out",
                _ => return None,
            };
            Some(format!("{layer}.{}", rest(2)))
        }
        "input_blocks" => {
            let (block, part) = (number(1)?, number(2)?);
            if block == 0 {
                return Some(format!("conv_in.{}", rest(3)));
            }
            let (level, layer) = ((block - 1) / (layers + 1), (block - 1) % (layers + 1));
            if parts.get(3) == Some(&"op") {
                return Some(format!("down_blocks.{level}.downsamplers.0.conv.{}", rest(4)));
            }
            inner(&format!("down_blocks.{level}"), layer, part, &rest(3))
        }
        "middle_block" => match number(1)? {
            0 => inner("mid_block", 0, 0, &rest(2)),
            1 => inner("mid_block", 0, 1, &rest(2)),
            2 => inner("mid_block", 1, 0, &rest(2)),
            _ => None,
        },
        "output_blocks" => {
            let (block, part) = (number(1)?, number(2)?);
            let (level, layer) = (block / (layers + 1), block % (layers + 1));
            if parts.get(3) == Some(&"conv") {
                return Some(format!("up_blocks.{level}.upsamplers.0.conv.{}", rest(4)));
            }
            inner(&format!("up_blocks.{level}"), layer, part, &rest(3))
        }
        _ => None,
    }
}

/// A residual block (part 0) or a transformer (part 1) of a level.
fn inner(block: &str, layer: usize, part: usize, rest: &str) -> Option<String> {
    if part == 1 {
        return Some(format!("{block}.attentions.{layer}.{rest}"));
    }
    let names = [
        ("in_layers.0.", "norm1."),
        ("in_layers.2.", "conv1."),
        ("emb_layers.1.", "time_emb_proj."),
        ("out_layers.0.", "norm2."),
        ("out_layers.3.", "conv2."),
        ("skip_connection.", "conv_shortcut."),
    ];
    let (old, new) = names.iter().find(|(old, _)| rest.starts_with(old))?;
    Some(format!("{block}.resnets.{layer}.{new}{}", &rest[old.len()..]))
}

fn vae_name(name: &str, levels: usize) -> Option<String> {
    let parts: Vec<&str> = name.split('.').collect();
    let (half, rest) = (*parts.first()?, parts.get(1..)?);
    if matches!(half, "quant_conv" | "post_quant_conv") {
        return Some(name.to_owned());
    }
    if !matches!(half, "encoder" | "decoder") {
        return None;
    }
    let tail = |from: usize| rest.get(from..).map(|rest| rest.join(".")).unwrap_or_default();
    let place = match rest {
        ["conv_in" | "conv_out", ..] => tail(0),
        ["norm_out", ..] => format!("conv_norm_out.{}", tail(1)),
        ["mid", "block_1", ..] => format!("mid_block.resnets.0.{}", tail(2)),
        ["mid", "block_2", ..] => format!("mid_block.resnets.1.{}", tail(2)),
        ["mid", "attn_1", layer, ..] => {
            let layer = match *layer {
                "norm" => "group_norm",
                "q" => "to_q",
                "k" => "to_k",
                "v" => "to_v",
                "proj_out" => "to_out.0",
                _ => return None,
            };
            format!("mid_block.attentions.0.{layer}.{}", tail(3))
        }
        [side @ ("down" | "up"), level, kind, ..] => {
            let level: usize = level.parse().ok()?;
            // The decoder's levels were counted from the picture, diffusers counts them in the order they run.
            let level = if *side == "up" {
                levels.checked_sub(level + 1)?
            } else {
                level
            };
            match *kind {
                "block" => format!(
                    "{side}_blocks.{level}.resnets.{}",
                    tail(3).replace("nin_shortcut", "conv_shortcut")
                ),
                "downsample" | "upsample" => format!("{side}_blocks.{level}.{kind}rs.0.{}", tail(3)),
                _ => return None,
            }
        }
        _ => return None,
    };
    Some(format!("{half}.{place}"))
}
