//! What a file of any type of adapter holds for one layer.

use super::handle::AdapterHandle;
use super::keys::TensorRole;
use super::lora::LoraTensors;
use super::names::NamedLayers;
use super::weight_adapter::WeightAdapter;
use crate::families::AdapterNames;
use crate::nn::NormAdapter;
use crate::weights::Weight;
use candle_core::{Result, Tensor};
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;

/// The tensors that a file has for one layer, float32 on the CPU.
#[derive(Clone, Debug, Default)]
pub(super) struct RoleTensors {
    pub(super) tensors: BTreeMap<TensorRole, Tensor>,
    /// Those of a single number.
    pub(super) numbers: BTreeMap<TensorRole, f64>,
    /// The alpha and the rank that peft's `adapter_config.json` has for it, if that is of a LoKr or LoHa.
    pub(super) peft: Option<[f64; 2]>,
}

impl RoleTensors {
    /// The tensor of this role.
    pub(super) fn get(&self, role: TensorRole) -> Option<Tensor> {
        self.tensors.get(&role).cloned()
    }

    /// The alpha of the layer.
    pub(super) fn alpha(&self) -> Option<f64> {
        self.numbers.get(&TensorRole::Alpha).copied()
    }
}

/// A layer of the model that gets an adapter from a file.
pub struct Site<'a> {
    /// The name of the layer in saved files.
    pub name: String,
    /// How saved files name its tensors.
    pub names: AdapterNames,
    /// Its weight.
    pub weight: &'a Weight,
    /// The strength of the adapters of this file.
    pub(super) handle: &'a Arc<AdapterHandle>,
}

/// What a file holds for one layer: one implementation for each type of adapter. Errors are the end of a sentence that begins with
/// the name of the layer.
pub trait FileLayer: Debug + Send + Sync {
    /// The type of adapter, for messages: `LoRA`.
    fn kind(&self) -> &'static str;

    /// The number of outputs of the layer that it changes.
    fn outputs(&self) -> usize;

    /// The number of inputs of the layer that it changes, if that is a linear layer.
    fn inputs(&self) -> usize;

    /// Whether its strength is in no tensor of the file, where files of this type may have it.
    fn lacks_alpha(&self) -> bool;

    /// The adapters of the layers that the name in the file stands for, with their alpha. `metadata_alpha` is the alpha that the
    /// metadata of the file have for a rank.
    ///
    /// # Errors
    /// When an operation fails.
    fn split(
        &self,
        named: &NamedLayers,
        metadata_alpha: &dyn Fn(f64) -> Option<f64>,
    ) -> Result<Vec<Arc<dyn FileLayer>>>;

    /// The adapter for a layer.
    ///
    /// # Errors
    /// When the shapes do not match.
    fn adapter(&self, site: Site<'_>) -> std::result::Result<Arc<dyn WeightAdapter>, String>;

    /// The adapter for an embedding layer, whose weight is [count, width].
    ///
    /// # Errors
    /// When it is of a type that embedding layers do not have, or the shapes do not match.
    fn embedding_adapter(&self, site: Site<'_>) -> std::result::Result<Arc<dyn WeightAdapter>, String> {
        let _ = site;
        Err(format!(
            "the file has a {} of it, which is an embedding layer: only LoRAs and DoRAs of such layers can be used, with peft's names \
             (`lora_embedding_A`, `lora_embedding_B`)",
            self.kind()
        ))
    }

    /// The adapter for a norm.
    ///
    /// # Errors
    /// When it is of a type that norms do not have, or the shapes do not match.
    fn norm_adapter(&self, site: Site<'_>, has_bias: bool) -> std::result::Result<Arc<dyn NormAdapter>, String> {
        let _ = (site, has_bias);
        Err(format!(
            "the file has a {} of a norm; for norms only whole differences can be used",
            self.kind()
        ))
    }

    /// Its tensors but those of a LoRA ([`Self::lora`]), by the suffixes that files have for them.
    ///
    /// # Errors
    /// When the file has them for several layers of the model together.
    fn tensors(&self) -> std::result::Result<Vec<(&'static str, Tensor)>, String>;

    /// The LoRA that it is, or that a DoRA has.
    fn lora(&self) -> Option<&LoraTensors> {
        None
    }

    /// The implementation, for a training that starts from a file.
    fn as_any(&self) -> &dyn Any;
}

/// Reads the tensors of a layer. `None`: they are of another type of adapter.
pub(super) type Reader = fn(&RoleTensors) -> Option<std::result::Result<Arc<dyn FileLayer>, String>>;

/// A layer by its name in the file.
#[derive(Clone, Debug)]
pub struct AdapterModule {
    /// The key without its suffix.
    pub stem: String,
    /// The tensors of the layer.
    pub tensors: Arc<dyn FileLayer>,
}
