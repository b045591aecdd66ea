//! Which blocks of a transformer are trained: `train_blocks` and the indices of blocks in `network_args`.

use super::network_arguments::Arguments;
use super::report::Import;

/// Blocks of FLUX.1.
const DOUBLE_BLOCKS: usize = 19;
const SINGLE_BLOCKS: usize = 38;
/// The most blocks of a Stable Diffusion 3.5.
const JOINT_BLOCKS: usize = 38;

/// The names of the blocks of FLUX.1 that are trained; none: all.
pub(super) fn flux_blocks(import: &mut Import<'_>, arguments: &Arguments) -> Vec<String> {
    let which = arguments
        .get("train_blocks")
        .map_or("all", |argument| argument.text.as_str());
    let (double, single) = match which {
        "all" | "" => (true, true),
        "double" => (true, false),
        "single" => (false, true),
        other => {
            import.error(
                "network_args",
                format!(
                    "train_blocks: expected all, single or double, found {}",
                    other.escape_debug()
                ),
            );
            return Vec::new();
        }
    };
    let doubles = indices(import, arguments, "train_double_block_indices", DOUBLE_BLOCKS);
    let singles = indices(import, arguments, "train_single_block_indices", SINGLE_BLOCKS);
    if double && single && doubles.is_none() && singles.is_none() {
        return Vec::new();
    }
    let mut names = Vec::new();
    for (is_trained, which, prefix) in [
        (double, doubles, "transformer.transformer_blocks."),
        (single, singles, "transformer.single_transformer_blocks."),
    ] {
        match which {
            _ if !is_trained => {}
            None => names.push(prefix.to_owned()),
            Some(indices) => names.extend(indices.iter().map(|index| format!("{prefix}{index}."))),
        }
    }
    if names.is_empty() {
        import.error("network_args", "no block is trained");
    }
    names
}

/// The names of the blocks of Stable Diffusion 3 that are trained; none: all.
pub(super) fn joint_blocks(import: &mut Import<'_>, arguments: &Arguments) -> Vec<String> {
    match indices(import, arguments, "train_block_indices", JOINT_BLOCKS) {
        None => Vec::new(),
        Some(indices) if indices.is_empty() => {
            import.error("network_args", "no block is trained");
            Vec::new()
        }
        Some(indices) => indices
            .iter()
            .map(|index| format!("transformer.transformer_blocks.{index}."))
            .collect(),
    }
}

/// The blocks of `all`, `none`, or `0-3,7`; `None`: all.
fn indices(import: &mut Import<'_>, arguments: &Arguments, name: &str, blocks: usize) -> Option<Vec<usize>> {
    let text = arguments.get(name)?.text.trim();
    match text {
        "all" => return None,
        "none" | "" => return Some(Vec::new()),
        _ => {}
    }
    let part = |part: &str| -> Option<std::ops::RangeInclusive<usize>> {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        (first <= last && last < blocks).then_some(first..=last)
    };
    let parts: Option<Vec<_>> = text.split(',').map(part).collect();
    match parts {
        Some(parts) => {
            let mut all: Vec<usize> = parts.into_iter().flatten().collect();
            all.sort_unstable();
            all.dedup();
            Some(all)
        }
        None => {
            let shown = super::settings::shortened(text);
            import.error(
                "network_args",
                format!(
                    "{name}: expected blocks from 0 to {}, such as 0-3,7, found \"{shown}\"",
                    blocks - 1
                ),
            );
            None
        }
    }
}
