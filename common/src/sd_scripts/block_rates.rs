//! Learning rates of the blocks of a U-Net: `down_lr_weight`, `mid_lr_weight`, `up_lr_weight` and `block_lr_zero_threshold` of
//! `network_args`, as `networks/lora.py` reads them. Blocks are counted as in the original checkpoints; here they have diffusers' names.

use super::arguments::Argument;
use super::block_ranks;
use super::report::Import;
use super::script::ScriptFamily;
use super::unet_blocks::{block_counts, unet_blocks};
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
pub(super) fn block_rates(import: &mut Import<'_>, arguments: &[Argument], convolutions: bool) -> Vec<Block> {
    let argument = |name: &str| arguments.iter().find(|argument| argument.name == name);
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
    let counts = block_counts(is_xl);
    let mut weights: Vec<Vec<f64>> = Vec::new();
    for ((text, count), is_middle) in texts.iter().zip(counts).zip([false, true, false]) {
        let mut list = match text {
            None => Vec::new(),
            Some(argument) => weights_of(import, argument, count, is_middle),
        };
        if let Some(argument) = text.filter(|_| !list.is_empty() && list.len() != count) {
            let effect = match list.len() > count {
                true => "the rest is ignored",
                false => "1 is taken for the others",
            };
            let numbers = if count == 1 { "number" } else { "numbers" };
            let (name, found) = (&argument.name, list.len());
            let message = format!("{name}: expected {count} {numbers}, found {found}; as in sd-scripts, {effect}");
            import.note("network_args", message);
        }
        list.resize(count, 1.0);
        weights.push(
            list.into_iter()
                .map(|weight| if weight > threshold { weight } else { 0.0 })
                .collect(),
        );
    }
    let weighted = unet_blocks(is_xl, convolutions)
        .into_iter()
        .filter_map(|(name, part, index)| {
            let weight = *weights.get(part)?.get(index)?;
            let is_left_out = block_ranks::is_left_out(arguments, is_xl, (part, index), &name);
            Some(Block {
                name,
                weight: if is_left_out { 0.0 } else { weight },
            })
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
