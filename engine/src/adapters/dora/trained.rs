//! `network.type: dora`.

use super::super::file_layer::FileLayer;
use super::super::lora::LoraLayer;
use super::super::lora::new_layer;
use super::super::trained_layer::{AdapterType, NewLayer, TrainedLayer, Values};
use super::super::weight_adapter::WeightAdapter;
use super::file::DecomposedTensors;
use super::layer::{DecomposedLayer, Formula};
use super::norms::{Axis, roots, squared_norms};
use crate::families::AdapterNames;
use crate::nn::{BaseLayer, LayerAdapter};
use crate::rng::TorchGenerator;
use crate::weights::Weight;
use candle_core::{DType, Result, Tensor, Var};
use std::sync::{Arc, Mutex};

/// DoRA with a magnitude for each output. The norm is taken for a constant in the backward pass (section 4.3 of the paper), as in peft
/// and ai-toolkit. Training drops what it drops of a LoRA, and the norm is that of the whole change.
#[derive(Clone, Copy, Debug)]
pub struct Dora;

impl AdapterType for Dora {
    /// `down` is normal with a standard deviation of 1/sqrt(rank), as in ai-toolkit, `up` is zero, and the magnitude is the norm of the
    /// weight.
    fn create(&self, new: NewLayer<'_>, generator: &mut TorchGenerator) -> Result<Arc<dyn TrainedLayer>> {
        let (weight, names) = (new.weight, new.names);
        let deviation = (1.0 / new.rank as f64).sqrt() as f32;
        let mut lora = new_layer(new, generator, |_, _, new, dims| {
            Var::from_tensor(&Tensor::zeros(dims, DType::F32, new.device)?)
        })?;
        let down = generator
            .randn(lora.down.elem_count())
            .into_iter()
            .map(|n| n * deviation);
        let down = Tensor::from_vec(down.collect(), lora.down.shape(), weight.device())?;
        lora.down = Var::from_tensor(&down)?;
        let frozen = squared_norms(&weight.dense()?.detach(), Axis::Outputs)?;
        let magnitude = Var::from_tensor(&roots(&frozen)?)?;
        let lora = Arc::new(lora);
        let layer = DecomposedLayer {
            inner: lora.clone(),
            magnitude,
            axis: Axis::Outputs,
            formula: Formula::Peft,
            handle: lora.handle.clone(),
            frozen: Mutex::new(Some(frozen)),
            norms: None,
        };
        Ok(Arc::new(TrainedDora { lora, layer, names }))
    }
}

/// The DoRA of a layer that is trained.
#[derive(Debug)]
struct TrainedDora {
    lora: Arc<LoraLayer>,
    layer: DecomposedLayer,
    names: AdapterNames,
}

impl TrainedDora {
    /// The name of the magnitude in files: programs that read these names of layers know the magnitude by this one.
    fn suffix(&self) -> &'static str {
        match self.names {
            AdapterNames::Kohya => "dora_scale",
            // transformers reads it with this ending alone.
            AdapterNames::Peft => "lora_magnitude_vector.weight",
        }
    }
}

impl LayerAdapter for TrainedDora {
    fn apply(&self, layer: &BaseLayer<'_>, x: &Tensor, output: Tensor) -> Result<Tensor> {
        self.layer.apply(layer, x, output)
    }

    fn forward(&self, layer: &BaseLayer<'_>, x: &Tensor) -> Result<Option<Tensor>> {
        self.layer.forward(layer, x)
    }
}

impl WeightAdapter for TrainedDora {
    fn change(&self, weight: &Weight) -> Result<Tensor> {
        self.layer.change(weight)
    }
}

impl TrainedLayer for TrainedDora {
    fn name(&self) -> &str {
        self.lora.name()
    }

    fn params(&self) -> Vec<(&'static str, &Var)> {
        let mut params = self.lora.params();
        params.push((self.suffix(), &self.layer.magnitude));
        params
    }

    fn saved(&self) -> Result<Vec<(&'static str, Tensor)>> {
        let mut tensors = self.lora.saved()?;
        let magnitude = self.layer.magnitude.as_detached_tensor();
        let axes = self.lora.up.rank();
        let mut shape = vec![1; axes];
        // peft has the axis of the outputs of a convolution second.
        let axis = usize::from(self.names == AdapterNames::Peft && axes > 2);
        shape[axis] = magnitude.elem_count();
        let magnitude = match self.names {
            AdapterNames::Peft if axes == 2 => magnitude,
            _ => magnitude.reshape(shape)?,
        };
        tensors.push((self.suffix(), magnitude));
        Ok(tensors)
    }

    fn values(&self, file: &dyn FileLayer) -> std::result::Result<Values<'_>, String> {
        let Some(tensors) = file.as_any().downcast_ref::<DecomposedTensors>() else {
            return Err(format!(
                "the file has a {} of it, and this job trains a DoRA",
                file.kind()
            ));
        };
        let mut values = self.lora.values(&*tensors.inner)?;
        let outputs = self.layer.magnitude.elem_count();
        if tensors.axis(outputs, tensors.inputs())? == Axis::Inputs {
            return Err(
                "the file has a magnitude for each input of it, and this job trains one for each output".to_owned(),
            );
        }
        let magnitude = tensors
            .magnitude
            .flatten_all()
            .and_then(|flat| flat.to_device(self.layer.magnitude.device()));
        values
            .values
            .push((&self.layer.magnitude, magnitude.map_err(|error| error.to_string())?));
        Ok(values)
    }
}
