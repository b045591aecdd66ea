//! Z-Image's transformer in one file without a config: with the names of the original release, as ComfyUI's files have them, or of
//! diffusers, with or without a prefix. Its sizes are those of its tensors.

use super::block::MAX_TIME_FEATURES;
use super::original_names::{ATTENTION, OUTER};
use super::transformer::{PATCH, SINUSOIDS, TIME_HIDDEN, ZImageConfig};
use crate::error::Result;
use crate::models::original_layer::OriginalLayer;
use crate::models::single_file::{PREFIXES, count_blocks, file_error, side, without_prefix};
use crate::weights::Index;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// For errors.
const FAMILY: &str = "Z-Image";
/// The lists of blocks, and whether their blocks depend on the timestep.
const BLOCKS: [(&str, bool); 3] = [("noise_refiner", true), ("context_refiner", false), ("layers", true)];
/// The padding tokens. They are rows of a matrix, which quantised GGUF files may have as vectors.
const PAD_TOKENS: [&str; 2] = ["x_pad_token", "cap_pad_token"];
/// Norms over heads: the original name, and diffusers' name.
const HEAD_NORMS: [(&str, &str); 2] = [("q_norm", "norm_q"), ("k_norm", "norm_k")];
/// Norms over tokens of a block.
const TOKEN_NORMS: [&str; 4] = ["attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"];

/// Whether the tensors have the names of the original release.
pub fn has_original_names(index: &Index) -> bool {
    prefix_of(index, OUTER[0].0).is_some()
}

/// What stands before the name of this layer outside of the blocks.
fn prefix_of(index: &Index, layer: &str) -> Option<&'static str> {
    let mut prefixes = PREFIXES.into_iter();
    prefixes.find(|prefix| index.contains(&format!("{prefix}{layer}.weight")))
}

/// The transformer's tensors among those of a file, under diffusers' names. They have the original names or those of diffusers.
/// A layer that is several layers in diffusers is split by rows.
///
/// # Errors
/// When there is no transformer of Z-Image, or a tensor with an original name is missing or has a shape that does not fit the others.
pub fn with_diffusers_names(index: &Index) -> Result<Index> {
    let (original, ours) = OUTER[0];
    if let Some(prefix) = prefix_of(index, original) {
        return from_original(index, prefix);
    }
    let prefix = prefix_of(index, ours).ok_or_else(|| {
        file_error(
            index,
            format!("it has no transformer of {FAMILY}: expected a tensor `{original}.weight` or `{ours}.weight`"),
        )
    })?;
    Ok(with_pad_rows(&without_prefix(index, prefix)))
}

/// The padding tokens as rows.
fn with_pad_rows(index: &Index) -> Index {
    index.renamed(|name, shape| {
        let is_vector = PAD_TOKENS.contains(&name) && shape.len() == 1;
        let shape = if is_vector {
            [&[1], shape].concat()
        } else {
            shape.to_vec()
        };
        Some((name.to_owned(), shape))
    })
}

/// The sizes that the original names of a file have.
struct Sizes {
    width: usize,
    head_width: usize,
    hidden: usize,
    token: usize,
    text: usize,
}

impl Sizes {
    fn of(index: &Index, prefix: &str) -> Result<Self> {
        let side = |name: &str, axis: usize| side(index, FAMILY, &format!("{prefix}{name}"), axis);
        Ok(Self {
            width: side("x_embedder.weight", 0)?,
            head_width: side("layers.0.attention.q_norm.weight", 0)?,
            hidden: side("layers.0.feed_forward.w1.weight", 0)?,
            token: side("x_embedder.weight", 1)?,
            text: side("cap_embedder.1.weight", 1)?,
        })
    }

    fn time(&self) -> usize {
        self.width.min(MAX_TIME_FEATURES)
    }

    /// The tensors outside of the blocks: their original names and shapes.
    fn outer(&self) -> Vec<(String, Vec<usize>)> {
        let (width, time) = (self.width, self.time());
        let layers = [
            ("x_embedder", [width, self.token]),
            ("t_embedder.mlp.0", [TIME_HIDDEN, SINUSOIDS]),
            ("t_embedder.mlp.2", [time, TIME_HIDDEN]),
            ("cap_embedder.1", [width, self.text]),
            ("final_layer.linear", [self.token, width]),
            ("final_layer.adaLN_modulation.1", [width, time]),
        ];
        let mut tensors = vec![("cap_embedder.0.weight".to_owned(), vec![self.text])];
        for (name, [rows, columns]) in layers {
            tensors.push((format!("{name}.weight"), vec![rows, columns]));
            tensors.push((format!("{name}.bias"), vec![rows]));
        }
        tensors
    }

    /// The tensors of a block that have one name in both, without those of queries, keys and values.
    fn of_block(&self, is_modulated: bool) -> Vec<(String, Vec<usize>)> {
        let (width, hidden) = (self.width, self.hidden);
        let mut tensors = vec![
            ("feed_forward.w1.weight".to_owned(), vec![hidden, width]),
            ("feed_forward.w2.weight".to_owned(), vec![width, hidden]),
            ("feed_forward.w3.weight".to_owned(), vec![hidden, width]),
        ];
        tensors.extend(TOKEN_NORMS.map(|name| (format!("{name}.weight"), vec![width])));
        if is_modulated {
            tensors.push(("adaLN_modulation.0.weight".to_owned(), vec![4 * width, self.time()]));
            tensors.push(("adaLN_modulation.0.bias".to_owned(), vec![4 * width]));
        }
        tensors
    }
}

fn from_original(index: &Index, prefix: &str) -> Result<Index> {
    let sizes = Sizes::of(index, prefix)?;
    let (mut whole, mut parts) = (BTreeMap::new(), BTreeMap::new());
    for (name, shape) in sizes.outer() {
        let file_name = format!("{prefix}{name}");
        index.check_shape(&file_name, &shape.as_slice().into())?;
        let outer = OUTER.iter().find_map(|(original, ours)| {
            let rest = name.strip_prefix(original)?;
            rest.starts_with('.').then(|| format!("{ours}{rest}"))
        });
        whole.insert(file_name, outer.unwrap_or(name));
    }
    for name in PAD_TOKENS {
        let file_name = format!("{prefix}{name}");
        if index.shape(&file_name) != Some(&[sizes.width]) {
            index.check_shape(&file_name, &[1, sizes.width].as_slice().into())?;
        }
        whole.insert(file_name, name.to_owned());
    }
    for (list, is_modulated) in BLOCKS {
        for block in 0..count_blocks(index, &format!("{prefix}{list}")) {
            let block = format!("{list}.{block}");
            for (name, shape) in sizes.of_block(is_modulated) {
                let name = format!("{block}.{name}");
                let file_name = format!("{prefix}{name}");
                index.check_shape(&file_name, &shape.as_slice().into())?;
                whole.insert(file_name, name);
            }
            for (original, ours) in HEAD_NORMS {
                let name = format!("{prefix}{block}.attention.{original}.weight");
                index.check_shape(&name, &sizes.head_width.into())?;
                whole.insert(name, format!("{block}.attention.{ours}.weight"));
            }
            for (original, ours) in ATTENTION {
                let rows = ours.len() * sizes.width;
                let layer = OriginalLayer {
                    name: format!("{prefix}{block}.attention.{original}"),
                    parts: ours.iter().map(|part| format!("{block}.attention.{part}")).collect(),
                    halves_swapped: false,
                };
                let name = format!("{}.weight", layer.name);
                index.check_shape(&name, &[rows, sizes.width].as_slice().into())?;
                match layer.parts.as_slice() {
                    [only] => {
                        whole.insert(name, format!("{only}.weight"));
                    }
                    _ => {
                        parts.insert(name, layer.views("weight", sizes.width, rows));
                    }
                }
            }
        }
    }
    let renamed = index.renamed(|name, shape| Some((whole.get(name)?.clone(), shape.to_vec())));
    let split = index.views(|name, _| parts.get(name).cloned().unwrap_or_default());
    Ok(with_pad_rows(&renamed.merged(split)))
}

/// The config of a transformer whose tensors have diffusers' names.
///
/// # Errors
/// When a tensor is missing that shows a size, or has a shape that no such model has.
pub fn config_of(index: &Index) -> Result<ZImageConfig> {
    let side = |name: &str, axis: usize| side(index, FAMILY, name, axis);
    let embedder = format!("{}.weight", OUTER[0].1);
    let (width, token) = (side(&embedder, 0)?, side(&embedder, 1)?);
    let head_width = side("layers.0.attention.norm_q.weight", 0)?;
    if width % head_width != 0 || token % (PATCH * PATCH) != 0 {
        return Err(file_error(
            index,
            format!(
                "tensor `{embedder}` has the shape [{width}, {token}]: expected a multiple of {head_width}, the features of a head, and of \
                 {}, the latents of a token",
                PATCH * PATCH
            ),
        ));
    }
    // 32, 48 and 48 of 128 in every published model.
    let side_axis = head_width * 3 / 8 / 2 * 2;
    Ok(ZImageConfig {
        in_channels: token / (PATCH * PATCH),
        dim: width,
        n_layers: count_blocks(index, "layers"),
        n_refiner_layers: count_blocks(index, "noise_refiner"),
        n_heads: width / head_width,
        cap_feat_dim: side("cap_embedder.1.weight", 1)?,
        axes_dims: vec![head_width - 2 * side_axis, side_axis, side_axis],
        // Of the published models.
        axes_lens: vec![1536, 512, 512],
        ..ZImageConfig::default()
    })
}

/// A config as diffusers writes it to `transformer/config.json`.
#[must_use]
pub fn config_json(config: &ZImageConfig) -> Value {
    json!({
        "_class_name": "ZImageTransformer2DModel",
        "_diffusers_version": "0.42.1",
        "all_f_patch_size": config.all_f_patch_size,
        "all_patch_size": config.all_patch_size,
        "axes_dims": config.axes_dims,
        "axes_lens": config.axes_lens,
        "cap_feat_dim": config.cap_feat_dim,
        "dim": config.dim,
        "in_channels": config.in_channels,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_heads,
        "n_layers": config.n_layers,
        "n_refiner_layers": config.n_refiner_layers,
        "norm_eps": config.norm_eps,
        "qk_norm": config.qk_norm,
        "rope_theta": config.rope_theta,
        "siglip_feat_dim": config.siglip_feat_dim,
        "t_scale": config.t_scale,
    })
}
