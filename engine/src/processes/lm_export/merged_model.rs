//! A language model whose weights stay in their files, with the changes of LoRAs.

use super::super::language_model_part::load_language_model_changes;
use crate::adapters::{LoadedAdapter, LoadedChanges, WeightAdapter};
use crate::error::{EngineError, Result};
use crate::models::causal_lm::{CausalLm, CausalLmOptions};
use crate::weights::Weight;
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A model and what LoRAs add to its weights.
pub(super) struct MergedModel {
    /// The model without the LoRAs.
    pub(super) decoder: CausalLm,
    /// The LoRAs, as they were loaded.
    pub(super) loras: Vec<LoadedAdapter>,
    tensors: BTreeMap<String, Weight>,
    /// What changes weights, by the name of the tensor.
    adapters: BTreeMap<String, Vec<Arc<dyn WeightAdapter>>>,
    /// What is added to biases and to the weights of norms, by the name of the tensor.
    vectors: BTreeMap<String, Vec<Tensor>>,
}

impl MergedModel {
    /// Opens a model folder and LoRAs for it, each with its strength. `shapes_only`: no weight of the model is read.
    ///
    /// # Errors
    /// When one of them cannot be used, or a LoRA cannot be merged.
    pub(super) fn open(folder: &Path, loras: &[(PathBuf, f64)], shapes_only: bool) -> Result<Self> {
        let options = CausalLmOptions {
            streamed: if shapes_only { 0.0 } else { 1.0 },
            shapes_only,
            ..CausalLmOptions::cpu()
        };
        let decoder = CausalLm::load(folder, &options)?;
        let mut model = Self {
            tensors: decoder.tensors()?.into_iter().collect(),
            decoder,
            loras: Vec::new(),
            adapters: BTreeMap::new(),
            vectors: BTreeMap::new(),
        };
        for (path, strength) in loras {
            model.add_lora(path, *strength)?;
        }
        Ok(model)
    }

    fn add_lora(&mut self, path: &Path, strength: f64) -> Result<()> {
        let LoadedChanges { file, layers, norms } = load_language_model_changes(&mut self.decoder, path, strength)?;
        self.loras.push(file);
        // Without strength there is no change.
        if strength == 0.0 {
            return Ok(());
        }
        for (name, adapter) in layers {
            if let Some(change) = adapter.bias_change()? {
                self.add_vector(path, format!("{name}.bias"), change)?;
            }
            self.adapters.entry(format!("{name}.weight")).or_default().push(adapter);
        }
        for (name, adapter) in norms {
            for (suffix, change) in ["weight", "bias"].into_iter().zip(adapter.changes()?) {
                if let Some(change) = change {
                    self.add_vector(path, format!("{name}.{suffix}"), change.detach())?;
                }
            }
        }
        Ok(())
    }

    /// Adds a vector to a tensor of the model.
    fn add_vector(&mut self, path: &Path, name: String, change: Tensor) -> Result<()> {
        if !self.tensors.contains_key(&name) {
            return Err(EngineError::bad_input(format!(
                "{}: it changes `{name}`, which this model does not have",
                path.display()
            )));
        }
        self.vectors.entry(name).or_default().push(change);
        Ok(())
    }

    /// The number of tensors.
    pub(super) fn len(&self) -> usize {
        self.tensors.len()
    }

    /// A tensor of the merged model by transformers' name, in f32. A sum is computed in f32. Each LoRA changes the weight of the model without
    /// the others.
    ///
    /// # Errors
    /// When it cannot be read.
    pub(super) fn tensor(&self, name: &str) -> Result<Tensor> {
        let weight = self.tensors.get(name);
        let weight = weight.ok_or_else(|| EngineError::Internal(format!("`{name}` is missing")))?;
        // The changes come first: while they are computed, the weight is in memory for them alone.
        let mut change: Option<Tensor> = None;
        for adapter in self.adapters.get(name).into_iter().flatten() {
            let other = adapter.change(weight)?;
            change = Some(match change {
                Some(change) => (change + other)?,
                None => other,
            });
        }
        let mut sum = weight.dense()?.to_dtype(DType::F32)?;
        if let Some(change) = change {
            sum = (sum + change)?;
        }
        for vector in self.vectors.get(name).into_iter().flatten() {
            sum = (sum + vector)?;
        }
        Ok(sum)
    }
}

/// Checks that a number format has all numbers of a tensor.
///
/// # Errors
/// When one is not finite in it.
pub(super) fn check_range(name: &str, tensor: &Tensor, dtype: DType) -> Result<()> {
    if tensor.elem_count() == 0 {
        return Ok(());
    }
    let largest = tensor.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
    let limit = match dtype {
        DType::F16 => half::f16::MAX.to_f32(),
        _ => f32::MAX,
    };
    match largest <= limit {
        true => Ok(()),
        false => Err(EngineError::bad_input(format!(
            "`{name}` has a number of the size {largest}, which {dtype:?} does not have: use `save.dtype: bf16` or `f32`"
        ))),
    }
}
