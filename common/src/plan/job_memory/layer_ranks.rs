//! `network.layer_ranks`, as the engine reads it.

use crate::plan::json::{number, text};
use crate::plan::walk::build::LayerRankOptions;
use serde_json::Value;

/// The entries of a network with these ranks, which are those of what an entry does not set.
pub(super) fn layer_ranks(network: &Value, rank: f64, conv_rank: f64) -> Vec<LayerRankOptions> {
    let entries = network.get("layer_ranks").and_then(Value::as_array);
    let of = |entry: &Value| LayerRankOptions {
        contains: text(entry, "/contains").unwrap_or("").to_owned(),
        rank: number(entry, "/linear").unwrap_or(rank).clamp(0.0, 1e5),
        conv_rank: number(entry, "/conv").unwrap_or(conv_rank).clamp(0.0, 1e5),
    };
    entries.into_iter().flatten().map(of).collect()
}
