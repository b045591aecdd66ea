//! Conversion of the names of a text encoder's tensors between OpenCLIP and transformers.
//!
//! OpenCLIP has one tensor for query, key and value of a layer, and the projection of the pooled text transposed.

use crate::weights::{Index, View};

/// The layers inside a block: the OpenCLIP name, and that of transformers.
const BLOCK_LAYERS: [(&str, &str); 5] = [
    ("ln_1.", "layer_norm1."),
    ("ln_2.", "layer_norm2."),
    ("mlp.c_fc.", "mlp.fc1."),
    ("mlp.c_proj.", "mlp.fc2."),
    ("attn.out_proj.", "self_attn.out_proj."),
];

/// The tensors outside the blocks.
const OUTER: [(&str, &str); 4] = [
    ("token_embedding.weight", "text_model.embeddings.token_embedding.weight"),
    (
        "positional_embedding",
        "text_model.embeddings.position_embedding.weight",
    ),
    ("ln_final.weight", "text_model.final_layer_norm.weight"),
    ("ln_final.bias", "text_model.final_layer_norm.bias"),
];

const BLOCKS: (&str, &str) = ("transformer.resblocks.", "text_model.encoder.layers.");
const PROJECTION: (&str, &str) = ("text_projection", "text_projection.weight");
/// Query, key and value, in the order of their rows.
const PARTS: [&str; 3] = ["q_proj", "k_proj", "v_proj"];

/// The tensors with this prefix in an index, under the names of transformers.
pub(super) fn to_transformers(index: &Index, prefix: &str) -> Index {
    let renamed = index.renamed(|name, shape| Some((renamed(name.strip_prefix(prefix)?)?, shape.to_vec())));
    let views = index.views(|name, shape| match name.strip_prefix(prefix) {
        Some(name) => views(name, shape).unwrap_or_default(),
        None => Vec::new(),
    });
    renamed.merged(views)
}

fn renamed(name: &str) -> Option<String> {
    if let Some((_, new)) = OUTER.iter().find(|(old, _)| *old == name) {
        return Some((*new).to_owned());
    }
    let (block, inner) = name.strip_prefix(BLOCKS.0)?.split_once('.')?;
    let (old, new) = BLOCK_LAYERS.iter().find(|(old, _)| inner.starts_with(old))?;
    Some(format!("{}{block}.{new}{}", BLOCKS.1, &inner[old.len()..]))
}

fn views(name: &str, shape: &[usize]) -> Option<Vec<(String, View)>> {
    if name == PROJECTION.0 {
        return Some(vec![(PROJECTION.1.to_owned(), View::Transposed)]);
    }
    let (block, inner) = name.strip_prefix(BLOCKS.0)?.split_once('.')?;
    let kind = inner.strip_prefix("attn.in_proj_")?;
    let count = shape.first()? / PARTS.len();
    let parts = PARTS.iter().enumerate().map(|(i, part)| {
        let name = format!("{}{block}.self_attn.{part}.{kind}", BLOCKS.1);
        let start = i * count;
        (name, View::Rows { start, count })
    });
    Some(parts.collect())
}

/// How a tensor of a single file is made from those of transformers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) enum SavedTensor {
    /// One tensor as it is.
    Whole(String),
    /// The transpose of one.
    Transposed(String),
    /// Several, one below the other.
    Concatenated(Vec<String>),
}

/// The OpenCLIP name of a tensor with this name of transformers, and what it is made from. `None` for keys and values,
/// which are saved with the queries.
pub(super) fn to_open_clip(name: &str) -> Option<(String, SavedTensor)> {
    let whole = || SavedTensor::Whole(name.to_owned());
    if name == PROJECTION.1 {
        return Some((PROJECTION.0.to_owned(), SavedTensor::Transposed(name.to_owned())));
    }
    if let Some((old, _)) = OUTER.iter().find(|(_, new)| *new == name) {
        return Some(((*old).to_owned(), whole()));
    }
    let (block, inner) = name.strip_prefix(BLOCKS.1)?.split_once('.')?;
    if let Some(kind) = inner.strip_prefix("self_attn.q_proj.") {
        let parts = PARTS
            .iter()
            .map(|part| format!("{}{block}.self_attn.{part}.{kind}", BLOCKS.1));
        return Some((
            format!("{}{block}.attn.in_proj_{kind}", BLOCKS.0),
            SavedTensor::Concatenated(parts.collect()),
        ));
    }
    let (old, new) = BLOCK_LAYERS.iter().find(|(_, new)| inner.starts_with(new))?;
    Some((format!("{}{block}.{old}{}", BLOCKS.0, &inner[new.len()..]), whole()))
}

/// Whether the tensor is saved as a part of another one.
pub(super) fn is_saved_with_queries(name: &str) -> bool {
    let inner = name.strip_prefix(BLOCKS.1).and_then(|rest| rest.split_once('.'));
    inner.is_some_and(|(_, inner)| inner.starts_with("self_attn.k_proj.") || inner.starts_with("self_attn.v_proj."))
}
