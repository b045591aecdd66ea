//! A language model whose weights stay in their files, with the changes of LoRAs.

use super::super::language_model_part::load_language_model_lora;
use crate::adapters::LoadedAdapter;
use crate::error::{EngineError, Result};
use crate::models::causal_lm::{CausalLm, CausalLmOptions};
use crate::nn::{LayerMut, LowRank, VisitLayers as _};
use crate::weights::Weight;
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A model and what LoRAs add to its weights.
pub(super) struct MergedModel {
    /// The model without the LoRAs.
    pub(super) decoder: CausalLm,
    /// The LoRAs, as they were loaded.
    pub(super) loras: Vec<LoadedAdapter>,
    tensors: BTreeMap<String, Weight>,
    /// What is added, by the name of the tensor.
    changes: BTreeMap<String, Vec<LowRank>>,
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
            changes: BTreeMap::new(),
        };
        for (path, strength) in loras {
            model.add_lora(path, *strength)?;
        }
        Ok(model)
    }

    fn add_lora(&mut self, path: &Path, strength: f64) -> Result<()> {
        // Adapters are attached to a copy, which shares all weights.
        let mut adapted = self.decoder.clone();
        let loaded = load_language_model_lora(&mut adapted, path, strength)?;
        let changes = &mut self.changes;
        let refuse = |name: &str| {
            EngineError::bad_input(format!(
                "{}: its adapter of `{name}` is not a LoRA (DoRA, LoKr and others are not merged yet): merge it with peft, or use a LoRA",
                path.display()
            ))
        };
        adapted.visit_layers(&mut |name, layer| {
            let LayerMut::Linear(layer) = layer else {
                return Ok(());
            };
            for adapter in &layer.adapters {
                // Without strength there is no change.
                if strength != 0.0 {
                    let change = adapter.low_rank().ok_or_else(|| refuse(name))?;
                    changes.entry(format!("{name}.weight")).or_default().push(change);
                }
            }
            Ok(())
        })?;
        adapted.visit_norms(&mut |name, layer| match layer {
            LayerMut::Norm(norm) if !norm.adapters.is_empty() => Err(refuse(name)),
            _ => Ok(()),
        })?;
        self.loras.push(loaded);
        Ok(())
    }

    /// The number of tensors.
    pub(super) fn len(&self) -> usize {
        self.tensors.len()
    }

    /// A tensor of the merged model by transformers' name, in f32. A sum is computed in f32.
    ///
    /// # Errors
    /// When it cannot be read.
    pub(super) fn tensor(&self, name: &str) -> Result<Tensor> {
        let weight = self.tensors.get(name);
        let weight = weight.ok_or_else(|| EngineError::Internal(format!("`{name}` is missing")))?;
        let mut sum = weight.dense()?.to_dtype(DType::F32)?;
        for LowRank { down, up, scale } in self.changes.get(name).into_iter().flatten() {
            let product = up
                .detach()
                .to_dtype(DType::F32)?
                .matmul(&down.detach().to_dtype(DType::F32)?)?;
            sum = (sum + (product * *scale)?)?;
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
