//! Learning rates of the blocks of a U-Net: `down_lr_weight`, `mid_lr_weight`, `up_lr_weight` and `block_lr_zero_threshold` of
//! `network_args`, as `networks/lora.py` reads them. Blocks are counted as in the original checkpoints; here they have diffusers' names.

use super::arguments::Argument;
use super::report::Import;
use super::script::ScriptFamily;
use std::f64::consts::FRAC_PI_2;

/// Why they are refused for other networks.
const OTHER_NETWORKS: &str = "is for networks.lora of a U-Net";

/// Some layers of a U-Net, as part of diffusers' names: `down_blocks.1.attentions.0.`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Block {
    pub name: String,
    /// What the learning rate is multiplied by; 0: it has no LoRA.
    pub weight: f64,
}

impl Block {
    /// As part of the names of LoRAs.
    pub(super) fn flattened(&self) -> String {
        self.name.replace('.', "_")
    }
}

/// The blocks that have a LoRA, each with its weight. Empty if no weight is given. `convolutions`: those outside of attentions have
/// LoRAs, too.
pub(super) fn block_rates(import: &mut Import<'_>, given: &[Argument], convolutions: bool) -> Vec<Block> {
    let argument = |name: &str| given.iter().find(|argument| argument.name == name);
    let names = ["down_lr_weight", "mid_lr_weight", "up_lr_weight"];
    let texts = names.map(|name| argument(name).filter(|argument| !matches!(argument.text.trim(), "" | "None")));
    let Some(first) = texts.iter().flatten().next() else {
        return Vec::new();
    };
    let family = import.script.family();
    let is_unet = matches!(family, ScriptFamily::Sd | ScriptFamily::Sdxl);
    if !is_unet || import.settings.text("network_module") != Some("networks.lora") {
        import.error("network_args", format!("{} {OTHER_NETWORKS}", first.name));
        return Vec::new();
    }
    let threshold = match argument("block_lr_zero_threshold").filter(|argument| !argument.is_off()) {
        Some(argument) => number(import, argument, &argument.text),
        None => 0.0,
    };
    let is_xl = family == ScriptFamily::Sdxl;
    let counts = if is_xl { [9, 3, 9] } else { [12, 1, 12] };
    let mut weights: Vec<Vec<f64>> = Vec::new();
    for ((text, count), is_middle) in texts.iter().zip(counts).zip([false, true, false]) {
        let mut list = match text {
            None => Vec::new(),
            Some(argument) => weights_of(import, argument, count, is_middle),
        };
        list.resize(count, 1.0);
        weights.push(
            list.into_iter()
                .map(|weight| if weight > threshold { weight } else { 0.0 })
                .collect(),
        );
    }
    let blocks = if is_xl {
        blocks_of_xl(convolutions)
    } else {
        blocks_of_sd(convolutions)
    };
    let weighted = blocks.into_iter().filter_map(|(name, part, index)| {
        let weight = *weights.get(part)?.get(index)?;
        Some(Block { name, weight })
    });
    weighted.collect()
}

fn number(import: &mut Import<'_>, argument: &Argument, text: &str) -> f64 {
    let found = text
        .trim()
        .parse()
        .ok()
        .filter(|number: &f64| number.is_finite() && *number >= 0.0);
    if found.is_none() {
        let message = format!(
            "{}: expected numbers from 0, found \"{}\"",
            argument.name,
            text.chars().take(60).collect::<String>().escape_debug()
        );
        import.error("network_args", message);
    }
    found.unwrap_or(1.0)
}

/// A list of numbers, or a curve over the blocks: `sine+0.25`.
fn weights_of(import: &mut Import<'_>, argument: &Argument, count: usize, is_middle: bool) -> Vec<f64> {
    let text = argument.text.as_str();
    if is_middle || text.contains(',') {
        let items = text.split(',').map(|item| match item.trim() {
            "" => "0",
            item => item,
        });
        return items.map(|item| number(import, argument, item)).collect();
    }
    let (curve, base) = text.split_once('+').unwrap_or((text, "0"));
    let base = number(import, argument, base);
    // From 0 in the first block to 1 in the last.
    let rising = (0..count).map(|block| block as f64 / (count - 1) as f64);
    let weights: Vec<f64> = match curve.trim() {
        "linear" => rising.collect(),
        "reverse_linear" => rising.rev().collect(),
        "sine" => rising.map(|share| (share * FRAC_PI_2).sin()).collect(),
        "cosine" => rising.rev().map(|share| (share * FRAC_PI_2).sin()).collect(),
        "zeros" => vec![0.0; count],
        other => {
            let message = format!(
                "{}: expected {count} numbers with commas between them, or cosine, sine, linear, reverse_linear or zeros, found \"{}\"",
                argument.name,
                other.chars().take(60).collect::<String>().escape_debug()
            );
            import.error("network_args", message);
            Vec::new()
        }
    };
    weights.into_iter().map(|weight| weight + base).collect()
}

/// A name, the list in which its weight is (down, middle, up), and the place in the list.
type Placed = (String, usize, usize);

/// The layers of `count` blocks on one side. `attentions`: which of them have attentions.
fn side(
    (part, prefix): (usize, &str),
    count: usize,
    attentions: &[usize],
    convolutions: bool,
    place: impl Fn(usize, usize) -> usize,
) -> Vec<Placed> {
    let per_block = if part == 0 { 2 } else { 3 };
    let sampler = if part == 0 { "downsamplers" } else { "upsamplers" };
    let mut found = Vec::new();
    for block in 0..count {
        for layer in 0..per_block {
            let mut add =
                |kind: &str| found.push((format!("{prefix}.{block}.{kind}.{layer}."), part, place(block, layer)));
            if attentions.contains(&block) {
                add("attentions");
            }
            if convolutions {
                add("resnets");
            }
        }
        // The last block has none.
        if convolutions && block + 1 < count {
            found.push((format!("{prefix}.{block}.{sampler}.0."), part, place(block, 2)));
        }
    }
    found
}

const DOWN: (usize, &str) = (0, "down_blocks");
const UP: (usize, &str) = (2, "up_blocks");

/// Stable Diffusion 1 and 2: the first of the twelve places on the way down is that of the first convolution, which has no LoRA.
fn blocks_of_sd(convolutions: bool) -> Vec<Placed> {
    let mut found = side(DOWN, 4, &[0, 1, 2], convolutions, |block, layer| 1 + 3 * block + layer);
    found.push(("mid_block.".into(), 1, 0));
    found.extend(side(UP, 4, &[1, 2, 3], convolutions, |block, layer| 3 * block + layer));
    found
}

fn blocks_of_xl(convolutions: bool) -> Vec<Placed> {
    let mut found = side(DOWN, 3, &[1, 2], convolutions, |block, layer| 1 + 3 * block + layer);
    found.push(("mid_block.attentions.0.".into(), 1, 1));
    if convolutions {
        found.push(("mid_block.resnets.0.".into(), 1, 0));
        found.push(("mid_block.resnets.1.".into(), 1, 2));
    }
    found.extend(side(UP, 3, &[0, 1], convolutions, |block, layer| 3 * block + layer));
    found
}
