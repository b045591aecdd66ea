//! Merges a trained network into the layers that it changes, and starts it anew (`train.merge_network_on_save`).

use super::handle::AdapterPass;
use super::network::AdapterNetwork;
use crate::error::{EngineError, Result};
use crate::families::Part;
use crate::nn::LayerMut;
use crate::quant::Quantized;
use crate::weights::Weight;
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;
use std::sync::Arc;

impl AdapterNetwork {
    /// Checks that the network can be merged into the layers of `parts`. Call this before training.
    ///
    /// # Errors
    /// When its type cannot start anew, or a layer's weight is quantised.
    pub fn check_mergeable(&self, parts: &mut [Part<'_>]) -> Result<()> {
        if let Some(layer) = self.layers_by_path().values().find(|layer| layer.zeroed().is_none()) {
            return Err(EngineError::bad_input(format!(
                "train.merge_network_on_save: the type of the network cannot start anew (layer `{}`): use `network.type: lora`",
                layer.name()
            )));
        }
        self.visit_targets(parts, |name, layer, _| match layer.weight() {
            Weight::Quantized(quantized) if !is_half(quantized) => Err(EngineError::bad_input(format!(
                "train.merge_network_on_save: the weight of `{name}` is quantised ({}), and most of a LoRA's change would be rounded \
                 away: use a model that is not quantised, or turn the key off",
                quantized.kind()
            ))),
            _ => Ok(()),
        })
    }

    /// Adds the network's changes, times `strength`, to the layers of `parts`, and starts the network anew: then it changes nothing.
    /// Layers that are trained themselves get their weights, whatever the strength, and go on from there.
    /// A sum is computed in float32 and rounded once to the dtype of the layer. Layers without a change keep their bits. Returns the
    /// number of changed layers.
    ///
    /// # Errors
    /// When the device fails.
    pub fn merge(&self, parts: &mut [Part<'_>], strength: f64) -> Result<usize> {
        let mut merged = 0;
        self.visit_targets(parts, |_, mut layer, adapter| {
            if let Some((weight, bias)) = adapter.replacement() {
                let dtype = layer.weight().dtype();
                layer.set_weight(weight.to_dtype(dtype)?);
                if let Some(bias) = bias {
                    layer.set_bias(bias.to_dtype(dtype)?);
                }
                return Ok(());
            }
            let pass = AdapterPass::inference(1.0);
            let (weight, bias) = self.handle.in_pass(pass, || {
                Ok::<_, EngineError>((adapter.change(layer.weight())?, adapter.bias_change()?))
            })?;
            let has_weight = !is_zero(&weight)?;
            let bias = match bias {
                Some(bias) if !is_zero(&bias)? => Some(bias),
                _ => None,
            };
            if has_weight {
                let sum = sum(&layer.weight().dense()?, &weight, strength)?;
                layer.set_weight(sum);
            }
            if let (Some(change), Some(base)) = (&bias, layer.bias()) {
                let sum = sum(base, change, strength)?;
                layer.set_bias(sum);
            }
            // The others keep their values: a LoCon with both `scalar` and `up` at zero would get no gradients.
            if has_weight || bias.is_some() {
                merged += 1;
                for var in adapter.zeroed().into_iter().flatten() {
                    var.set(&var.zeros_like()?)?;
                }
            }
            Ok(())
        })?;
        Ok(merged)
    }

    /// Whether the network changes nothing: it is new, or it started anew.
    ///
    /// # Errors
    /// When the device fails.
    pub fn changes_nothing(&self) -> Result<bool> {
        for layer in self.layers_by_path().values() {
            // A trained number that multiplies the change is zero at first, beside matrices that are not.
            let scalar = layer.params().into_iter().find(|(name, _)| *name == "scalar");
            if let Some((_, scalar)) = scalar
                && is_zero(&scalar.as_detached_tensor())?
            {
                continue;
            }
            for var in layer.zeroed().into_iter().flatten() {
                if !is_zero(&var.as_detached_tensor())? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// The weights and biases of its layers without the network, by part and name: `unet.conv_in.weight`.
    ///
    /// # Errors
    /// When a weight cannot be read.
    pub fn base_tensors(&self, parts: &mut [Part<'_>]) -> Result<BTreeMap<String, Tensor>> {
        let mut tensors = BTreeMap::new();
        self.visit_targets(parts, |name, layer, adapter| {
            tensors.insert(format!("{name}.weight"), layer.weight().dense()?);
            if let Some(bias) = layer.bias().filter(|_| adapter.changes_bias()) {
                tensors.insert(format!("{name}.bias"), bias.clone());
            }
            Ok(())
        })?;
        Ok(tensors)
    }

    /// Sets the weights and biases of its layers, by the names of [`Self::base_tensors`].
    ///
    /// # Errors
    /// When one is missing or has another shape. Then no layer is changed.
    pub fn set_base_tensors(&self, parts: &mut [Part<'_>], tensors: &BTreeMap<String, Tensor>) -> Result<()> {
        let find = |name: String, dims: &[usize]| match tensors.get(&name) {
            Some(tensor) if tensor.dims() == dims => Ok(tensor),
            Some(tensor) => Err(EngineError::bad_input(format!(
                "its merged `{name}` has the shape {:?}, the model needs {dims:?}",
                tensor.dims()
            ))),
            None => Err(EngineError::bad_input(format!(
                "it has no merged `{name}`, which this network changes"
            ))),
        };
        for set in [false, true] {
            self.visit_targets(parts, |name, mut layer, adapter| {
                let weight = find(format!("{name}.weight"), layer.weight().dims())?;
                let bias = layer.bias().filter(|_| adapter.changes_bias());
                let bias =
                    bias.map(|bias| Ok::<_, EngineError>((find(format!("{name}.bias"), bias.dims())?, bias.dtype())));
                let bias = bias.transpose()?;
                if set {
                    let (dtype, device) = (layer.weight().dtype(), layer.weight().device().clone());
                    layer.set_weight(weight.to_device(&device)?.to_dtype(dtype)?.contiguous()?);
                    if let Some((bias, dtype)) = bias {
                        layer.set_bias(bias.to_device(&device)?.to_dtype(dtype)?.contiguous()?);
                    }
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Calls `f` with the name, the layer and the adapter of every target in `parts`.
    fn visit_targets(
        &self,
        parts: &mut [Part<'_>],
        mut f: impl FnMut(&str, LayerMut<'_>, &Arc<dyn super::TrainedLayer>) -> Result<()>,
    ) -> Result<()> {
        let layers = self.layers_by_path();
        for part in parts.iter_mut() {
            let id = part.id;
            let mut visit = |path: &str, layer: LayerMut<'_>| match layers.get(&(id, path)) {
                Some(adapter) => f(&format!("{id}.{path}"), layer, adapter),
                None => Ok(()),
            };
            part.layers.visit_layers(&mut visit)?;
            part.layers.visit_embeddings(&mut visit)?;
            part.layers.visit_norms(&mut visit)?;
        }
        Ok(())
    }
}

/// The sum of a weight and a change, in the dtype of the weight.
fn sum(base: &Tensor, change: &Tensor, strength: f64) -> Result<Tensor> {
    let base = base.detach();
    let change = (change.reshape(base.shape())? * strength)?;
    Ok((base.to_dtype(DType::F32)? + change)?.to_dtype(base.dtype())?)
}

fn is_zero(tensor: &Tensor) -> Result<bool> {
    if tensor.elem_count() == 0 {
        return Ok(true);
    }
    Ok(tensor.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()? == 0.0)
}

/// Whether a weight is kept in 16-bit floats, which a CPU widens at each use.
fn is_half(quantized: &Quantized) -> bool {
    matches!(quantized.kind(), "bf16" | "f16")
}
