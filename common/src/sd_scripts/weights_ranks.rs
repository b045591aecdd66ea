//! `dim_from_weights`: the ranks of the file in `network_weights`.

use super::report::Import;
use crate::model_files::{Unreadable, header_of};

/// The largest ranks of a LoRA file.
pub(super) struct LargestRanks {
    pub linear: u64,
    /// Of convolutions with a kernel above 1 x 1.
    pub conv: Option<u64>,
}

/// The largest ranks of the file. `None` after an error.
pub(super) fn largest_ranks(import: &mut Import<'_>) -> Option<LargestRanks> {
    let Some(path) = import.settings.text("network_weights") else {
        let message = "needs network_weights, the LoRA whose ranks are used: set it, or remove this option";
        import.error("dim_from_weights", message);
        return None;
    };
    let shown = path.escape_debug().to_string();
    let header = match header_of(&import.directory.join(path)) {
        Ok(header) => header,
        Err(Unreadable::Pickle(why) | Unreadable::Other(why)) => {
            let message = format!("`{shown}` is needed to read its ranks: {why}");
            import.error("network_weights", message);
            return None;
        }
    };
    let mut ranks = LargestRanks { linear: 0, conv: None };
    for (name, shape) in &header.shapes {
        if !(name.ends_with("lora_down.weight") || name.ends_with("lora_A.weight")) {
            continue;
        }
        let Some(rank) = shape.first().copied() else { continue };
        if shape.iter().skip(2).any(|side| *side > 1) {
            ranks.conv = ranks.conv.max(Some(rank));
        } else {
            ranks.linear = ranks.linear.max(rank);
        }
    }
    if ranks.linear == 0 && ranks.conv.is_none() {
        let message = format!("`{shown}` has no LoRA: none of its tensors is a lora_down.weight");
        import.error("network_weights", message);
        return None;
    }
    // A network has a rank for linear layers, also if the file has none.
    ranks.linear = ranks.linear.max(1);
    Some(ranks)
}
