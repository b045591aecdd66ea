//! A layer of a model's original release, and the layers of diffusers' model that it consists of.

use crate::weights::View;

/// A layer of the original release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OriginalLayer {
    /// Its name: `double_blocks.0.img_attn.qkv`.
    pub name: String,
    /// diffusers' paths of the layers that it consists of, in the order of their rows.
    pub parts: Vec<String>,
    /// Whether the two halves of its rows are in the other order than in diffusers.
    pub halves_swapped: bool,
}

impl OriginalLayer {
    /// The tensors of diffusers that this layer's tensor of `rows` rows is split into, with their names: query, key and value have `width`
    /// rows each, and what follows has the rest. `kind`: `weight` or `bias`.
    pub(crate) fn views(&self, kind: &str, width: usize, rows: usize) -> Vec<(String, View)> {
        let named = |part: &String| format!("{part}.{kind}");
        if self.halves_swapped {
            return self
                .parts
                .iter()
                .map(|part| (named(part), View::HalvesSwapped))
                .collect();
        }
        let parts = self.parts.iter().enumerate().map(|(at, part)| {
            let start = at * width;
            let count = if at < 3 { width } else { rows.saturating_sub(start) };
            (named(part), View::Rows { start, count })
        });
        parts.collect()
    }
}
