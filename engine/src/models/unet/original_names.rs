//! Conversion of the names of a U-Net's tensors between the original releases (LDM; SGM for SDXL) and diffusers.
//!
//! LDM numbers blocks through all levels, and every level has the same number of residual blocks.

use std::collections::{BTreeMap, BTreeSet};

/// The layers outside the levels: the LDM name, and diffusers' name.
const OUTER_LAYERS: [(&str, &str); 7] = [
    ("input_blocks.0.0.", "conv_in."),
    ("time_embed.0.", "time_embedding.linear_1."),
    ("time_embed.2.", "time_embedding.linear_2."),
    // SDXL.
    ("label_emb.0.0.", "add_embedding.linear_1."),
    ("label_emb.0.2.", "add_embedding.linear_2."),
    ("out.0.", "conv_norm_out."),
    ("out.2.", "conv_out."),
];

/// The layers of a residual block: the LDM name, and diffusers' name.
const RESNET_LAYERS: [(&str, &str); 6] = [
    ("in_layers.0.", "norm1."),
    ("in_layers.2.", "conv1."),
    ("emb_layers.1.", "time_emb_proj."),
    ("out_layers.0.", "norm2."),
    ("out_layers.3.", "conv2."),
    ("skip_connection.", "conv_shortcut."),
];

/// The largest number of a level, a block or a layer, far above that of any model: names of files may have any number, and a sum of such
/// numbers would overflow.
const MAX_NUMBER: usize = 1 << 16;

/// The number that a part of a name is.
fn parse_number(part: &str) -> Option<usize> {
    part.parse().ok().filter(|number| *number <= MAX_NUMBER)
}

/// The number of residual blocks per level of a U-Net with LDM names: the first downsampler follows the blocks of the
/// first level.
pub(crate) fn layers_per_level<'a>(names: impl Iterator<Item = &'a str>) -> usize {
    let (mut last, mut downsampler) = (0, None);
    for name in names {
        let mut parts = name.split('.');
        let block = match (parts.next(), parts.next().and_then(parse_number)) {
            (Some("input_blocks"), Some(block)) => block,
            _ => continue,
        };
        last = last.max(block);
        if parts.nth(1) == Some("op") {
            downsampler = Some(downsampler.map_or(block, |first: usize| first.min(block)));
        }
    }
    downsampler.map_or(last, |block| block.saturating_sub(1))
}

/// diffusers' name of a tensor with this LDM name.
pub(crate) fn to_diffusers(name: &str, layers: usize) -> Option<String> {
    if let Some((ldm, diffusers)) = OUTER_LAYERS.iter().find(|(ldm, _)| name.starts_with(ldm)) {
        return Some(format!("{diffusers}{}", &name[ldm.len()..]));
    }
    let parts: Vec<&str> = name.split('.').collect();
    let number = |i: usize| parts.get(i).and_then(|part| parse_number(part));
    let rest = |from: usize| parts.get(from..).map(|parts| parts.join(".")).unwrap_or_default();
    match *parts.first()? {
        "input_blocks" => {
            let (block, part) = (number(1)?.checked_sub(1)?, number(2)?);
            let (level, layer) = (block / (layers + 1), block % (layers + 1));
            if parts.get(3) == Some(&"op") {
                return Some(format!("down_blocks.{level}.downsamplers.0.conv.{}", rest(4)));
            }
            layer_to_diffusers(&format!("down_blocks.{level}"), layer, part, &rest(3))
        }
        "middle_block" => match number(1)? {
            0 => layer_to_diffusers("mid_block", 0, 0, &rest(2)),
            1 => layer_to_diffusers("mid_block", 0, 1, &rest(2)),
            2 => layer_to_diffusers("mid_block", 1, 0, &rest(2)),
            _ => None,
        },
        "output_blocks" => {
            let (block, part) = (number(1)?, number(2)?);
            let (level, layer) = (block / (layers + 1), block % (layers + 1));
            if parts.get(3) == Some(&"conv") {
                return Some(format!("up_blocks.{level}.upsamplers.0.conv.{}", rest(4)));
            }
            layer_to_diffusers(&format!("up_blocks.{level}"), layer, part, &rest(3))
        }
        _ => None,
    }
}

/// diffusers' name of a tensor in a residual block (part 0) or a transformer (part 1) of a block.
fn layer_to_diffusers(block: &str, layer: usize, part: usize, rest: &str) -> Option<String> {
    if part == 1 {
        return Some(format!("{block}.attentions.{layer}.{rest}"));
    }
    let (ldm, diffusers) = RESNET_LAYERS.iter().find(|(ldm, _)| rest.starts_with(ldm))?;
    Some(format!("{block}.resnets.{layer}.{diffusers}{}", &rest[ldm.len()..]))
}

/// Converts diffusers' names of a U-Net to those of the original releases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OriginalNames {
    /// Residual blocks of each level in the down path; a level of the up path has one more.
    layers: usize,
    /// Levels of the up path with transformers.
    with_attention: BTreeSet<usize>,
}

impl OriginalNames {
    /// From diffusers' names of tensors or layers. `None` if levels have different numbers of residual blocks: LDM has no names for these.
    pub(crate) fn new<'a>(names: impl Iterator<Item = &'a str>) -> Option<Self> {
        let mut layers: BTreeMap<(&str, usize), usize> = BTreeMap::new();
        let mut with_attention = BTreeSet::new();
        for name in names {
            let parts: Vec<&str> = name.splitn(5, '.').collect();
            let [side @ ("down_blocks" | "up_blocks"), level, kind, layer, _] = *parts.as_slice() else {
                continue;
            };
            let (level, layer) = (parse_number(level)?, parse_number(layer)?);
            match (kind, side) {
                ("resnets", _) => {
                    let count = layers.entry((side, level)).or_default();
                    *count = (*count).max(layer + 1);
                }
                ("attentions", "up_blocks") => {
                    with_attention.insert(level);
                }
                _ => {}
            }
        }
        let first = *layers.get(&("down_blocks", 0))?;
        let equal = layers
            .iter()
            .all(|((side, _), count)| *count == first + usize::from(*side == "up_blocks"));
        equal.then_some(Self {
            layers: first,
            with_attention,
        })
    }
}

impl OriginalNames {
    /// The original name of a layer with this diffusers name: `input_blocks.1.1.proj_in`.
    pub(crate) fn of_layer(&self, path: &str) -> Option<String> {
        const WEIGHT: &str = ".weight";
        let name = self.of_tensor(&format!("{path}{WEIGHT}"))?;
        Some(name.strip_suffix(WEIGHT)?.to_owned())
    }

    /// The original name of a tensor with this diffusers name.
    pub(crate) fn of_tensor(&self, name: &str) -> Option<String> {
        if let Some((ldm, diffusers)) = OUTER_LAYERS.iter().find(|(_, diffusers)| name.starts_with(diffusers)) {
            return Some(format!("{ldm}{}", &name[diffusers.len()..]));
        }
        let parts: Vec<&str> = name.split('.').collect();
        let number = |i: usize| parts.get(i).and_then(|part| parse_number(part));
        let rest = |from: usize| parts.get(from..).map(|parts| parts.join(".")).unwrap_or_default();
        let layers = self.layers;
        match *parts.as_slice() {
            ["mid_block", kind, _, ..] => {
                let (part, rest) = layer_to_ldm(kind, &rest(3))?;
                let block = match (part, number(2)?) {
                    (0, 0) => 0,
                    (1, 0) => 1,
                    (0, 1) => 2,
                    _ => return None,
                };
                Some(format!("middle_block.{block}.{rest}"))
            }
            ["down_blocks", _, "downsamplers", "0", "conv", ..] => {
                let block = (number(1)? + 1) * (layers + 1);
                Some(format!("input_blocks.{block}.0.op.{}", rest(5)))
            }
            ["up_blocks", _, "upsamplers", "0", "conv", ..] => {
                let level = number(1)?;
                let block = level * (layers + 1) + layers;
                let part = if self.with_attention.contains(&level) { 2 } else { 1 };
                Some(format!("output_blocks.{block}.{part}.conv.{}", rest(5)))
            }
            [side @ ("down_blocks" | "up_blocks"), _, kind, _, ..] => {
                let (part, rest) = layer_to_ldm(kind, &rest(4))?;
                let (level, layer) = (number(1)?, number(3)?);
                let (prefix, offset) = match side {
                    // LDM counts the first convolution as block 0.
                    "down_blocks" => ("input_blocks", 1),
                    _ => ("output_blocks", 0),
                };
                let block = level * (layers + 1) + layer + offset;
                Some(format!("{prefix}.{block}.{part}.{rest}"))
            }
            _ => None,
        }
    }
}

fn layer_to_ldm(kind: &str, rest: &str) -> Option<(usize, String)> {
    match kind {
        "attentions" => Some((1, rest.to_owned())),
        "resnets" => {
            let (ldm, diffusers) = RESNET_LAYERS
                .iter()
                .find(|(_, diffusers)| rest.starts_with(diffusers))?;
            Some((0, format!("{ldm}{}", &rest[diffusers.len()..])))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_no_model_are_left_out() {
        let largest = usize::MAX;
        let names = [
            format!("input_blocks.{largest}.0.in_layers.0.weight"),
            "input_blocks.3.0.op.weight".to_owned(),
        ];
        let layers = |count: usize| layers_per_level(names.iter().take(count).map(String::as_str));
        assert_eq!([layers(1), layers(2)], [0, 2]);
        for side in ["input_blocks", "output_blocks"] {
            let name = format!("{side}.{largest}.0.in_layers.0.weight");
            assert_eq!(to_diffusers(&name, layers(1)), None);
        }
        let name = format!("down_blocks.0.resnets.{largest}.conv1.weight");
        assert_eq!(OriginalNames::new([name.as_str()].into_iter()), None);
    }
}
