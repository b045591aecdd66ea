//! Ranks of layers that differ from those of their network: of `network.layer_ranks`, or of the layers of a LoRA file.

use super::adapter_file::AdapterFile;
use super::lora::LoraTensors;
use super::names::{LayerIndex, LayerKey};
use crate::error::{EngineError, Result};
use std::collections::BTreeMap;

/// The rank and the alpha of an adapter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rank {
    /// 0: there is no adapter.
    pub rank: usize,
    /// The output is scaled by alpha / rank.
    pub alpha: f64,
}

/// The ranks of the layers whose name contains a text.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerRank {
    /// Part of the dotted or flattened name.
    pub contains: String,
    /// Of linear layers and 1x1 convolutions.
    pub linear: Rank,
    /// Of larger convolutions.
    pub conv: Rank,
}

/// The ranks of the layers of a LoRA file.
///
/// # Errors
/// When the file has another type of adapter for a layer, or no layer of the model.
pub(super) fn ranks_of(file: &AdapterFile, index: &LayerIndex) -> Result<BTreeMap<LayerKey, Rank>> {
    let failed = |reason: String| EngineError::WeightsFile {
        path: file.path.clone(),
        reason,
    };
    let (layers, _) = file.resolve(index)?;
    if layers.is_empty() {
        let origin = file.origin().unwrap_or_else(|| "another model family".to_owned());
        return Err(failed(format!(
            "none of its {} layers is in this model: it was made for {origin}",
            file.modules.len()
        )));
    }
    let mut ranks = BTreeMap::new();
    for (key, layer) in layers {
        let Some(tensors) = layer.as_any().downcast_ref::<LoraTensors>() else {
            return Err(failed(format!(
                "layer `{}`: `network.ranks_of_pretrained_lora` needs a LoRA, and the file has a {} of it",
                key.1,
                layer.kind()
            )));
        };
        let rank = tensors.rank();
        let alpha = tensors.alpha.unwrap_or(rank as f64);
        ranks.insert(key, Rank { rank, alpha });
    }
    Ok(ranks)
}
