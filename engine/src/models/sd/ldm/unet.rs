//! The names of a U-Net's tensors, those of the first release and diffusers', into each other.
//!
//! The first release counts blocks through all levels, where every level has equally many residual blocks.

use std::collections::{BTreeMap, BTreeSet};

/// What lies before, between and behind the levels: the old name, and the new one.
const AROUND: [(&str, &str); 5] = [
    ("input_blocks.0.0.", "conv_in."),
    ("time_embed.0.", "time_embedding.linear_1."),
    ("time_embed.2.", "time_embedding.linear_2."),
    ("out.0.", "conv_norm_out."),
    ("out.2.", "conv_out."),
];

/// The layers of a residual block: the old name, and the new one.
const RESIDUAL: [(&str, &str); 6] = [
    ("in_layers.0.", "norm1."),
    ("in_layers.2.", "conv1."),
    ("emb_layers.1.", "time_emb_proj."),
    ("out_layers.0.", "norm2."),
    ("out_layers.3.", "conv2."),
    ("skip_connection.", "conv_shortcut."),
];

/// Residual blocks per level of a U-Net with old names: the first downsampler stands right behind those of the first level.
pub(super) fn layers<'a>(names: impl Iterator<Item = &'a str>) -> usize {
    let (mut last, mut downsampler) = (0, None);
    for name in names {
        let mut parts = name.split('.');
        let block = match (parts.next(), parts.next().and_then(|block| block.parse::<usize>().ok())) {
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

/// diffusers' name of a tensor.
pub(super) fn new_name(name: &str, layers: usize) -> Option<String> {
    if let Some((old, new)) = AROUND.iter().find(|(old, _)| name.starts_with(old)) {
        return Some(format!("{new}{}", &name[old.len()..]));
    }
    let parts: Vec<&str> = name.split('.').collect();
    let number = |i: usize| parts.get(i).and_then(|part| part.parse::<usize>().ok());
    let rest = |from: usize| parts.get(from..).map(|parts| parts.join(".")).unwrap_or_default();
    match *parts.first()? {
        "input_blocks" => {
            let (block, part) = (number(1)?.checked_sub(1)?, number(2)?);
            let (level, layer) = (block / (layers + 1), block % (layers + 1));
            if parts.get(3) == Some(&"op") {
                return Some(format!("down_blocks.{level}.downsamplers.0.conv.{}", rest(4)));
            }
            new_inner(&format!("down_blocks.{level}"), layer, part, &rest(3))
        }
        "middle_block" => match number(1)? {
            0 => new_inner("mid_block", 0, 0, &rest(2)),
            1 => new_inner("mid_block", 0, 1, &rest(2)),
            2 => new_inner("mid_block", 1, 0, &rest(2)),
            _ => None,
        },
        "output_blocks" => {
            let (block, part) = (number(1)?, number(2)?);
            let (level, layer) = (block / (layers + 1), block % (layers + 1));
            if parts.get(3) == Some(&"conv") {
                return Some(format!("up_blocks.{level}.upsamplers.0.conv.{}", rest(4)));
            }
            new_inner(&format!("up_blocks.{level}"), layer, part, &rest(3))
        }
        _ => None,
    }
}

/// A residual block (part 0) or a transformer (part 1) of a level.
fn new_inner(block: &str, layer: usize, part: usize, rest: &str) -> Option<String> {
    if part == 1 {
        return Some(format!("{block}.attentions.{layer}.{rest}"));
    }
    let (old, new) = RESIDUAL.iter().find(|(old, _)| rest.starts_with(old))?;
    Some(format!("{block}.resnets.{layer}.{new}{}", &rest[old.len()..]))
}

/// What the old names of a U-Net depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Levels {
    /// Residual blocks of each level on the way down; on the way up there is one more.
    layers: usize,
    /// Levels on the way up that have transformers.
    attended: BTreeSet<usize>,
}

impl Levels {
    /// From diffusers' names. None where levels differ in their numbers of residual blocks, for which there are no old names.
    pub(super) fn of<'a>(names: impl Iterator<Item = &'a str>) -> Option<Self> {
        let mut layers: BTreeMap<(&str, usize), usize> = BTreeMap::new();
        let mut attended = BTreeSet::new();
        for name in names {
            let parts: Vec<&str> = name.splitn(5, '.').collect();
            let [side @ ("down_blocks" | "up_blocks"), level, kind, layer, _] = *parts.as_slice() else {
                continue;
            };
            let (level, layer) = (level.parse().ok()?, layer.parse::<usize>().ok()?);
            match (kind, side) {
                ("resnets", _) => {
                    let count = layers.entry((side, level)).or_default();
                    *count = (*count).max(layer + 1);
                }
                ("attentions", "up_blocks") => {
                    attended.insert(level);
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
            attended,
        })
    }
}

/// The first release's name of a tensor.
pub(super) fn old_name(name: &str, levels: &Levels) -> Option<String> {
    if let Some((old, new)) = AROUND.iter().find(|(_, new)| name.starts_with(new)) {
        return Some(format!("{old}{}", &name[new.len()..]));
    }
    let parts: Vec<&str> = name.split('.').collect();
    let number = |i: usize| parts.get(i).and_then(|part| part.parse::<usize>().ok());
    let rest = |from: usize| parts.get(from..).map(|parts| parts.join(".")).unwrap_or_default();
    let layers = levels.layers;
    match *parts.as_slice() {
        ["mid_block", kind, _, ..] => {
            let (part, rest) = old_inner(kind, &rest(3))?;
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
            let part = if levels.attended.contains(&level) { 2 } else { 1 };
            Some(format!("output_blocks.{block}.{part}.conv.{}", rest(5)))
        }
        [side @ ("down_blocks" | "up_blocks"), _, kind, _, ..] => {
            let (part, rest) = old_inner(kind, &rest(4))?;
            let (level, layer) = (number(1)?, number(3)?);
            let (old, before) = match side {
                // The first convolution is counted too.
                "down_blocks" => ("input_blocks", 1),
                _ => ("output_blocks", 0),
            };
            let block = level * (layers + 1) + layer + before;
            Some(format!("{old}.{block}.{part}.{rest}"))
        }
        _ => None,
    }
}

fn old_inner(kind: &str, rest: &str) -> Option<(usize, String)> {
    match kind {
        "attentions" => Some((1, rest.to_owned())),
        "resnets" => {
            let (old, new) = RESIDUAL.iter().find(|(_, new)| rest.starts_with(new))?;
            Some((0, format!("{old}{}", &rest[new.len()..])))
        }
        _ => None,
    }
}
