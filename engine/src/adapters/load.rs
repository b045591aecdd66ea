//! Puts a LoRA file on a model.

use super::file::{LoraFile, LoraTensors};
use super::keys::{Component, LayerIndex, saved_name};
use super::layer::{LoraHandle, LoraLayer, Multiplier, Shape};
use crate::error::{EngineError, Result};
use crate::nn::{LayerMut, VisitLayers};
use candle_core::{Device, Tensor, Var};
use std::path::Path;
use std::sync::Arc;

/// A LoRA that is on a model now.
#[derive(Debug)]
pub struct LoadedLora {
    /// Changes its strength at any time.
    pub multiplier: Multiplier,
    /// How many layers it changes.
    pub layers: usize,
    /// Names in the file that fit nothing in this model: ignored, worth a warning.
    pub unknown: Vec<String>,
}

/// Loads a LoRA file and hooks it into the layers of `parts`, each a component and its model.
///
/// # Errors
/// When the file is damaged or of another kind, a shape does not fit its layer, or no name fits this model.
pub fn load_lora(parts: &mut [(Component, &mut dyn VisitLayers)], path: &Path, multiplier: f64) -> Result<LoadedLora> {
    let file = LoraFile::open(path)?;
    let index = index_of(parts)?;
    let (mut found, unknown) = file.resolve(&index);
    if found.is_empty() {
        return Err(EngineError::WeightsFile {
            path: file.path,
            reason: format!(
                "none of its {} layers is in this model (the first is `{}`): it was made for another model family",
                file.modules.len(),
                file.modules.first().map_or("", |m| m.stem.as_str())
            ),
        });
    }
    let handle = LoraHandle::new(multiplier);
    let layers = found.len();
    for (component, model) in parts.iter_mut() {
        model.visit_layers(&mut |name, mut layer| {
            let Some(tensors) = found.remove(&(*component, name.to_owned())) else {
                return Ok(());
            };
            let lora = place(&mut layer, saved_name(*component, name), tensors, &handle).map_err(|reason| {
                EngineError::WeightsFile {
                    path: file.path.clone(),
                    reason: format!("layer `{name}`: {reason}"),
                }
            })?;
            push(layer, Arc::new(lora));
            Ok(())
        })?;
    }
    Ok(LoadedLora {
        multiplier: handle.multiplier.clone(),
        layers,
        unknown,
    })
}

/// All layers of a model by name.
pub(super) fn index_of(parts: &mut [(Component, &mut dyn VisitLayers)]) -> Result<LayerIndex> {
    let mut index = LayerIndex::default();
    for (component, model) in parts.iter_mut() {
        let mut paths = Vec::new();
        model.visit_layers(&mut |name, _| {
            paths.push(name.to_owned());
            Ok(())
        })?;
        index.add(*component, &paths);
    }
    Ok(index)
}

/// Appends an adapter to a layer.
pub(super) fn push(layer: LayerMut<'_>, adapter: Arc<LoraLayer>) {
    match layer {
        LayerMut::Linear(l) => l.adapters.push(adapter),
        LayerMut::Conv2d(c) => c.adapters.push(adapter),
    }
}

/// Kind, weight dims and device of a layer.
pub(super) fn facts(layer: &LayerMut<'_>) -> (Shape, Vec<usize>, Device) {
    match layer {
        LayerMut::Linear(l) => (Shape::Linear, l.weight.dims().to_vec(), l.weight.device().clone()),
        LayerMut::Conv2d(c) => (
            Shape::Conv {
                stride: c.stride,
                padding: c.padding,
            },
            c.weight.dims().to_vec(),
            c.weight.device().clone(),
        ),
    }
}

/// The tensors as this layer needs them: files write linear layers as 1x1 convolutions and the other way round.
fn place(
    layer: &mut LayerMut<'_>,
    name: String,
    tensors: LoraTensors,
    handle: &Arc<LoraHandle>,
) -> std::result::Result<LoraLayer, String> {
    let (shape, dims, device) = facts(layer);
    let rank = tensors.down.dims()[0];
    let fit = |t: &Tensor, want: &[usize]| -> std::result::Result<Var, String> {
        let squeezed = |d: &[usize]| d.iter().copied().filter(|n| *n != 1).collect::<Vec<_>>();
        if squeezed(t.dims()) != squeezed(want) {
            return Err(format!("the file has {:?}, the model needs {want:?}", t.dims()));
        }
        let t = t
            .reshape(want)
            .and_then(|t| t.to_device(&device))
            .map_err(|e| e.to_string())?;
        Var::from_tensor(&t).map_err(|e| e.to_string())
    };
    let kernel: Vec<usize> = dims[2..].to_vec();
    let ones = vec![1usize; kernel.len()];
    let wanted = |out: usize, inp: usize, k: &[usize]| [&[out, inp], k].concat();
    let down_kernel = if tensors.mid.is_some() { &ones } else { &kernel };
    let down = fit(&tensors.down, &wanted(rank, dims[1], down_kernel))?;
    let up = fit(&tensors.up, &wanted(dims[0], rank, &ones))?;
    let mid = match &tensors.mid {
        Some(mid) => Some(fit(mid, &wanted(rank, rank, &kernel))?.as_detached_tensor()),
        None => None,
    };
    let alpha = tensors.alpha.unwrap_or(rank as f64) * tensors.scalar;
    Ok(LoraLayer {
        name,
        down,
        up,
        mid,
        alpha,
        dropout: 0.0,
        shape,
        handle: handle.clone(),
    })
}
