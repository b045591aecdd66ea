//! The trainable network of a model: its target layers, saving and loading. The types of adapters are in files of their own.

use super::adapter_config::{AdapterConfig, LayerTraining, Naming, has_large_kernel};
use super::adapter_file::AdapterFile;
use super::difference::{DenseLayer, Difference};
use super::handle::AdapterHandle;
use super::load::{attach_adapter, index_layers};
use super::lora::Lora;
use super::names::{LayerIndex, LayerKey};
use super::ranks::{Rank, ranks_of};
use super::trained_layer::{AdapterType, NewLayer, TrainedLayer};
use super::whole_layer::{PREFIX, Whole};
use crate::error::{EngineError, Result};
use crate::families::{AdapterNames, Part, PartRole};
use crate::nn::{LayerMut, NormParams};
use crate::optim::Param;
use crate::rng::TorchGenerator;
use crate::weights::Weight;
use candle_core::{DType, Device, Tensor, Var};
use std::collections::BTreeMap;
use std::sync::Arc;

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
        let name = match target {
            Some(LayerTraining::Whole) => format!("{PREFIX}{path}"),
            _ => naming.saved_name(path),
        };
        let new = self.new_layer(name, naming, (weight, bias), Rank { rank, alpha });
        Ok(Some(adapter.create(new, generator)?))
    }

    /// What an adapter is made of.
    fn new_layer<'b>(
        &'b self,
        name: String,
        naming: Naming,
        (weight, bias): (&'b Weight, Option<&'b Tensor>),
        Rank { rank, alpha }: Rank,
    ) -> NewLayer<'b> {
        NewLayer {
            name,
            names: naming.names,
            weight,
            bias,
            dims: weight.dims(),
            device: weight.device(),
            rank,
            alpha,
            dropout: self.config.dropout,
            tucker: self.config.tucker,
            rank_stabilised: self.config.rank_stabilised,
            scalar: self.config.scalar,
            handle: &self.handle,
        }
    }

    /// The adapter of an embedding layer; `None` if it is not a target.
    fn of_embedding(
        &self,
        naming: Naming,
        path: &str,
        layer: &LayerMut<'_>,
        generator: &mut TorchGenerator,
    ) -> Result<Option<Arc<dyn TrainedLayer>>> {
        let weight = layer.weight();
        let target = self.config.embedding_target(naming, path, weight.dims());
        let Some(rank) = target.filter(|_| self.adapter.covers_embeddings()) else {
            return Ok(None);
        };
        let new = self.new_layer(naming.saved_name(path), naming, (weight, None), rank);
        Ok(Some(self.adapter.create_embedding(new, generator)?))
    }

    /// The difference of a norm; `None` if it is not a target.
    fn of_norm(&self, naming: Naming, path: &str, norm: &NormParams) -> Result<Option<Arc<DenseLayer>>> {
        let (weight, bias) = (&norm.weight, norm.own_bias());
        let dims = weight.dims();
        if !self.config.trains_norm(naming, path, dims, bias.is_some()) {
            return Ok(None);
        }
        let whole = Rank { rank: 1, alpha: 1.0 };
        let layer = DenseLayer::zeros(self.new_layer(naming.saved_name(path), naming, (weight, bias), whole))?;
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
        // After the layers, so that the numbers that are drawn for these do not depend on them.
        for part in parts.iter_mut() {
            let naming = Naming::of(part, adapter);
            part.layers.visit_embeddings(&mut |path, layer| {
                let Some(trained) = new.of_embedding(naming, path, &layer, generator)? else {
                    return Ok(());
                };
                targets.push(TargetLayer {
                    part: naming.part,
                    role: naming.role,
                    path: path.to_owned(),
                    has_large_kernel: false,
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
            part.layers.visit_embeddings(&mut |path, layer| {
                let target = config.embedding_target(naming, path, layer.weight().dims());
                has_target |= target.is_some() && adapter.covers_embeddings();
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
            part.layers.visit_embeddings(&mut |path, layer| {
                if continues && let Some(trained) = new.of_embedding(naming, path, &layer, generator)? {
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
