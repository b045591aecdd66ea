//! A magnitude in a file, beside the tensors of another type of adapter.

use super::super::file_layer::{FileLayer, Reader, RoleTensors, Site};
use super::super::handle::AdapterHandle;
use super::super::keys::TensorRole;
use super::super::loha::LohaTensors;
use super::super::lokr::LokrTensors;
use super::super::lora::LoraTensors;
use super::super::lora::{read_lora, read_lora_embedding};
use super::super::names::NamedLayers;
use super::super::weight_adapter::WeightAdapter;
use super::layer::{DecomposedLayer, Formula};
use super::norms::Axis;
use candle_core::{Result, Tensor, Var};
use std::any::Any;
use std::sync::{Arc, Mutex};

/// The types of adapters that a DoRA normalises.
const INNER_READERS: [Reader; 4] = [read_lora, read_lora_embedding, LokrTensors::read, LohaTensors::read];

/// A magnitude and the adapter that it belongs to.
#[derive(Clone, Debug)]
pub(super) struct DecomposedTensors {
    pub(super) inner: Arc<dyn FileLayer>,
    /// As in the file.
    pub(super) magnitude: Tensor,
    pub(super) formula: Formula,
}

/// Reads the tensors of a layer that has a magnitude. `None`: it has none.
pub(in super::super) fn read_decomposed(
    found: &RoleTensors,
) -> Option<std::result::Result<Arc<dyn FileLayer>, String>> {
    let (role, formula) = [
        (TensorRole::Magnitude, Formula::Peft),
        (TensorRole::DoraScale, Formula::Lycoris),
    ]
    .into_iter()
    .find(|(role, _)| found.tensors.contains_key(role))?;
    let magnitude = found.get(role)?;
    let mut others = found.clone();
    others.tensors.remove(&role);
    if others.tensors.contains_key(&TensorRole::DoraScale) {
        return Some(Err("it has two magnitudes, of which one alone can be used".to_owned()));
    }
    Some(match INNER_READERS.iter().find_map(|read| read(&others)) {
        Some(inner) => inner.map(|inner| -> Arc<dyn FileLayer> {
            Arc::new(DecomposedTensors {
                inner,
                magnitude,
                formula,
            })
        }),
        None => Err("it has the magnitude of a DoRA and no other tensor: the file is incomplete".to_owned()),
    })
}

/// The DoRA of a layer that consists of the rows of these, one after the other, with the LoRA of the whole. `None`: one is not a DoRA with a
/// magnitude for each output, or they differ in what a strength means.
pub(in super::super) fn joined(parts: &[&dyn FileLayer], lora: LoraTensors) -> Result<Option<Arc<dyn FileLayer>>> {
    let parts: Vec<_> = parts
        .iter()
        .map(|part| part.as_any().downcast_ref::<DecomposedTensors>())
        .collect();
    let Some(Some(first)) = parts.first().copied() else {
        return Ok(None);
    };
    let mut magnitudes = Vec::with_capacity(parts.len());
    for part in parts {
        match part {
            Some(part) if part.formula == first.formula && part.is_of_outputs() => {
                magnitudes.push(part.magnitude.flatten_all()?);
            }
            _ => return Ok(None),
        }
    }
    Ok(Some(Arc::new(DecomposedTensors {
        inner: Arc::new(lora),
        magnitude: Tensor::cat(&magnitudes, 0)?,
        formula: first.formula,
    })))
}

/// Whether a layer is a DoRA with a magnitude for each input of a weight with these dimensions.
pub(in super::super) fn has_magnitude_of_inputs(layer: &dyn FileLayer, weight: &[usize]) -> bool {
    match (layer.as_any().downcast_ref::<DecomposedTensors>(), weight) {
        (Some(dora), [outputs, inputs, ..]) => dora.axis(*outputs, *inputs) == Ok(Axis::Inputs),
        _ => false,
    }
}

impl DecomposedTensors {
    /// Whether the magnitude has a number for each output. Only of linear layers: others may have another number of inputs in a file.
    fn is_of_outputs(&self) -> bool {
        self.axis(self.outputs(), self.inputs()) == Ok(Axis::Outputs)
    }

    /// The axis of the magnitude for a layer with this many outputs and inputs.
    pub(super) fn axis(&self, outputs: usize, inputs: usize) -> std::result::Result<Axis, String> {
        let dims = self.magnitude.dims();
        let count = self.magnitude.elem_count();
        match dims {
            // LyCORIS, from version 3 on only if `wd_on_out` is off.
            [1, length, ..]
                if self.formula == Formula::Lycoris && *length == inputs && count == inputs && dims[0] != outputs =>
            {
                Ok(Axis::Inputs)
            }
            _ if count == outputs => Ok(Axis::Outputs),
            _ => Err(format!(
                "the file's magnitude has the shape {dims:?}, the layer has {outputs} outputs and {inputs} inputs"
            )),
        }
    }

    /// The adapter for a layer. `inner`: makes that of the change.
    fn adapter_with(
        &self,
        site: Site<'_>,
        axis: Axis,
        inner: impl FnOnce(&dyn FileLayer, Site<'_>) -> std::result::Result<Arc<dyn WeightAdapter>, String>,
    ) -> std::result::Result<Arc<dyn WeightAdapter>, String> {
        let handle = site.handle.clone();
        let failed = |error: candle_core::Error| error.to_string();
        let magnitude = self
            .magnitude
            .flatten_all()
            .and_then(|flat| flat.to_device(site.weight.device()));
        let magnitude = Var::from_tensor(&magnitude.map_err(failed)?).map_err(failed)?;
        let inner_handle = match self.formula {
            Formula::Peft => handle.clone(),
            Formula::Lycoris => AdapterHandle::new(1.0),
        };
        let site = Site {
            handle: &inner_handle,
            ..site
        };
        Ok(Arc::new(DecomposedLayer {
            inner: inner(&*self.inner, site)?,
            magnitude,
            axis,
            formula: self.formula,
            handle,
            frozen: Mutex::default(),
            norms: Some(Mutex::default()),
        }))
    }
}

impl FileLayer for DecomposedTensors {
    fn kind(&self) -> &'static str {
        "DoRA"
    }

    fn outputs(&self) -> usize {
        self.inner.outputs()
    }

    fn inputs(&self) -> usize {
        self.inner.inputs()
    }

    fn lacks_alpha(&self) -> bool {
        self.inner.lacks_alpha()
    }

    fn split(
        &self,
        named: &NamedLayers,
        metadata_alpha: &dyn Fn(f64) -> Option<f64>,
    ) -> Result<Vec<Arc<dyn FileLayer>>> {
        let inner = self.inner.split(named, metadata_alpha)?;
        let with = |inner, magnitude| -> Arc<dyn FileLayer> {
            Arc::new(Self {
                inner,
                magnitude,
                formula: self.formula,
            })
        };
        if !named.is_converted() {
            return Ok(inner
                .into_iter()
                .map(|inner| with(inner, self.magnitude.clone()))
                .collect());
        }
        let magnitude = self.magnitude.flatten_all()?;
        if !self.is_of_outputs() {
            candle_core::bail!(
                "its DoRA has a magnitude for each input, which cannot be split onto the layers of this model that the layer consists of"
            );
        }
        let ranges = named.row_ranges();
        let parts = inner.into_iter().zip(ranges).map(|(inner, ranges)| {
            let rows = ranges.iter().map(|(start, count)| magnitude.narrow(0, *start, *count));
            Ok(with(inner, Tensor::cat(&rows.collect::<Result<Vec<_>>>()?, 0)?))
        });
        parts.collect()
    }

    fn adapter(&self, site: Site<'_>) -> std::result::Result<Arc<dyn WeightAdapter>, String> {
        let dims = site.weight.dims();
        let axis = self.axis(dims[0], dims[1])?;
        self.adapter_with(site, axis, |inner, site| inner.adapter(site))
    }

    /// peft has a magnitude for each feature.
    fn embedding_adapter(&self, site: Site<'_>) -> std::result::Result<Arc<dyn WeightAdapter>, String> {
        let width = site.weight.dims().get(1).copied().unwrap_or(0);
        let found = self.magnitude.elem_count();
        if found != width || self.formula != Formula::Peft {
            return Err(format!(
                "the file has {found} magnitudes of an embedding layer with {width} features; only DoRAs of peft can be used, which have one \
                 for each"
            ));
        }
        self.adapter_with(site, Axis::Inputs, |inner, site| inner.embedding_adapter(site))
    }

    fn tensors(&self) -> std::result::Result<Vec<(&'static str, Tensor)>, String> {
        let name = match self.formula {
            Formula::Peft => "lora_magnitude_vector",
            Formula::Lycoris => "dora_scale",
        };
        let mut tensors = self.inner.tensors()?;
        tensors.push((name, self.magnitude.clone()));
        Ok(tensors)
    }

    fn lora(&self) -> Option<&LoraTensors> {
        self.inner.lora()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
