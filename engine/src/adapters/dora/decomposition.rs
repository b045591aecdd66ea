//! `network_kwargs.dora_wd`: a LoRA, LoKr or LoHa with magnitudes, as LyCORIS trains it.

use super::super::dropout::Dropout;
use super::super::file_layer::FileLayer;
use super::super::handle::AdapterHandle;
use super::super::trained_layer::{AdapterType, NewLayer, TrainedLayer, Values};
use super::super::weight_adapter::{WeightAdapter, product, tracked_if};
use super::file::DecomposedTensors;
use super::norms::{Axis, roots, squared_norms};
use crate::families::{AdapterNames, PartRole};
use crate::nn::{self, BaseLayer, Decomposition, LayerAdapter, decomposed_weight, forward_layer};
use crate::rng::TorchGenerator;
use crate::weights::Weight;
use candle_core::{DType, Result, Tensor, Var};
use std::sync::Arc;

/// An adapter whose weight is normalised and multiplied with magnitudes. Unlike that of `type: dora`, the norm of the weight with its change
/// gets a gradient, and what training drops is dropped before the norms.
#[derive(Debug)]
pub struct WeightDecomposed {
    /// The type of the change.
    pub inner: Box<dyn AdapterType>,
    /// Whether the change is a LoRA, whose files of transformers have names that programs do not know beside LyCORIS' magnitude.
    pub is_lora: bool,
    /// Whether there is a magnitude for each output; else for each input.
    pub on_outputs: bool,
}

impl AdapterType for WeightDecomposed {
    fn covers(&self, role: PartRole, path: &str) -> bool {
        self.inner.covers(role, path)
    }

    fn check_names(&self, names: AdapterNames) -> std::result::Result<(), String> {
        if self.is_lora && names == AdapterNames::Peft {
            return Err(
                "network.network_kwargs.dora_wd: this model has a transformer, beside whose LoRAs few programs read LyCORIS' magnitudes: \
                 use `type: dora`, or `dora_wd` with `type: lokr` or `loha`"
                    .to_owned(),
            );
        }
        self.inner.check_names(names)
    }

    fn has_old_names(&self) -> bool {
        self.inner.has_old_names()
    }

    /// The change starts as without magnitudes, and a magnitude as the norm of the weight.
    fn create(&self, new: NewLayer<'_>, generator: &mut TorchGenerator) -> Result<Arc<dyn TrainedLayer>> {
        let axis = match self.on_outputs {
            true => Axis::Outputs,
            false => Axis::Inputs,
        };
        let (weight, dropout, handle) = (new.weight, new.dropout, new.handle.clone());
        let magnitude = roots(&squared_norms(&weight.dense()?.detach(), axis)?)?;
        let change = NewLayer {
            dropout: Dropout::default(),
            ..new
        };
        Ok(Arc::new(TrainedDecomposition {
            inner: self.inner.create(change, generator)?,
            magnitude: Var::from_tensor(&magnitude)?,
            axis,
            dims: weight.dims().to_vec(),
            dropout,
            handle,
        }))
    }
}

/// The name of the magnitude in files.
const SUFFIX: &str = "dora_scale";

/// The weight decomposition of a layer that is trained.
#[derive(Debug)]
struct TrainedDecomposition {
    /// The change, which drops nothing itself.
    inner: Arc<dyn TrainedLayer>,
    /// [out] or [in].
    magnitude: Var,
    axis: Axis,
    /// The shape of the layer's weight.
    dims: Vec<usize>,
    /// Outputs of the change, or the whole layer.
    dropout: Dropout,
    handle: Arc<AdapterHandle>,
}

impl TrainedDecomposition {
    /// The weight that replaces that of the layer.
    fn weight(&self, base: &Weight, strength: f64, dropout_seed: Option<&str>, dtype: DType) -> Result<Tensor> {
        let is_training = dropout_seed.is_some();
        let Some(change) = self.inner.change_factors(is_training)? else {
            candle_core::bail!("the change of {} is not made of two factors", self.inner.name());
        };
        let mask = match dropout_seed {
            Some(seed) => self
                .dropout
                .output_mask(seed, self.inner.name(), self.dims[0], base.device())?,
            None => None,
        };
        let [a, b] = &change.factors;
        let magnitude = tracked_if(is_training, &self.magnitude);
        let options = Decomposition {
            form: change.form,
            scale: change.scale,
            axis: self.axis.position(),
            strength,
            dtype,
        };
        decomposed_weight(base, [a, b], &magnitude, mask.as_ref(), options)
    }
}

impl LayerAdapter for TrainedDecomposition {
    fn apply(&self, layer: &BaseLayer<'_>, x: &Tensor, output: Tensor) -> Result<Tensor> {
        let (strength, seed) = (self.handle.strength(), self.handle.dropout_seed());
        if self.dropout.is_off(strength, seed.as_deref(), self.inner.name()) {
            return Ok(output);
        }
        let weight = self.weight(layer.weight, strength, seed.as_deref(), x.dtype())?;
        // Without the bias, of which the output has one already.
        let change = (product(layer.kind, x, &weight, None)? - forward_layer(layer, x, false, &[])?)?;
        nn::add(&output, &change.to_dtype(output.dtype())?)
    }

    fn forward(&self, layer: &BaseLayer<'_>, x: &Tensor) -> Result<Option<Tensor>> {
        let (strength, seed) = (self.handle.strength(), self.handle.dropout_seed());
        if self.dropout.is_off(strength, seed.as_deref(), self.inner.name()) {
            return Ok(None);
        }
        let weight = self.weight(layer.weight, strength, seed.as_deref(), x.dtype())?;
        let bias = layer.bias.map(|bias| bias.to_dtype(x.dtype())).transpose()?;
        product(layer.kind, x, &weight, bias.as_ref()).map(Some)
    }
}

impl WeightAdapter for TrainedDecomposition {
    fn change(&self, weight: &Weight) -> Result<Tensor> {
        let strength = self.handle.strength();
        let base = weight.dense()?.detach().to_dtype(DType::F32)?;
        match strength == 0.0 {
            true => base.zeros_like(),
            false => self.weight(weight, strength, None, DType::F32)? - base,
        }
    }
}

impl TrainedLayer for TrainedDecomposition {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn params(&self) -> Vec<(&'static str, &Var)> {
        let mut params = self.inner.params();
        params.push((SUFFIX, &self.magnitude));
        params
    }

    fn saved(&self) -> Result<Vec<(&'static str, Tensor)>> {
        let mut tensors = self.inner.saved()?;
        let mut shape = vec![1; self.dims.len()];
        shape[self.axis.position()] = self.magnitude.elem_count();
        tensors.push((SUFFIX, self.magnitude.as_detached_tensor().reshape(shape)?));
        Ok(tensors)
    }

    /// The norm of the change before the weight is decomposed, as LyCORIS.
    fn limit_norm(&self, max: f64) -> Result<()> {
        self.inner.limit_norm(max)
    }

    fn values(&self, file: &dyn FileLayer) -> std::result::Result<Values<'_>, String> {
        let Some(tensors) = file.as_any().downcast_ref::<DecomposedTensors>() else {
            return Err(format!(
                "the file has a {} of it without magnitudes, and this job trains them: set `network.network_kwargs.dora_wd: false`",
                file.kind()
            ));
        };
        let mut values = self.inner.values(&*tensors.inner)?;
        if tensors.axis(self.dims[0], self.dims[1])? != self.axis {
            let (found, on_outputs) = match self.axis {
                Axis::Outputs => ("input", false),
                Axis::Inputs => ("output", true),
            };
            return Err(format!(
                "the file has a magnitude for each {found} of it: set `network.network_kwargs.wd_on_out: {on_outputs}`"
            ));
        }
        let magnitude = tensors
            .magnitude
            .flatten_all()
            .and_then(|flat| flat.to_device(self.magnitude.device()));
        let magnitude = magnitude.map_err(|error| error.to_string())?;
        values.values.push((&self.magnitude, magnitude));
        Ok(values)
    }
}
