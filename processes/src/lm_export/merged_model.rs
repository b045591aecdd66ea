//! A language model whose weights stay in their files, with the changes of LoRAs.

use super::super::language_model_part::load_language_model_changes;
use crate::adapters::{LoadedAdapter, LoadedChanges, WeightAdapter, is_finite};
use crate::error::{EngineError, Result};
use crate::models::causal_lm::{CausalLm, CausalLmOptions};
use crate::weights::Weight;
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A model and what LoRAs add to its weights.
pub(super) struct MergedModel {
    /// The model without the LoRAs. Its output layer is one of its own if a LoRA changes the table of embeddings.
    pub(super) decoder: CausalLm,
    /// The LoRAs, as they were loaded.
    pub(super) loras: Vec<LoadedAdapter>,
    /// Whether the table of embeddings is no longer the output layer too, because a LoRA changes it.
    pub(super) is_untied: bool,
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
            is_untied: false,
            adapters: BTreeMap::new(),
            vectors: BTreeMap::new(),
        };
        for (path, strength) in loras {
            model.add_lora(path, *strength)?;
        }
        // A LoRA of the table changes the vectors of tokens and not the output layer.
        if model.adapters.contains_key(&model.decoder.embedding_name()) && model.decoder.untie_output() {
            model.is_untied = true;
            model.tensors = model.decoder.tensors()?.into_iter().collect();
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

/// Checks that all numbers of a float32 tensor are finite, also after they are rounded to `dtype`.
///
/// # Errors
/// When a number is NaN or infinite, or too large for `dtype`.
pub(super) fn check_range(name: &str, tensor: &Tensor, dtype: DType) -> Result<()> {
    if tensor.elem_count() == 0 {
        return Ok(());
    }
    if !is_finite(tensor)? {
        return Err(EngineError::bad_input(format!(
            "`{name}` has numbers that are not finite (NaN or infinite): the weights of the model or of a LoRA are damaged"
        )));
    }
    if is_finite(&tensor.to_dtype(dtype)?)? {
        return Ok(());
    }
    let largest = tensor.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
    let larger_formats = match dtype {
        DType::F16 => "`save.dtype: bf16` or `f32`",
        _ => "`save.dtype: f32`",
    };
    Err(EngineError::bad_input(format!(
        "`{name}` has a number of the size {largest}, which is too large for {dtype:?}: use {larger_formats}"
    )))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn numbers_that_a_format_does_not_have_are_refused() {
        let check = |numbers: &[f32], dtype: DType| {
            let tensor = Tensor::new(numbers, &Device::Cpu).unwrap();
            check_range("w", &tensor, dtype).map_err(|error| error.to_string())
        };
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            assert_eq!(check(&[0.5, -65_504.0, 1e-30], dtype), Ok(()), "{dtype:?}");
            for wrong in [[1.0, f32::NAN], [f32::NAN, 1.0], [f32::NEG_INFINITY, 1.0]] {
                let message = check(&wrong, dtype).unwrap_err();
                assert!(message.contains("`w`") && message.contains("not finite"), "{message}");
            }
        }
        let message = check(&[1.0, -70_000.0], DType::F16).unwrap_err();
        assert!(message.contains("70000") && message.contains("bf16"), "{message}");
        assert_eq!(check(&[70_000.0], DType::BF16), Ok(()));
        // The largest number of f32 is rounded to infinity in bfloat16.
        let message = check(&[f32::MAX], DType::BF16).unwrap_err();
        assert!(message.contains("`save.dtype: f32`"), "{message}");
        assert_eq!(check(&[f32::MAX], DType::F32), Ok(()));
        assert_eq!(check(&[], DType::F16), Ok(()));
    }
}
