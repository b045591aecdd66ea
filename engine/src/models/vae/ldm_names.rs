//! Conversion of the names of an autoencoder's tensors between LDM and diffusers.
//!
//! LDM numbers the decoder's levels from the image, diffusers in the order in which they run.

use crate::weights::Index;

/// The layers of the mid block's attention: the LDM name, and diffusers' name.
const ATTENTION: [(&str, &str); 5] = [
    ("norm", "group_norm"),
    ("q", "to_q"),
    ("k", "to_k"),
    ("v", "to_v"),
    ("proj_out", "to_out.0"),
];

/// The tensors of an autoencoder with LDM names after this prefix, under diffusers' names. `levels`: those of the model.
pub(crate) fn with_diffusers_names(index: &Index, prefix: &str, levels: usize) -> Index {
    index.renamed(|name, shape| {
        let name = to_diffusers(name.strip_prefix(prefix)?, levels)?;
        // The LDM layout has 1 x 1 convolutions in the attention, diffusers has linear layers.
        let linear = name.contains(".attentions.") && name.ends_with(".weight") && shape.len() == 4;
        let shape = if linear { shape[..2].to_vec() } else { shape.to_vec() };
        Some((name, shape))
    })
}

/// diffusers' name of a tensor with this LDM name, in a model with this number of levels.
pub(crate) fn to_diffusers(name: &str, levels: usize) -> Option<String> {
    let parts: Vec<&str> = name.split('.').collect();
    let (half, rest) = (*parts.first()?, parts.get(1..)?);
    if matches!(half, "quant_conv" | "post_quant_conv") {
        return Some(name.to_owned());
    }
    if !matches!(half, "encoder" | "decoder") {
        return None;
    }
    let tail = |from: usize| rest.get(from..).map(|rest| rest.join(".")).unwrap_or_default();
    let inner = match rest {
        ["conv_in" | "conv_out", ..] => tail(0),
        ["norm_out", ..] => format!("conv_norm_out.{}", tail(1)),
        ["mid", "block_1", ..] => format!("mid_block.resnets.0.{}", tail(2)),
        ["mid", "block_2", ..] => format!("mid_block.resnets.1.{}", tail(2)),
        ["mid", "attn_1", layer, ..] => {
            let (_, layer) = ATTENTION.iter().find(|(ldm, _)| ldm == layer)?;
            format!("mid_block.attentions.0.{layer}.{}", tail(3))
        }
        [side @ ("down" | "up"), level, kind, ..] => {
            let level = convert_level(side, level, levels)?;
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
    Some(format!("{half}.{inner}"))
}

/// The LDM name of a tensor with this diffusers name, in a model with this number of levels.
pub fn to_ldm(name: &str, levels: usize) -> Option<String> {
    let parts: Vec<&str> = name.split('.').collect();
    let (half, rest) = (*parts.first()?, parts.get(1..)?);
    if matches!(half, "quant_conv" | "post_quant_conv") {
        return Some(name.to_owned());
    }
    if !matches!(half, "encoder" | "decoder") {
        return None;
    }
    let tail = |from: usize| rest.get(from..).map(|rest| rest.join(".")).unwrap_or_default();
    let inner = match rest {
        ["conv_in" | "conv_out", ..] => tail(0),
        ["conv_norm_out", ..] => format!("norm_out.{}", tail(1)),
        ["mid_block", "resnets", "0", ..] => format!("mid.block_1.{}", tail(3)),
        ["mid_block", "resnets", "1", ..] => format!("mid.block_2.{}", tail(3)),
        ["mid_block", "attentions", "0", ..] => {
            let layer = tail(3);
            let (ldm, diffusers) = ATTENTION.iter().find(|(_, diffusers)| layer.starts_with(diffusers))?;
            format!("mid.attn_1.{ldm}{}", &layer[diffusers.len()..])
        }
        [side @ ("down_blocks" | "up_blocks"), level, kind, ..] => {
            let side = side.trim_end_matches("_blocks");
            let level = convert_level(side, level, levels)?;
            match *kind {
                "resnets" => format!(
                    "{side}.{level}.block.{}",
                    tail(3).replace("conv_shortcut", "nin_shortcut")
                ),
                "downsamplers" | "upsamplers" => {
                    format!("{side}.{level}.{}.{}", kind.trim_end_matches("rs"), tail(4))
                }
                _ => return None,
            }
        }
        _ => return None,
    };
    Some(format!("{half}.{inner}"))
}

/// Converts the number of a level between both conventions.
fn convert_level(side: &str, level: &str, levels: usize) -> Option<usize> {
    let level: usize = level.parse().ok()?;
    match side {
        "up" => levels.checked_sub(level.checked_add(1)?),
        _ => Some(level),
    }
}
