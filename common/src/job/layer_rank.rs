//! `network.layer_ranks`: other ranks and alphas for some of the layers.

use super::declare::section;
use super::limits::{MAX_FACTOR, MAX_RANK};
use super::schema::{PresentKeys, ReadContext};

section! {
    /// The rank and the alpha of some layers. What is not set is that of the network.
    pub struct LayerRank("layer_ranks") {
        /// Part of the dotted or flattened names of the layers, such as `down_blocks.1.` or `lora_te`.
        contains: String = String::new(), Works, shown "required";
        /// Their rank, as `network.linear`; 0: these linear layers and 1x1 convolutions have no adapter.
        linear: Option<u32> = None, Works;
        /// Their alpha, as `network.linear_alpha`.
        linear_alpha: Option<f64> = None, Works;
        /// The rank of larger convolutions, as `network.conv`; 0: they have no adapter.
        conv: Option<u32> = None, Works;
        /// The alpha of larger convolutions; null: that of the network, or the rank where it has none.
        conv_alpha: Option<f64> = None, Works;
    }
    finish = finish;
}

fn finish(entry: &mut LayerRank, _present: &PresentKeys, cx: &mut ReadContext) {
    if entry.contains.is_empty() {
        cx.error_at(
            "contains",
            "needs a part of the names of the layers, such as `down_blocks.1.`",
        );
    }
    for (key, rank) in [("linear", entry.linear), ("conv", entry.conv)] {
        cx.check_at_most(key, rank.unwrap_or(0), MAX_RANK);
    }
    for (key, alpha) in [("linear_alpha", entry.linear_alpha), ("conv_alpha", entry.conv_alpha)] {
        cx.check_in_range(key, alpha.unwrap_or(1.0), -MAX_FACTOR..=MAX_FACTOR);
    }
}
