//! Ranks and alphas of the blocks of a U-Net: `block_dims`, `block_alphas`, `conv_block_dims` and `conv_block_alphas` of `network_args`,
//! as `networks/lora.py` reads them (`get_block_dims_and_alphas`).

use super::arguments::Argument;
use super::report::{Import, number};
use super::script::ScriptFamily;
use super::unet_blocks::{block_counts, unet_blocks};
use serde_json::{Value, json};

/// The arguments.
pub(super) const ARGUMENTS: [&str; 4] = ["block_dims", "block_alphas", "conv_block_dims", "conv_block_alphas"];
/// Arguments that switch them on: `block_dims`, and weights of learning rates.
const SWITCHES: [&str; 4] = ["block_dims", "down_lr_weight", "mid_lr_weight", "up_lr_weight"];

/// The ranks and alphas of a network.
pub(super) struct NetworkRanks {
    pub linear: (f64, f64),
    pub conv: Option<(f64, f64)>,
}

/// The argument of this name, if it is set.
fn find_argument<'a>(arguments: &'a [Argument], name: &str) -> Option<&'a Argument> {
    let is_set = |argument: &&Argument| argument.name == name && !matches!(argument.text.trim(), "" | "None");
    arguments.iter().find(is_set)
}

/// Whether layers outside of attentions have LoRAs: larger convolutions have a rank, which may be 0.
pub(super) fn has_convolutions(arguments: &[Argument]) -> bool {
    let has_blocks = SWITCHES.iter().any(|name| find_argument(arguments, name).is_some());
    find_argument(arguments, "conv_dim").is_some()
        || (find_argument(arguments, "conv_block_dims").is_some() && has_blocks)
}

/// The entries of `network.layer_ranks`: of the blocks whose ranks or alphas differ from those of the network.
pub(super) fn block_ranks(import: &mut Import<'_>, arguments: &[Argument], network: &NetworkRanks) -> Vec<Value> {
    let Some(first) = ARGUMENTS.iter().find_map(|name| find_argument(arguments, name)) else {
        return Vec::new();
    };
    let family = import.script.family();
    let is_unet = matches!(family, ScriptFamily::Sd | ScriptFamily::Sdxl);
    if !is_unet || import.settings.text("network_module") != Some("networks.lora") {
        let message = format!("{} is for networks.lora of a U-Net: remove it", first.name);
        import.error("network_args", message);
        return Vec::new();
    }
    if !SWITCHES.iter().any(|name| find_argument(arguments, name).is_some()) {
        let message = format!("{} is ignored without block_dims, as in sd-scripts", first.name);
        import.note("network_args", message);
        return Vec::new();
    }
    let is_xl = family == ScriptFamily::Sdxl;
    // SDXL counts its embeddings and its output too, which have no LoRA.
    let count = if is_xl { 23 } else { 25 };
    let mut list = |name: &str, is_rank: bool| match find_argument(arguments, name) {
        Some(argument) => numbers(import, argument, count, is_rank).map(Some),
        None => Some(None),
    };
    let (Some(dims), Some(alphas), Some(conv_dims), Some(conv_alphas)) = (
        list("block_dims", true),
        list("block_alphas", false),
        list("conv_block_dims", true),
        list("conv_block_alphas", false),
    ) else {
        return Vec::new();
    };
    let at = |list: &Option<Vec<f64>>, place: usize, default: f64| match list {
        Some(list) => list.get(place).copied().unwrap_or(default),
        None => default,
    };
    let conv_alpha = match find_argument(arguments, "conv_alpha").and_then(Argument::number) {
        Some(alpha) => alpha,
        None => network.conv.map_or(1.0, |(_, alpha)| alpha),
    };
    let mut entries = Vec::new();
    for (name, part, index) in unet_blocks(is_xl, has_convolutions(arguments)) {
        let place = place_of(is_xl, part, index);
        let linear = (at(&dims, place, network.linear.0), at(&alphas, place, network.linear.1));
        let conv = match &conv_dims {
            // conv_block_alphas counts only beside conv_block_dims.
            Some(_) => Some((at(&conv_dims, place, 0.0), at(&conv_alphas, place, conv_alpha))),
            None => network.conv,
        };
        if linear == network.linear && conv == network.conv {
            continue;
        }
        let mut entry = json!({"contains": name, "linear": number(linear.0), "linear_alpha": number(linear.1)});
        if let Some((rank, alpha)) = conv {
            entry["conv"] = number(rank);
            entry["conv_alpha"] = number(alpha);
        }
        entries.push(entry);
    }
    entries
}

/// Whether ranks of 0 leave out the block at a place of a list (`part` and `index` of `unet_blocks`): it has no LoRA then. Mistakes of
/// the argument are reported with the ranks.
pub(super) fn is_left_out(arguments: &[Argument], is_xl: bool, (part, index): (usize, usize), name: &str) -> bool {
    let rank_in = |argument: &str| -> Option<f64> {
        let list = find_argument(arguments, argument)?;
        let place = place_of(is_xl, part, index);
        list.text.split(',').nth(place)?.trim().parse().ok()
    };
    let conv = match find_argument(arguments, "conv_block_dims") {
        Some(_) => rank_in("conv_block_dims"),
        None => find_argument(arguments, "conv_dim").and_then(Argument::number),
    };
    let has_convolutions = !name.contains("attentions") && conv.is_some_and(|rank| rank > 0.0);
    // Samplers are a larger convolution alone.
    !has_convolutions && (rank_in("block_dims") == Some(0.0) || name.contains("samplers"))
}

/// The place in a list of all blocks, of the block at `index` of the list `part`. SDXL counts its embeddings first, which have no LoRA.
fn place_of(is_xl: bool, part: usize, index: usize) -> usize {
    let [down, middle, _] = block_counts(is_xl);
    usize::from(is_xl) + [0, down, down + middle][part] + index
}

/// The numbers of an argument; `None` after an error.
fn numbers(import: &mut Import<'_>, argument: &Argument, count: usize, is_rank: bool) -> Option<Vec<f64>> {
    let parse = |text: &str| match is_rank {
        true => text.trim().parse::<u32>().ok().map(f64::from),
        false => text.trim().parse::<f64>().ok().filter(|number| number.is_finite()),
    };
    let items: Vec<Option<f64>> = argument.text.split(',').map(parse).collect();
    let found: Option<Vec<f64>> = items.iter().copied().collect();
    let found = found.filter(|numbers| numbers.len() == count);
    if found.is_none() {
        let what = if is_rank { "whole numbers from 0" } else { "numbers" };
        let is = match items.iter().position(Option::is_none) {
            Some(place) => format!("item {} is not one", place + 1),
            None => format!("found {}", items.len()),
        };
        let message = format!(
            "{}: expected {count} {what} with commas between them, {is}",
            argument.name
        );
        import.error("network_args", message);
    }
    found
}
