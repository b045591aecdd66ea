//! The settings of a network, and which layers of a model they select.

use super::dropout::Dropout;
use super::names::{LayerKey, flatten, old_prefix, saved_name, toolkit_name};
use super::ranks::{LayerRank, Rank};
use super::trained_layer::AdapterType;
use super::whole_layer::WHOLE_LAYERS;
use crate::families::{AdapterNames, Part, PartRole};
use aitk_common::job::lora_containers::is_in_container;
use std::collections::BTreeMap;

/// The settings in `network`.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterConfig {
    /// The rank for linear layers and 1x1 convolutions.
    pub rank: usize,
    /// The alpha for linear layers and 1x1 convolutions.
    pub alpha: f64,
    /// The rank for larger convolutions; `None`: they get no LoRA.
    pub conv_rank: Option<usize>,
    /// The alpha for larger convolutions.
    pub conv_alpha: f64,
    /// Other ranks and alphas for some of the layers. The first entry whose text is in a layer's name is used.
    pub layer_ranks: Vec<LayerRank>,
    /// What training drops.
    pub dropout: Dropout,
    /// Larger convolutions have a Tucker decomposition, with a third matrix (LyCORIS' `use_tucker`).
    pub tucker: bool,
    /// The scale is alpha / sqrt(rank) in place of alpha / rank (LyCORIS' `rs_lora`).
    pub rank_stabilised: bool,
    /// A trained number multiplies the change of each LoRA, LoKr and LoHa (LyCORIS' `use_scalar`).
    pub scalar: bool,
    /// Only layers whose name contains one of these strings are targets. Empty: all layers.
    pub only_if_contains: Vec<String>,
    /// Layers whose name contains one of these strings are not targets. Takes precedence over `only_if_contains`.
    pub ignore_if_contains: Vec<String>,
    /// Targets whose name contains one of these strings, also norms, and convolutions whatever their kernel, are trained as whole
    /// differences of weight and bias ([`Difference`](super::Difference)), whatever the type of the network.
    pub full_if_contains: Vec<String>,
    /// All norms are trained as whole differences.
    pub norms: bool,
    /// Differences of norms have LyCORIS' names in files (`train_norm`).
    pub lycoris_norms: bool,
    /// Only layers and norms in modules of a U-Net with these class names in diffusers are targets. Empty: all are.
    pub containers: Vec<String>,
    /// The first and the last convolution of a U-Net are trained themselves, whatever the filters say.
    pub whole_in_out: bool,
    /// Only layers with at least this many weights and biases are targets.
    pub parameter_threshold: u64,
    /// Only layers in the repeated blocks of a transformer ([`Part::block_lists`]) are targets.
    pub blocks_only: bool,
    /// Layers with dotted names have the alpha too, because a file beside the saved one has it (peft's `adapter_config.json`).
    pub alpha_in_config: bool,
}

impl Default for AdapterConfig {
    /// Rank 4 and alpha 1 for linear layers and 1x1 convolutions of repeated blocks.
    fn default() -> Self {
        Self {
            rank: 4,
            alpha: 1.0,
            conv_rank: None,
            conv_alpha: 1.0,
            layer_ranks: Vec::new(),
            dropout: Dropout::default(),
            tucker: false,
            rank_stabilised: false,
            scalar: false,
            only_if_contains: Vec::new(),
            ignore_if_contains: Vec::new(),
            full_if_contains: Vec::new(),
            norms: false,
            lycoris_norms: false,
            containers: Vec::new(),
            whole_in_out: false,
            parameter_threshold: 0,
            blocks_only: true,
            alpha_in_config: false,
        }
    }
}

/// How a layer is trained.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum LayerTraining {
    /// With the network's type of adapter.
    Adapter(Rank),
    /// As a whole difference.
    Difference,
    /// Itself.
    Whole,
}

impl AdapterConfig {
    /// The names of a layer or norm by which filters of the config select it. `None`: they leave it out, or it is in no part of the model
    /// that is trained.
    fn selected(&self, part: Naming, path: &str, dims: &[usize], has_bias: bool) -> Option<Names> {
        if part.role == PartRole::TextEncoder && !(path.contains("self_attn.") || path.contains("mlp.")) {
            return None;
        }
        let is_in = |block: &&str| path.strip_prefix(*block).is_some_and(|rest| rest.starts_with('.'));
        if self.blocks_only && !part.block_lists.is_empty() && !part.block_lists.iter().any(is_in) {
            return None;
        }
        let is_unet = part.role == PartRole::Denoiser && part.part_names == AdapterNames::Kohya;
        if is_unet && !is_in_container(&self.containers, path) {
            return None;
        }
        let parameters = dims.iter().product::<usize>() + if has_bias { dims[0] } else { 0 };
        if (parameters as u64) < self.parameter_threshold {
            return None;
        }
        let names = Names::of(part, path);
        if self.ignore_if_contains.iter().any(|s| contain(s, &names.dotted)) {
            return None;
        }
        let is_selected =
            self.only_if_contains.is_empty() || self.only_if_contains.iter().any(|text| names.contain(text));
        is_selected.then_some(names)
    }

    /// Whether a norm of a part with this path and weight shape is trained.
    pub(super) fn trains_norm(&self, part: Naming, path: &str, dims: &[usize], has_bias: bool) -> bool {
        let names = self.selected(part, path, dims, has_bias);
        names.is_some_and(|names| self.norms || self.full_if_contains.iter().any(|text| names.contain(text)))
    }

    /// How a layer of a part with this path and weight shape is trained; `None` if it is not a target. `of_file`: the ranks of the layers
    /// of a file, which alone are targets.
    pub(super) fn target(
        &self,
        part: Naming,
        path: &str,
        dims: &[usize],
        has_bias: bool,
        of_file: Option<&BTreeMap<LayerKey, Rank>>,
    ) -> Option<LayerTraining> {
        if self.whole_in_out && part.role == PartRole::Denoiser && WHOLE_LAYERS.contains(&path) {
            return Some(LayerTraining::Whole);
        }
        let names = self.selected(part, path, dims, has_bias)?;
        if self.full_if_contains.iter().any(|text| names.contain(text)) {
            return Some(LayerTraining::Difference);
        }
        let entry = self.layer_ranks.iter().find(|entry| names.contain(&entry.contains));
        let has_large_kernel = has_large_kernel(dims);
        let Rank { rank, alpha } = match (of_file, entry) {
            (Some(ranks), _) => *ranks.get(&(part.part, path.to_owned()))?,
            (None, Some(entry)) if has_large_kernel => entry.conv,
            (None, Some(entry)) => entry.linear,
            (None, None) if has_large_kernel => Rank {
                rank: self.conv_rank?,
                alpha: self.conv_alpha,
            },
            (None, None) => Rank {
                rank: self.rank,
                alpha: self.alpha,
            },
        };
        let alpha = match part.names {
            // These names have an alpha beside them. As LyCORIS, so that programs, which take alpha / rank, get the scale.
            AdapterNames::Kohya if self.rank_stabilised => alpha * (rank as f64).sqrt(),
            AdapterNames::Kohya => alpha,
            AdapterNames::Peft if self.alpha_in_config => alpha,
            // Their files have no alpha, so the scale is 1.
            AdapterNames::Peft => rank as f64,
        };
        (rank > 0).then_some(LayerTraining::Adapter(Rank { rank, alpha }))
    }

    /// The rank of an embedding layer of a part with this path and weight shape; `None` if it is not a target. It is one only if
    /// `only_if_contains` has its own name (`embed_tokens`, `model.embed_tokens`), as in peft's `target_modules`. Parts of it (`model.`) mean
    /// other layers.
    pub(super) fn embedding_target(&self, part: Naming, path: &str, dims: &[usize]) -> Option<Rank> {
        let own_name = path.rsplit('.').next().unwrap_or(path);
        let names = self.selected(part, path, dims, false)?;
        let mut texts = self.only_if_contains.iter().filter(|text| text.contains(own_name));
        if !texts.any(|text| names.contain(text)) {
            return None;
        }
        let alpha = match part.names {
            AdapterNames::Peft if !self.alpha_in_config => self.rank as f64,
            AdapterNames::Peft | AdapterNames::Kohya => self.alpha,
        };
        Some(Rank { rank: self.rank, alpha })
    }
}

/// The names of a layer that filters match.
struct Names {
    dotted: Vec<String>,
    flattened: Vec<String>,
}

impl Names {
    fn of(part: Naming, path: &str) -> Self {
        let mut dotted = vec![format!("{}.{path}", part.lora_prefix)];
        let saved = part.saved_name(path);
        dotted.extend(toolkit_name(&saved_name(
            part.part_names,
            part.role,
            part.lora_prefix,
            path,
        )));
        let flattened = dotted.iter().chain([&saved]).map(|name| flatten(name)).collect();
        Self { dotted, flattened }
    }

    fn contain(&self, text: &str) -> bool {
        contain(text, &self.dotted) || contain(text, &self.flattened)
    }
}

fn contain(text: &str, names: &[String]) -> bool {
    names.iter().any(|name| name.contains(text))
}

/// Whether a weight of this shape is that of a convolution with a kernel above 1x1.
pub(super) fn has_large_kernel(dims: &[usize]) -> bool {
    dims.iter().skip(2).any(|side| *side > 1)
}

/// How the layers of a part are named.
#[derive(Clone, Copy)]
pub(super) struct Naming {
    pub(super) part: &'static str,
    pub(super) role: PartRole,
    lora_prefix: &'static str,
    /// The beginning of saved names.
    saved_prefix: &'static str,
    pub(super) names: AdapterNames,
    /// Those of the part, which filters of configs match too.
    part_names: AdapterNames,
    block_lists: &'static [&'static str],
}

impl Naming {
    pub(super) fn of(part: &Part<'_>, adapter: &dyn AdapterType) -> Self {
        let naming = Self {
            part: part.id,
            role: part.role,
            lora_prefix: part.lora_prefix,
            saved_prefix: part.lora_prefix,
            names: part.lora_names,
            part_names: part.lora_names,
            block_lists: part.block_lists,
        };
        match adapter.has_old_names() && part.lora_names == AdapterNames::Peft {
            true => Self {
                saved_prefix: old_prefix(part.id),
                names: AdapterNames::Kohya,
                ..naming
            },
            false => naming,
        }
    }

    pub(super) fn saved_name(self, path: &str) -> String {
        saved_name(self.names, self.role, self.saved_prefix, path)
    }
}
