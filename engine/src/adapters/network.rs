//! The trainable network of a model: its target layers, saving and loading. The types of adapters are in files of their own.

use super::adapter_file::AdapterFile;
use super::difference::{DenseLayer, Difference};
use super::dropout::Dropout;
use super::handle::AdapterHandle;
use super::load::{attach_adapter, index_layers};
use super::lora::Lora;
use super::names::{LayerIndex, LayerKey, flatten, old_prefix, saved_name, toolkit_name};
use super::ranks::{LayerRank, Rank, ranks_of};
use super::trained_layer::{AdapterType, NewLayer, TrainedLayer};
use super::whole_layer::{PREFIX, WHOLE_LAYERS, Whole};
use crate::error::{EngineError, Result};
use crate::families::{AdapterNames, Part, PartRole};
use crate::nn::{LayerMut, NormParams};
use crate::optim::Param;
use crate::rng::TorchGenerator;
use aitk_common::job::lora_containers::is_in_container;
use candle_core::{DType, Device, Tensor, Var};
use std::collections::BTreeMap;
use std::sync::Arc;

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
    /// differences of weight and bias ([`Difference`]), whatever the type of the network.
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
enum LayerTraining {
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
    fn trains_norm(&self, part: Naming, path: &str, dims: &[usize], has_bias: bool) -> bool {
        let names = self.selected(part, path, dims, has_bias);
        names.is_some_and(|names| self.norms || self.full_if_contains.iter().any(|text| names.contain(text)))
    }

    /// How a layer of a part with this path and weight shape is trained; `None` if it is not a target. `of_file`: the ranks of the layers
    /// of a file, which alone are targets.
    fn target(
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
fn has_large_kernel(dims: &[usize]) -> bool {
    dims.iter().skip(2).any(|side| *side > 1)
}

/// How the layers of a part are named.
#[derive(Clone, Copy)]
struct Naming {
    part: &'static str,
    role: PartRole,
    lora_prefix: &'static str,
    /// The beginning of saved names.
    saved_prefix: &'static str,
    names: AdapterNames,
    /// Those of the part, which filters of configs match too.
    part_names: AdapterNames,
    block_lists: &'static [&'static str],
}

impl Naming {
    fn of(part: &Part<'_>, adapter: &dyn AdapterType) -> Self {
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

    fn saved_name(self, path: &str) -> String {
        saved_name(self.names, self.role, self.saved_prefix, path)
    }
}

/// A layer with an adapter.
#[derive(Debug)]
struct TargetLayer {
    part: &'static str,
    role: PartRole,
    path: String,
    has_large_kernel: bool,
    layer: Arc<dyn TrainedLayer>,
}

/// The result of loading weights from a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoadReport {
    /// The number of layers whose weights were loaded.
    pub loaded: usize,
    /// Layers that the file lacks; they keep their initial values.
    pub missing: Vec<String>,
    /// Names in the file that match no layer.
    pub unknown: Vec<String>,
    /// The number of layers whose rank differed and was padded or cut. A saved optimizer state does not fit them.
    pub resized: usize,
    /// The number of layers whose alpha / rank is another one in the file, beside which its matrices are used as they are.
    pub other_strengths: usize,
    /// What the strength of the first of them is multiplied with.
    pub first_other_strength: Option<f64>,
}

/// Checks that the settings can be used for these parts, whatever their layers.
fn check_config(adapter: &dyn AdapterType, config: &AdapterConfig, parts: &[Part<'_>]) -> Result<()> {
    if config.rank == 0 || config.conv_rank == Some(0) {
        return Err(EngineError::bad_input(
            "a LoRA rank is 0, which trains nothing: set `network.linear`, and `network.conv` if it is there, to 1 or more",
        ));
    }
    let mut predicting = parts.iter().filter(|part| part.role.predicts());
    if config.whole_in_out && predicting.any(|part| part.lora_names == AdapterNames::Peft) {
        return Err(EngineError::bad_input(
            "network.network_kwargs.full_train_in_out: only U-Nets have the two layers (`conv_in`, `conv_out`) that are trained, and this \
             model has a transformer: set it to false",
        ));
    }
    let has_no_alpha = |part: &Part<'_>| part.role.predicts() && Naming::of(part, adapter).names == AdapterNames::Peft;
    if config.rank_stabilised && parts.iter().any(has_no_alpha) {
        return Err(EngineError::bad_input(
            "network.network_kwargs.rs_lora: this model has a transformer, whose adapters have the scale 1 and no alpha in their files: \
             set it to false",
        ));
    }
    for part in parts.iter() {
        adapter.check_names(part.lora_names).map_err(EngineError::bad_input)?;
    }
    Ok(())
}

/// The error of a network without a layer.
fn no_target() -> EngineError {
    EngineError::bad_input(
        "network.network_kwargs: no layer is left to train; check `only_if_contains`, `ignore_if_contains`, \
                 `target_lin_modules`, `target_conv_modules` and `parameter_threshold` (of a config of sd-scripts: the weights of its blocks \
                 and `block_lr_zero_threshold`)",
    )
}

/// The name of a tensor of an adapter in saved files.
fn tensor_name(layer: &dyn TrainedLayer, suffix: &str) -> String {
    format!("{}.{suffix}", layer.name())
}

/// Whether a number is another one in this dtype, and not an infinite one.
fn is_rounded(number: &Tensor, dtype: DType) -> Result<bool> {
    let number = number.to_dtype(DType::F32)?;
    let saved = number.to_dtype(dtype)?.to_dtype(DType::F32)?.to_scalar::<f32>()?;
    Ok(saved.is_finite() && saved != number.to_scalar::<f32>()?)
}

/// Makes the adapters of a network, one for each target.
struct NewTargets<'a> {
    adapter: &'a dyn AdapterType,
    config: &'a AdapterConfig,
    /// The ranks of the layers of a file, which alone are targets.
    of_file: Option<BTreeMap<LayerKey, Rank>>,
    handle: Arc<AdapterHandle>,
}

impl<'a> NewTargets<'a> {
    fn new(
        adapter: &'a dyn AdapterType,
        config: &'a AdapterConfig,
        ranks_file: Option<&AdapterFile>,
        index: &LayerIndex,
    ) -> Result<Self> {
        Ok(Self {
            adapter,
            config,
            of_file: ranks_file.map(|file| ranks_of(file, index)).transpose()?,
            handle: AdapterHandle::new(1.0),
        })
    }

    /// The adapter of a layer; `None` if it is not a target.
    fn of_layer(
        &self,
        naming: Naming,
        path: &str,
        layer: &LayerMut<'_>,
        generator: &mut TorchGenerator,
    ) -> Result<Option<Arc<dyn TrainedLayer>>> {
        let (weight, bias) = (layer.weight(), layer.bias());
        let dims = weight.dims();
        let target = self
            .config
            .target(naming, path, dims, bias.is_some(), self.of_file.as_ref());
        let whole = Rank { rank: 1, alpha: 1.0 };
        let (adapter, Rank { rank, alpha }) = match target {
            Some(LayerTraining::Adapter(rank)) if self.adapter.covers(naming.role, path) => (self.adapter, rank),
            Some(LayerTraining::Adapter(_)) | None => return Ok(None),
            Some(LayerTraining::Difference) => (&Difference as &dyn AdapterType, whole),
            Some(LayerTraining::Whole) => (&Whole as &dyn AdapterType, whole),
        };
        let new = NewLayer {
            name: match target {
                Some(LayerTraining::Whole) => format!("{PREFIX}{path}"),
                _ => naming.saved_name(path),
            },
            names: naming.names,
            weight,
            bias,
            dims,
            device: weight.device(),
            rank,
            alpha,
            dropout: self.config.dropout,
            tucker: self.config.tucker,
            rank_stabilised: self.config.rank_stabilised,
            scalar: self.config.scalar,
            handle: &self.handle,
        };
        Ok(Some(adapter.create(new, generator)?))
    }

    /// The difference of a norm; `None` if it is not a target.
    fn of_norm(&self, naming: Naming, path: &str, norm: &NormParams) -> Result<Option<Arc<DenseLayer>>> {
        let (weight, bias) = (&norm.weight, norm.own_bias());
        let dims = weight.dims();
        if !self.config.trains_norm(naming, path, dims, bias.is_some()) {
            return Ok(None);
        }
        let layer = DenseLayer::zeros(NewLayer {
            name: naming.saved_name(path),
            names: naming.names,
            weight,
            bias,
            dims,
            device: weight.device(),
            rank: 1,
            alpha: 1.0,
            dropout: self.config.dropout,
            tucker: self.config.tucker,
            rank_stabilised: self.config.rank_stabilised,
            scalar: self.config.scalar,
            handle: &self.handle,
        })?;
        Ok(Some(Arc::new(match self.config.lycoris_norms {
            true => layer.with_lycoris_names(),
            false => layer,
        })))
    }
}

/// The trainable network of a model.
#[derive(Debug)]
pub struct AdapterNetwork {
    targets: Vec<TargetLayer>,
    index: LayerIndex,
    /// The strength and the mode of all layers.
    pub handle: Arc<AdapterHandle>,
}

impl AdapterNetwork {
    /// [`Self::attach_as`] a LoRA.
    ///
    /// # Errors
    /// As there.
    pub fn attach(config: &AdapterConfig, parts: &mut [Part<'_>], generator: &mut TorchGenerator) -> Result<Self> {
        Self::attach_as(&Lora, config, None, parts, generator)
    }

    /// Attaches a new adapter of a type to every target of the config. Its numbers are drawn layer by layer in the order of `parts`
    /// and of their layers. `ranks_file`: a LoRA whose layers alone are targets, with their ranks and alphas.
    ///
    /// # Errors
    /// When there is no target layer, the rank of the network is 0, or the type cannot be trained on the model.
    pub fn attach_as(
        adapter: &dyn AdapterType,
        config: &AdapterConfig,
        ranks_file: Option<&AdapterFile>,
        parts: &mut [Part<'_>],
        generator: &mut TorchGenerator,
    ) -> Result<Self> {
        check_config(adapter, config, parts)?;
        let index = index_layers(parts)?;
        let new = NewTargets::new(adapter, config, ranks_file, &index)?;
        let mut targets = Vec::new();
        for part in parts.iter_mut() {
            let naming = Naming::of(part, adapter);
            part.layers.visit_layers(&mut |path, layer| {
                let Some(trained) = new.of_layer(naming, path, &layer, generator)? else {
                    return Ok(());
                };
                targets.push(TargetLayer {
                    part: naming.part,
                    role: naming.role,
                    path: path.to_owned(),
                    has_large_kernel: has_large_kernel(layer.weight().dims()),
                    layer: trained.clone(),
                });
                attach_adapter(layer, trained);
                Ok(())
            })?;
        }
        for part in parts.iter_mut() {
            let naming = Naming::of(part, adapter);
            part.layers.visit_norms(&mut |path, norm| {
                let LayerMut::Norm(norm) = norm else { return Ok(()) };
                let Some(layer) = new.of_norm(naming, path, norm)? else {
                    return Ok(());
                };
                norm.adapters.push(layer.clone());
                targets.push(TargetLayer {
                    part: naming.part,
                    role: naming.role,
                    path: path.to_owned(),
                    has_large_kernel: false,
                    layer,
                });
                Ok(())
            })?;
        }
        let handle = new.handle;
        if targets.is_empty() {
            return Err(no_target());
        }
        Ok(Self { targets, index, handle })
    }

    /// Checks what [`Self::attach_as`] checks, and attaches nothing: the weights can be those of [`crate::families::load_without_weights`].
    ///
    /// # Errors
    /// When there is no target layer, the rank of the network is 0, or the type cannot be trained on the model.
    pub fn check(
        adapter: &dyn AdapterType,
        config: &AdapterConfig,
        ranks_file: Option<&AdapterFile>,
        parts: &mut [Part<'_>],
    ) -> Result<()> {
        check_config(adapter, config, parts)?;
        let index = index_layers(parts)?;
        let of_file = ranks_file.map(|file| ranks_of(file, &index)).transpose()?;
        let mut has_target = false;
        for part in parts.iter_mut() {
            let naming = Naming::of(part, adapter);
            part.layers.visit_layers(&mut |path, layer| {
                let (dims, has_bias) = (layer.weight().dims().to_vec(), layer.bias().is_some());
                has_target |= match config.target(naming, path, &dims, has_bias, of_file.as_ref()) {
                    Some(LayerTraining::Adapter(_)) => adapter.covers(naming.role, path),
                    Some(LayerTraining::Difference | LayerTraining::Whole) => true,
                    None => false,
                };
                Ok(())
            })?;
            part.layers.visit_norms(&mut |path, norm| {
                let LayerMut::Norm(norm) = norm else { return Ok(()) };
                has_target |= config.trains_norm(naming, path, norm.weight.dims(), norm.own_bias().is_some());
                Ok(())
            })?;
        }
        has_target.then_some(()).ok_or_else(no_target)
    }

    /// Shows the names of the tensors that the network of [`Self::attach_as`] would train, as [`Self::params`] has them, until `visit` returns
    /// `false`. Nothing is attached, and one adapter exists at a time: the weights can be those of [`crate::families::load_without_weights`].
    ///
    /// # Errors
    /// When the rank of the network is 0, or the type cannot be trained on the model.
    pub fn visit_tensor_names(
        adapter: &dyn AdapterType,
        config: &AdapterConfig,
        ranks_file: Option<&AdapterFile>,
        parts: &mut [Part<'_>],
        generator: &mut TorchGenerator,
        visit: &mut dyn FnMut(&str) -> bool,
    ) -> Result<()> {
        check_config(adapter, config, parts)?;
        let index = index_layers(parts)?;
        let new = NewTargets::new(adapter, config, ranks_file, &index)?;
        let mut continues = true;
        let mut show = |layer: &dyn TrainedLayer| {
            let mut names = layer.params().into_iter();
            names.all(|(suffix, _)| visit(&tensor_name(layer, suffix)))
        };
        for part in parts.iter_mut() {
            let naming = Naming::of(part, adapter);
            part.layers.visit_layers(&mut |path, layer| {
                if continues && let Some(trained) = new.of_layer(naming, path, &layer, generator)? {
                    continues = show(&*trained);
                }
                Ok(())
            })?;
            part.layers.visit_norms(&mut |path, norm| {
                let LayerMut::Norm(norm) = norm else { return Ok(()) };
                if continues && let Some(trained) = new.of_norm(naming, path, norm)? {
                    continues = show(&*trained);
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// The number of layers with an adapter.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.targets.len()
    }

    /// Whether a layer of a text encoder has an adapter.
    #[must_use]
    pub fn covers_text_encoder(&self) -> bool {
        self.targets.iter().any(|e| e.role == PartRole::TextEncoder)
    }

    /// The adapter of each layer, by part and path.
    pub(super) fn layers_by_path(&self) -> BTreeMap<(&str, &str), &Arc<dyn TrainedLayer>> {
        let targets = self.targets.iter();
        targets
            .map(|target| ((target.part, &*target.path), &target.layer))
            .collect()
    }

    /// The trained parameters in a fixed order: for each layer its own, with the names that files have for them.
    #[must_use]
    pub fn params(&self) -> Vec<Param> {
        let of = |layer: &Arc<dyn TrainedLayer>| -> Vec<Param> {
            let params = layer.params().into_iter();
            params
                .map(|(suffix, var)| Param {
                    name: tensor_name(&**layer, suffix),
                    var: var.clone(),
                })
                .collect()
        };
        self.targets.iter().flat_map(|target| of(&target.layer)).collect()
    }

    /// Makes the changes smaller whose norm is above `max` (`scale_weight_norms`).
    ///
    /// # Errors
    /// When the device fails, or the type of adapter has no such limit.
    pub fn limit_norms(&self, max: f64) -> Result<()> {
        for target in &self.targets {
            target.layer.limit_norm(max)?;
        }
        Ok(())
    }

    /// The tensors of an adapter file: weights and, where its names have them, alphas, in `dtype`, on the CPU. An alpha that the dtype would
    /// round is in float32, because it scales the whole layer.
    ///
    /// # Errors
    /// When the device fails.
    pub fn tensors(&self, dtype: DType) -> Result<BTreeMap<String, Tensor>> {
        let mut out = BTreeMap::new();
        for TargetLayer { layer, .. } in &self.targets {
            for (suffix, tensor) in layer.saved()? {
                let tensor = match suffix == "alpha" && is_rounded(&tensor, dtype)? {
                    true => tensor,
                    false => tensor.to_dtype(dtype)?,
                };
                out.insert(format!("{}.{suffix}", layer.name()), tensor.to_device(&Device::Cpu)?);
            }
        }
        Ok(out)
    }

    /// Loads the weights of a file of any dialect of the network's type. A LoRA of another rank is padded or cut. Any other
    /// difference in shape is an error.
    ///
    /// # Errors
    /// When a shape does not match, the file has another type of adapter, or no layer of the file is a target.
    pub fn load(&self, file: &AdapterFile) -> Result<LoadReport> {
        let (mut resolved, unknown) = file.resolve(&self.index)?;
        let mut report = LoadReport {
            unknown,
            ..LoadReport::default()
        };
        let mut updates: Vec<(&Var, Tensor)> = Vec::new();
        for target in &self.targets {
            let Some(tensors) = resolved.remove(&(target.part, target.path.clone())) else {
                report.missing.push(target.layer.name().to_owned());
                continue;
            };
            let found = target
                .layer
                .values(&*tensors)
                .map_err(|reason| EngineError::WeightsFile {
                    path: file.path.clone(),
                    reason: format!(
                        "layer `{}`: {reason}{}",
                        target.layer.name(),
                        file.origin()
                            .map_or_else(String::new, |origin| format!("; it was made for {origin}"))
                    ),
                })?;
            report.resized += usize::from(found.resized);
            report.other_strengths += usize::from(found.other_strength.is_some());
            report.first_other_strength = report.first_other_strength.or(found.other_strength);
            report.loaded += 1;
            updates.extend(found.values);
        }
        if report.loaded == 0 {
            return Err(EngineError::WeightsFile {
                path: file.path.clone(),
                reason: format!(
                    "none of its layers is trained by this job: it was made for {}",
                    file.origin().unwrap_or_else(|| "another model or network".into())
                ),
            });
        }
        report
            .unknown
            .extend(resolved.into_keys().map(|(part, path)| format!("{part}.{path}")));
        for (var, value) in updates {
            var.set(&value.contiguous()?)?;
        }
        Ok(report)
    }

    /// The number of convolutions with a kernel above 1x1.
    #[must_use]
    pub fn convolutions(&self) -> usize {
        self.targets.iter().filter(|target| target.has_large_kernel).count()
    }
}
