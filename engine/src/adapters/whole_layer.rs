//! Layers that are trained themselves, beside a network: the first and the last convolution of a U-Net
//! (`network_kwargs.full_train_in_out`).
//!
//! As in ai-toolkit's `LoRASpecialNetwork`, the weight and the bias are the trained numbers, not a change of them, so that weight decay is
//! that of a full fine-tune. Files have them as `unet_conv_in.weight` and `.bias`, `unet_conv_out.weight` and `.bias`.

use super::file_layer::{FileLayer, RoleTensors, Site};
use super::handle::AdapterHandle;
use super::keys::TensorRole;
use super::names::NamedLayers;
use super::trained_layer::{AdapterType, NewLayer, TrainedLayer, Values};
use super::weight_adapter::{WeightAdapter, add_product, product, tracked_if};
use crate::nn::{BaseLayer, LayerAdapter};
use crate::rng::TorchGenerator;
use crate::weights::Weight;
use candle_core::{DType, Result, Tensor, Var};
use std::any::Any;
use std::sync::Arc;

/// The layers of a U-Net that can be trained so.
pub(super) const WHOLE_LAYERS: [&str; 2] = ["conv_in", "conv_out"];
/// What files put before their names.
pub(super) const PREFIX: &str = "unet_";
/// The type of adapter, for messages.
pub(super) const WHOLE_LAYER: &str = "whole layer";

/// A layer that is trained itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Whole;

impl AdapterType for Whole {
    fn create(&self, new: NewLayer<'_>, _: &mut TorchGenerator) -> Result<Arc<dyn TrainedLayer>> {
        let variable = |tensor: &Tensor| Var::from_tensor(&tensor.detach().to_dtype(DType::F32)?);
        Ok(Arc::new(WholeLayer {
            weight: variable(&new.weight.dense()?)?,
            bias: new.bias.map(variable).transpose()?,
            name: new.name,
            handle: new.handle.clone(),
        }))
    }
}

/// Another weight and bias of a layer. At a strength other than 1 it is between them and the layer's own.
#[derive(Debug)]
struct WholeLayer {
    name: String,
    /// In the shape of the layer's weight.
    weight: Var,
    /// [out].
    bias: Option<Var>,
    handle: Arc<AdapterHandle>,
}

impl WholeLayer {
    fn tracked(&self) -> (Tensor, Option<Tensor>) {
        let is_training = self.handle.dropout_seed().is_some();
        let bias = self.bias.as_ref().map(|bias| tracked_if(is_training, bias));
        (tracked_if(is_training, &self.weight), bias)
    }
}

impl LayerAdapter for WholeLayer {
    fn apply(&self, layer: &BaseLayer<'_>, x: &Tensor, output: Tensor) -> Result<Tensor> {
        let strength = self.handle.strength();
        if strength == 0.0 {
            return Ok(output);
        }
        let (weight, bias) = self.tracked();
        let weight = ((weight - layer.weight.dense()?.detach().to_dtype(DType::F32)?)? * strength)?;
        let bias = match (bias, layer.bias) {
            (Some(bias), Some(base)) => Some(((bias - base.detach().to_dtype(DType::F32)?)? * strength)?),
            _ => None,
        };
        add_product(layer.kind, x, &weight, bias.as_ref(), &output)
    }

    fn forward(&self, layer: &BaseLayer<'_>, x: &Tensor) -> Result<Option<Tensor>> {
        if self.handle.strength() != 1.0 {
            return Ok(None);
        }
        let (weight, bias) = self.tracked();
        let dtype = x.dtype();
        let weight = weight.to_dtype(dtype)?;
        let bias = bias.map(|bias| bias.to_dtype(dtype)).transpose()?;
        product(layer.kind, x, &weight, bias.as_ref()).map(Some)
    }
}

impl WeightAdapter for WholeLayer {
    fn change(&self, weight: &Weight) -> Result<Tensor> {
        (self.weight.as_detached_tensor() - weight.dense()?.detach().to_dtype(DType::F32)?)? * self.handle.strength()
    }
}

impl TrainedLayer for WholeLayer {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<(&'static str, &Var)> {
        let bias = self.bias.iter().map(|bias| ("bias", bias));
        std::iter::once(("weight", &self.weight)).chain(bias).collect()
    }

    fn saved(&self) -> Result<Vec<(&'static str, Tensor)>> {
        let params = self.params().into_iter();
        Ok(params.map(|(suffix, var)| (suffix, var.as_detached_tensor())).collect())
    }

    /// Nothing is zero: after a merge it is what the model has.
    fn zeroed(&self) -> Option<Vec<&Var>> {
        Some(Vec::new())
    }

    fn changes_bias(&self) -> bool {
        self.bias.is_some()
    }

    fn replacement(&self) -> Option<(Tensor, Option<Tensor>)> {
        let bias = self.bias.as_ref().map(Var::as_detached_tensor);
        Some((self.weight.as_detached_tensor(), bias))
    }

    fn values(&self, file: &dyn FileLayer) -> std::result::Result<Values<'_>, String> {
        let Some(tensors) = file.as_any().downcast_ref::<WholeTensors>() else {
            return Err(format!(
                "the file has a {} of it, and this job trains the layer itself (`full_train_in_out`)",
                file.kind()
            ));
        };
        tensors.check(self.weight.dims(), self.bias.is_some())?;
        let mut values = Values::default();
        let found = std::iter::once(&tensors.weight).chain(&tensors.bias);
        for ((_, var), found) in self.params().into_iter().zip(found) {
            let value = found.to_device(var.device()).map_err(|error| error.to_string())?;
            values.values.push((var, value));
        }
        Ok(values)
    }
}

/// The weight and the bias of a layer in a file, float32 on the CPU.
#[derive(Clone, Debug)]
pub(super) struct WholeTensors {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl WholeTensors {
    fn check(&self, dims: &[usize], has_bias: bool) -> std::result::Result<(), String> {
        if self.weight.dims() != dims {
            return Err(format!(
                "the file has {:?}, the model needs {dims:?}",
                self.weight.dims()
            ));
        }
        match (&self.bias, has_bias) {
            (Some(bias), true) if bias.dims() != &dims[..1] => Err(format!(
                "the file's bias has {:?}, the model needs {:?}",
                bias.dims(),
                &dims[..1]
            )),
            (Some(_), false) => Err("the file has a bias of it, and the layer of this model has none".to_owned()),
            (None, true) => Err("the file has no bias of it: it is incomplete".to_owned()),
            _ => Ok(()),
        }
    }
}

/// Reads a layer that is in a file itself. `None`: it is not.
pub(super) fn read_whole(found: &RoleTensors) -> Option<std::result::Result<Arc<dyn FileLayer>, String>> {
    let (weight, bias) = (found.get(TensorRole::Whole), found.get(TensorRole::WholeBias));
    match (weight, bias) {
        (None, None) => None,
        (None, Some(_)) => Some(Err(
            "it has a `.bias` and no `.weight`: the file is incomplete".to_owned()
        )),
        (Some(weight), _) if weight.rank() < 2 => {
            Some(Err(format!("its weight {:?} is not that of a layer", weight.dims())))
        }
        (Some(weight), bias) => Some(Ok(Arc::new(WholeTensors { weight, bias }))),
    }
}

impl FileLayer for WholeTensors {
    fn kind(&self) -> &'static str {
        WHOLE_LAYER
    }

    fn outputs(&self) -> usize {
        self.weight.dims()[0]
    }

    fn inputs(&self) -> usize {
        self.weight.dims()[1]
    }

    fn lacks_alpha(&self) -> bool {
        false
    }

    fn split(&self, named: &NamedLayers, _: &dyn Fn(f64) -> Option<f64>) -> Result<Vec<Arc<dyn FileLayer>>> {
        if named.is_converted() {
            candle_core::bail!("a whole layer of a U-Net is one layer of the model");
        }
        Ok(vec![Arc::new(self.clone())])
    }

    fn adapter(&self, site: Site<'_>) -> std::result::Result<Arc<dyn WeightAdapter>, String> {
        self.check(site.weight.dims(), self.bias.is_some())?;
        let variable = |tensor: &Tensor| {
            let tensor = tensor.to_device(site.weight.device());
            tensor
                .and_then(|tensor| Var::from_tensor(&tensor))
                .map_err(|error| error.to_string())
        };
        Ok(Arc::new(WholeLayer {
            weight: variable(&self.weight)?,
            bias: self.bias.as_ref().map(variable).transpose()?,
            name: site.name,
            handle: site.handle.clone(),
        }))
    }

    fn tensors(&self) -> std::result::Result<Vec<(&'static str, Tensor)>, String> {
        let weight = [("weight", self.weight.clone())].into_iter();
        Ok(weight
            .chain(self.bias.iter().map(|bias| ("bias", bias.clone())))
            .collect())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
